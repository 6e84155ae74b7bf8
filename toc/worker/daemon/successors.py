"""When the processes of a daemon that are missing are started: at once, or after a backoff."""

from __future__ import annotations

import time
from collections.abc import Callable

from toc.worker.daemon.processes import WorkerProcess

RESTART_CAP_SECONDS = 10.0
"""Longest backoff before the successor of a process that dies soon after its start."""
SERVED_CAP_SECONDS = 1.0
"""Longest backoff if the process has served, and others cannot serve in its place."""
LIVED_SECONDS = 10.0
"""A worker process that lived this long is replaced at once when it dies."""


class Successors:
    """The processes to be started, by index: at first all of them, now."""

    def __init__(self, processes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._at: dict[int, float] = dict.fromkeys(range(processes), 0.0)
        self._deaths = [0] * processes
        """How many in a row died soon after their start."""
        self.loaded = False
        """Whether the application has loaded once. If so, a later failure may be temporary."""

    def start_in(self, index: int, seconds: float) -> None:
        """Start this process after some seconds, in place of one that ends or could not be started."""
        self._at[index] = self._monotonic() + seconds

    def none(self) -> None:
        """Start no more."""
        self._at.clear()

    def take_due(self) -> list[int]:
        """Remove and return the processes to start now."""
        now = self._monotonic()
        due = [index for index, at in self._at.items() if at <= now]
        for index in due:
            del self._at[index]
        return due

    def next_at(self) -> float:
        """When to start the next one (monotonic); infinite if none is missing."""
        return min(self._at.values(), default=float("inf"))

    def backoff(self, ended: WorkerProcess, *, replaceable: bool) -> float | None:
        """The seconds before the successor of a process starts. None: only an operator can help.

        That is so if the application never loaded here. If it has, an update may be replacing its files.
        ``replaceable``: others serve in its place meanwhile. A worker has served tasks, of which one may have
        ended it, which can happen only a few times; other tasks wait for it.
        """
        if ended.unfit is not None and ended.unfit["wrong"] and not self.loaded:
            return None
        lived = self._monotonic() - ended.born
        self._deaths[ended.index] = 0 if lived > LIVED_SECONDS else self._deaths[ended.index] + 1
        cap = SERVED_CAP_SECONDS if ended.heard and not replaceable else RESTART_CAP_SECONDS
        return min(0.1 * (2.0 ** min(self._deaths[ended.index], 10) - 1), cap)
