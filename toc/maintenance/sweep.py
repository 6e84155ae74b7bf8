"""The sweep: completes the Redis index from the task table.

An entry can be missing although its row exists: after a crash between row and index, a submit while Redis was
down, a row written in a caller's transaction, or when a task comes inside the horizon. This file goes from
rows to entries. ``toc.maintenance.sweeper`` decides which rows, and when.

Entries are added with ZADD LT unless the id is in the PrepareQueue: an early entry is harmless (the row check
puts it back), a late or absent one is not. There is no high-water mark in id or time, because commit order is
not id order: each pass covers its whole range.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from toc.failpoint import failpoint
from toc.index.calls import IndexBroken, Scored
from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock, RateLimit
from toc.model.errors import IndexUnavailable, SchemaBehind, StoreUnavailable
from toc.model.task import TaskStatus
from toc.model.topic import SLOT_AMOUNTS, Slot, Topic
from toc.model.verdict import after_expiry, beyond_horizon, entry_score, has_expired
from toc.observe.log import get_logger
from toc.observe.metrics import EXPIRED_TASKS, ROWS_WITHOUT_TOPIC, SWEEP_ADDED, SWEEP_ROWS
from toc.store.batch import Guard
from toc.store.scan import DueRow, Position
from toc.store.shards import Trouble
from toc.store.store import Store

log = get_logger(__name__)

ROWS_PER_STEP = 200
"""Rows that one step reads, about: one or two milliseconds of this process's time."""
LEAST_PAGE = 20
TABLES_PER_PAGE = 32
NEAR_MS = 60_000
"""Tasks due within this time (a minute) are restored first."""
FAST_ROWS = 1000
"""Rows per step where nothing else is held up."""
COMPLAIN_SECONDS = 60.0
"""How often the same trouble is logged."""


class SweepCounts(NamedTuple):
    """Counts: rows read, entries that were absent or too late, rows whose node failed, rows whose slot is
    broken. The owner of a broken slot fills it again once it is mended.
    """

    rows: int = 0
    added: int = 0
    failed: int = 0
    broken: int = 0


