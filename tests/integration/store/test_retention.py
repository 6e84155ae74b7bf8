"""Bodies are written, moved and deleted with their rows; finished rows go when their retention is over."""

from contextlib import closing
from typing import Any

import pytest
import structlog
from fault.kit.proxy import Proxy
from harness.clocks import StandingClock
from harness.metrics import taken
from harness.patience import until
from harness.rows import NewRow, insert, insert_many
from harness.tables import engine_of
from sqlalchemy import create_engine

from toc.maintenance.retention import (
    CYCLE_SECONDS,
    FORGET_SECONDS,
    LARGE_PAGE,
    MIN_SECONDS,
    TABLES,
    Retention,
)
from toc.model.bulk import BulkJob, BulkKind, BulkState
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import DedupConflict, StoreUnavailable
from toc.model.sharding import table_of_job
from toc.model.task import Content, TaskRow, TaskStatus
from toc.model.topic import Topic
from toc.observe.metrics import PURGED
from toc.store.servers.server import DatabaseServer
from toc.store.servers.shards import Parts
from toc.store.store import Store
from toc.store.tasks.bodies import BODY_BYTES
from toc.store.tasks.rows import bounded

# Bodies: written, moved and deleted with their rows, and readable under the version that the row has.


EVERY_BYTE = bytes(range(256)) * 41 + b"';\\--%s%%"


def with_body(row: TaskRow, content: Content) -> TaskRow:
    return row._replace(body_length=len(content.data), body_sha256=content.fingerprint())


def stored(store: Store, row: TaskRow) -> Content | None:
    """The body that the row, as it is now, names."""
    now = store.get(row.job_id)
    return None if now is None else store.bodies.read({now.job_id: now.version}).get(now.job_id)


def count(place: Any, rows: list[TaskRow]) -> int:
    """How many bodies these tasks have, of whatever version."""
    engine = create_engine(place.urls[0])
    found = 0
    with engine.connect() as connection:
        for row in rows:
            table = (row.job_id >> 12 & 1023) % place.tables
            schema = "" if place.urls[0].startswith("sqlite") else f"{place.prefix}{table % place.databases}."
            found += connection.exec_driver_sql(
                f"SELECT COUNT(*) FROM {schema}timeout_body_{table:04d} WHERE job_id={row.job_id}"
            ).scalar_one()
    engine.dispose()
    return found


def test_a_body_keeps_to_its_row_through_all_that_happens(store: Store, place: Any, new_row: NewRow) -> None:
    content = Content("a/b", EVERY_BYTE)
    row, plain = with_body(new_row(), content), new_row()
    insert_many(store, [row, plain], content)
    assert store.reschedule(row.job_id, row.action_time + 1)[0]
    assert stored(store, row) == content
    assert not store.bodies.read({row.job_id: 0}), "a try of the old version is superseded"

    from toc.model.verdict import Failure

    store.die([Failure(row.job_id, 1, 0, 0, 1, 0, row.next_time, "no")])
    (again,) = store.redrive([row.job_id, plain.job_id], row.action_time).values()
    assert (again.version, again.status) == (2, TaskStatus.PENDING)
    assert store.redrive([row.job_id], row.action_time) == {}
    assert stored(store, row) == content
    assert count(place, [row, plain]) == 1
    store.die([Failure(row.job_id, 2, 0, 0, 1, 0, row.next_time, "no")])
    assert sum(store.delete_ended({row.job_id: len(content.data)}, [TaskStatus.DEAD]).whole()) == 1
    assert count(place, [row]) == 0


def test_dedup_compares_bodies_by_length_hash_and_type(store: Store, new_row: NewRow) -> None:
    first, other, typed = Content("a/b", b"one"), Content("a/b", b"two"), Content("a/c", b"one")
    row = with_body(new_row(dedup_key="k"), first)
    assert insert(store, row, first) == row.job_id
    again = new_row(row.biz_id, dedup_key="k")
    assert insert(store, with_body(again, first), first) == row.job_id
    for content in (other, typed, None):
        another = again if content is None else with_body(again, content)
        with pytest.raises(DedupConflict, match="another body") as caught:
            insert(store, another, content)
        assert caught.value.job_id == row.job_id
        with pytest.raises(DedupConflict):
            insert_many(store, [fresh := new_row(), another], content)
        assert store.read([fresh.job_id, again.job_id]) == {}, "nothing was written"
    assert stored(store, row) == first


