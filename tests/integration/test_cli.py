"""The command line against real servers: mostly SQLite and Redis, MariaDB and ZooKeeper where they matter."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from harness import forks
from harness.patience import until
from harness.rows import change, known

from benchmarks.local import RedisServer
from benchmarks.private import free_port
from toc import CancelOutcome, NewTask, Settings, TaskStatus, TimeoutCenter, Topic
from toc.cli.main import main
from toc.index.messages import Peek, Prepared, PrepareRequest
from toc.maintenance.due_walk import DueWalk
from toc.model.bulk import BulkState
from toc.model.errors import PartialCancel, SchemaBehind, TopicDrift, TopicExists
from toc.model.topic import Declaration
from toc.model.verdict import Failure
from toc.operate import running as runs_now
from toc.operate.admin import migrator
from toc.operate.operation import Record
from toc.operate.topics import sync_topics
from toc.sdk.parts import open_queues
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.store.tasks.pulls import HandOut
from toc.worker.app import check_drift

CANARY = "hunter2canary"


class Toc:
    """Runs commands as the ``toc`` program does, and keeps what they wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.code = 0
        self.out = self.err = ""

    def __call__(self, *words: object) -> Toc:
        self.code = main([str(word) for word in words])
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        assert CANARY not in self.out + self.err
        return self

    def ok(self, *words: object) -> str:
        """Run and expect success; returns stdout."""
        assert self(*words).code == 0, self.err
        return self.out

    def json(self, *words: object, code: int = 0) -> Any:
        """Run with --json; stdout must be JSON and nothing else."""
        assert self(*words, "--json").code == code, self.err
        return json.loads(self.out)

    def refused(self, *words: object, code: int = 2) -> str:
        """Run and expect ``code``, one error and nothing on stdout; returns the error."""
        assert self(*words).code == code, (self.code, self.err)
        assert self.out == ""
        assert self.err.startswith("error: ") or "Error" in self.err
        return self.err


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of SQLite with the schema and nothing in it."""
    path = tmp_path_factory.mktemp("schema") / "toc.db"
    migrator(Settings(database_urls=[f"sqlite:///{path}"])).upgrade()
    return path


@pytest.fixture
def toc(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clean_redis: RedisServer,
    upgraded: Path,
) -> Toc:
    """The program with SQLite, a Redis, an upgraded schema and no topics."""
    for name in list(os.environ):
        if name.startswith("TOC_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toc.dev.demo", raising=False)  # its center has read its settings
    monkeypatch.setenv("TOC_DATABASE_URLS", f"sqlite:///{tmp_path / 'toc.db'}")
    monkeypatch.setenv("TOC_REDIS_URL", clean_redis.url)
    shutil.copy(upgraded, tmp_path)
    return Toc(capsys)


@pytest.fixture
def topic(toc: Toc) -> str:
    """A timed topic with four slots."""
    toc.ok("topic", "create", "order.close", "--biz-type", 7, "--slots", 4)
    return "order.close"


@pytest.fixture
def center(toc: Toc) -> Iterator[TimeoutCenter]:
    """An SDK on the same servers."""
    assert toc
    with TimeoutCenter(Settings()) as made:
        yield made


# --- what is due, runs, has ended ------------------------------------------------------------------------


def test_a_task_that_runs_is_told_from_one_that_waits(toc: Toc, topic: str, center: TimeoutCenter) -> None:
    worker = "web1-0-77"
    ids = [center.submit(topic, biz_id=biz_id, delay=0.01) for biz_id in range(3)]
    waiting = center.submit(topic, biz_id=9, delay=60)
    slots = center.catalog.get(topic).slots()
    center.queues.claim(slots, worker)
    assert until(
        lambda: all(row.next_time <= center.clock.now_ms() for row in center.store.read(ids).values())
    )
    assert toc.json("running") == []
    center.store.leases.identify(worker)
    center.store.leases.take(dict.fromkeys(ids, 30))
    running = toc.json("running", "--topic", topic)
    assert {(int(one["job_id"]), one["owner"], one["host"]) for one in running} == {
        (job_id, worker, "web1") for job_id in ids
    }
    assert running == sorted(running, key=lambda one: (one["slot"], int(one["job_id"])))
    shown = toc.json("get", ids[0])
    since = datetime.fromisoformat(shown["since"])
    center.store.leases.take({ids[0]: 30})  # renewed
    assert toc.json("get", ids[0])["since"] == shown["since"]
    assert timedelta(0) <= datetime.now(UTC) - since < timedelta(minutes=5)
    assert (shown["owner"], shown["host"]) == (worker, "web1")
    for seconds, late in ((2.4, False), (9, True)):  # it began up to 1.5 s before its lease
        change(center.store, ids[0], f"action_time=lease_since-{round(seconds * 1000)}")
        told = toc.json("get", ids[0])["late"]
        assert (told is not None) is late
    assert (
        told["sentence"]
        == "It started 9.0 s late because of something that cannot be told before its try ends."
    )
    assert (told["cause"], told["remedy"]) == ("unknown", "look again when its try has ended")
    center.store.leases.take({ids[1]: 30}, waiting={ids[1]})
    assert toc.json("get", ids[1])["since"] is None, "it has not started"
    assert [one["job_id"] for one in toc.json("running") if one["since"] is None] == [str(ids[1])]
    waits = toc.json("get", waiting)
    assert waits["slot"].startswith(f"{topic}_")
    assert "owner" not in waits
    assert toc.json("running", "--limit", 2) == running[:2]
    assert "no-topic" in toc.refused("running", "--topic", "no-topic")


def test_a_table_that_is_gone_hides_no_running_task_of_others(
    toc: Toc, topic: str, center: TimeoutCenter
) -> None:
    store, now = center.store, center.clock.now_ms
    submitted = [center.submit(topic, biz_id=biz_id, delay=0.01) for biz_id in (1, 2, 3)]
    ids = {store._shards.table_of(job_id): job_id for job_id in submitted}
    assert len(ids) > 1
    assert until(lambda: all(row.next_time <= now() for row in store.read(submitted).values()))
    store.leases.identify("web1-0-77")
    store.leases.take(dict.fromkeys(submitted, 600))
    gone = min(ids)
    name = store._shards.names[gone]
    store._shards.server_of[gone].run([Statement(f"ALTER TABLE {name} RENAME TO gone")])
    running = {int(one["job_id"]) for one in toc.json("running", code=4)}
    assert running == {job_id for job_id in submitted if store._shards.table_of(job_id) != gone}
    assert f"missing: {store.name_of(gone)}: " in toc.err


def test_running_tasks_of_others_and_a_backlog_hide_none(
    toc: Toc, topic: str, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What workers have taken is in the PrepareQueues. Without these few of the due rows are looked at."""
    toc.ok("topic", "create", "a.lot", "--biz-type", 8, "--slots", 1)
    lots = center.submit_many([NewTask("a.lot", n, 0.001) for n in range(40)])
    waits, runs = (
        center.submit(topic, biz_id=biz_id, delay=delay) for biz_id, delay in ((0, 0.01), (0, 0.02))
    )
    slots = [*center.catalog.get(topic).slots(), *center.catalog.get("a.lot").slots()]
    taken = list[int]()

    def all_taken() -> bool:
        for prepared in center.queues.prepare([PrepareRequest(slot, 100, 16, 1) for slot in slots]).values():
            assert isinstance(prepared, Prepared)
            taken.extend(job_id for job_id, _ in prepared.entries)
        return {*taken} == {*lots, waits, runs}

    assert until(all_taken)
    center.store.leases.identify("web1-0-77")
    center.store.leases.take(dict.fromkeys([*lots, runs], 600))
    monkeypatch.setattr(runs_now, "ROWS", 1)
    monkeypatch.setattr(runs_now, "LEAST_ROWS", 1)

    def shown(*words: object) -> list[int]:
        return [int(one["job_id"]) for one in toc.json("running", *words)]

    assert shown("--topic", topic, "--limit", 1) == [runs]
    assert "others may run" not in toc.err
    assert len(shown("--limit", 3)) == 3
    assert "others may run" in toc.err
    assert {*shown("--limit", 1000)} == {*lots, runs}
    monkeypatch.setattr(center.queues, "present", False)
    found = runs_now.running(center, [center.catalog.get(topic)], 9)
    assert (found.tasks, found.more) == ([], True)


