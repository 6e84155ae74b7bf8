"""Waiting notes: a note in Redis for each slot with late tasks that were taken and cannot start.

The StoreQueue no longer holds these tasks, and only their worker knows which of its entries run. Or it holds
them at a later time than their due time, because their worker postponed them: their rows cannot be read. So
the worker publishes the backlog for metrics and ``toc slots``: twice a second, once a task is late by a
second, and not at all while everything is in time.

A note expires after prepare_timeout, so it covers a worker that hangs. Reclaim withdraws the note of each
slot that it puts entries back into; a worker withdraws its own with the next pass of its heartbeat. A note
does not count while nothing is prepared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from toc.index.messages import Waiting
from toc.index.queues import Queues
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot
from toc.worker.stages.entry import NO_FENCE, Entry

LATE_SECONDS = 1.0
"""An entry due and taken at least this long ago is noted. Few ever are."""
TELL_SECONDS = 1.0
"""How often a note is changed."""
AGAIN_SECONDS = 2.5
"""How often an unchanged note is written again: the slot's former owner may have withdrawn it."""


AGAIN_MS = 5000
"""By this long after the end of its pause, a postponed entry was surely taken again, and postponed
again if necessary."""


class PutAway:
    """The slots with postponed tasks, and since when the first of these has been due.
    Thread-safe."""

    def __init__(self) -> None:
        self._slots: dict[Slot, tuple[int, int]] = {}
        """slot -> when the first of its postponed tasks was due, and when this expires unless
        another one is added (ms)."""
        self._lock = threading.Lock()

    def add(self, slot: Slot, due: int, until: int) -> None:
        """Add a task that was due at ``due`` and comes again at ``until`` (both ms)."""
        with self._lock:
            since, _ = self._slots.get(slot, (due, 0))
            self._slots[slot] = min(since, due), until + AGAIN_MS

    def since(self, now_ms: int) -> dict[Slot, int]:
        """The slots with postponed tasks, and when the first of each was due (ms)."""
        if not self._slots:
            return {}
        with self._lock:
            self._slots = {slot: times for slot, times in self._slots.items() if times[1] > now_ms}
            return {slot: since for slot, (since, _) in self._slots.items()}


class WaitingNotes:
    """The notes of one worker. Used by one thread."""

    def __init__(self, queues: Queues, clock: Clock, put_away: PutAway) -> None:
        self._queues = queues
        self._clock = clock
        self._put_away = put_away
        self._written: dict[Slot, tuple[Waiting, float]] = {}
        """The last note of each slot, and when it was written (monotonic)."""

    def tell(self, entries: Iterable[Entry], now: float) -> None:
        """Write notes about those of the held ``entries`` that wait. ``now`` is monotonic."""
        waiting = self._waiting(entries, now)
        notes: dict[Slot, Waiting | None] = {}
        for slot, note in waiting.items():
            before, at = self._written.get(slot, (None, float("-inf")))
            if now - at >= (TELL_SECONDS if note != before else AGAIN_SECONDS):
                notes[slot] = note
        notes |= dict.fromkeys(self._written.keys() - waiting.keys())
        if not notes:
            return
        for slot, done in self._queues.note_waiting(notes).items():
            written = notes[slot]
            if written is None or isinstance(done, IndexUnavailable):
                self._written.pop(slot, None)  # if a withdrawn note stays, it soon expires
            else:
                self._written[slot] = written, now

    def _waiting(self, entries: Iterable[Entry], now: float) -> dict[Slot, Waiting]:
        now_ms = self._clock.now_ms()
        waiting: dict[Slot, Waiting] = {}
        for entry in entries:
            if entry.started or entry.settled or now - entry.held < LATE_SECONDS or entry.fence == NO_FENCE:
                continue
            if now_ms - entry.due >= LATE_SECONDS * 1000:
                since, tasks, _ = waiting.get(entry.slot, (entry.due, 0, 0))
                waiting[entry.slot] = Waiting(min(since, entry.due), tasks + 1, entry.topic.prepare_timeout)
        for slot, due in self._put_away.since(now_ms).items():
            if now_ms - due >= LATE_SECONDS * 1000:
                since, tasks, seconds = waiting.get(slot, (due, 0, AGAIN_MS // 1000))
                waiting[slot] = Waiting(min(since, due), tasks, seconds)
        return waiting
