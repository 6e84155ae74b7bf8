"""Orders, the outcome that each of their deadlines must have, and the times of a compressed run.

The oracle: "close if unpaid" is cancelled by a payment within 30 minutes of the purchase, 30:00 included;
otherwise it fires. "Confirm receipt" fires for every order that was delivered.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from toc.model.errors import InvalidInput, shown

CLOSE = "demo.order.close"
CONFIRM = "demo.order.confirm"

PAY_WITHIN = 1800.0
"""Seconds after the purchase in which a payment keeps an order open."""
COMPRESSED = 30.0
"""Into how many seconds 30 minutes and 7 days are both compressed, at speed 1."""
MIN_MARGIN = 0.25
"""The least distance of a payment from its deadline, in seconds of the run: real clocks race."""
LATE_CAP = 10.0
"""A payment after its deadline, often days later, is made at most this many seconds after it, at speed 1."""
EVENTS_PER_SECOND = 150
"""The highest rate of submits and cancels in a run; more orders make the run longer, not denser."""
MAX_COUNT = 100_000
"""The largest number of made-up orders, which take half an hour."""
SPEEDS = (0.01, 60.0)


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
    """Read orders from a CSV file: order_id, purchased_at, approved_at, delivered_at. Raises InvalidInput."""
    orders = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = {"order_id", "purchased_at", "approved_at", "delivered_at"} - set(
                reader.fieldnames or ()
            )
            if missing:
                raise InvalidInput(f"{path} has no column {', '.join(sorted(missing))}")
            for row in reader:
                try:
                    orders.append(_order(row))
                except (TypeError, ValueError) as exc:
                    raise InvalidInput(f"{path}, line {reader.line_num}: {exc}") from exc
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise InvalidInput(f"{shown(str(path))} cannot be read: {why}") from exc
    if not orders:
        raise InvalidInput(f"{path} holds no orders")
    return orders


def _order(row: dict[str, str]) -> Order:
    if not row["order_id"]:
        raise ValueError("order_id is empty")
    purchased = datetime.fromisoformat(row["purchased_at"])
    paid_after = None
    if row["approved_at"]:
        paid_after = (datetime.fromisoformat(row["approved_at"]) - purchased).total_seconds()
    return Order(row["order_id"], paid_after, bool(row["delivered_at"]))


def synthetic_orders(count: int, seed: int) -> list[Order]:
    """Return made-up orders, the same for the same seed: most are paid in time, some late, some never.

    Every twentieth is paid within seconds of 30:00, before, after or exactly then. Raises InvalidInput.
    """
    if not 1 <= count <= MAX_COUNT:
        raise InvalidInput(f"--count must be 1 to {MAX_COUNT}, not {shown(count)}")
    chance = random.Random(seed)
    orders = []
    for number in range(count):
        kind = chance.random()
        paid_after: float | None
        if number % 20 == 19:
            paid_after = PAY_WITHIN + chance.choice((-5.0, -1.0, 0.0, 1.0, 5.0))
        elif kind < 0.6:
            paid_after = float(chance.randrange(0, 1800))
        elif kind < 0.85:
            paid_after = PAY_WITHIN + chance.expovariate(1 / 20_000)
        else:
            paid_after = None
        delivered = paid_after is not None and chance.random() < 0.8
        orders.append(Order(f"demo-{seed}-{number:05d}", paid_after, delivered))
    return orders


def plan(orders: Sequence[Order], speed: float = 1.0, *, late_margin: float = MIN_MARGIN) -> Plan:
    """Plan the run: purchases are in the first half of the window, deliveries in the second.

    A payment is made at least MIN_MARGIN before its deadline or ``late_margin`` after it, in seconds of the
    run. Raises InvalidInput.
    """
    if not SPEEDS[0] <= speed <= SPEEDS[1]:
        raise InvalidInput(f"--speed must be {SPEEDS[0]:g} to {SPEEDS[1]:g}, not {speed:g}")
    length = COMPRESSED / speed
    late_cap = max(LATE_CAP / speed, late_margin)
    events = sum(1 + (order.paid_after is not None) + order.delivered for order in orders)
    window = max(length, events / EVENTS_PER_SECOND) / 2
    deadlines = []
    for number, order in enumerate(orders):
        start = window * number / len(orders)
        cancel_at = None
        if order.paid_after is not None:
            offset = max(order.paid_after, 0.0) / PAY_WITHIN * length
            if not order.closes:
                moved = min(offset, length - MIN_MARGIN)
            else:
                moved = min(max(offset, length + late_margin), length + late_cap)
            cancel_at = start + moved
        deadlines.append(Deadline(order.order_id, CLOSE, start, start + length, cancel_at, order.closes))
        if order.delivered:
            begin = window + start
            deadlines.append(Deadline(order.order_id, CONFIRM, begin, begin + length, None, True))
    deadlines.sort(key=lambda deadline: deadline.submit_at)
    return Plan(deadlines, 2 * window + length + late_cap)