def test_a_task_that_a_consumer_has_is_told_from_one_that_waits(toc: Toc, center: TimeoutCenter) -> None:
    toc.ok("topic", "create", "mail.send", "--biz-type", 9, "--slots", 1, "--delivery", "pull")
    job_id = center.submit("mail.send", biz_id=1, delay=0.01)
    item = HandOut(job_id, 9, retries=16, ttr_ms=60_000, nonce=bytes(range(16)))

    def handed_out() -> bool:
        return center.store.pulls.hand_out([item], center.clock.now_ms())[job_id].nonce == item.nonce

    assert "owner" not in toc.json("get", job_id)
    assert until(handed_out, 60)
    shown = toc.json("get", job_id)
    assert (shown["owner"], shown["host"], shown["slot"]) == ("a consumer", None, "mail.send_0")
    assert datetime.fromisoformat(shown["since"]) < datetime.fromisoformat(shown["next_time"])


def test_what_is_due_or_ended_of_a_topic_is_in_order(toc: Toc, topic: str, center: TimeoutCenter) -> None:
    ids = [center.submit(topic, biz_id=n, delay=timedelta(hours=n)) for n in range(1, 6)]
    center.submit(topic, biz_id=0, delay=timedelta(days=3))
    assert center.cancel(ids[4]) is CancelOutcome.CANCELLED
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    due = toc.json("find", "--topic", topic, "--before", tomorrow)
    assert [int(one["job_id"]) for one in due] == ids[:4]
    first = toc.json("find", "--topic", topic, "--before", tomorrow, "--limit", 3)
    (cursor,) = re.findall(r"--next (\S+)", toc.err)
    rest = toc.json("find", "--topic", topic, "--before", tomorrow, "--next", cursor)
    assert [int(one["job_id"]) for one in first + rest] == ids[:4]
    ended = toc.json("find", "--topic", topic, "--status", "cancelled", "--after", "1h")
    assert [int(one["job_id"]) for one in ended] == ids[4:]
    assert toc.json("find", "--topic", topic, "--status", "cancelled", "--before", "1h") == []
    assert str(ids[0]) in toc.ok("find", "--topic", topic)
    assert [int(one["job_id"]) for one in toc.json("find", "--biz-id", 5, "--after", "1h")] == ids[4:]
    for wrong in (("--topic", topic, "--next", "x"), ("--topic", topic, "--error", "")):
        toc.refused("find", *wrong)


