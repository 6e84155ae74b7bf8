"""The line of a topic: the entries that wait for its handler, and how long that runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from toc.model.lateness import Cause
from toc.model.topic import Slot
from toc.worker.entry import Crowd, Entry

START_WITHIN_SECONDS = 0.1
"""How far ahead the poller takes: as many entries as can start within this time."""
FIRST_GUESS_SECONDS = 0.005
"""Assumed run time of a handler that has not run yet."""


PEAK_SECONDS = 1.0
"""For how long it counts how many ran at once. Handlers often end together: now is not enough."""
LONG_SECONDS = 0.1
"""Handlers that take longer keep their threads; with shorter ones it is the number of tasks that counts."""


@dataclass(eq=False, slots=True)
class Line:
    """The entries of one topic that wait. Its owner locks it."""

    topic: str
    waiting: deque[Entry] = field(default_factory=deque)
    seconds: float = FIRST_GUESS_SECONDS
    """Moving average of the time that a run of the handler takes."""
    peak: int = 0
    """How many ran at once at the most since ``peak_since`` (monotonic), and in the time before."""
    peak_before: int = 0
    peak_since: float = 0.0

    def note_run(self, seconds: float) -> None:
        """Add a run to the average."""
        self.seconds += (max(seconds, 1e-5) - self.seconds) * 0.1

    def most_running(self, running: int) -> int:
        """Return how many ran at once a moment ago at most, given how many run now."""
        now = monotonic()
        if now - self.peak_since > max(PEAK_SECONDS, 2 * self.seconds):
            self.peak_before, self.peak, self.peak_since = self.peak, running, now
        return max(self.peak_before, self.peak)

    def crowd(self, most: int, concurrency: int) -> Crowd:
        """What keeps its entries, of which so many ran at once: the topic's concurrency (0: none), or their
        number."""
        if concurrency and most >= concurrency:
            return Cause.CONCURRENCY, f"{concurrency} at once, {self.seconds:.2g} s each"
        return Cause.BACKLOG, f"{len(self.waiting)} were taken and waited"

    def withdraw(self, slots: set[Slot] | None) -> list[Entry]:
        """Remove and return the entries of these slots (None: all)."""
        taken: list[Entry] = []
        kept: deque[Entry] = deque()
        for entry in self.waiting:
            (taken if slots is None or entry.slot in slots else kept).append(entry)
        self.waiting = kept
        return taken
