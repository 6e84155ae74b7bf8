"""A morning in the shop: ``python -m orders``, while a worker runs ``orders.deadlines:center``."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from . import service
from .database import create_tables, engine, messages, orders
from .deadlines import CONFIRM_AFTER, PAY_WITHIN, REMIND_AHEAD, center


def main() -> None:
    """Place, pay and deliver; then watch what the deadlines make of it."""
    create_tables()
    unpaid = int(time.time())
    paid, delivered = unpaid + 1, unpaid + 2
    for order_id in (unpaid, paid, delivered):
        service.place_order(order_id)
    service.pay(paid)
    service.pay(delivered)
    service.deliver(delivered)
    member_id = f"member-{unpaid}"
    soon = REMIND_AHEAD + timedelta(seconds=2)
    service.change_membership(member_id, datetime.now(UTC) + soon)
    longest = max(PAY_WITHIN, CONFIRM_AFTER, timedelta(seconds=2))
    print(f"{unpaid} is unpaid, {paid} is paid, {delivered} is delivered; waiting {longest}", flush=True)
    time.sleep(longest.total_seconds() + 1)
    with engine().connect() as connection:
        for order_id, state in connection.execute(
            select(orders).where(orders.c.order_id.in_((unpaid, paid, delivered)))
        ):
            print(f"{order_id} is {state}")
        for text in connection.scalars(select(messages.c.text).where(messages.c.member_id == member_id)):
            print(f"{member_id} was told: {text}")
    center.close()


if __name__ == "__main__":
    main()
