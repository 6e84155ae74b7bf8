"""The index of a cluster without one: nothing to add to or to remove, and the rows alone say what is due.

What would change an index does nothing; what would look at one answers that there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from toc.index.calls import BySlot, Scored
from toc.index.messages import CancelReply
from toc.index.queues import Queues
from toc.model.errors import IndexUnavailable, TocError
from toc.model.topic import Slot

WHY = "this cluster has no index: it runs on its database alone"
NEVER_TAKEN = CancelReply(removed=False, prepared=False, redis_now_ms=0)
"""Only the row, which was read before, tells whether a try has begun."""


class NoIndex(Queues):
    """Queues that are none. Connects to nothing.

    ``indexed`` tells whether there is an index by now: operators may have switched it on while this process
    goes on. The rows do not tell of each try any more then.
    """

    present = False

    def __init__(self, indexed: Callable[[], bool] = lambda: False) -> None:
        super().__init__("redis://none")
        self.refuse(WHY)
        self._indexed = indexed

    def add(self, entries: Scored) -> BySlot[int]:
        """Do nothing."""
        return dict.fromkeys(entries, 0)

    def restore_dead(self, entries: Mapping[Slot, Sequence[tuple[int, int]]]) -> BySlot[int]:
        """Do nothing."""
        return dict.fromkeys(entries, 0)

    def redrive(self, entries: Scored) -> BySlot[int]:
        """Do nothing."""
        return dict.fromkeys(entries, 0)

    def forget(self, entries: Mapping[Slot, Sequence[int]]) -> BySlot[int]:
        """Do nothing."""
        return dict.fromkeys(entries, 0)

    def purge_dead(self, entries: Mapping[Slot, Sequence[int]]) -> BySlot[int]:
        """Do nothing."""
        return dict.fromkeys(entries, 0)

    @override
    def cancel(self, slot: Slot, job_id: int) -> CancelReply:
        """Reply that the row tells whether a try has begun. Raises IndexUnavailable if there is an index."""
        return self._row_tells()

    def cancel_many(self, slots: Mapping[int, Slot]) -> dict[int, CancelReply | IndexUnavailable]:
        """Reply that the rows tell whether tries have begun."""
        try:
            return dict.fromkeys(slots, self._row_tells() if slots else NEVER_TAKEN)
        except IndexUnavailable as exc:
            return dict.fromkeys(slots, exc)

    @override
    def reschedule(self, slot: Slot, job_id: int, score: float) -> CancelReply:
        """Reply that the row tells whether a try has begun. Raises IndexUnavailable if there is an index."""
        return self._row_tells()

    def _row_tells(self) -> CancelReply:
        try:
            if not self._indexed():
                return NEVER_TAKEN
        except TocError as exc:
            raise IndexUnavailable(f"whether there is an index is not known: {exc}") from exc
        raise IndexUnavailable("there is an index by now: set TOC_REDIS_URL and start this process again")