def test_what_comes_due_and_what_would_pile_up_is_drawn_and_told(
    toc: Toc, topic: str, center: TimeoutCenter
) -> None:
    center.submit_many([NewTask(topic, number, delay=1800) for number in range(3)])
    walk = DueWalk(center.store, center.catalog, center.clock, lambda: frozenset(center.store.tables))
    assert until(lambda: walk.run_once() >= 0 and not toc.json("due")["missing"])
    assert toc.json("due", topic)["topics"][0]["hour"] == 3
    assert toc.json("due")["total"]["hour"] == 3
    drawn = toc.ok("due", topic)
    assert re.search(r"^next hour \(UTC\)\n\d\d:\d\d +3 #{40}$", drawn, re.MULTILINE), drawn
    assert "minutes were counted at most" in toc.err
    pile = toc.json("what-if", topic, "--pause", "2h", "--rate", "1")
    assert (pile["topic"], pile["waiting"], pile["rate"]) == (topic, 3, 1)
    assert pile["drain_seconds"] == pytest.approx(3, abs=1)
    assert len(pile["steps"]) > 60
    assert toc.json("what-if", "--pause", "2h")["waiting"] == 3
    told = toc.ok("what-if", topic, "--pause", "2h", "--rate", "1")
    assert re.search(r"^waiting +3$", told, re.MULTILINE), told
    assert "steps" not in told
    assert [line.split()[0] for line in toc.err.splitlines()] == ["without", "tasks", "--json"]


