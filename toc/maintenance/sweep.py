"""The sweep: completes the Redis index from the task table.

An entry can be missing although its row exists: after a crash between row and index, a submit while Redis was
down, a row written in a caller's transaction, or when a task comes inside the horizon. This file goes from
rows to entries. ``toc.maintenance.sweeper`` decides which rows, and when.

Entries are added with ZADD LT unless the id is in the PrepareQueue: an early entry is harmless (the row check
puts it back), a late or absent one is not. There is no high-water mark in id or time, because commit order is
not id order: each pass covers its whole range.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from toc.index.calls import IndexBroken, Scored
from toc.index.queues import Queues
from toc.model import verdict
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock, RateLimit
from toc.model.errors import IndexUnavailable, SchemaBehind, StoreUnavailable
from toc.model.task import TaskStatus
from toc.model.topic import SLOT_AMOUNTS, Delivery, Slot, Topic
from toc.observe.log import get_logger
from toc.observe.metrics import EXPIRED_TASKS, ROWS_WITHOUT_TOPIC, SWEEP_ADDED, TRIES
from toc.store.store import Store
from toc.store.tasks.batch import Guard
from toc.store.tasks.scan import DueRow

log = get_logger(__name__)

MAX_AHEAD_MS = 30_000
"""Tasks due within this time are indexed even beyond their topic's horizon: the next look at them may come so
much later."""


Mine = Callable[[], frozenset[int]]
"""Returns the tables that this worker serves now."""
Over = Mapping[int, tuple[DueRow, Topic]]
"""Rows that may be over, with their topics."""
Died = Callable[[int, str, str], None]
"""Called with the job_id, the topic and the reason once a row says that a task that nobody pulls is dead."""


class SweepCounts(NamedTuple):
    """Counts: rows read, entries that were absent or too late, rows whose node failed, rows whose slot is
    broken. The owner of a broken slot fills it again once it is mended.
    """

    rows: int = 0
    added: int = 0
    failed: int = 0
    broken: int = 0

    def plus(self, other: SweepCounts) -> SweepCounts:
        """The sums of these and others."""
        return SweepCounts(*(a + b for a, b in zip(self, other, strict=True)))


class Sweep:
    """Adds the index entries that rows lack. Thread-safe."""

    def __init__(
        self, store: Store, queues: Queues, catalog: TopicCatalog, clock: Clock, died: Died = lambda *_: None
    ) -> None:
        self.scans = store.scans
        self._died = died
        self._store = store
        self.clock = clock
        self._queues = queues
        self.indexed = queues.present
        """Whether there is an index to complete. If not, only what is over by its row is to be ended."""
        self._catalog = catalog
        self._complains = RateLimit(clock)

    def horizon_ms(self) -> int:
        """How far ahead (ms) any topic keeps tasks in Redis."""
        return max((topic.horizon for topic in self._catalog.known().values()), default=0) * 1000

    def add(self, rows: Collection[DueRow]) -> SweepCounts:
        """Index pending rows that are due within their topic's horizon; end those whose time is over."""
        now = self.clock.now_ms()
        known = self._catalog.known_type
        entries: dict[Slot, list[tuple[int, float]]] = {}
        pairs = [(row, known(row.biz_type) or self._topic(row)) for row in rows]
        over = {row.job_id: (row, topic) for row, topic in pairs if topic and _may_be_over(row, topic, now)}
        ended = self._end(over, now) if over else set()
        for row, topic in pairs:
            if topic is None or row.job_id in ended:
                continue
            if row.next_time - now <= MAX_AHEAD_MS or not verdict.beyond_horizon(topic, row.next_time, now):
                score = verdict.entry_score(topic, row.next_time, row.attempts)
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, score))
                if row.slot_amount != topic.slot_amount:
                    self._stamped_otherwise(topic, row)
        return self._outcome("store", len(rows), entries, self._queues.add(entries))

    def _end(self, over: Over, now: int) -> set[int]:
        """End those of these tasks whose time is over at ``now`` (ms): rows, then entries. Returns their ids.

        A worker that takes an expired task ends it, too. But nobody takes the tasks of a paused topic. What
        cannot be ended now is read again by a later pass.
        """
        pulled = {job_id: pair for job_id, pair in over.items() if _is_pulled(pair[1])}
        others = {job_id: pair for job_id, pair in over.items() if job_id not in pulled}
        ends = [*self._expired(others, now), *self._lapsed(pulled)]
        guards = self._store.expire(ends) if ends else {}
        dead: dict[Slot, list[tuple[int, int]]] = {}
        gone: dict[Slot, list[int]] = {}
        ended = [end for end in ends if guards.get(end.job_id) is Guard.APPLIED]
        for end in ended:
            row, topic = over[end.job_id]
            slot = topic.slot(row.slot_crc, row.slot_amount)
            if end.started:
                dead.setdefault(slot, []).append((end.job_id, now))
            else:
                gone.setdefault(slot, []).append(end.job_id)
            if end.expired:
                EXPIRED_TASKS.of(topic.name).add()
                log.info("task_expired", job_id=end.job_id, topic=topic.name, started=end.started)
            if end.started and end.nonce is None:
                self._died(end.job_id, topic.name, "it has expired")
            elif end.started:
                TRIES.of(topic.name, "dead").add()
                log.warning("task_dead", job_id=end.job_id, topic=topic.name, error=end.error)
        # If a node is away: the row check drops an entry, and a later pass over dead rows restores one.
        self._queues.restore_dead(dead)
        self._queues.forget(gone)
        return {end.job_id for end in ended}

    def _expired(self, over: Over, now: int) -> list[verdict.Failure]:
        """Return the ends of tasks that expired more than prepare_timeout ago.

        By then a try that had started in time has a lease, and its row is left alone.
        """
        return [
            verdict.after_expiry(row, now)
            for row in self._store.read_tries(over).values()
            if row.status == TaskStatus.PENDING
            and row.next_time <= now
            and row.lease <= 0
            and verdict.has_expired(row.expires_at, _long_ago(over[row.job_id][1], now))
        ]

    def _lapsed(self, over: Over) -> list[verdict.Failure]:
        """Return the ends of pulled tasks that have expired, or whose last ttr is over."""
        return [
            verdict.after_lapse(row)
            for row in self._store.pulls.read(over).values()
            if verdict.unpulled(row, over[row.job_id][1]) is verdict.Unpulled.OVER
        ]

    def restore_dead(self, rows: Collection[DueRow]) -> SweepCounts:
        """Restore the DeadQueue entries of rows of status 4."""
        entries: dict[Slot, list[tuple[int, int]]] = {}
        for row in rows:
            if topic := self._topic(row):
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, row.next_time))
        restored = self._queues.restore_dead(entries)  # [rule: dead-restored]
        return self._outcome("dead", len(rows), entries, restored)

    def _outcome(
        self, queue: str, rows: int, entries: Scored, results: Mapping[Slot, int | IndexUnavailable]
    ) -> SweepCounts:
        added = failed = broken = 0
        for slot, result in results.items():
            if isinstance(result, IndexUnavailable):
                if isinstance(result, IndexBroken):
                    broken += len(entries[slot])
                else:
                    failed += len(entries[slot])
                if self._complains():
                    log.warning("sweep_not_indexed", slot=str(slot), error=str(result))
            else:
                added += result
        SWEEP_ADDED.of(queue).add(added)
        return SweepCounts(rows, added, failed, broken)

    def _stamped_otherwise(self, topic: Topic, row: DueRow) -> None:
        """Give the topic the slots that a row needs, if it has fewer: another program has changed one of
        them, or this process has an old view of the topic, and then nothing changes.

        An amount that no topic can have is only named: ``Topic.slot`` ignores it.
        """
        legal = row.slot_amount in SLOT_AMOUNTS
        if (legal and row.slot_amount < topic.slot_amount) or not self._complains((topic, row.slot_amount)):
            return
        if not legal:
            about = {"job_id": row.job_id, "topic": topic.name, "slot_amount": row.slot_amount}
            log.warning("slot_amount_not_understood", **about)
            return
        with suppress(StoreUnavailable, SchemaBehind):  # the topic table does not answer; the row comes again
            if self._store.topics.raise_slots(topic.name, row.slot_amount):
                log.warning("slots_raised", job_id=row.job_id, topic=topic.name, slots=row.slot_amount)

    def _topic(self, row: DueRow) -> Topic | None:
        topic = self._catalog.known_type(row.biz_type)
        if topic is not None or not self._complains(row.biz_type):
            return topic
        try:
            topic = self._catalog.of_type(row.biz_type)
        except (StoreUnavailable, SchemaBehind):
            return None  # the topic table does not answer; the rows come again
        if topic is None:
            ROWS_WITHOUT_TOPIC.of().add()
            log.error("no_topic_for_row", job_id=row.job_id, biz_type=row.biz_type)
        return topic


def _is_pulled(topic: Topic) -> bool:
    return topic.delivery is Delivery.PULL and not topic.paused


def _long_ago(topic: Topic, now: int) -> int:
    """The instant (ms) before which a handler's task must have expired to be ended here."""
    return now - topic.prepare_timeout * 1000


def _may_be_over(row: DueRow, topic: Topic, now: int) -> bool:
    """Whether the time of a pending task may be over, for ``Sweep`` to find out."""
    if row.next_time > now:
        return False
    if _is_pulled(topic):
        return row.attempts > 0 or verdict.has_expired(row.expires_at, now)
    return verdict.has_expired(row.expires_at, _long_ago(topic, now))