class Sweep:
    """Adds the index entries that rows lack. Thread-safe."""

    def __init__(self, store: Store, queues: Queues, catalog: TopicCatalog, clock: Clock) -> None:
        self.scans = store.scans
        self.untaken = store.leases.untaken
        self._store = store
        self._topics = store.topics
        self.clock = clock
        self._queues = queues
        self._catalog = catalog
        self._complains = RateLimit(clock, COMPLAIN_SECONDS)

    def horizon_ms(self) -> int:
        """How far ahead (ms) any topic keeps tasks in Redis."""
        return max((topic.horizon for topic in self._catalog.known().values()), default=0) * 1000

    def add(
        self, rows: Iterable[DueRow], within_ms: int = 0, *, missing: bool = False
    ) -> tuple[SweepCounts, set[int]]:
        """Index pending rows. Returns the counts and the ids whose node is out of reach.

        Rows due within ``within_ms`` are indexed even beyond their topic's horizon: their next look may come
        too late. ``missing``: most entries are probably absent, so they are added without a lookup. Rows that
        expired long ago end instead.
        """
        now = self.clock.now_ms()
        known = self._catalog.known_type
        entries: dict[Slot, list[tuple[int, float]]] = {}
        expired: dict[int, tuple[DueRow, Topic]] = {}
        count = 0
        for row in rows:
            count += 1
            topic = known(row.biz_type) or self._topic(row)
            if topic is None:
                continue
            if row.next_time <= now and has_expired(row.expires_at, _long_ago(topic, now)):
                expired[row.job_id] = row, topic
                continue
            if row.next_time - now <= within_ms or not beyond_horizon(topic, row.next_time, now):
                score = entry_score(topic, row.next_time, row.attempts)
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, score))
                if row.slot_amount != topic.slot_amount:
                    self._stamped_otherwise(topic, row)
        if expired:
            self._expire(expired, now)
        added, failed, broken = self._complete(entries, missing)
        SWEEP_ROWS.of().add(count)
        SWEEP_ADDED.of("store").add(added)
        if added:
            log.debug("sweep_indexed", entries=added)  # also tasks that have ended meanwhile
        return SweepCounts(count, added, len(failed) - broken, broken), failed

    def _expire(self, expired: Mapping[int, tuple[DueRow, Topic]], now: int) -> None:
        """End tasks that expired more than prepare_timeout ago: no worker takes them, because their
        topic is paused.

        By then a try that had started in time has a lease, and its row is left alone. Rows that
        cannot be ended now are read again by a later pass.
        """
        ends = {
            row.job_id: after_expiry(row, now)
            for row in self._store.read_tries(expired).values()
            if row.status == TaskStatus.PENDING
            and row.next_time <= now
            and row.lease <= 0
            and has_expired(row.expires_at, _long_ago(expired[row.job_id][1], now))
        }
        guards = self._store.expire(list(ends.values())) if ends else {}
        dropped: dict[int, Slot] = {}
        dead: dict[Slot, list[tuple[int, int]]] = {}
        counts: Counter[str] = Counter()
        for job_id, guard in guards.items():
            if guard is Guard.APPLIED:
                row, topic = expired[job_id]
                slot = topic.slot(row.slot_crc, row.slot_amount)
                if ends[job_id].started:
                    dead.setdefault(slot, []).append((job_id, now))
                else:
                    dropped[job_id] = slot
                counts[topic.name] += 1
                log.info("task_expired", job_id=job_id, topic=topic.name, started=ends[job_id].started)
        for name, ended in counts.items():
            EXPIRED_TASKS.of(name).add(ended)
        # If a node is away: the row check drops an entry, and a later pass over dead rows restores one.
        self._queues.cancel_many(dropped)
        self._queues.restore_dead(dead)

    def restore_dead(self, rows: Iterable[DueRow]) -> tuple[SweepCounts, set[int]]:
        """Restore the DeadQueue entries of rows of status 4. Returns the counts and the ids out of reach."""
        entries: dict[Slot, list[tuple[int, int]]] = {}
        count = 0
        for row in rows:
            count += 1
            topic = self._topic(row)
            if topic is not None:
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, row.next_time))
        restored = self._queues.restore_dead(entries)  # [rule: dead-restored]
        added, failed, broken = self._outcome(entries, restored)
        SWEEP_ROWS.of().add(count)
        SWEEP_ADDED.of("dead").add(added)
        return SweepCounts(count, added, len(failed) - broken, broken), failed

    def _complete(self, entries: Scored, missing: bool) -> tuple[int, set[int], int]:
        """Add entries that are absent or too late. Returns what ``_outcome`` does."""
        if missing:
            return self._outcome(entries, self._queues.add(entries))
        lacking: dict[Slot, list[tuple[int, float]]] = {}
        unknown: dict[Slot, IndexUnavailable] = {}
        for slot, found in self._queues.lacking(entries).items():
            if isinstance(found, IndexUnavailable):
                unknown[slot] = found
            elif found:
                lacking[slot] = found
        results = self._queues.add(lacking) if lacking else {}
        return self._outcome(entries, {**results, **unknown})

    def _outcome(
        self,
        entries: Scored,
        results: Mapping[Slot, int | IndexUnavailable],
    ) -> tuple[int, set[int], int]:
        """How many entries were added, the ids that were not, how many of those for a broken slot."""
        added = broken = 0
        failed: set[int] = set()
        for slot, result in results.items():
            if isinstance(result, IndexUnavailable):
                failed.update(job_id for job_id, _ in entries[slot])
                if isinstance(result, IndexBroken):
                    broken += len(entries[slot])
                if self._complains():
                    log.warning("sweep_not_indexed", slot=str(slot), error=str(result))
            else:
                added += result
        return added, failed, broken

    def _stamped_otherwise(self, topic: Topic, row: DueRow) -> None:
        """Give the topic the slots that a row needs, if it has fewer: another program has changed one of
        them, or this process has an old view of the topic, and then nothing changes.

        An amount that no topic can have is only named: ``Topic.slot`` ignores it.
        """
        legal = row.slot_amount in SLOT_AMOUNTS
        if (legal and row.slot_amount < topic.slot_amount) or not self._complains((topic, row.slot_amount)):
            return
        if not legal:
            log.warning(
                "slot_amount_not_understood",
                job_id=row.job_id, topic=topic.name, slot_amount=row.slot_amount,
            )  # fmt: skip
            return
        with suppress(StoreUnavailable, SchemaBehind):  # the topic table does not answer; the row comes again
            if self._topics.raise_slots(topic.name, row.slot_amount):
                log.warning("slots_raised", job_id=row.job_id, topic=topic.name, slots=row.slot_amount)

    def _topic(self, row: DueRow) -> Topic | None:
        topic = self._catalog.known_type(row.biz_type)
        if topic is not None:
            return topic
        ROWS_WITHOUT_TOPIC.of().add()
        if not self._complains(row.biz_type):
            return None
        try:
            topic = self._catalog.of_type(row.biz_type)
        except (StoreUnavailable, SchemaBehind):
            return None  # the topic table does not answer; the rows come again
        if topic is None:
            log.error("no_topic_for_row", job_id=row.job_id, biz_type=row.biz_type)
        return topic


def _long_ago(topic: Topic, now: int) -> int:
    """The instant (ms) before which a task must have expired for the sweep to end it."""
    return now - topic.prepare_timeout * 1000


