"""Bulk jobs: what matched when one was made is changed, whatever ends in between, and nothing else."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fault.kit.proxy import Proxy, through
from harness import secured
from harness.gateway import Gateway
from harness.patience import in_a_moment, until
from harness.system import NewSystem, System

from benchmarks.local import MariaDB
from toc import NewTask, RescheduleOutcome, TaskStatus, TimeoutCenter
from toc.model.access import Role, Token
from toc.model.bulk import KEPT_MS, BulkJob
from toc.model.clock import Clock, to_ms
from toc.model.documents import parse_instant as instant_of
from toc.model.errors import Busy, IndexUnavailable, InvalidInput, SchemaBehind, StoreUnavailable
from toc.model.sharding import BizId
from toc.model.verdict import Failure
from toc.operate import bulk
from toc.operate.audit import audit
from toc.operate.bulk_jobs import MOST_RUNNING, STEP, BulkRunner, work_off
from toc.operate.operation import Doing, Operation, Record
from toc.sdk.changes import Changes
from toc.store.records.bulk import LEASE_MS, BulkTable
from toc.store.servers.server import Locked, Refused, Statement

TOPIC, OTHER = "test.sync", "test.doomed"


class Stopped(Clock):
    """Its seconds pass when the test says so."""

    def __init__(self) -> None:
        self.passed = 1000.0
        self.monotonic = lambda: self.passed


def submitted(center: TimeoutCenter, count: int, topic: str = TOPIC, delay: float = 3600) -> list[int]:
    return center.submit_many([NewTask(topic, number, delay=delay) for number in range(count)])


def killed(center: TimeoutCenter, count: int, error: str, topic: str = TOPIC) -> list[int]:
    """Dead tasks."""
    job_ids = submitted(center, count, topic)
    now = center.clock.now_ms()
    center.store.die([Failure(job_id, 0, 0, 0, 16, 0, now, error) for job_id in job_ids])
    return job_ids


def act(center: TimeoutCenter, operation: Operation, **values: Any) -> Record:
    """What an operator does at the command line."""
    given = {one.name: one.default for one in operation.params if one.default not in (None, ...)}
    given.pop("text", None)
    record: Record = operation.perform(Doing(center, "ann@host", operation.right), given | values)
    return record


def make(center: TimeoutCenter, operation: Operation, **values: Any) -> str:
    """Make a job of all that match, as it is confirmed."""
    asked = {"topic": TOPIC, **values}
    count = act(center, operation, **asked, dry_run=True)["would_change"]
    return str(act(center, operation, **asked, tasks=count, confirm=asked["topic"])["name"])


def run(center: TimeoutCenter, name: str, runner: BulkRunner | None = None) -> Record:
    """Do the job's steps until it ends."""
    runner = runner or BulkRunner(center)
    assert until(lambda: runner.run_once() >= 0 and act(center, bulk.show, name=name)["state"] == "done")
    return act(center, bulk.show, name=name)


def outcomes(center: TimeoutCenter, name: str, **which: Any) -> dict[int, str]:
    """What came of each task."""
    found: dict[int, str] = {}
    page: Record = {"next": 0}
    while page["next"] is not None:
        page = act(center, bulk.outcomes, name=name, **which, next=page["next"])
        found |= {int(one["job_id"]): one["outcome"] for one in page["tasks"]}
    return found


def statuses(center: TimeoutCenter, job_ids: list[int]) -> set[int]:
    return {row.status for row in center.store.read(job_ids).values()}


def test_a_job_changes_what_matched_when_it_was_made_and_nothing_else(system: System) -> None:
    center = system.center
    soon, later = submitted(center, 1234), submitted(center, 50, delay=90_000)
    elsewhere, dead = submitted(center, 20, OTHER), killed(center, 30, "refused")
    ends = datetime.now(UTC) + timedelta(hours=10)
    name = make(center, bulk.cancel_all, due_before=ends, rate=10_000)
    after = submitted(center, 40)  # it matches, but nobody has confirmed it
    begun = submitted(center, 1)
    center.store.mark_begun(soon[:3], "a try began")
    job = run(center, name)
    assert (job["done"], job["tasks"], job["topic"], job["by"]) == (1234, 1234, TOPIC, "ann@host")
    assert job["counts"] == {"cancelled": 1231, "may_have_started": 3}
    assert job["selected"] == {"due_before": job["selected"]["due_before"]}
    assert set(outcomes(center, name)) == set(soon)
    assert set(outcomes(center, name, outcome="may_have_started")) == set(soon[:3])
    assert statuses(center, soon) == {TaskStatus.CANCELLED}
    assert statuses(center, [*later, *elsewhere, *after, *begun]) == {TaskStatus.PENDING}
    assert statuses(center, dead) == {TaskStatus.DEAD}