def test_a_reschedule_whose_answer_was_lost_is_unknown_and_happened_once_with_its_body(
    through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
    content = Content("a/b", b"x")
    row = with_body(new_row(attempts=2), content)
    insert(through_proxy, row, content)
    proxy.eat(b";COMMIT")
    with pytest.raises(StoreUnavailable):
        through_proxy.reschedule(row.job_id, row.action_time + 1)
    assert proxy.stats.eaten == 1
    assert stored(through_proxy, row) == content
    after = through_proxy.read([row.job_id])[row.job_id]
    assert (after.version, after.attempts, after.action_time) == (1, 0, row.action_time + 1)


def test_a_transaction_deletes_a_bounded_number_of_bytes(
    mysql_store: Store, mysql_place: Any, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Content("a/b", bytes(BODY_BYTES // 2 - 1))
    rows = [with_body(new_row(1), content) for _ in range(5)]
    insert_many(mysql_store, rows, content)
    mysql_store.finish((row.job_id, 0) for row in rows)
    sent: list[int] = []
    run = DatabaseServer.run

    def counted(self: DatabaseServer, statements: Any, **how: Any) -> Any:
        results = run(self, statements, **how)
        if statements[0].sql.startswith("DELETE"):
            sent.append(results[-1].matched)
        return results

    monkeypatch.setattr(DatabaseServer, "run", counted)
    assert sum(mysql_store.delete_ended({row.job_id: len(content.data) for row in rows}).whole()) == 5
    assert sent == [2, 2, 1]
    assert count(mysql_place, rows) == 0
    assert [*bounded([("a", -1), ("b", 5), ("c", 5), ("d", 20), ("e", 0)], 10)] == [
        ["a", "b", "c"],
        ["d"],
        ["e"],
    ]


# Finished rows go when their topic's retention is over, and nothing else goes.

NOW = 1_700_000_000_000
"""In the past, so the servers' clocks agree with whatever is old by this one."""
HOUR = 3_600_000
PENDING, PROCESSED, CANCELLED, DEAD = map(int, TaskStatus)


class Purging:
    """A Retention over all tables of a store, with topics that can be altered."""

    def __init__(self, store: Store, **retentions: int) -> None:
        self.store = store
        self.clock = StandingClock(NOW)
        self.topics = [
            Topic(name, number, 1, retention=seconds)
            for number, (name, seconds) in enumerate(retentions.items(), start=7)
        ]
        self.catalog = TopicCatalog(lambda: self.topics, self.clock)
        self.catalog.refresh()
        self.tables = [table for part in store.tables_of_server() for table in part]
        self.mine = frozenset(self.tables)
        self.retention = Retention(store, self.catalog, self.clock, lambda: self.mine, audit=3600)
        self.looks = 0
        look = store.scans.scan

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.looks += 1
            return look(*args, **kwargs)

        store.scans.scan = counted  # type: ignore[method-assign]

    def cycle(self) -> None:
        """Until it has looked at everything, and a moment later."""
        looks = -1
        while looks != self.looks:
            looks = self.looks
            for _ in range(12):  # records are purged in between
                self.retention.run_once()
            self.clock.now += 50
        self.clock.now += int(CYCLE_SECONDS * 1000)

    def left(self, rows: list[TaskRow]) -> set[int]:
        """The ids of those that are there."""
        return set(self.store.read([row.job_id for row in rows]))


@pytest.fixture
def old_row(new_row: NewRow) -> NewRow:
    """A row that ended so many milliseconds ago."""

    def make(ago: int, status: int = PROCESSED, **fields: Any) -> TaskRow:
        return new_row(status=status, next_time=NOW - ago, **fields)

    return make


def ids(*rows: TaskRow) -> set[int]:
    return {row.job_id for row in rows}


def test_finished_rows_alone_go_when_their_retention_is_over(fresh_store: Store, old_row: NewRow) -> None:
    purging = Purging(fresh_store, brief=3600, long=7200)
    brief, long, unknown = 7, 8, 9
    gone = [
        old_row(HOUR + 1, biz_type=brief),
        old_row(HOUR + 1, CANCELLED, biz_type=brief),
        old_row(2 * HOUR + 1, biz_type=long),
        *[old_row(2 * HOUR, biz_type=brief) for _ in range(300)],
    ]
    kept = [
        old_row(HOUR - 1000, biz_type=brief),
        old_row(2 * HOUR - 1000, biz_type=long),
        old_row(100 * HOUR, biz_type=unknown),
        *[old_row(100 * HOUR, status, biz_type=brief) for status in (PENDING, DEAD)],
    ]
    insert_many(fresh_store, gone + kept)
    for topic in ("brief", "long", "?"):
        taken(PURGED.of(topic))
    purging.cycle()
    assert purging.left(gone + kept) == ids(*kept)
    assert [taken(PURGED.of(topic)) for topic in ("brief", "long", "?")] == [302, 1, 0]
    purging.clock.now += 1000
    purging.cycle()
    assert purging.left(kept) == ids(*kept[2:]), "the others' time has come"


def test_kept_rows_are_passed_however_many_ended_at_once(fresh_store: Store, old_row: NewRow) -> None:
    purging = Purging(fresh_store, brief=3600, long=100 * 3600)
    kept = [old_row(50 * HOUR, biz_type=8, biz_id=1) for _ in range(3 * LARGE_PAGE)]
    gone = [old_row(50 * HOUR - n, biz_type=7, biz_id=1) for n in (0, 1)]
    insert_many(fresh_store, kept + gone)
    purging.cycle()
    assert purging.left(kept + gone) == ids(*kept)
    looks = purging.looks
    purging.cycle()
    groups = -(-len(purging.tables) // TABLES)
    assert purging.looks - looks == 2 * 2 * groups, "they are not read again"


@pytest.mark.parametrize("what", ["topics are created", "it takes days"])
def test_a_pass_among_many_rows_that_others_keep_ends(fresh_store: Store, old_row: NewRow, what: str) -> None:
    purging = Purging(fresh_store, brief=3600, long=5000 * 3600)
    insert_many(fresh_store, [old_row(100 * HOUR, biz_type=8, biz_id=1) for _ in range(3 * LARGE_PAGE)])
    old = [old_row(2 * HOUR, biz_type=7, biz_id=1)]
    insert_many(fresh_store, old)
    for n in range(80):
        if what == "topics are created":
            purging.topics.append(Topic(f"new-{n}", 100 + n, 1, retention=3600))
            purging.catalog.refresh()
        else:
            purging.clock.now += 13 * HOUR
        purging.retention.run_once()
        purging.clock.now += 50
    assert not purging.left(old)


def test_rows_are_kept_for_a_minute_at_least(fresh_store: Store, old_row: NewRow) -> None:
    purging = Purging(fresh_store, none=0)
    rows = [old_row((MIN_SECONDS - 5) * 1000, biz_type=7), old_row((MIN_SECONDS + 1) * 1000, biz_type=7)]
    insert_many(fresh_store, rows)
    purging.cycle()
    assert purging.left(rows) == ids(rows[0])


def test_bulk_jobs_go_in_one_cycle_however_many_are_old(place: Any, fresh_store: Store) -> None:
    with closing(place.open(clock=StandingClock(NOW))) as then:
        for number in range(50):
            job = BulkJob(f"b{number}", BulkKind.CANCEL, "topic", {}, "ann", 1.0, 1, BulkState.DONE)
            then.bulk.add(job, [number])
    assert len(fresh_store.bulk.list(99)) == 50
    assert fresh_store.bulk.part("b7", 0).job_ids == (7,)
    Purging(fresh_store).cycle()
    assert fresh_store.bulk.list(99) == []
    assert not any(fresh_store.bulk.part(f"b{number}", 0).job_ids for number in range(50))


@pytest.mark.parametrize("table", ["timeout_audit", "timeout_request", "timeout_bulk"])
def test_a_missing_table_of_records_keeps_nothing_else_from_being_purged(
    place: Any, fresh_store: Store, old_row: NewRow, table: str
) -> None:
    purging = Purging(fresh_store, topic=3600)
    rows = [old_row(2 * HOUR, biz_type=7, biz_id=n) for n in range(50)]
    insert_many(fresh_store, rows)
    missing = fresh_store.name_of(0).replace("timeout_task_0000", table)
    with place.without(missing), structlog.testing.capture_logs() as logs:
        while purging.left(rows) or not logs:
            purging.cycle()
    assert {line["event"] for line in logs} == {"purge_failed"}


@pytest.mark.parametrize(("same", "kept"), [(1, 0), (300, 0), (1, 300)])
@pytest.mark.parametrize("place", ["mysql"], indirect=True)
def test_a_row_that_another_has_locked_keeps_no_others_and_goes_once_it_is_free(
    place: Any, fresh_store: Store, old_row: NewRow, same: int, kept: int
) -> None:
    purging = Purging(fresh_store, topic=3600, long=100 * 3600)
    held = old_row(2 * HOUR + 2, biz_type=7, biz_id=1)
    others = [old_row(2 * HOUR, biz_type=7, biz_id=biz_id) for biz_id in [1] * same + [3] * 300]
    longer = [old_row(2 * HOUR + 1, biz_type=8, biz_id=1) for _ in range(kept)]
    insert_many(fresh_store, [held, *others, *longer])
    table, another = (table_of_job(row.job_id, place.tables) for row in (held, others[-1]))
    assert table != another
    taken(PURGED.of("topic"))
    name = f"{place.prefix}{table % place.databases}.timeout_task_{table:04d}"
    with engine_of(place.root_url) as engine, engine.connect() as holder:
        holder.exec_driver_sql(f"SELECT * FROM {name} WHERE job_id={held.job_id} FOR UPDATE")
        purging.cycle()
        assert purging.left([held, *others]) == ids(held)
        assert taken(PURGED.of("topic")) == len(others)
    if same + kept > LARGE_PAGE:  # it was passed over
        purging.clock.now += int(FORGET_SECONDS * 1000)
    purging.cycle()
    assert purging.left([held]) == set()


def test_rows_of_a_server_that_did_not_answer_are_not_passed_over(
    fresh_store: Store, old_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if others of their page went before."""
    purging = Purging(fresh_store, topic=3600)
    rows = [old_row(2 * HOUR, biz_type=7, biz_id=1) for _ in range(300)]
    insert_many(fresh_store, rows)
    delete = fresh_store.delete_ended

    def half(sizes: dict[int, int]) -> Parts[int]:
        monkeypatch.undo()
        left = sorted(sizes)[::2]
        deleted = delete({job_id: size for job_id, size in sizes.items() if job_id not in left})
        deleted.failed |= dict.fromkeys(left, StoreUnavailable("away"))
        return deleted

    monkeypatch.setattr(fresh_store, "delete_ended", half)
    for _ in range(3):
        purging.cycle()
    assert purging.left(rows) == set()


def test_bodies_go_with_the_finished_rows_that_have_one(fresh_store: Store, old_row: NewRow) -> None:
    purging = Purging(fresh_store, brief=3600)
    content = Content("a/b", b"")
    named = {"body_length": 0, "body_sha256": content.fingerprint()}
    gone, kept = old_row(HOUR + 1, biz_type=7, **named), old_row(HOUR - 1, biz_type=7, **named)
    insert_many(fresh_store, [gone, kept], content)
    purging.cycle()
    wanted = {gone.job_id: 0, kept.job_id: 0}
    assert fresh_store.bodies.read(wanted) == {kept.job_id: content}


def test_rows_of_a_deleted_topic_go_when_its_retention_is_over(fresh_store: Store, old_row: NewRow) -> None:
    purging = Purging(fresh_store, brief=3600)
    deleted = Topic("deleted", 990, 1, retention=7200, paused=True)
    old, young = old_row(2 * HOUR + 1, biz_type=990), old_row(HOUR, biz_type=990)
    dead = old_row(100 * HOUR, DEAD, biz_type=990)
    insert_many(fresh_store, [old, young, dead])
    purging.cycle()
    assert purging.left([old]) == ids(old), "no topic of that biz_type is known"
    fresh_store.topics.create(deleted)
    assert fresh_store.topics.close("deleted", 0)
    assert fresh_store.topics.retire(deleted, 1)
    purging.cycle()  # it learns of that
    purging.cycle()
    assert purging.left([old, young, dead]) == ids(young, dead)


def test_a_host_whose_clock_is_days_ahead_deletes_nothing_young(fresh_store: Store, new_row: NewRow) -> None:
    purging = Purging(fresh_store, topic=3600)
    here = Clock().now_ms()
    purging.clock.now = began = here + 100 * HOUR
    old, soon, young = (
        [new_row(status=PROCESSED, biz_type=7, biz_id=n, next_time=here - ago) for n in range(20)]
        for ago in (HOUR + 1000, HOUR - 3000, HOUR - 600_000)
    )
    insert_many(fresh_store, old + soon + young)
    purging.cycle()
    assert purging.left(old) == set()
    assert purging.left(soon + young) == ids(*soon, *young)

    def purged() -> bool:
        purging.cycle()
        return not purging.left(soon)

    assert until(purged, 60)
    assert purging.clock.now - began < FORGET_SECONDS * 1000 / 2, "they were passed over"
    assert purging.left(young) == ids(*young)