# --- tasks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "done", "more"), [("cancel", "cancelled", []), ("reschedule", "rescheduled", ["--delay", "1h"])]
)
def test_pending_tasks_are_counted_and_nothing_is_done_unasked_or_to_none(
    toc: Toc, center: TimeoutCenter, topic: str, kind: str, done: str, more: list[str]
) -> None:
    pending, cancelled = (center.submit(topic, biz_id=1, delay=60) for _ in range(2))
    center.cancel(cancelled)
    due = known(center.get(pending)).action_time
    for which in (["--topic", topic], ["--topic", topic, "--biz-id", 1], ["--biz-id", 1]):
        assert toc.json("bulk", kind, *which, *more, "--dry-run") == {f"would_{kind}": 1}
        what = f"{kind} 1 pending tasks of {topic if topic in which else '1, of all topics'}"
        assert f"error: {what}: add --yes to confirm\n" == toc.refused("bulk", kind, *which, *more)
    assert toc.json("bulk", kind, "--biz-id", 2, *more) == {done: 0}, "there is nothing to ask about"
    past = ["--action-time", "2020-01-01T00:00:00Z", "--dry-run"]
    assert "not after now" in toc.refused("bulk", "reschedule", "--topic", topic, *past), (
        "as without --dry-run"
    )
    assert toc.json("bulk", "list") == []
    task = known(center.get(pending))
    assert (task.status, task.action_time) == (TaskStatus.PENDING, due)
    assert toc.json("bulk", kind, "--topic", topic, *more, "--yes") == {done: 1}
    (job,) = toc.json("bulk", "list")
    assert (job["kind"], job["topic"], job["state"], job["rate"]) == (kind, topic, "done", 10_000)


