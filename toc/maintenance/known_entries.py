"""Remembers which entries the sweep has just found in the index, so that it need not look them up again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from toc.model.clock import Clock

KNOWN_SECONDS = 5.0
"""How long an entry found in the index is assumed to exist; at most twice as long."""
MAX_KNOWN = 100_000


class KnownEntries:
    """Ids found in the index a few seconds ago, each with its next_time then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._fresh: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._since = clock.monotonic()
        self.epoch = 0
        """Counts how often everything was forgotten."""

    def without(self, pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
        """The (job_id, next_time) pairs that are not known."""
        fresh, older = self._fresh.get, self._older.get
        return {job_id: due for job_id, due in pairs if fresh(job_id) != due and older(job_id) != due}

    def learn(self, pairs: Mapping[int, int], epoch: int) -> None:
        """Remember these for a while, unless everything was forgotten since ``epoch``."""
        with self._lock:
            if epoch != self.epoch:
                return
            now = self._clock.monotonic()
            if now - self._since > KNOWN_SECONDS or len(self._fresh) > MAX_KNOWN:
                self._older, self._fresh, self._since = self._fresh, {}, now
            self._fresh.update(pairs)

    def age(self) -> None:
        """Forget what is too old."""
        if self._clock.monotonic() - self._since > 2 * KNOWN_SECONDS:
            self.forget()

    def forget(self) -> None:
        """Forget everything: the index may have lost any of it. Any thread may call it."""
        with self._lock:
            self.epoch += 1
            self._fresh, self._older, self._since = {}, {}, self._clock.monotonic()
