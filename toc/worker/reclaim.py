"""Reclaim: give back what a worker that died or fell silent has left in the PrepareQueues.

Also the slow safety poll: a peek at every slot finds due times whose wake-up message was lost, and tells
which slots hold prepared entries that are not ours; only those are searched for timed-out ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from toc.catalog import TopicCatalog
from toc.clock import Clock
from toc.errors import IndexUnavailable, StoreUnavailable
from toc.failpoint import failpoint
from toc.log import get_logger
from toc.metrics import RECLAIMED, TRIES
from toc.queue.messages import ExpiredRequest
from toc.queue.queues import Queues
from toc.queue.scores import split, store_score
from toc.store.batch import Failure, Guard
from toc.store.store import Store
from toc.task import TaskStatus, TryRow
from toc.topic import Slot, Topic
from toc.worker.entry import Inflight
from toc.worker.loop import Loop
from toc.worker.poll import Poller
from toc.worker.slots import OwnedSlot, SlotBook, instant_of

log = get_logger(__name__)

TICK_SECONDS = 1.0
TURNED_SECONDS = 0.03
PEEK_SECONDS = 5.0
RECLAIM_LIMIT = 200
MAX_CRASHES = 60_000
"""What the column holds; a task that has killed its worker so often is not counted further."""
CRASHED = "the worker that ran it died or fell silent"


class Reclaimer:
    """The loop that rolls back timed-out entries, and at once those of workers known to be dead."""

    def __init__(
        self,
        *,
        store: Store,
        queues: Queues,
        catalog: TopicCatalog,
        clock: Clock,
        book: SlotBook,
        inflight: Inflight,
        poller: Poller,
        max_crashes: int,
    ) -> None:
        self._store = store
        self._queues = queues
        self._catalog = catalog
        self._clock = clock
        self._book = book
        self._inflight = inflight
        self._poller = poller
        self._max_crashes = max_crashes
        self._peeked_at = float("-inf")
        self._suspects: set[Slot] = set()
        self.loop = Loop("reclaim", self.run_once)

    def look_now(self) -> None:
        """Slots were claimed or a worker is known to have died: do not wait for the next peek."""
        self._peeked_at = float("-inf")
        self.loop.wake()

    def run_once(self) -> float:
        """One look; returns the seconds until the next."""
        now = self._clock.monotonic()
        if now - self._peeked_at >= PEEK_SECONDS:
            self._peeked_at = now
            self._peek()
        if self._suspects:
            try:
                self._reclaim()
            except StoreUnavailable as exc:
                log.warning("not_reclaimed", error=str(exc))
        # Entries time out as Redis's clock turns to another second: look just after that.
        return TICK_SECONDS - self._clock.now_ms() % 1000 / 1000 + TURNED_SECONDS

    def _peek(self) -> None:
        owned = self._book.owned
        held = Counter(entry.slot for entry in self._inflight.snapshot())
        idle: dict[Slot, list[int]] = {}
        for slot, peek in self._queues.peek(list(owned)).items():
            if isinstance(peek, IndexUnavailable):
                continue
            if peek.next_due is not None:
                self._poller.look_at(slot, instant_of(peek.next_due))
            if peek.prepared > held[slot]:
                self._suspects.add(slot)
                continue
            self._suspects.discard(slot)
            if not peek.prepared and owned[slot].others:
                idle[slot] = list(owned[slot].others)
                owned[slot].others = {}
        if idle:
            # Nothing is prepared there: whoever drew these numbers has nothing left under them.
            self._queues.unclaim(idle)

    def _reclaim(self) -> None:
        owned = self._book.owned
        topics = self._catalog.known()
        dead = self._book.dead
        requests = [
            ExpiredRequest(
                slot, topics[slot.topic].prepare_timeout, _numbers_of(dead, owned[slot]), RECLAIM_LIMIT
            )
            for slot in self._suspects
            if slot in owned and slot.topic in topics
        ]
        self._suspects &= {request.slot for request in requests}
        found: dict[Slot, list[tuple[int, float]]] = {}
        for slot, result in self._queues.expired(requests).items():
            if isinstance(result, IndexUnavailable):
                continue
            left = [pair for pair in result if self._inflight.get(pair[0]) is None]
            if left:
                found[slot] = left
        if found:
            self._roll_back(found, topics)

    def _roll_back(self, found: Mapping[Slot, list[tuple[int, float]]], topics: Mapping[str, Topic]) -> None:
        """Listed, the rows written, then moved under the fence: a crash in between repeats it uncharged."""
        rows = self._store.read_tries([job_id for pairs in found.values() for job_id, _ in pairs])
        now = self._clock.now_ms()
        crashes: dict[int, Failure] = {}
        for slot, pairs in found.items():
            topic = topics[slot.topic]
            dead = _numbers_of(self._book.dead, self._book.owned[slot]) if slot in self._book.owned else []
            for job_id, score in pairs:
                row = rows.get(job_id)
                if row is not None and row.status == TaskStatus.PENDING:
                    _, remaining, claim = split(score)
                    failure = crash_of(row, topic, remaining, now, self._max_crashes, dead=claim in dead)
                    if failure is not None:
                        crashes[job_id] = failure
        guards = self._store.fail(list(crashes.values())) if crashes else {}
        cancelled = [row.job_id for row in rows.values() if row.status == TaskStatus.CANCELLED]
        if cancelled:
            # Before the entry goes: a cancel that is under way looks for it.  [rule: mark-tried]
            self._store.mark_tried(cancelled)
        failpoint("reclaim.rows-written")
        commits: dict[Slot, list[tuple[int, float]]] = {}
        backs: dict[Slot, list[tuple[int, float, float]]] = {}
        buries: dict[Slot, list[tuple[int, float, int]]] = {}
        for slot, pairs in found.items():
            topic = topics[slot.topic]
            for job_id, score in pairs:
                row = rows.get(job_id)
                # The whole score as its fence: it stands while nobody has kept the entry alive since it was
                # listed. A worker that has woken up meanwhile goes on, with its failure fenced off.
                # [rule: whole-score]
                if row is None or row.status in (TaskStatus.PROCESSED, TaskStatus.CANCELLED):
                    commits.setdefault(slot, []).append((job_id, score))
                elif row.status == TaskStatus.DEAD:
                    buries.setdefault(slot, []).append((job_id, score, now))
                elif job_id not in crashes:
                    target = store_score(row.next_time, topic.remaining(row.attempts), row.attempts)
                    backs.setdefault(slot, []).append((job_id, score, target))
                elif guards[job_id] is Guard.APPLIED:
                    TRIES.of(topic.name, "crashed").add()
                    crash = crashes[job_id]
                    left = topic.remaining(crash.new_attempts)
                    target = store_score(crash.next_time, left, crash.new_attempts)
                    backs.setdefault(slot, []).append((job_id, score, target))
                # LOST: the row changed meanwhile; the next look reads it again
        # An entry whose node does not answer is found again by a later look.
        if commits:
            self._queues.commit(commits)
        if backs:
            self._queues.rollback(backs)
        if buries:
            self._queues.bury(buries)
        for slot, pairs in found.items():
            RECLAIMED.of(slot.topic).add(len(pairs))
        log.warning("reclaimed", slots=len(found), tasks=sum(len(pairs) for pairs in found.values()))


def crash_of(
    row: TryRow, topic: Topic, remaining: int, now: int, max_crashes: int, *, dead: bool
) -> Failure | None:
    """How the row changes because its try ended with its worker; None when it stays as it is.

    Charges a try, but never the last one: no task dies of a crash of its worker. Where the row was written
    before (more tries are used up than by the entry), a try is not charged again; but unless its worker is
    known to be dead, the crash is counted all the same: the entry may carry stale tries, whoever ran it may
    be running on, and its late failure must find another row. From ``max_crashes`` on it runs in quarantine,
    which counts its runs itself when they begin; what only waited there is not counted.
    """
    written = row.attempts > topic.retries - remaining
    if row.next_time > now or row.crashes >= max_crashes or (written and dead):  # [rule: crash-counted]
        return None
    attempts, error = row.attempts, None
    if not written:
        # max, as retries may have been lowered  [rule: never-the-last]
        attempts = max(attempts, min(attempts + 1, topic.retries - 1))
        error = CRASHED
    return Failure(
        row.job_id,
        row.version,
        row.attempts,
        row.crashes,
        attempts,
        min(row.crashes + 1, MAX_CRASHES),
        max(now, row.action_time),  # not before it, even if the clock was set back
        error,
    )


def _numbers_of(dead: frozenset[str], owned: OwnedSlot) -> list[int]:
    return [number for number, worker in owned.others.items() if worker in dead]  # [rule: known-death]
