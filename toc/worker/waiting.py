"""What waits here: a note in Redis for each slot of which tasks are taken and late, and cannot start.

A StoreQueue does not hold them any more, and only the worker that took them knows which of its entries run.
So it says how things stand, for whoever asks how late tasks are: metrics, ``toc slots``, ``toc doctor``.
"""

from __future__ import annotations

from collections.abc import Iterable

from toc.clock import Clock
from toc.errors import IndexUnavailable
from toc.queue.messages import Waiting
from toc.queue.queues import Queues
from toc.topic import Slot
from toc.worker.entry import NO_FENCE, Entry

LATE_SECONDS = 1.0
"""What has been due for so long and was taken so long ago is worth a note; little ever is."""
TELL_SECONDS = 1.0
"""How often a note is changed."""
AGAIN_SECONDS = 2.5
"""How often it is written anew if nothing changes: who had the slot before may have taken it back."""


class WaitingNotes:
    """The notes of one worker. Used by one thread."""

    def __init__(self, queues: Queues, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock
        self._told: dict[Slot, tuple[Waiting, float]] = {}
        """What was noted, and when (monotonic)."""

    def tell(self, entries: Iterable[Entry], now: float) -> None:
        """Note what waits of these entries, all that are held; ``now`` is monotonic."""
        waiting = self._waiting(entries, now)
        notes: dict[Slot, Waiting | None] = {}
        for slot, note in waiting.items():
            before, at = self._told.get(slot, (None, float("-inf")))
            if now - at >= (TELL_SECONDS if note != before else AGAIN_SECONDS):
                notes[slot] = note
        notes |= dict.fromkeys(self._told.keys() - waiting.keys())
        if not notes:
            return
        for slot, done in self._queues.note_waiting(notes).items():
            told = notes[slot]
            if told is None or isinstance(done, IndexUnavailable):
                self._told.pop(slot, None)  # a note that is not taken back soon runs out
            else:
                self._told[slot] = told, now

    def _waiting(self, entries: Iterable[Entry], now: float) -> dict[Slot, Waiting]:
        now_ms = self._clock.now_ms()
        waiting: dict[Slot, Waiting] = {}
        for entry in entries:
            if entry.started or entry.settled or now - entry.held < LATE_SECONDS or entry.fence == NO_FENCE:
                continue
            due = entry.row.next_time if entry.checked else entry.taken
            if now_ms - due < LATE_SECONDS * 1000:
                continue
            since, count, _ = waiting.get(entry.slot, (due, 0, 0))
            waiting[entry.slot] = Waiting(min(since, due), count + 1, entry.topic.prepare_timeout)
        return waiting
