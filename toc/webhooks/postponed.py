"""What waits for a target: postponed tasks that are overdue by their action time, counted and named.

Each process counts what it has postponed itself, until the time at which that comes back. A task is postponed
by one process at a time, so the sum over all processes is what waits.
"""

from __future__ import annotations

from collections import Counter

from toc.observe.metrics import WEBHOOK_POSTPONED, WEBHOOK_WAITING

MAX_LABELS = 300
"""Targets with a name of their own in the metrics of one process."""
OTHERS = "(others)"


class Labels:
    """Names of targets as labels of metrics: bounded, however many targets there are."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, target: str) -> str:
        """Return the label of a target."""
        if target not in self._known:
            if len(self._known) >= MAX_LABELS:
                return OTHERS
            self._known.add(target)
        return target


class Waits:
    """Counts postponed tasks by target and reason. Instants are ms. Used by the event loop alone."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._until: dict[tuple[str, str], Counter[int]] = {}
        """(target, reason) -> the second in which tasks come back -> how many."""

    def note(self, target: str, reason: str, until: int) -> None:
        """Count a task that was postponed."""
        self._until.setdefault((target, reason), Counter())[until // 1000] += 1
        WEBHOOK_POSTPONED.of(self._labels.of(target), reason).add()

    def waiting(self, target: str, reason: str) -> int:
        """How many tasks wait for a target, for this reason."""
        until = self._until.get((target, reason))
        return sum(until.values()) if until else 0

    def update_gauges(self, now: int) -> None:
        """Forget what has come back by ``now``, and update the gauges."""
        counts: Counter[tuple[str, str]] = Counter()
        for (target, reason), seconds in list(self._until.items()):
            for second in [each for each in seconds if each < now // 1000]:
                del seconds[second]
            counts[self._labels.of(target), reason] += sum(seconds.values())
            if not seconds:
                del self._until[target, reason]
        for labels, count in counts.items():
            WEBHOOK_WAITING.of(*labels).set(count)
