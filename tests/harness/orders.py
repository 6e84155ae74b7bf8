"""Orders, the outcome that each of their deadlines must have, and the times of a compressed run.

The oracle: "close if unpaid" is cancelled by a payment within 30 minutes of the purchase, 30:00 included;
otherwise it fires. "Confirm receipt" fires for every order that was delivered.
"""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

CLOSE, CONFIRM = "order-close", "order-confirm"
"""Topics, the same at every door, as nobody who uses one knows of the others."""
PAY_WITHIN = 1800.0
"""Seconds after the purchase in which a payment keeps an order open."""
COMPRESSED = 30.0
"""Into how many seconds 30 minutes and 7 days are both compressed, at speed 1."""
MIN_MARGIN = 0.25
"""The least distance of a payment from its deadline, in seconds of the run: real clocks race."""
EVENTS_PER_SECOND = 150
"""The highest rate of submits and cancels in a run; more orders make the run longer, not denser."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order. ``paid_after`` is in seconds after the purchase, None if it was never paid."""

    order_id: str
    paid_after: float | None
    delivered: bool

    @property
    def closes(self) -> bool:
        """Whether its "close if unpaid" fires."""
        return self.paid_after is None or self.paid_after > PAY_WITHIN


@dataclass(frozen=True, slots=True)
class Deadline:
    """One task of the run. Times are seconds after the run's start; ``fires`` is the required outcome."""

    order_id: str
    topic: str
    submit_at: float
    due_at: float
    cancel_at: float | None
    fires: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: its deadlines in the order of their submits."""

    deadlines: list[Deadline]
    seconds: float


def read_orders(path: Path) -> list[Order]:
    """Read orders from a CSV file: order_id, purchased_at, approved_at, delivered_at."""
    orders = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            purchased, paid_after = datetime.fromisoformat(row["purchased_at"]), None
            if row["approved_at"]:
                paid_after = (datetime.fromisoformat(row["approved_at"]) - purchased).total_seconds()
            orders.append(Order(row["order_id"], paid_after, bool(row["delivered_at"])))
    return orders


def synthetic_orders(count: int, seed: int) -> list[Order]:
    """Return made-up orders, the same for the same seed: most are paid in time, some late, some never.

    Every twentieth is paid within seconds of 30:00, before, after or exactly then.
    """
    chance = random.Random(seed)
    orders = []
    for number in range(count):
        kind = chance.random()
        paid_after: float | None = None
        if number % 20 == 19:
            paid_after = PAY_WITHIN + chance.choice((-5.0, -1.0, 0.0, 1.0, 5.0))
        elif kind < 0.6:
            paid_after = float(chance.randrange(0, 1800))
        elif kind < 0.85:
            paid_after = PAY_WITHIN + chance.expovariate(1 / 20_000)
        delivered = paid_after is not None and chance.random() < 0.8
        orders.append(Order(f"demo-{seed}-{number:05d}", paid_after, delivered))
    return orders


def plan(orders: Sequence[Order], speed: float, *, late_margin: float) -> Plan:
    """Plan the run: purchases are in the first half of the window, deliveries in the second.

    A payment is made at least MIN_MARGIN before its deadline or ``late_margin`` after it, in seconds.
    """
    length = COMPRESSED / speed
    events = sum(1 + (order.paid_after is not None) + order.delivered for order in orders)
    window = max(length, events / EVENTS_PER_SECOND) / 2
    deadlines = []
    for number, order in enumerate(orders):
        start = window * number / len(orders)
        cancel_at = None
        if order.paid_after is not None:
            paid = max(order.paid_after, 0.0) / PAY_WITHIN * length
            cancel_at = start + (length + late_margin if order.closes else min(paid, length - MIN_MARGIN))
        deadlines.append(Deadline(order.order_id, CLOSE, start, start + length, cancel_at, order.closes))
        if order.delivered:
            begin = window + start
            deadlines.append(Deadline(order.order_id, CONFIRM, begin, begin + length, None, True))
    deadlines.sort(key=lambda deadline: deadline.submit_at)
    return Plan(deadlines, 2 * window + length + late_margin)
