"""One round of a pass of the sweep over many tables, slice by slice."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from toc.store.scan import Position

PROBES_PER_STEP = 600
"""Tables that one step asks whether anything is due: less than 10 ms of the server's time. Waking up for a
step costs a worker more than its tables do, so few due rows mean few steps."""


class Round:
    """Progress of a pass over many tables: tables not yet read, and pages left of others."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.period = 0.0
        """Seconds that the previous round took, rests included."""
        self.rows = self.unknown = 0
        self.known_before = False
        """Whether most ids of the previous round were known. If so, this round first reads only
        ids, and then the few rows whose ids are unknown."""
        self.tables: deque[int] = deque()
        self.more: dict[int, Position] = {}
        self._read: list[int] = []
        """Tables whose turn has come in this round."""
        self._slice = 1
        self._all = 1

    def start(self, began: float, tables: Sequence[int], slices: int) -> None:
        """Begin a round of at least ``slices`` slices."""
        self.period = began - self.began
        self.began = began
        self.known_before = self.unknown < self.rows / 2
        self.rows = self.unknown = 0
        self.tables = deque(tables)
        self._read = []
        self._all = len(tables)
        self._slice = min(ceil(len(tables) / max(1, slices)), PROBES_PER_STEP)

    def take(self) -> list[int]:
        """Return the tables of the next slice. Those of which pages are left go to the end of the
        round instead."""
        slice_ = [self.tables.popleft() for _ in range(min(self._slice, len(self.tables)))]
        self.tables.extend(table for table in slice_ if table in self.more)
        taken = [table for table in slice_ if table not in self.more]
        self._read += taken
        return taken

    def read_again(self) -> None:
        """If the round is not over, add the tables that it has read once more, after those that it
        has not.

        So each table has its turn, however often this is called.
        """
        if self.tables or self.more:
            self.tables.extend(self._read)
            self._read = []
            self._all = len(self.tables)

    @property
    def part_done(self) -> float:
        """The completed part of the round, 0 to 1."""
        return 1 - len(self.tables) / max(1, self._all)
