"""What happens when a deadline passes. Run it with ``toc worker --app orders.deadlines:center``.

A handler may run more than once (its worker can die after the work and before that is written down), so each
does its work in a way that does it once: a guarded UPDATE, or a key that the second time is refused.
"""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from toc import Dead, Retry, Task, TimeoutCenter

from .database import engine, members, messages, orders

CLOSE = "order.close"
CONFIRM = "order.confirm"
REMIND = "member.remind"


def _period(name: str, usual: timedelta) -> timedelta:
    """A period, or what the environment says in seconds: nobody waits 7 days to see an example run."""
    seconds = os.environ.get(name)
    return usual if seconds is None else timedelta(seconds=float(seconds))


PAY_WITHIN = _period("ORDERS_PAY_WITHIN", timedelta(minutes=30))
CONFIRM_AFTER = _period("ORDERS_CONFIRM_AFTER", timedelta(days=7))
REMIND_AHEAD = _period("ORDERS_REMIND_AHEAD", timedelta(days=3))
ASK_AGAIN = _period("ORDERS_ASK_AGAIN", timedelta(seconds=30))

center = TimeoutCenter()


@center.handler(CLOSE)
def close_unpaid(task: Task) -> None:
    """Close an order that nobody has paid.

    Payment and closing race for the same row: the UPDATE that finds it ``placed`` wins, the other does
    nothing. So the shop is right even where a payment's cancel comes too late.
    """
    with engine().begin() as connection:
        closed = connection.execute(
            update(orders)
            .where(orders.c.order_id == task.biz_id, orders.c.state == "placed")
            .values(state="closed")
        )
        if closed.rowcount:
            return
        state = connection.scalar(select(orders.c.state).where(orders.c.order_id == task.biz_id))
    if state is None:
        raise Dead(f"there is no order {task.biz_id}")  # trying again would not make one
    if state == "paying":
        raise Retry(after=ASK_AGAIN, reason="the bank has not answered yet")


@center.handler(CONFIRM, batch=200)
def confirm_receipts(tasks: list[Task]) -> dict[int, BaseException | None]:
    """Confirm the receipt of parcels delivered a week ago: one UPDATE for up to 200 of them."""
    wanted = [task.biz_id for task in tasks]
    with engine().begin() as connection:
        connection.execute(
            update(orders)
            .where(orders.c.order_id.in_(wanted), orders.c.state == "delivered")
            .values(state="confirmed")
        )
        known = set(connection.scalars(select(orders.c.order_id).where(orders.c.order_id.in_(wanted))))
    # Only these fail; the tasks that are not named are processed.
    return {
        task.job_id: Dead(f"there is no order {task.biz_id}") for task in tasks if task.biz_id not in known
    }


@center.handler(REMIND)
async def remind(task: Task) -> None:
    """Tell a member that the membership ends soon."""
    member_id = str(task.biz_id)
    expires_at = await asyncio.to_thread(_expiry, member_id)
    if expires_at is None:
        return  # the member has left
    early = expires_at - REMIND_AHEAD.total_seconds() - time.time()
    if early > 0:
        # Prolonged, and the service died before it moved this deadline: come back when it is time.
        raise Retry(after=timedelta(seconds=early), reason="the membership was prolonged")
    await asyncio.to_thread(send, f"expiry-{member_id}-{expires_at}", member_id, "your membership ends soon")


def _expiry(member_id: str) -> int | None:
    with engine().connect() as connection:
        return connection.scalar(select(members.c.expires_at).where(members.c.member_id == member_id))


def send(key: str, member_id: str, text: str) -> None:
    """Send a message once, however often it is asked for. (This shop's mail goes into a table.)"""
    try:
        with engine().begin() as connection:
            connection.execute(messages.insert().values(message_key=key, member_id=member_id, text=text))
    except IntegrityError:
        return
