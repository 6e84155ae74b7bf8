"""Schedules on real servers, with a clock in the hands of the test."""

import zoneinfo
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from harness.clocks import StandingClock
from harness.metrics import taken
from harness.rows import known
from harness.system import System

from toc import CancelOutcome, NewTask, Task, TaskStatus, TimeoutCenter
from toc.maintenance.scheduler import LOOK_EVERY, Scheduler
from toc.maintenance.sweep import Sweep
from toc.model.access import Role, Token
from toc.model.clock import from_ms, to_ms
from toc.model.errors import InvalidSchedule, ScheduleExists, UnknownSchedule, UnknownTopic
from toc.model.schedule import Definition, zone_named
from toc.model.schedule_state import new_state
from toc.model.sharding import BizId
from toc.model.verdict import Failure
from toc.observe.metrics import SCHEDULES_STUCK
from toc.operate.doctor_tasks import schedule_lines
from toc.operate.operation import Doing
from toc.operate.schedules import list_schedules
from toc.sdk import schedules as sdk_schedules
from toc.store.servers.mysql import MySqlServer
from toc.store.servers.server import Statement
from toc.store.tasks import schedules as schedule_rows
from toc.store.tasks.batch import Guard
from toc.store.tasks.select import Selection

START = datetime(2024, 3, 29, 0, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Bench:
    """An application, the scheduler of all tables and the servers of the task table, by one clock."""

    def __init__(self, system: System) -> None:
        self.clock = StandingClock(to_ms(START))
        self.env = system.env
        self.settings = system.settings
        system.create_topics(retention=86_400)
        self.center = TimeoutCenter(system.settings, clock=self.clock)

    def worker(self) -> Scheduler:
        store, catalog = self.center.store, self.center.catalog
        catalog.refresh()
        sweep = Sweep(store, self.center.queues, catalog, self.clock)
        return Scheduler(store, catalog, sweep, lambda: frozenset(store.tables))

    def until(self, later: timedelta, *, ended: bool = True, scheduler: Scheduler | None = None) -> None:
        """Let time pass while a worker works. ``ended``: each task ends a second after it was due."""
        end = to_ms(START + later)
        scheduler = scheduler or self.worker()
        while True:
            if ended:
                self.end_all()
            step = ceil(scheduler.run_once() * 1000)
            if step and self.clock.now >= end:
                return
            self.clock.now = min(self.clock.now + step, end) if step else self.clock.now

    def end_all(self) -> None:
        store = self.center.store
        due = store.selections.page(Selection(TaskStatus.PENDING, before=self.clock.now - 999), None, 10_000)
        for row in due.rows:
            store.finish([(row.job_id, row.version)])

    def rows(self) -> list[Any]:
        store = self.center.store
        pages = store.schedules.page()
        return [row for stored in pages for row in store.find(BizId.of(stored.name))]

    def tasks(self, name: str) -> list[Task]:
        tasks = [task for task in self.center.find(biz_id=name) if task.status is not TaskStatus.CANCELLED]
        return sorted(tasks, key=lambda task: task.scheduled_for or START)

    def hours(self, name: str) -> list[float]:
        """The nominal times of its tasks, in hours since START."""
        return [((task.scheduled_for or START) - START) / HOUR for task in self.tasks(name)]


@pytest.fixture
def bench(system: System, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("toc.maintenance.scheduler.LOOK_EVERY", 1800.0)  # days pass here
    one = Bench(system)
    monkeypatch.setattr(MySqlServer, "from_now", lambda self, ms: self.instant(one.clock.now + ms))
    yield one
    one.center.close()


def test_a_read_that_stands_still_is_not_followed_by_a_rest_longer_than_a_look(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server, or this process, may have stood still all the time: then it has cost nobody anything."""
    bench.center.schedules.create("hourly", topic="test.sync", every=3600)
    scheduler, soonest = bench.worker(), bench.center.store.schedules.soonest

    def slowly(tables: Iterable[int]) -> Any:
        bench.clock.now += 9000
        return soonest(tables)

    monkeypatch.setattr("toc.maintenance.scheduler.LOOK_EVERY", LOOK_EVERY)
    monkeypatch.setattr(bench.center.store.schedules, "soonest", slowly)
    assert scheduler.run_once() <= LOOK_EVERY


def test_a_new_schedule_of_a_few_seconds_is_punctual_though_no_worker_was_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toc.maintenance.scheduler.LOOK_EVERY", LOOK_EVERY)
    at_rest = bench.worker()
    bench.until(timedelta(0), scheduler=at_rest)
    bench.center.schedules.create("quick", topic="test.sync", every=4)
    bench.until(timedelta(seconds=17), scheduler=at_rest)
    tasks = bench.tasks("quick")
    assert [task.action_time for task in tasks] == [task.scheduled_for for task in tasks]
    nominal = [task.scheduled_for for task in tasks[:4]]
    assert nominal == [START + timedelta(seconds=4 * n) for n in range(1, 5)], "none is left out"


def test_a_table_that_waits_all_the_time_hides_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have been taken over meanwhile, or hold a schedule that is new or was changed."""
    scheduler, table = bench.worker(), bench.center.store.schedules
    bench.center.schedules.create("busy", topic="test.sync", every=60)
    scheduler.run_once()
    due, more = table.due, {table.table_of("busy")}
    monkeypatch.setattr(table, "due", lambda *asked: due(*asked)._replace(more=more))
    bench.center.schedules.create("other", topic="test.sync", every=HOUR)
    assert table.table_of("other") not in more
    for _ in range(65):
        bench.clock.now += 60_000
        scheduler.run_once()
    assert bench.hours("other") == [1]


def test_occurrences_are_in_the_index_before_they_are_due(bench: Bench) -> None:
    bench.center.schedules.create("soon", topic="test.sync", every=HOUR)
    bench.until(HOUR - timedelta(seconds=5))
    (task,) = bench.tasks("soon")
    topic = bench.center.catalog.get("test.sync")
    row = known(bench.center.store.get(task.job_id))
    slot = topic.slot(row.slot_crc, row.slot_amount)
    assert bench.center.queues.peek([slot])[slot].next_due == to_ms(task.action_time)  # type: ignore[union-attr]
    assert bench.center.cancel(task.job_id) is CancelOutcome.CANCELLED


def test_overlap_asks_the_row_of_the_task(bench: Bench) -> None:
    for overlap in ("skip", "allow", "buffer_one"):
        bench.center.schedules.create(overlap, topic="test.sync", every=HOUR, overlap=overlap)
    bench.until(3.5 * HOUR, ended=False)
    assert [bench.hours(name) for name in ("skip", "allow", "buffer_one")] == [[1], [1, 2, 3], [1]]
    bench.until(4.5 * HOUR)
    assert [bench.hours(name) for name in ("skip", "allow")] == [[1, 4], [1, 2, 3, 4]]
    assert bench.hours("buffer_one") == [1, 2, 4]
    assert [each.skipped for each in bench.center.schedules.list()] == [0, 1, 2]


@pytest.mark.parametrize("end", ["cancelled", "dead", "expired", "purged", "redriven"])
def test_the_next_one_runs_however_a_task_ended_unless_it_was_redriven(bench: Bench, end: str) -> None:
    bench.center.schedules.create("o", topic="test.sync", every=HOUR)
    bench.until(1.5 * HOUR, ended=False)
    store, [task] = bench.center.store, bench.tasks("o")
    job_id = task.job_id
    if end == "cancelled":
        bench.center.cancel(job_id)
    elif end == "purged":
        store.finish([(job_id, 0)])
        store.delete_ended({job_id: 0}).whole()
        assert bench.center.get(job_id) is None
    else:
        die = store.expire if end == "expired" else store.die
        assert die([Failure(job_id, 0, 0, 0, 1, 0, bench.clock.now, "it fails")])[job_id] is Guard.APPLIED
    if end == "redriven":
        assert store.redrive([job_id], bench.clock.now)
    bench.until(2.5 * HOUR, ended=False)
    former = [] if end in ("cancelled", "purged") else [1]
    assert bench.hours("o") == former + ([] if end == "redriven" else [2])
    assert [one.skipped for one in bench.center.schedules.list()] == [int(end == "redriven")]


def test_an_edit_replaces_the_occurrence_that_has_not_started(bench: Bench) -> None:
    schedules = bench.center.schedules
    schedules.create("edit", topic="test.sync", every=HOUR)
    bench.until(1.5 * HOUR)
    bench.until(2 * HOUR - timedelta(seconds=10))  # the occurrence of hour 2 is a task
    assert bench.hours("edit") == [1, 2]
    schedules.alter("edit", attribute={"new": True})
    bench.until(2.5 * HOUR)
    assert bench.hours("edit") == [1, 2]
    assert [task.attribute.get("new") for task in bench.tasks("edit")] == [None, True]
    bench.until(3 * HOUR - timedelta(seconds=10))
    schedules.alter("edit", cron="30 * * * *")
    bench.until(4 * HOUR)
    assert bench.hours("edit") == [1, 2, 3.5]
    bench.until(4.5 * HOUR - timedelta(milliseconds=500))  # too near: it is left as it is
    schedules.alter("edit", topic="test.async", every=HOUR)
    bench.until(5.5 * HOUR)
    assert bench.hours("edit") == [1, 2, 3.5, 4.5, 5]
    assert [task.topic for task in bench.tasks("edit")][-2:] == ["test.sync", "test.async"]
    assert known(schedules.get("edit")).fired == 5


@pytest.mark.parametrize("change", ["attribute", "topic", "pause", "delete"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_occurrence_that_was_rescheduled_by_hand_is_left_alone_and_not_made_again(
    bench: Bench, change: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules, occurrences = bench.center.schedules, bench.center.store.schedules
    schedules.create("moved", topic="test.sync", every=10, overlap="allow")
    first, moved, third = bench.tasks("moved")
    at, planned = START + HOUR, occurrences.planned

    def move() -> None:
        bench.center.reschedule(moved.job_id, action_time=at)

    def and_then_moved(*args: Any) -> Any:
        found = planned(*args)
        monkeypatch.setattr(occurrences, "planned", planned)
        move()
        return found

    if when == "before":
        move()
    else:
        monkeypatch.setattr(occurrences, "planned", and_then_moved)
    if change in ("pause", "delete"):
        getattr(schedules, change)("moved")
        rest = []
    else:
        schedules.alter("moved", **{change: "test.async" if change == "topic" else {"new": 1}})
        rest = [START + timedelta(seconds=10), START + timedelta(seconds=30)]
    assert sorted(task.action_time for task in bench.tasks("moved")) == [*rest, at]
    assert [bench.center.get(one.job_id).status for one in (first, third)] == [TaskStatus.CANCELLED] * 2  # type: ignore[union-attr]
    [left] = [task for task in bench.tasks("moved") if task.action_time == at]
    assert (left.job_id, left.topic, left.attribute.get("new")) == (moved.job_id, "test.sync", None)


def test_an_edit_of_the_overlap_holds_for_what_is_no_task_yet(bench: Bench) -> None:
    schedules = bench.center.schedules
    schedules.create("often", topic="test.sync", every=10, overlap="allow")
    bench.until(timedelta(seconds=25), ended=False)
    schedules.alter("often", overlap="skip")
    bench.until(timedelta(seconds=85), ended=False)
    assert [round(hours * 3600) for hours in bench.hours("often")] == [10, 20, 30, 40, 50]
    bench.until(timedelta(seconds=95))
    assert [round(hours * 3600) for hours in bench.hours("often")] == [10, 20, 30, 40, 50, 90, 100]


def test_pause_resume_and_delete(bench: Bench) -> None:
    schedules = bench.center.schedules
    schedules.create("p", topic="test.sync", every=HOUR)
    with pytest.raises(ScheduleExists):
        schedules.create("p", topic="test.sync", every=HOUR)
    bench.until(2 * HOUR - timedelta(seconds=10))
    assert schedules.pause("p").paused
    bench.until(4.5 * HOUR)
    assert bench.hours("p") == [1]
    assert not schedules.resume("p").paused
    bench.until(6 * HOUR - timedelta(seconds=10))
    assert bench.hours("p") == [1, 5, 6]
    assert schedules.delete("p")
    assert not schedules.delete("p")
    bench.until(8 * HOUR)
    assert bench.hours("p") == [1, 5]
    for use in (schedules.pause, schedules.trigger, schedules.preview):
        with pytest.raises(UnknownSchedule):
            use("p")
    # One of the same name is another: its occurrences are new ones.
    schedules.create("p", topic="test.sync", every=HOUR)
    bench.until(9.5 * HOUR)
    assert bench.hours("p") == [1, 5, 9]


@pytest.mark.parametrize("change", ["pause", "delete"])
def test_what_is_due_in_a_moment_is_stopped_too(bench: Bench, change: str) -> None:
    schedules = bench.center.schedules
    for name in ("near", "again"):
        schedules.create(name, topic="test.sync", every=HOUR)
    bench.until(2 * HOUR - timedelta(milliseconds=200))
    assert bench.hours("near") == [1, 2]
    getattr(schedules, change)("near")
    getattr(schedules, change)("again")
    if change == "pause":
        schedules.resume("again")
    else:
        schedules.create("again", topic="test.sync", every=HOUR)
    bench.until(3.5 * HOUR)
    assert bench.hours("near") == [1]
    assert bench.hours("again") == [1, 2, 3]


DAMAGE = {
    "look_time": "'0000-00-00'", "after_time": "'0000-00-00'",
    "after_time ": "'9999-12-31 23:59:59.999'", "gmt_create": "'0000-00-00'", "definition": "'{}'",
    "definition ": "REPEAT('[',60000)", "definition  ": "'null'", "next_time": "'0000-00-00'",
    "buffered": "'9999-12-31 23:59:59.999'", "last_job_id": "18446744073709551615",
}  # fmt: skip


def test_rows_that_were_damaged_by_hand_hold_up_no_other_in_their_table(bench: Bench) -> None:
    table = bench.center.store.schedules
    names = [f"n{number}" for number in range(2000)]
    here = [name for name in names if table.table_of(name) == 0][:150]
    damaged = dict(zip(here, DAMAGE.items(), strict=False))
    for number, name in enumerate(here):
        definition = Definition(name, "test.sync", cron="* * * * *", zone="Pacific/Kiritimati")
        table.create(definition, new_state(definition, number, bench.clock.now))
    server, rows = table._shards.server_of[0], table._shards.schedule_names
    for name, (column, value) in damaged.items():
        harm = f"SET STATEMENT sql_mode='' FOR UPDATE {rows[0]} SET {column}={value} WHERE name=%s"
        server.run([Statement(harm, [name])])
    bench.until(timedelta(seconds=140))
    healthy = here[len(damaged) :]
    assert {name: [round(60 * hours) for hours in bench.hours(name)] for name in healthy} == {
        name: [1, 2] for name in healthy
    }
    assert taken(SCHEDULES_STUCK.of()) > 0
    listed = {one.name for one in bench.center.schedules.list()}
    assert set(healthy) <= listed
    for name, (column, _) in damaged.items():
        if name in listed:
            assert bench.hours(name) or column.strip() in ("after_time", "buffered"), column
        assert bench.center.schedules.delete(name), column


def test_a_list_for_some_topics_reads_none_of_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = {"test.sync": 30, "test.async": 3, "test.batch": 1}
    for topic, many in topics.items():
        for number in range(many):
            bench.center.schedules.create(f"{topic}.{number}", topic=topic, every=HOUR)
    read: list[object] = []

    def stored_of(row: Any, real: Any = schedule_rows._stored_of) -> Any:
        read.append(row)
        return real(row)

    monkeypatch.setattr(schedule_rows, "_stored_of", stored_of)
    token = Token("some", frozenset({Role.READ}), ("test.a*c", "*batch", "none"))
    doing = Doing(bench.center, "some", list_schedules.right, token)
    after: str | None = ""
    found: list[str] = []
    while after is not None:
        page = list_schedules.perform(doing, {"after": after, "limit": 2})
        found += [one["name"] for one in page["schedules"]]
        after = page["next"]
    assert found == ["test.async.0", "test.async.1", "test.async.2", "test.batch.0"]
    assert len(read) <= 4 + 2, "those left, in each of two pages"


def test_a_backfill_makes_what_there_is_not(bench: Bench) -> None:
    schedules = bench.center.schedules
    schedules.create("fill", topic="test.sync", every=HOUR, overlap="allow")
    bench.until(3.5 * HOUR)
    with_dry_run = schedules.backfill("fill", START - 4 * HOUR, START + 30 * HOUR, dry_run=True)
    assert with_dry_run == schedules.backfill("fill", START - 4 * HOUR, START + 30 * HOUR, rate=2)
    assert with_dry_run == (8, 3, 5, 0)
    assert bench.hours("fill") == [-4, -3, -2, -1, 0, 1, 2, 3]
    gaps = [task.action_time - from_ms(bench.clock.now) for task in bench.tasks("fill")[:5]]
    assert [round(gap / timedelta(seconds=1), 1) for gap in gaps] == [0, 0.5, 1, 1.5, 2]
    again = schedules.backfill("fill", START - 4 * HOUR, START + 30 * HOUR)
    assert again == (8, 8, 0, 0)
    # An edit leaves the backfilled ones alone; purged ones run again, and the preview counts them.
    schedules.alter("fill", attribute={"a": 1})
    assert len(bench.hours("fill")) == 8
    bench.until(40 * HOUR)
    bench.center.store.delete_ended({task.job_id: -1 for task in bench.tasks("fill")[5:8]}).whole()
    # Four days from 1 on: those of the first day and half are older than the retention of one day.
    counts = schedules.backfill("fill", START + HOUR, START + 20 * HOUR, dry_run=True)
    assert counts == (20, 17, 3, 3)


@pytest.mark.parametrize("again", [False, True])
def test_a_backfill_ends_with_its_schedule(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    schedules, submit_many = bench.center.schedules, bench.center.submit_many
    schedules.create("gone", topic="test.sync", every=HOUR, overlap="allow", paused=True)
    bench.until(3 * HOUR)
    monkeypatch.setattr(sdk_schedules, "BACKFILL_PAGE", 2)

    def submit(tasks: Iterable[NewTask]) -> list[int]:
        assert schedules.delete("gone")
        if again:
            schedules.create("gone", topic="test.sync", every=HOUR, overlap="allow", paused=True)
        return submit_many(tasks)

    monkeypatch.setattr(bench.center, "submit_many", submit)
    with pytest.raises(UnknownSchedule):
        schedules.backfill("gone", START - 10 * HOUR, START)
    assert len(bench.tasks("gone")) == 2


def test_what_cannot_be_moved_on_holds_up_no_other(bench: Bench) -> None:
    schedules = bench.center.schedules
    with pytest.raises(UnknownTopic):
        schedules.create("orphan", topic="none", every=HOUR)
    with pytest.raises(InvalidSchedule):
        schedules.create("orphan", topic="test.sync", every=HOUR, zone="Nowhere")
    for number in range(30):
        schedules.create(f"orphan{number}", topic="test.doomed", every=HOUR)
        schedules.create(f"fine{number}", topic="test.sync", every=HOUR)
    catalog = bench.center.catalog
    without = {name: topic for name, topic in catalog.known().items() if name != "test.doomed"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "known", lambda: without)
        patch.setattr(catalog, "refresh", lambda: without)
        bench.until(1.5 * HOUR)
        assert all(bench.hours(f"fine{number}") == [1] for number in range(30))
        assert not any(bench.hours(f"orphan{number}") for number in range(30))
    assert taken(SCHEDULES_STUCK.of()) > 0
    bench.until(2.5 * HOUR)
    assert all(bench.hours(f"orphan{number}") == [1, 2] for number in range(30)), "late, but not lost"


def test_what_is_declared_in_code_is_reconciled_by_name(bench: Bench) -> None:
    center = bench.center

    @center.schedule("above", every=timedelta(minutes=5))
    @center.handler("test.sync")
    def handle(task: Task) -> None: ...

    @center.handler("test.async")
    @center.schedule("below", cron="0 9 * * *", zone="Europe/Berlin")
    @center.schedule("second", cron="0 10 * * *", topic="test.batch")
    def other(task: Task) -> None: ...

    center.schedules.create("by-hand", topic="test.sync", every=HOUR)
    center.schedules.create("above", topic="test.sync", every=HOUR)
    center.schedules.pause("above")
    assert center.schedules.reconcile() == {}
    found = {each.name: each for each in center.schedules.list()}
    assert found.keys() == {"above", "below", "second", "by-hand"}
    assert found["above"].definition.every == timedelta(minutes=5)
    assert found["above"].paused, "what an operator has paused stays so"
    topics = ("test.async", "test.batch")
    assert (found["below"].definition.topic, found["second"].definition.topic) == topics
    assert center.schedules.reconcile() == {}
    assert [each.modified for each in center.schedules.list()] == [
        found[name].modified for name in sorted(found)
    ]
    with pytest.raises(InvalidSchedule, match="twice"):
        center.schedule("above", every=60)(handle)


@pytest.fixture
def zones(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Gives zone Test/Moved the rules of another one, as an update of the system's tzdata does: the file."""
    database = files("tzdata").joinpath("zoneinfo")

    def like(name: str) -> None:
        (tmp_path / "Test").mkdir(exist_ok=True)
        (tmp_path / "Test" / "Moved").write_bytes(database.joinpath(name).read_bytes())

    former = zoneinfo.TZPATH
    zoneinfo.reset_tzpath([str(tmp_path)])
    yield like
    zoneinfo.reset_tzpath(former)
    forget_zones()


def forget_zones() -> None:
    """As a process does that is started again."""
    zone_named.cache_clear()
    zoneinfo.ZoneInfo.clear_cache()


def test_new_rules_of_a_zone_count_once_the_worker_was_restarted_and_no_day_is_left_out_or_doubled(
    bench: Bench, zones: Callable[[str], None]
) -> None:
    zones("Etc/GMT-1")  # an hour ahead of UTC
    bench.center.schedules.create("noon", topic="test.sync", cron="0 12 * * *", zone="Test/Moved")
    bench.until(timedelta(days=1, hours=2))
    assert bench.hours("noon") == [11]
    zones("Etc/GMT-3")
    bench.until(timedelta(days=3, hours=2))
    assert bench.hours("noon") == [11, 24 + 11, 48 + 11], "a worker goes by the rules with which it began"
    forget_zones()
    bench.until(timedelta(days=5, hours=2))
    assert bench.hours("noon") == [11, 24 + 11, 48 + 11, 72 + 9, 96 + 9]
    fires = bench.center.schedules.preview("noon", count=1)
    assert fires[0].nominal.isoformat() == "2024-04-03T12:00:00+03:00"
    seen = known(bench.center.schedules.get("noon"))
    assert (seen.fired, seen.skipped, seen.missed) == (5, 0, 0)


def test_where_its_zone_is_unknown_a_schedule_is_shown_named_and_can_be_changed(
    bench: Bench, zones: Callable[[str], None], tmp_path: Path
) -> None:
    zones("Etc/GMT-1")
    schedules = bench.center.schedules
    for name in ("altered", "resumed", "every", "deleted"):
        schedules.create(name, topic="test.sync", cron="0 12 * * *", zone="Test/Moved")
    (tmp_path / "Test" / "Moved").unlink()
    forget_zones()
    topics = bench.center.store.topics.list()
    assert {one.name for one in schedules.list() if "'Test/Moved'" in one.stuck} == {
        "altered", "resumed", "every", "deleted"
    }  # fmt: skip
    assert {line.of for line in schedule_lines(bench.center, topics)} == {
        "altered", "resumed", "every", "deleted"
    }  # fmt: skip
    paused = schedules.pause("resumed")
    assert (paused.paused, paused.next_time, paused.missed) == (True, None, 0)
    with pytest.raises(InvalidSchedule, match="Test/Moved"):
        schedules.resume("resumed")
    with pytest.raises(InvalidSchedule, match="Test/Moved"):
        schedules.alter("altered", overlap="allow")
    assert schedules.alter("altered", zone="Etc/UTC").stuck == ""
    assert schedules.alter("every", every=HOUR, zone="UTC").next_time is not None
    assert schedules.trigger("resumed")
    assert schedules.delete("deleted")
    assert list(schedule_lines(bench.center, topics)) == [], "the one that is left is paused"
    zones("Etc/GMT-1")
    schedules.resume("resumed")
    bench.until(timedelta(hours=13))
    assert (bench.hours("resumed")[-1], bench.hours("altered")) == (11, [12])
    bench.clock.now += 86_400_000
    assert {line.of for line in schedule_lines(bench.center, topics)} == {"altered", "resumed", "every"}
    assert all("--topic TOPIC" in line.do for line in schedule_lines(bench.center, []))