def test_each_kind_of_job_has_its_outcomes(system: System) -> None:
    center = system.center
    refused, late = killed(center, 120, "it refused"), killed(center, 30, "timed out")
    job = run(center, make(center, bulk.redrive_all, error="refuse"))
    assert job["counts"] == {"redriven": 120}
    assert statuses(center, refused) == {TaskStatus.PENDING}
    assert statuses(center, late) == {TaskStatus.DEAD}
    name = make(center, bulk.purge_all)
    center.store.redrive(late[:4], center.clock.now_ms())
    assert run(center, name)["counts"] == {"purged": 26, "not_dead": 4}
    assert set(center.store.read(late)) == set(late[:4])

    at = (datetime.now(UTC) + timedelta(days=3)).replace(microsecond=0)
    name = make(center, bulk.reschedule_all, action_time=at)
    center.cancel(refused[0])
    counts = run(center, name)["counts"]
    assert counts.pop("too_late") == 1
    assert sum(counts.values()) == 123, "some may have started: they are due"
    assert {row.action_time for row in center.store.read(refused[1:]).values()} == {at.timestamp() * 1000}
    told = act(center, bulk.show, name=name)
    assert told["action_time"] == at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    audited = center.store.audit.list(10, action="tasks.reschedule")
    assert [(row.actor, row.target, row.result is not None) for row in audited] == [("ann@host", TOPIC, True)]


