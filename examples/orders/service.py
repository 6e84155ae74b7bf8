"""What the shop does, and the deadlines that follow from it."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import select, update

from toc import RescheduleOutcome

from .database import engine, members, orders
from .deadlines import CLOSE, CONFIRM, CONFIRM_AFTER, PAY_WITHIN, REMIND, REMIND_AHEAD, center


def place_order(order_id: int) -> int:
    """Take an order, which closes if it is not paid in time. Returns the deadline's job_id.

    Order and deadline are one transaction: there is never one without the other.
    """
    with engine().begin() as connection:
        connection.execute(orders.insert().values(order_id=order_id, state="placed"))
        return center.submit(CLOSE, biz_id=order_id, delay=PAY_WITHIN, connection=connection)


def begin_payment(order_id: int) -> bool:
    """The bank is asked: the order is not closed until it has answered. False if it is too late."""
    return _move(order_id, "placed", "paying")


def payment_failed(order_id: int) -> None:
    """The bank said no. The deadline still stands: the order closes when it has passed."""
    _move(order_id, "paying", "placed")


def pay(order_id: int) -> bool:
    """The bank said yes. False if the order is closed (or paid) already.

    The shop's own row decides; cancelling the deadline then only saves its handler from running in vain.
    """
    if not (_move(order_id, "paying", "paid") or _move(order_id, "placed", "paid")):
        return False
    center.cancel_by_biz(CLOSE, biz_id=order_id)
    return True


def deliver(order_id: int) -> int | None:
    """The parcel has arrived: its receipt is confirmed a week later. None unless the order was paid.

    Carriers report a delivery more than once. The dedup_key makes the second report find the first's
    deadline, also where the first report died between its two steps.
    """
    if not _move(order_id, "paid", "delivered") and _state(order_id) != "delivered":
        return None
    return center.submit(CONFIRM, biz_id=order_id, delay=CONFIRM_AFTER, dedup_key=f"confirm-{order_id}")


def change_membership(member_id: str, expires_at: datetime) -> int | None:
    """A membership was bought, prolonged or cut short. Returns the job_id of its reminder.

    None if it expires so soon that there is nothing to remind of ahead.
    """
    remind_at = expires_at - REMIND_AHEAD
    with engine().begin() as connection:
        # The shop's row first: a reminder that comes too early looks at it and comes back.
        changed = connection.execute(
            update(members)
            .where(members.c.member_id == member_id)
            .values(expires_at=int(expires_at.timestamp()))
        )
        if not changed.rowcount:
            connection.execute(
                members.insert().values(member_id=member_id, expires_at=int(expires_at.timestamp()))
            )
        reminder: int | None = connection.scalar(
            select(members.c.reminder).where(members.c.member_id == member_id)
        )
    if remind_at <= datetime.now(UTC):
        if reminder is not None:
            center.cancel(reminder)
        return None
    if reminder is not None:
        outcome = center.reschedule(reminder, action_time=remind_at)
        if outcome in (RescheduleOutcome.RESCHEDULED, RescheduleOutcome.MAY_HAVE_STARTED):
            return reminder
        # TOO_LATE or UNKNOWN: that reminder is history; the new period gets its own.
    job_id = center.submit(REMIND, biz_id=member_id, action_time=remind_at)
    with engine().begin() as connection:
        connection.execute(update(members).where(members.c.member_id == member_id).values(reminder=job_id))
    return job_id


def _move(order_id: int, old: str, new: str) -> bool:
    with engine().begin() as connection:
        moved = connection.execute(
            update(orders).where(orders.c.order_id == order_id, orders.c.state == old).values(state=new)
        )
    return moved.rowcount == 1


def _state(order_id: int) -> str | None:
    with engine().connect() as connection:
        return connection.scalar(select(orders.c.state).where(orders.c.order_id == order_id))
