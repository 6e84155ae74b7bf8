"""Dead queues: removes DeadQueue entries whose tasks are not dead any more.

A redrive or a purge removes the entry. But an old snapshot, a failover, or a process that had read the row
before can bring it back, and a redrive while Redis is away leaves it there. Nothing takes entries from a
DeadQueue to run them, so no row check finds them: the owner of the slot checks once a minute.

A row that dies between its read and the removal loses its entry for a moment. The sweep's pass over
the dead rows restores it within a minute.
"""

from collections.abc import Callable, Collection, Mapping

from toc.index.queues import Queues
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable
from toc.model.task import TryRow
from toc.model.topic import Slot
from toc.model.verdict import Place, belongs
from toc.observe.log import get_logger
from toc.observe.metrics import ORPHANS
from toc.store.store import Store

log = get_logger(__name__)

PASS_SECONDS = 60.0
PAGE = 200
"""About how many rows one step reads."""
REST = 19
"""The rest after a step, as a multiple of its time: live tasks come first."""


class DeadQueueCheck:
    """Passes over the slots whose DeadQueue was not empty at the last peek, page by page.

    ``buried`` returns, for each slot of this worker, the size of its DeadQueue at the last peek.
    """

    def __init__(
        self, store: Store, queues: Queues, clock: Clock, buried: Callable[[], Mapping[Slot, int]]
    ) -> None:
        self._store = store
        self._queues = queues
        self._clock = clock
        self._buried = buried
        self._began = float("-inf")
        self._left: dict[Slot, int] = {}
        """Slots left in this pass, with the rank to start from."""

    def run_once(self) -> float:
        """One step. Returns the seconds until the next."""
        now = self._clock.monotonic()
        buried = self._buried()
        if not self._left and now - self._began >= PASS_SECONDS:
            self._began = now
            self._left = {slot: 0 for slot, count in buried.items() if count}
        self._left = {slot: start for slot, start in self._left.items() if slot in buried}
        if self._left:
            self._step(buried)
        ended = self._clock.monotonic()
        rest = min((ended - now) * REST, PASS_SECONDS)
        return rest if self._left else max(rest, self._began + PASS_SECONDS - ended)

    def _step(self, buried: Mapping[Slot, int]) -> None:
        """Check one page of a large DeadQueue, or many small ones."""
        pages: dict[Slot, int] = {}
        expected = 0
        for slot, start in self._left.items():
            if expected < PAGE:
                pages[slot] = start
                expected += min(buried[slot], PAGE)
        found: dict[Slot, Collection[int]] = {}
        for slot, page in self._queues.ids("dead", pages, PAGE).items():
            # Added again below if more is left. If Redis did not answer, the next pass reads it.
            del self._left[slot]
            if not isinstance(page, IndexUnavailable):
                found[slot] = page
        rows = self._store.read_tries([job_id for ids in found.values() for job_id in ids])
        for slot, ids in found.items():
            known = {job_id: rows.get(job_id) for job_id in ids if job_id not in rows.unanswered}
            gone = {job_id: row for job_id, row in known.items() if belongs(row) is not Place.DEAD_QUEUE}
            if gone:
                self._remove(slot, gone)
            if len(ids) >= PAGE:
                self._left[slot] = pages[slot] + len(ids) - len(gone)

    def _remove(self, slot: Slot, entries: Mapping[int, TryRow | None]) -> None:
        removed = self._queues.purge_dead({slot: list(entries)})[slot]
        if isinstance(removed, IndexUnavailable) or not removed:
            return  # the next pass looks again, or an operator was faster
        log.info("dead_entries_removed", slot=str(slot), tasks=removed)
        for job_id, row in entries.items():
            if row is None:
                log.error("orphan_dropped", job_id=job_id, slot=str(slot))
                ORPHANS.of(slot.topic).add()