def test_a_cancel_that_reached_some_tasks_only_has_failed_in_the_audit(
    toc: Toc, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def partly(*_: object, **__: object) -> Record:
        raise PartialCancel({7: CancelOutcome.CANCELLED}, [8])

    monkeypatch.setattr(TimeoutCenter, "cancel_by_biz", partly)
    assert toc("cancel", "--topic", topic, "--biz-id", 1).code == 4
    (action,) = toc.json("audit", "--action", "tasks.cancel")
    assert (action["outcome"], action["result"]["cancelled"]) == ("failed", 1)


# --- slots and dead tasks -----------------------------------------------------------------------------------


def kill_tasks(center: TimeoutCenter, topic: str, count: int) -> list[int]:
    """Tasks that are dead, in row and DeadQueue, as after their last try."""

    job_ids = [center.submit(topic, biz_id=number, delay=60) for number in range(count)]
    now = center.clock.now_ms()
    failures = [Failure(job_id, 0, 0, 0, 16, 0, now, "no luck") for job_id in job_ids]
    center.store.die(failures)
    entries: dict[Any, list[tuple[int, int]]] = {}
    found = center.catalog.get(topic)
    for row in center.store.read(job_ids).values():
        entries.setdefault(found.slot(row.slot_crc, row.slot_amount), []).append((row.job_id, now))
    center.queues.restore_dead(entries)
    return job_ids


def test_a_redrive_without_redis_leaves_the_index_to_the_sweep(
    toc: Toc, center: TimeoutCenter, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_ids = kill_tasks(center, topic, 3)
    monkeypatch.setenv("TOC_REDIS_URL", f"redis://127.0.0.1:{free_port()}")
    assert toc.json("dead", "redrive", *job_ids) == {"redriven": 3, "not_indexed_yet": 3, "left": 0}
    assert {row.status for row in center.store.read(job_ids).values()} == {TaskStatus.PENDING}


# --- many tasks at once -----------------------------------------------------------------------------------


def _account(toc: Toc, action: str) -> dict[str, Any]:
    """The one line on stderr that says who did what, with the details that the audit has of it."""
    (line,) = [line for line in toc.err.splitlines() if '"change_made"' in line]
    found: dict[str, Any] = json.loads(line)
    (audited,) = toc.json("audit", "--limit", 1)
    assert found["by"].count("@") == 1
    assert (found["action"], found["by"], found["outcome"]) == (action, audited["by"], audited["outcome"])
    assert found["action"] == audited["action"]
    found.update(audited["details"])
    return found


def test_dead_tasks_are_listed_and_redriven_by_filters_and_a_line_says_who_did_it(
    toc: Toc, center: TimeoutCenter, topic: str
) -> None:
    toc.ok("topic", "create", "other", "--biz-type", 77, "--slots", 2)
    here, there = kill_tasks(center, topic, 4), kill_tasks(center, "other", 3)

    def listed(*words: object) -> set[int]:
        return {int(each["job_id"]) for each in toc.json("dead", "list", *words)}

    assert listed("--topic", "other") == set(there)
    assert len(listed("--limit", 2)) == 2
    assert "no luck" in toc.ok("dead", "show", here[0])
    assert listed("--biz-id", 2) == {here[2], there[2]}
    assert listed("--error", "no lu") == {*here, *there}
    assert listed("--error", "luck no") == set()
    assert listed("--after", "1h") == {*here, *there}
    assert listed("--before", "1h") == set()
    assert listed("--before", "2099-01-01T00:00:00Z", "--after", "2020-01-01T00:00:00+01:00") == {
        *here,
        *there,
    }
    assert toc.json("bulk", "redrive", "--topic", topic, "--dry-run") == {"would_redrive": 4}
    assert "purge 4 dead tasks of order.close: add --yes" in toc.refused("bulk", "purge", "--topic", topic)
    assert listed() == {*here, *there}, "nothing has changed"
    assert toc.json("bulk", "redrive", "--topic", topic, "--biz-id", 1)["redriven"] == 1
    said = _account(toc, "tasks.redrive")
    assert (said["selected"], said["redriven"]) == ({"biz_id": 1}, 1)
    assert toc.json("bulk", "tasks", said["bulk"]) == [{"job_id": str(here[1]), "outcome": "redriven"}]
    assert toc.json("bulk", "redrive", "--biz-id", 2)["redriven"] == 2, "of both topics"
    some = ["bulk", "redrive", "--error", "no luck", "--after", "1h", "--topic"]
    assert [toc.json(*some, name)["redriven"] for name in (topic, "other")] == [2, 2]
    assert listed() == set()
    assert toc.json(*some, topic) == {"redriven": 0}
    assert "change_made" not in toc.err
    assert toc("dead", "redrive", here[0]).code == 1, "it is not dead"


def test_tasks_that_fail_show_in_the_exit_code(
    toc: Toc, center: TimeoutCenter, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_tasks(center, topic, 2)

    def fail(*_: object, **__: object) -> Record:
        raise KeyError("a bug")

    for name in ("redrive", "delete_ended"):
        monkeypatch.setattr(Store, name, fail)
    for command, done in (("redrive", "redriven"), ("purge", "purged")):
        told = toc.json("bulk", command, "--topic", topic, *["--yes"][: command == "purge"], code=1)
        assert told == {done: 0, "failed": 2}
        assert "2 failed" in toc.err


def test_dead_tasks_whose_redis_is_out_of_reach_are_not_purged(
    toc: Toc, center: TimeoutCenter, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = kill_tasks(center, topic, 2)
    monkeypatch.setenv("TOC_REDIS_URL", f"redis://127.0.0.1:{free_port()}")
    assert toc.json("dead", "purge", *dead, code=4) == {"purged": 0, "left": 2}
    assert set(center.store.read(dead)) == set(dead)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_an_ended_command_leaves_a_stopped_bulk_job(
    toc: Toc, center: TimeoutCenter, topic: str, number: int, tmp_path: Path
) -> None:
    center.submit_many([NewTask(topic, n, delay=3600) for n in range(300)])
    words = ["bulk", "cancel", "--topic", topic, "--rate", "5", "--yes"]
    said = tmp_path / "said"
    command = forks.start(words, env=os.environ, session=True, streams={"stderr": str(said)})

    def begun() -> bool:
        return any(job.done for job in center.store.bulk.list(1)) or command.poll() is not None

    assert until(begun)
    os.kill(command.pid, number)
    assert command.wait(60) == 130
    (job,) = center.store.bulk.list(1)
    assert (job.state, 0 < job.done < 300) == (BulkState.STOPPED, True)
    assert f"bulk job {job.name}: {job.done} of 300 tasks are done; " in said.read_text()
    assert f"toc bulk resume {job.name}" in said.read_text()
    assert toc.json("audit", "--action", "tasks.cancel")[0]["outcome"] == "interrupted"
    assert toc.json("bulk", "resume", job.name)["state"] == "waiting"
    assert "without a gateway it waits" in toc.err


# --- the index --------------------------------------------------------------------------------------------


def test_rebuild_and_sweep_fill_the_index_from_the_rows_and_count(
    toc: Toc, center: TimeoutCenter, topic: str, clean_redis: RedisServer
) -> None:
    made = toc.json("topic", "create", "other", "--biz-type", 77, "--slots", 2)
    center.submit_many([NewTask(topic, n, delay=600) for n in range(300)])
    center.submit_many([NewTask(made["name"], n, delay=600) for n in range(20)])
    dead = kill_tasks(center, topic, 3)
    clean_redis.call("FLUSHALL")
    assert toc.json("rebuild", "--topic", "other") == {"rows": 20, "added": 20, "not_indexed": 0}
    assert toc.json("sweep") == {"rows": 323, "added": 303, "not_indexed": 0}
    assert toc.json("rebuild") == {"rows": 323, "added": 0, "not_indexed": 0}
    peeks = center.queues.peek(center.catalog.get(topic).slots()).values()
    assert sum(peek.store for peek in peeks if isinstance(peek, Peek)) == 300
    assert sum(peek.dead for peek in peeks if isinstance(peek, Peek)) == len(dead)
    assert "no topic 'none'" in toc.refused("rebuild", "--topic", "none")


def test_a_rebuild_without_redis_says_what_is_not_indexed_and_ends_with_4(
    toc: Toc, center: TimeoutCenter, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    center.submit(topic, biz_id=1, delay=600)
    monkeypatch.setenv("TOC_REDIS_URL", f"redis://127.0.0.1:{free_port()}")
    assert toc.json("rebuild", code=4) == {"rows": 1, "added": 0, "not_indexed": 1}
    assert "out of reach" in toc.err


def test_a_rebuild_without_some_tables_indexes_what_the_others_have_and_ends_with_3(
    toc: Toc, center: TimeoutCenter, topic: str
) -> None:
    job_ids = center.submit_many([NewTask(topic, n, delay=600) for n in range(50)])
    table = center.store._shards.table_of(job_ids[0])
    left = sum(center.store._shards.table_of(job_id) != table for job_id in job_ids)
    server, name = center.store._shards.servers[0], center.store._shards.names[table]
    server.run([Statement(f"ALTER TABLE {name} RENAME TO gone")])
    assert 0 < left < 50
    assert toc.json("rebuild", code=3)["rows"] == left
    assert name in toc.err


# --- servers that are missing or not ready ----------------------------------------------------------------


def test_a_task_table_that_redis_remembers_is_not_made_anew_in_silence(
    toc: Toc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_redis: RedisServer
) -> None:
    monkeypatch.setenv("TOC_DATABASE_URLS", f"sqlite:///{tmp_path / 'lost.db'}")
    monkeypatch.setenv("TOC_REDIS_URL", clean_redis.url)
    with closing(open_queues(Settings())) as queues:
        queues.own("0" * 32, "shop with its tables on db1:3306")
    assert toc("db", "check").code == 3
    assert "is this the right server?" in toc.err
    refused = toc.refused("db", "upgrade", code=2)
    assert "belong to shop with its tables on db1:3306" in refused
    assert "--new" in refused
    toc.ok("db", "upgrade", "--new")
    toc.ok("db", "upgrade")


def test_an_upgrade_by_an_older_version_than_the_schemas_says_that_there_is_nothing_to_do(
    toc: Toc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOC_DATABASE_URLS", f"sqlite:///{tmp_path / 'later.db'}")
    toc.ok("db", "upgrade")
    with closing(sqlite3.connect(tmp_path / "later.db", isolation_level=None)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    toc.ok("db", "upgrade")
    assert "later than this version" in toc.err
    assert "nothing to do" in toc.err
    toc.ok("db", "check")


DECLARES = """
import toc
center = toc.TimeoutCenter()
center.handler('sync.made')(print)
center.handler('{topic}', retries=9, backoff_cap="5m")(print)
center.topic('sync.small', slots=2)
center.topic('sync.pulled', delivery="pull")
center.topic('sync.taken', biz_type=1)
"""


def test_sync_brings_topics_to_what_code_declares_and_names_what_is_refused(
    toc: Toc, topic: str, center: TimeoutCenter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, gone = center.store, Topic("gone", 1, 1, paused=True)
    store.topics.create(gone)
    assert store.topics.close("gone", 0)
    assert store.topics.retire(gone, 1)
    for number, name in ((2, "sync.small"), (3, "sync.pulled")):
        store.topics.create(Topic(name, number, 4))
    (tmp_path / "app_of_sync.py").write_text(DECLARES.format(topic=topic))
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = toc.refused("topic", "sync", "--app", "app_of_sync:centre", code=2)
    assert "module 'app_of_sync' has no 'centre'" in wrong
    before = store.topics.list()
    outcomes = {
        "sync.made": "create",
        topic: "alter",
        **dict.fromkeys(("sync.small", "sync.pulled", "sync.taken"), "refused"),
    }
    for dry_run in (True, False):
        words = ["topic", "sync", "--app", "app_of_sync:center", *(["--dry-run"] if dry_run else [])]
        assert toc(*words).code == 1
        refused = toc.err
        assert ("nothing was changed" if dry_run else "this was done") in refused
        for error in ("sync.small: InvalidTopic: ", "sync.pulled: TopicInUse: ", "sync.taken: TopicExists: "):
            assert error in refused
        if dry_run:
            toc("topic", "sync", "--app", "app_of_sync:center", "--dry-run", "--json")
            steps = {step["topic"]: step for step in json.loads(toc.out)}
            assert {name: step["action"] for name, step in steps.items()} == outcomes
            assert steps[topic]["changes"]["retries"] == {"was": 16, "is": 9}
            assert store.topics.list() == before
    made, altered = store.topics.get("sync.made"), store.topics.get(topic)
    assert made is not None
    assert made.biz_type > 10**8
    assert altered is not None
    assert (altered.retries, altered.backoff_cap, altered.biz_type) == (9, 300, 7)
    assert store.topics.get("sync.taken") is None
    del sys.modules["app_of_sync"]
    monkeypatch.setenv("TOC_TABLES", "2")
    refused = toc.refused("topic", "sync", "--app", "app_of_sync:center", code=SchemaBehind.exit_code)
    del sys.modules["app_of_sync"]  # its topics are nothing to other tests of this process
    assert "TOC_DATABASES and TOC_TABLES differ" in refused, "no worker would start"
    actions = {row["action"] for row in toc.json("audit") if row["outcome"] == "done"}
    assert actions == {"topic.alter", "topic.create"}
    store.topics.alter("sync.small", slot_amount=8)
    center.topic("sync.small", slots=4)
    center.topic("sync.none", slots=4)
    center.catalog.refresh()
    with structlog.testing.capture_logs() as logs:
        check_drift(center)
    assert {(one["topic"], one["do"]) for one in logs} == {
        (topic, "toc topic sync --app module:center") for topic in ("sync.small", "sync.none")
    }
    center.settings = center.settings.model_copy(update={"topic_drift": "refuse"})
    with pytest.raises(
        TopicDrift, match=r"sync\.small \(slot_amount is 8, declared 4\); sync\.none \(there is none\)"
    ):
        check_drift(center)


def test_two_that_sync_at_once_both_have_the_topic(center: TimeoutCenter) -> None:
    def perform(operation: Any, **_: Any) -> Record:
        done.append(operation.name)
        if len(done) == 1:  # another has read the same list, and comes first
            center.store.topics.create(Topic("sync.both", 77, 4, retries=3))
            raise TopicExists("sync.both")
        return {}

    done: list[str] = []
    (step,) = sync_topics(center, [Declaration.of("sync.both", {"retries": 5})], perform)
    assert (step.action, step.refused, done) == ("alter", "", ["topic.create", "topic.alter"])