class Crawl:
    """One pass over all rows of a status in some tables, in steps, each table in order of due time.

    ``where`` is an additional SQL condition, ``missing`` is passed to ``Sweep.add``.
    """

    def __init__(
        self,
        sweep: Sweep,
        tables: Iterable[int],
        *,
        from_ms: int,
        to_ms: int,
        status: TaskStatus = TaskStatus.PENDING,
        where: str = "",
        rows_per_step: int = ROWS_PER_STEP,
        missing: bool = False,
    ) -> None:
        self._missing = missing
        self._sweep = sweep
        self._waiting = deque(tables)
        self._active: dict[int, Position] = {}
        self._broken_off: dict[int, Position] = {}
        """Positions reached in waiting tables that did not answer."""
        self._from = Position(from_ms)
        self._to_ms = to_ms
        self._status = status
        self._where = where
        self._rows = rows_per_step
        self._at_once = 1
        """How many tables a step reads: more while they hold little."""
        self.tables = len(self._waiting)

    @property
    def tables_left(self) -> int:
        """How many tables have yet to be read to their end."""
        return len(self._waiting) + len(self._active)

    @property
    def reading(self) -> list[int]:
        """The tables of the next step."""
        return [*self._active, *list(self._waiting)[: max(0, self._at_once - len(self._active))]]

    @property
    def amid(self) -> bool:
        """Whether some table was read in part."""
        return bool(self._active)

    def step(self) -> SweepCounts:
        """Read and index the next rows.

        Raises the error if none of this step's tables answers; they then come after all others, so calling it
        again goes on with those.
        """
        starts = {
            table: self._active.get(table) or self._broken_off.pop(table, self._from)
            for table in self.reading
        }
        if not starts:
            return SweepCounts()
        limit = max(LEAST_PAGE, self._rows // len(starts))
        pages = self._sweep.scans.page(starts, self._to_ms, limit, status=self._status, where=self._where)
        for _ in range(len(starts) - len(self._active)):
            self._waiting.popleft()
        # Tables that do not answer come again after all others, from their position.
        self._waiting.extend(pages.unanswered)
        self._broken_off.update((table, starts[table]) for table in pages.unanswered)
        self._active = {table: page[-1].position for table, page in pages.items() if len(page) >= limit}
        if not pages:
            pages.whole()
        rows = [row for page in pages.values() for row in page]
        if rows:
            failpoint("sweep.rows-read")
        if self._status is TaskStatus.DEAD:
            counts, _ = self._sweep.restore_dead(rows)
        else:
            counts, _ = self._sweep.add(rows, missing=self._missing)
        if len(rows) < self._rows / 2:
            self._at_once = min(2 * self._at_once, TABLES_PER_PAGE)
        else:
            self._at_once = max(self._at_once // 2, 1)
        return counts


def restore_passes(
    sweep: Sweep, tables: Sequence[int], *, where: str = "", rows_per_step: int = FAST_ROWS
) -> list[Crawl]:
    """The passes that restore an index without entries: what is due within a minute, the rest, dead tasks."""
    now = sweep.clock.now_ms()
    near, far = now + NEAR_MS, now + max(NEAR_MS, sweep.horizon_ms())
    more: dict[str, Any] = {"where": where, "rows_per_step": rows_per_step, "missing": True}
    return [
        Crawl(sweep, tables, from_ms=0, to_ms=near, **more),
        Crawl(sweep, tables, from_ms=near, to_ms=far, **more),
        Crawl(sweep, tables, from_ms=0, to_ms=now + 1000, status=TaskStatus.DEAD, **more),
    ]


def sweep_all(
    sweep: Sweep,
    tables: Sequence[int],
    *,
    where: str = "",
    progress: Callable[[float, SweepCounts], None] = lambda _part, _counts: None,
) -> SweepCounts:
    """Run every pass once over these tables without rests: pending rows, soonest first, then dead ones.

    ``progress`` gets the completed part, 0 to 1, and the counts so far. If some tables do not answer, it goes
    through all others, then raises StoreUnavailable or SchemaBehind.
    """
    crawls = restore_passes(sweep, tables, where=where)
    total = SweepCounts()
    failure: Trouble | None = None
    for crawl in crawls:
        silent: set[int] = set()
        """Tables that did not answer, since one of this pass did."""
        while crawl.tables_left > len(silent):
            reading = crawl.reading
            try:
                counts = crawl.step()
            except (StoreUnavailable, SchemaBehind) as exc:
                failure = failure or exc
                silent.update(reading)
                continue
            silent.clear()
            total = SweepCounts(*(a + b for a, b in zip(total, counts, strict=True)))
            left = sum(other.tables_left for other in crawls)
            progress(1 - left / max(1, len(crawls) * len(tables)), total)
    if failure is not None:
        raise failure
    return total