def test_a_task_that_fails_harms_itself_alone(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    center = system.center
    job_ids = submitted(center, 150)

    def judge(changes: Changes, chosen: Any, found: Any, real: Any = Changes.judge_cancels) -> Any:
        if job_ids[7] in chosen:
            raise KeyError("a bug, with a secret")
        return real(changes, chosen, found)

    monkeypatch.setattr(Changes, "judge_cancels", judge)
    job = run(center, make(center, bulk.cancel_all))
    assert job["counts"] == {"cancelled": 149, "failed": 1}
    assert job["error"] == f"task {job_ids[7]}: the gateway failed; its log tells more"
    assert set(outcomes(center, job["name"], outcome="failed")) == {job_ids[7]}


@contextmanager
def locked(center: TimeoutCenter, job_id: int, *, table: bool = False) -> Iterator[None]:
    """An open transaction of somebody else has the task's row, or its table."""
    shards = center.store._shards
    number = shards.table_of(job_id)
    name = shards.names[number]
    holder = shards.server_of[number]._connect_within(5)
    try:
        row = ["BEGIN", f"SELECT 1 FROM {name} WHERE job_id={job_id} FOR UPDATE"]
        holder.batch([f"LOCK TABLES {name} READ"] if table else row)
        yield
    finally:
        holder.close()


@pytest.mark.parametrize("kind", ["cancel", "reschedule", "redrive", "purge"])
def test_a_row_that_is_locked_fails_alone_and_nothing_is_done_twice(system: System, kind: str) -> None:
    center = system.center
    job_ids = killed(center, 250, "x") if kind in ("redrive", "purge") else submitted(center, 250)
    more = {"delay": 7200.0} if kind == "reschedule" else {}
    name = make(center, getattr(bulk, f"{kind}_all"), rate=10_000, **more)
    order = center.store.bulk.part(name, 0).job_ids
    held, first = order[50], order[0]
    runner = BulkRunner(center)
    with locked(center, held):
        runner.run_once()
        assert act(center, bulk.show, name=name)["error"] == "it waits: another transaction has locked a row"
        if kind == "redrive":  # it dies again before the next step
            center.store.die([Failure(first, 1, 0, 0, 16, 0, center.clock.now_ms(), "again")])
        job = run(center, name, runner)
    done = {"cancel": "cancelled", "reschedule": "rescheduled", "redrive": "redriven", "purge": "purged"}
    assert job["counts"] == {done[kind]: 249, "failed": 1}
    told = f"task {held}: another transaction has locked a row; another job tries it again"
    assert job["error"] == told
    assert set(outcomes(center, name, outcome="failed")) == {held}
    rows = center.store.read(job_ids)
    if kind in ("redrive", "reschedule"):
        assert {row.version for row in rows.values() if row.job_id != held} == {1}
    assert run(center, make(center, getattr(bulk, f"{kind}_all"), **more))["counts"][done[kind]] >= 1
    if kind == "purge":
        assert not center.store.read(job_ids)


@pytest.mark.parametrize("kind", ["cancel", "reschedule", "redrive", "purge"])
def test_a_table_that_is_locked_harms_no_tasks_of_others(system: System, kind: str) -> None:
    center = system.center
    shards = center.store._shards
    job_ids = killed(center, 90, "x") if kind in ("redrive", "purge") else submitted(center, 90)
    theirs = {one for one in job_ids if shards.table_of(one) == shards.table_of(job_ids[0])}
    name = make(
        center, getattr(bulk, f"{kind}_all"), rate=10_000, **{"delay": 9e4} if kind == "reschedule" else {}
    )
    with locked(center, job_ids[0], table=True):
        counts = run(center, name)["counts"]
    assert (counts.pop("failed"), sum(counts.values())) == (len(theirs), 90 - len(theirs))
    assert set(outcomes(center, name, outcome="failed")) == theirs


def test_what_is_done_before_a_server_is_away_is_not_done_again(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    center = system.center
    job_ids = submitted(center, 60)
    name = make(center, bulk.reschedule_all, delay=7200.0, rate=1000)
    fiftieth, away = center.store.bulk.part(name, 0).job_ids[50], [True]

    def reschedule(self: TimeoutCenter, job_id: int, real: Any = TimeoutCenter.reschedule, **to: Any) -> Any:
        return (
            refuse(StoreUnavailable("db1 is away"))
            if away and job_id == fiftieth
            else real(self, job_id, **to)
        )

    monkeypatch.setattr(TimeoutCenter, "reschedule", reschedule)
    BulkRunner(center).run_once()
    assert act(center, bulk.show, name=name)["done"] == 50
    away.clear()
    free_leases(center)
    assert run(center, name)["counts"] == {"rescheduled": 60}
    assert {row.version for row in center.store.read(job_ids).values()} == {1}


def test_what_dies_again_after_a_job_was_made_is_left_alone_and_it_says_so(system: System) -> None:
    center = system.center
    first, *rest = killed(center, 3, "x")
    name = make(center, bulk.redrive_all)
    center.store.redrive([first], center.clock.now_ms())
    made = to_ms(instant_of(act(center, bulk.show, name=name)["created"]))
    assert until(lambda: center.clock.now_ms() > made + 1000)
    center.store.die([Failure(first, 1, 0, 0, 16, 0, center.clock.now_ms(), "again")])
    job = run(center, name)
    assert job["counts"] == {"redriven": 2, "failed": 1}
    assert job["error"] == f"task {first}: it has died since the job was made"
    assert statuses(center, rest) == {TaskStatus.PENDING}
    assert statuses(center, [first]) == {TaskStatus.DEAD}


def test_a_deadline_that_has_passed_before_a_task_had_its_turn_is_its_failure(system: System) -> None:
    center = system.center
    job_ids = submitted(center, 3)
    name = in_a_moment(lambda at: make(center, bulk.reschedule_all, action_time=at))
    assert until(lambda: datetime.now(UTC) > instant_of(act(center, bulk.show, name=name)["action_time"]))
    job = run(center, name)
    assert job["counts"] == {"failed": 3}
    assert "not after now" in job["error"]
    assert {row.version for row in center.store.read(job_ids).values()} == {0}


def test_a_step_whose_outcomes_were_not_written_is_repeated_and_each_task_has_its_outcome(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    center = system.center
    lost: list[int] = []

    def save(table: BulkTable, job: BulkJob, owner: int, real: Any = BulkTable.save, **values: Any) -> Any:
        if values.get("part") and len(lost) < 2:
            lost.append(job.done)
            raise StoreUnavailable("the server went away")
        return real(table, job, owner, **values)

    def steps(runner: BulkRunner) -> bool:
        runner.run_once()
        free_leases(center)
        return len(lost) == 2

    monkeypatch.setattr(BulkTable, "save", save)
    done = {"cancel": "cancelled", "reschedule": "rescheduled", "redrive": "redriven", "purge": "purged"}
    for kind, outcome in done.items():
        lost.clear()
        job_ids = killed(center, 250, "x") if kind in ("redrive", "purge") else submitted(center, 250)
        more = {"action_time": datetime.now(UTC) + timedelta(days=1)} if kind == "reschedule" else {}
        name = make(center, getattr(bulk, f"{kind}_all"), rate=10_000, **more)
        assert until(partial(steps, BulkRunner(center)))
        assert run(center, name)["counts"] == {outcome: 250}
        assert outcomes(center, name) == dict.fromkeys(job_ids, outcome)
        (audited,) = center.store.audit.list(10, action=f"tasks.{kind}")
        assert audited.result is not None


def free_leases(center: TimeoutCenter) -> None:
    """As if all leases had ended."""
    table, server = center.store.bulk._table, center.store._shards.topic_server
    server.run([Statement(f"UPDATE {table} SET lease_until={server.from_now(-1)}")])


def test_nothing_is_done_that_was_not_confirmed(system: System) -> None:
    center = system.center
    job_ids = submitted(center, 100)
    all_ = {"topic": None, "tasks": 1, "confirm": TOPIC}
    for values, field in (
        (all_, "topic"),
        ({**all_, "biz_id": 1}, "confirm"),
        ({"tasks": 100}, "confirm"),
        ({"tasks": 100, "confirm": OTHER}, "confirm"),
        ({"confirm": TOPIC}, "tasks"),
        ({"confirm": TOPIC, "tasks": 89}, "tasks"),
        ({"confirm": TOPIC, "tasks": 100, "due_after": datetime(2099, 1, 1, tzinfo=UTC)}, None),
    ):
        with pytest.raises(InvalidInput) as refused:
            act(center, bulk.cancel_all, **{"topic": TOPIC, **values})
        assert refused.value.field == field, values
    with pytest.raises(InvalidInput):
        act(center, bulk.reschedule_all, topic=TOPIC, tasks=100, confirm=TOPIC)  # no time
    assert act(center, bulk.list_jobs)["jobs"] == []
    assert center.store.audit.list(10) == []
    assert statuses(center, job_ids) == {TaskStatus.PENDING}
    assert act(center, bulk.cancel_all, topic=TOPIC, confirm=TOPIC, tasks=91)["tasks"] == 100, "a few more"


def test_a_job_keeps_to_its_rate_and_can_be_stopped_and_resumed(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(system.center, 60)
    clock = Stopped()
    with TimeoutCenter(system.settings, clock=clock) as center:
        name = make(center, bulk.cancel_all, rate=10)
        runner = BulkRunner(center)

        def done() -> int:
            runner.run_once()
            count: int = act(center, bulk.show, name=name)["done"]
            return count

        assert done() == done() == 2, "no time has passed"
        for seconds in range(1, 4):
            for _ in range(10):
                clock.passed += 0.1
                runner.run_once()
            assert seconds * 10 <= done() <= seconds * 10 + 2
        with monkeypatch.context() as ahead:
            ahead.setattr(Clock, "now_ms", lambda _clock: round(time.time() * 1000) + 4 * LEASE_MS)
            assert act(center, bulk.show, name=name)["state"] == "running", "a lease is its server's"
        assert act(center, bulk.stop, name=name)["state"] == "stopping"
        before = done()
        clock.passed += 60
        stopped = done()
        assert before <= stopped <= before + 2, "a step may have been under way"
        clock.passed += 60
        assert done() == stopped
        assert act(center, bulk.show, name=name)["state"] == "stopped"
        assert act(center, bulk.resume, name=name)["state"] == "waiting"
        while act(center, bulk.show, name=name)["state"] != "done":
            clock.passed += 1
            runner.run_once()
        assert act(center, bulk.show, name=name)["counts"] == {"cancelled": 60}


def test_the_audit_says_how_far_a_job_came_that_has_not_ended(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    center = system.center
    submitted(center, 3 * STEP)
    name = make(center, bulk.cancel_all, rate=1000)
    runner = BulkRunner(center)

    def told() -> tuple[str, int]:
        runner.run_once()
        latest = act(center, audit, action="tasks.cancel")["actions"][0]
        return latest["outcome"], latest["result"].get("cancelled", 0)

    assert told() == ("unknown", 0)
    act(center, bulk.stop, name=name)
    assert until(lambda: told() == ("interrupted", act(center, bulk.show, name=name)["done"]))
    act(center, bulk.resume, name=name)
    assert until(lambda: told() == ("done", 3 * STEP))

    submitted(center, 7)
    act(center, bulk.stop, name=make(center, bulk.cancel_all))
    assert told() == ("interrupted", 0), "nobody had begun"
    name = make(center, bulk.cancel_all, rate=1)
    BulkRunner(center).run_once()
    act(center, bulk.stop, name=name)  # its gateway was killed, and has the lease still
    assert told() == ("interrupted", 1)
    monkeypatch.setattr(BulkTable, "add", lambda *_: refuse(StoreUnavailable("it is full")))
    with pytest.raises(StoreUnavailable):
        make(center, bulk.cancel_all)
    assert told() == ("failed", 0)


def refuse(error: BaseException) -> Any:
    raise error


def test_a_command_outlasts_an_outage_of_the_first_database(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    center = system.center
    submitted(center, 2 * STEP)
    shown: list[str] = []
    job = center.store.bulk.get(make(center, bulk.cancel_all, rate=10_000))

    def get(table: BulkTable, name: str, real: Any = BulkTable.get) -> Any:
        return refuse(StoreUnavailable("db1 is away")) if len(shown) < 3 else real(table, name)

    monkeypatch.setattr(BulkTable, "get", get)
    assert work_off(center, job, shown.append) == {"cancelled": 2 * STEP}
    assert "it waits: the first database is out of reach" in shown[1]

    submitted(center, STEP)
    job = center.store.bulk.get(make(center, bulk.cancel_all))
    monkeypatch.setattr(BulkTable, "move", lambda *_: refuse(StoreUnavailable("db1 is away")))
    with pytest.raises(KeyboardInterrupt) as ended:
        work_off(center, job, lambda _: refuse(KeyboardInterrupt()))
    assert f"0 of {STEP} tasks are done" in ended.value.__notes__[0]
    assert f"could not be stopped: toc bulk stop {job.name}" in ended.value.__notes__[0]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Locked("db1: it is locked"), "another transaction has locked a row"),
        (Refused("db1: it is full"), "a database server refuses it; its log says why"),
        (SchemaBehind("db1: no such table"), "a table is missing, or older: toc db check"),
        (StoreUnavailable("db1 is away"), "a database server is out of reach"),
        (IndexUnavailable("redis1 is away"), "a server or table does not answer"),
    ],
)
def test_a_job_says_what_it_waits_for_and_names_no_server(
    system: System, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    submitted(system.center, 1)
    name = make(system.center, bulk.cancel_all)
    monkeypatch.setattr(Changes, "judge_cancels", lambda *_: refuse(error))
    BulkRunner(system.center).run_once()
    assert act(system.center, bulk.show, name=name)["error"] == f"it waits: {told}"


def test_another_process_goes_on_and_one_that_was_late_changes_nothing(system: System) -> None:
    center = system.center
    job_ids = submitted(center, 3 * STEP)
    clock = Stopped()
    with TimeoutCenter(system.settings, clock=clock) as slow:
        name = make(center, bulk.reschedule_all, delay=7200.0, rate=1000)
        late, next_one = BulkRunner(slow), BulkRunner(center)
        late.run_once()
        assert act(center, bulk.show, name=name)["done"] == STEP
        next_one.run_once()
        assert act(center, bulk.show, name=name)["done"] == STEP, "the lease of the first holds"
        free_leases(center)
        assert run(center, name, next_one)["counts"] == {"rescheduled": 3 * STEP}
        assert center.reschedule(job_ids[STEP], delay=60) is RescheduleOutcome.RESCHEDULED
        clock.passed += LEASE_MS / 1000
        late.run_once()
        late.close()
    assert system.row(job_ids[STEP]).version == 2, "what came after the job holds"
    job = act(center, bulk.show, name=name)
    assert (job["state"], job["counts"]) == ("done", {"rescheduled": 3 * STEP})
    assert Counter(outcomes(center, name).values()) == {"rescheduled": len(job_ids)}


@pytest.mark.skipif(secured.SECURED, reason="a proxy must be able to read along")
def test_a_hanging_server_holds_up_no_job_of_other_servers(new_system: NewSystem, mariadb: MariaDB) -> None:
    with Proxy(mariadb.port) as proxy:
        system = new_system(database_urls=[mariadb.url, through(proxy, mariadb.url)], read_timeout=1.0)
        system.create_topics()
        center = system.center
        at_server = {center.store.server_of_biz(BizId.of(number)): number for number in range(99)}
        biz_ids = [at_server[0], at_server[1]]
        here, there = (
            center.submit_many([NewTask(TOPIC, biz_id, delay=3600) for _ in range(300)]) for biz_id in biz_ids
        )
        moved, stuck = (
            make(center, bulk.reschedule_all, biz_id=each, delay=86_400.0, rate=10_000) for each in biz_ids
        )
        proxy.stall()
        runner = BulkRunner(center)

        def done(name: str) -> bool:
            runner.run_once()
            return bool(act(center, bulk.show, name=name)["state"] == "done")

        assert until(lambda: done(moved))
        assert until(lambda: not done(stuck) and act(center, bulk.show, name=stuck)["error"] != "")
        assert center.store.away(1) is not None, "each step of the job would wait for it again"
        assert {row.version for row in center.store.read(here).values()} == {1}
        proxy.flow()
        assert until(lambda: done(stuck))
        assert {row.version for row in center.store.read(there).values()} == {1}


STOPPED = ("stopped", "the gateway failed; its log tells more")
DAMAGES: dict[str, tuple[str, str] | None] = {
    " SET details='[[['": None, " SET details='7'": None, " SET kind='x'": None,
    " SET counts='{\"a\": \"x\"}'": None, " SET counts='{\"gone\": 3}'": None,
    " SET rate=0": STOPPED, "_part SET job_ids=X'01'": STOPPED,
    "_part SET job_ids=X''": ("done", "120 of its tasks are not known any more"),
    " SET done=4000000000": ("done", ""),
}  # fmt: skip
"""By what is done to a job's row, its state and error in the list; None: it is not listed any more."""


def test_damaged_jobs_harm_themselves_alone(system: System) -> None:
    center = system.center
    submitted(center, 120)
    wrong = {damage: make(center, bulk.cancel_all) for damage in DAMAGES}
    right = make(center, bulk.cancel_all, rate=10_000)
    table, server = center.store.bulk._table, center.store._shards.topic_server
    for damage, name in wrong.items():
        server.run([Statement(f"UPDATE {table}{damage} WHERE name='{name}'")])
    runner = BulkRunner(center)
    assert run(center, right, runner)["counts"] == {"cancelled": 120}

    def found() -> dict[str, tuple[str, str] | None]:
        runner.run_once()
        listed = act(center, bulk.list_jobs)["jobs"]
        shown = {job["name"]: (job["state"], job["error"]) for job in listed}
        return {damage: shown.get(name) for damage, name in wrong.items()}

    assert until(lambda: found() == DAMAGES), found()


def test_jobs_are_kept_for_their_time_and_go_with_their_tasks(system: System) -> None:
    center = system.center
    submitted(center, 10)
    killed(center, 3, "x")
    stopped, done = (make(center, bulk.cancel_all) for _ in range(2))
    act(center, bulk.stop, name=stopped)
    run(center, done)
    running = make(center, bulk.purge_all)
    table, server = center.store.bulk._table, center.store._shards.topic_server
    long_ago = server.from_now(-KEPT_MS)
    old = [
        *(f"UPDATE {each} SET gmt_create={long_ago}" for each in (table, f"{table}_part")),
        f"UPDATE {table} SET gmt_modified={long_ago} WHERE name<>'{stopped}'",
    ]
    server.run([Statement(each) for each in old])
    assert not center.store.bulk.purge(KEPT_MS - 60_000)
    assert {job.name for job in center.store.bulk.list(10)} == {stopped, running}
    assert not center.store.bulk.part(done, 0).job_ids
    assert len(center.store.bulk.part(stopped, 0).job_ids) == 10
    assert run(center, running)["counts"] == {"purged": 3}


def test_nobody_has_so_many_jobs_that_those_of_others_wait_or_cannot_be_seen(system: System) -> None:
    center = system.center
    submitted(center, 10)
    submitted(center, 1, OTHER)
    cancel = {"rate": 1, "dry_run": False, "tasks": 10}
    mine = act(center, bulk.cancel_all, **{**cancel, "topic": OTHER, "confirm": OTHER})["name"]

    def by_another(operation: Operation, **values: Any) -> Record:
        token = Token("another", frozenset({Role.OPERATE}), (TOPIC,))
        found: Record = operation.perform(Doing(center, "another", operation.right, token), values)
        return found

    all_ = {**cancel, "topic": TOPIC, "confirm": TOPIC}
    made = [by_another(bulk.cancel_all, **all_)["name"] for _ in range(MOST_RUNNING)]
    with pytest.raises(Busy, match="stop it"):
        by_another(bulk.cancel_all, **all_)
    with pytest.raises(InvalidInput, match="say which topic"):
        by_another(bulk.cancel_all, **cancel, biz_id=1)
    by_another(bulk.stop, name=made[0])
    by_another(bulk.cancel_all, **all_)
    with pytest.raises(Busy, match="stop it"):
        by_another(bulk.resume, name=made[0])
    token = Token("mine", frozenset({Role.READ}), (OTHER,))
    seen = bulk.list_jobs.perform(Doing(center, "mine", bulk.list_jobs.right, token), {"limit": 5})["jobs"]
    assert [one["name"] for one in seen] == [mine], "newer jobs that it may not see took its place"
    assert act(center, bulk.cancel_all, **{**cancel, "topic": OTHER, "confirm": OTHER})["tasks"] == 1


@pytest.mark.skipif(secured.SECURED, reason="a proxy must be able to hang up")
def test_while_the_first_database_is_away_nothing_is_done_twice_and_then_it_goes_on(
    new_system: NewSystem, mariadb: MariaDB
) -> None:
    with Proxy(mariadb.port) as proxy:
        urls = [through(proxy, mariadb.url), mariadb.url]
        system = new_system(database_urls=urls)
        system.create_topics()
        center = system.center
        job_ids = submitted(center, 300)
        name = make(center, bulk.reschedule_all, delay=86_400.0, rate=1000)
        runner = BulkRunner(center)
        runner.run_once()
        proxy.refuse()
        for _ in range(3):
            runner.run_once()  # it neither raises nor goes on
        with pytest.raises(StoreUnavailable):
            act(center, bulk.show, name=name)
        proxy.accept()
        assert until(lambda: center.store.away(0) is None)
        free_leases(center)
        assert run(center, name, runner)["counts"] == {"rescheduled": 300}
        assert {row.version for row in center.store.read(job_ids).values()} <= {1, 2}, "a step was repeated"


# --- at gateways


def ask(gateway: Gateway, kind: str, token: str = "all", **body: Any) -> Any:
    return gateway.call("POST", f"/v1/bulk:{kind}", {"topic": TOPIC, **body}, token=token)


def test_a_gateway_is_killed_within_a_job_others_go_on(system: System, tmp_path: Path) -> None:
    center = system.center
    job_ids, others = submitted(center, 950), submitted(center, 30, OTHER)
    dying = {"TOC_FAILPOINT": "bulk.step-done:4", "TOC_FAILPOINT_ONCE": str(tmp_path / "died")}
    first = Gateway(system, env=dying)
    second: Gateway | None = None
    try:
        count = ask(first, "cancel", dry_run=True).body["would_change"]
        assert count == 950
        made = ask(first, "cancel", tasks=count, confirm=TOPIC)
        assert made.status == 200, made
        name = made.body["name"]
        assert until(lambda: (tmp_path / "died").exists())
        first._end()
        assert act(center, bulk.show, name=name)["done"] == 3 * STEP
        second = Gateway(system, host="gate-2", beside=first)
        assert until(lambda: act(center, bulk.show, name=name)["state"] == "done")
        job = act(center, bulk.show, name=name)
        assert job["counts"] == {"cancelled": 950}
        assert set(outcomes(center, name)) == set(job_ids)
        assert statuses(center, job_ids) == {TaskStatus.CANCELLED}
        assert statuses(center, others) == {TaskStatus.PENDING}
    finally:
        for one in filter(None, (first, second)):
            one.stop()


@pytest.fixture(scope="module")
def shop(shared: Gateway) -> Gateway:
    shared.make_token("shop", "operate", topics=("test.sync",))
    return shared


def test_a_job_is_for_tokens_of_its_topic_with_the_right_of_its_kind(shop: Gateway) -> None:
    center = shop.system.center
    submitted(center, 5)
    killed(center, 5, "x", OTHER)
    right = {"cancel": {"produce", "operate", "all", "shop"}, "purge": {"operate", "all", "shop"}}
    for kind, allowed in right.items():
        for token in ("produce", "consume", "read", "operate", "all", "shop"):
            answer = ask(shop, kind, token, dry_run=True)
            assert answer.status == (200 if token in allowed else 403), (kind, token, answer)
    hidden = ask(shop, "purge", "shop", topic=OTHER, dry_run=True)
    assert (hidden.status, hidden.body["type"]) == (404, "/docs#unknown-topic")

    made = ask(shop, "purge", "operate", topic=OTHER, tasks=5, confirm=OTHER, rate=1)
    assert made.status == 200, made
    name = made.body["name"]
    path = f"/v1/bulk/{name}"
    for token, status in (("read", 200), ("produce", 200), ("consume", 403), ("shop", 404)):
        assert shop.call("GET", path, token=token).status == status, token
        assert shop.call("GET", f"{path}/tasks", token=token).status == status, token
    assert name not in str(shop.call("GET", "/v1/bulk", token="shop").body)
    assert name in str(shop.call("GET", "/v1/bulk", token="read").body)
    for token, status in (("read", 403), ("produce", 403), ("shop", 404), ("operate", 200)):
        assert shop.call("POST", f"{path}:stop", token=token).status == status, token
    for token, status in (("read", 403), ("produce", 403), ("shop", 404), ("operate", 200)):
        assert shop.call("POST", f"{path}:resume", token=token).status == status, token
    assert until(lambda: shop.call("GET", path).body["state"] == "done")
    assert shop.call("GET", path).body["counts"] == {"purged": 5}
    (action,) = shop.call("GET", f"/v1/audit?action=tasks.purge&target={OTHER}").body["actions"]
    assert (action["by"], action["outcome"], action["result"]["purged"]) == ("operate", "done", 5)
    assert action["details"]["bulk"] == name


def test_a_gateway_that_ends_lets_others_go_on_at_once(system: System) -> None:
    center = system.center
    submitted(center, 40)
    with Gateway(system) as gateway:
        assert ask(gateway, "cancel", tasks=40, confirm=TOPIC, rate=5).status == 200
        (job,) = act(center, bulk.list_jobs)["jobs"]
        assert until(lambda: act(center, bulk.show, name=job["name"])["done"] > 0)
        os.kill(gateway.process.pid, signal.SIGTERM)
        assert gateway.process.wait(120) == 0
        assert act(center, bulk.show, name=job["name"])["state"] == "waiting"
        assert run(center, job["name"])["counts"] == {"cancelled": 40}
