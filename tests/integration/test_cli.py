"""The command line against real servers: mostly SQLite and Redis, MariaDB and ZooKeeper where they matter."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from toc.cli.main import main
from toc.client import TimeoutCenter
from toc.config import Settings
from toc.local.servers import MariaDB, RedisServer, ZooKeeper
from toc.queue.messages import Peek
from toc.task import NewTask, TaskStatus

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


@pytest.fixture
def toc(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clean_redis: RedisServer,
) -> Toc:
    """The program with SQLite, a Redis, an upgraded schema and no topics."""
    for name in list(os.environ):
        if name.startswith("TOC_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toc.demo.app", raising=False)  # its center has read its settings
    monkeypatch.setenv("TOC_DATABASE_URLS", f"sqlite:///{tmp_path / 'toc.db'}")
    monkeypatch.setenv("TOC_REDIS_URL", clean_redis.url)
    program = Toc(capsys)
    program.ok("db", "upgrade")
    return program


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


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- topics -----------------------------------------------------------------------------------------------


def test_a_topic_is_created_with_every_policy_and_shown(toc: Toc) -> None:
    made = toc.json(
        *(
            "topic",
            "create",
            "order.remind",
            "--biz-type",
            8,
            "--slots",
            16,
            "--type",
            "instant",
            "--retries",
            3,
        ),
        *("--backoff", "immediate", "--backoff-base", "500ms", "--backoff-cap", "2m", "--prepare-timeout", 5),
        *("--max-runtime", "10m", "--horizon", "2h", "--retention", "7d", "--concurrency", 5),
    )
    assert made == {
        "name": "order.remind",
        "biz_type": 8,
        "slot_amount": 16,
        "topic_type": "instant",
        "paused": False,
        "retries": 3,
        "backoff": "immediate",
        "backoff_base": 0.5,
        "backoff_cap": 120.0,
        "prepare_timeout": 5,
        "max_runtime": 600,
        "horizon": 7200,
        "retention": 604_800,
        "concurrency": 5,
    }
    assert toc.json("topic", "show", "order.remind") == made
    assert toc.json("topic", "list") == [made]
    assert "order.remind" in toc.ok("topic", "list")


def test_topics_are_altered_paused_and_resumed(toc: Toc, topic: str) -> None:
    assert toc.json("topic", "alter", topic, "--slots", 8, "--retries", 2)["slot_amount"] == 8
    assert toc.json("topic", "show", topic)["retries"] == 2
    toc.ok("topic", "pause", topic)
    assert toc.json("topic", "show", topic)["paused"] is True
    assert toc.json("topic", "resume", topic)["paused"] is False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["create", "a{b}", "--biz-type", 1, "--slots", 1], "not a topic name"),
        (["create", "a b", "--biz-type", 1, "--slots", 1], "not a topic name"),
        (["create", "a\nb", "--biz-type", 1, "--slots", 1], "not a topic name"),
        (["create", "a\x00b", "--biz-type", 1, "--slots", 1], "not a topic name"),
        (["create", "", "--biz-type", 1, "--slots", 1], "not a topic name"),
        (["create", "x" * 129, "--biz-type", 1, "--slots", 1], "not a topic name"),
        (["create", "t", "--biz-type", -1, "--slots", 1], "biz_type"),
        (["create", "t", "--biz-type", 2**63, "--slots", 1], "biz_type"),
        (["create", "t", "--biz-type", 1, "--slots", 3], "power of two"),
        (["create", "t", "--biz-type", 1, "--slots", 0], "slot_amount"),
        (["create", "t", "--biz-type", 1, "--slots", 2048], "slot_amount"),
        (["create", "t", "--biz-type", 1, "--slots", 1, "--retries", 32], "retries"),
        (["create", "t", "--biz-type", 1, "--slots", 1, "--backoff-base", "nan"], "duration"),
        (["create", "t", "--biz-type", 1, "--slots", 1, "--backoff-cap", "-1"], "duration"),
        (["create", "t", "--biz-type", 1, "--slots", 1, "--prepare-timeout", "1"], "prepare_timeout"),
        (["create", "order.close", "--biz-type", 1, "--slots", 1], "exists already"),
        (["create", "t", "--biz-type", 7, "--slots", 1], "biz_type 7 exists already"),
        (["alter", "order.close"], "nothing to change"),
        (["alter", "order.close", "--slots", 3], "power of two"),
        (["alter", "none", "--slots", 2], "no topic 'none'"),
        (["show", "none"], "order.close"),
        (["pause", "none"], "no topic 'none'"),
    ],
)
def test_a_wrong_topic_is_refused_and_nothing_is_written(
    toc: Toc, topic: str, words: list[object], says: str
) -> None:
    before = toc.json("topic", "list")
    assert says in toc.refused("topic", *words)
    assert toc.json("topic", "list") == before
    assert [each["name"] for each in before] == [topic]


# --- tasks ------------------------------------------------------------------------------------------------


def test_a_task_is_submitted_found_rescheduled_and_cancelled(toc: Toc, topic: str) -> None:
    job_id = int(
        toc.ok("submit", topic, "--biz-id", 42, "--delay", "30m", "--attribute", '{"reason": "unpaid"}')
    )
    task = toc.json("get", job_id)
    assert (task["job_id"], task["topic"], task["biz_id"], task["status"]) == (job_id, topic, 42, "pending")
    assert task["attribute"] == {"reason": "unpaid"}
    assert 1700 < task["due_in_seconds"] < 1801
    assert [found["job_id"] for found in toc.json("find", "--biz-id", 42)] == [job_id]
    assert toc.json("find", "--biz-id", 42, "--text") == []
    when = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
    assert toc.json("reschedule", job_id, "--action-time", when)["outcome"] == "rescheduled"
    assert toc.json("get", job_id)["due_in_seconds"] > 7000
    assert toc.json("reschedule", job_id, "--delay", "1h")["outcome"] == "rescheduled"
    assert toc.json("cancel", job_id) == {"job_id": job_id, "outcome": "cancelled"}
    assert toc.json("get", job_id)["status"] == "cancelled"
    assert toc.json("reschedule", job_id, "--delay", "1h", code=1)["outcome"] == "too_late"


def test_all_tasks_of_a_biz_id_on_a_topic_are_cancelled_at_once(toc: Toc, topic: str) -> None:
    job_ids = {toc.json("submit", topic, "--biz-id", "o-1", "--delay", 60)["job_id"] for _ in range(3)}
    outcomes = toc.json("cancel", "--topic", topic, "--biz-id", "o-1")
    assert {(each["job_id"], each["outcome"]) for each in outcomes} == {(job, "cancelled") for job in job_ids}


def test_a_dedup_key_gives_the_first_task_and_conflicts_over_another_attribute(toc: Toc, topic: str) -> None:
    words = ("submit", topic, "--biz-id", 1, "--delay", 60, "--dedup-key", "k")
    assert toc.ok(*words) == toc.ok(*words)
    assert "dedup_key" in toc.refused(*words, "--attribute", '{"other": 1}')


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--biz-id", 1, "--action-time", "2030-01-31T12:00:00"], "time zone"),
        (["--biz-id", 1, "--action-time", "2020-01-31T12:00:00Z"], "not after now"),
        (["--biz-id", 1, "--action-time", "9999-12-31T23:59:59Z"], "TOC_MAX_DELAY"),
        (["--biz-id", 1, "--action-time", "tomorrow"], "ISO 8601"),
        (["--biz-id", 1, "--delay", "nan"], "duration"),
        (["--biz-id", 1, "--delay", "inf"], "duration"),
        (["--biz-id", 1, "--delay", "-5"], "duration"),
        (["--biz-id", 1, "--delay", "0"], "not after now"),
        (["--biz-id", 1, "--delay", "4000d"], "TOC_MAX_DELAY"),
        (["--biz-id", 1, "--delay", "1e300d"], "delay"),
        (["--biz-id", 1], "delay or an action_time"),
        (["--biz-id", 1, "--delay", "1", "--action-time", "2090-01-31T12:00:00Z"], "not both"),
        (["--biz-id", 1, "--delay", "60", "--attribute", "{"], "not JSON"),
        (["--biz-id", 1, "--delay", "60", "--attribute", "[1]"], "JSON object"),
        (["--biz-id", 1, "--delay", "60", "--attribute", '{"x": NaN}'], "not JSON"),
        (["--biz-id", 1, "--delay", "60", "--attribute", json.dumps({"x": "y" * 5000})], "4096"),
        (["--biz-id", -1, "--delay", "60"], "out of range"),
        (["--biz-id", 2**63, "--delay", "60"], "out of range"),
        (["--biz-id", "", "--delay", "60"], "biz_id"),
        (["--biz-id", "x" * 256, "--delay", "60"], "biz_id"),
        (["--biz-id", "a\rb", "--delay", "60"], "control characters"),
        (["--delay", "60"], "--biz-id is missing"),
        (["--biz-id", 1, "--delay", "60", "--dedup-key", ""], "dedup_key"),
        (["--biz-id", 1, "--delay", "60", "--slot-basis", "\x07"], "control characters"),
    ],
)
def test_a_wrong_task_is_refused_and_nothing_is_written(
    toc: Toc, center: TimeoutCenter, topic: str, words: list[object], says: str
) -> None:
    assert says in toc.refused("submit", topic, *words)
    tables = [table for tables in center.store.tables_of_server() for table in tables]
    assert not center.store.scans.look(tables, {}, 0, 2**42, 10).stirring


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["submit", "none", "--biz-id", 1, "--delay", 60], "no topic 'none'", 2),
        (["submit", "a{b", "--biz-id", 1, "--delay", 60], "not a topic name", 2),
        (["get", 12345], "no task 12345", 1),
        (["get", 0], "not a job_id", 2),
        (["get", -5], "", 2),
        (["get", 2**63], "not a job_id", 2),
        (["find", "--biz-id", -1], "out of range", 2),
        (["find"], "--biz-id is missing", 2),
        (["find", "--biz-id", 1, "--topic", "none"], "no topic 'none'", 2),
        (["cancel"], "JOB_ID, or --topic", 2),
        (["cancel", 5, "--biz-id", 1], "JOB_ID, or --topic", 2),
        (["cancel", "--biz-id", 1], "JOB_ID, or --topic", 2),
        (["reschedule", 5], "--delay or --action-time", 2),
        (["reschedule", 5, "--delay", "4000d"], "TOC_MAX_DELAY", 2),
        (["reschedule", 5, "--delay", "1e300"], "TOC_MAX_DELAY", 2),
        (["slots", "--topic", "none"], "no topic 'none'", 2),
        (["slots", "--watch", "--json"], "not both", 2),
        (["dead", "list", "--topic", "none"], "no topic 'none'", 2),
        (["dead", "list", "--limit", 0], "limit", 2),
        (["dead", "show", 12345], "no task 12345", 1),
        (["dead", "redrive"], "JOB_IDs, or --topic", 2),
        (["dead", "redrive", 5, "--all"], "JOB_IDs, or --topic", 2),
        (["dead", "redrive", "--topic", "none"], "JOB_IDs, or --topic", 2),
        (["drain", "host1"], "TOC_ZOOKEEPER is not set", 2),
        (["worker", "--app", "nothing"], "package.module:center", 2),
        (["worker", "--app", "no.such.module:center"], "no module", 2),
        (["worker", "--app", "broken_app:center"], "ZeroDivisionError", 2),
        (["worker", "--app", "json:center"], "no such name", 2),
        (["worker", "--app", "json:loads"], "must be a toc.TimeoutCenter", 2),
        (["worker", "--app", "toc.demo.app:center"], "demo.order.close", 2),
        (["worker", "--app", "toc.demo.app:center", "--processes", 0], "TOC_PROCESSES=0", 2),
        (["worker", "--app", "toc.demo.app:center", "--threads", 9999], "TOC_THREADS=9999", 2),
    ],
)
def test_every_other_mistake_has_one_clear_error(
    toc: Toc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], says: str, code: int
) -> None:
    (tmp_path / "broken_app.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert says in toc.refused(*words, code=code)


def test_a_cancel_that_found_nothing_does_not_end_with_0(toc: Toc, topic: str) -> None:
    assert topic
    assert toc.json("cancel", 12345, code=1) == {"job_id": 12345, "outcome": "unknown"}


def test_lists_are_empty_arrays_when_there_is_nothing(toc: Toc) -> None:
    for words in (["topic", "list"], ["slots"], ["dead", "list"], ["find", "--biz-id", "1"]):
        assert toc.json(*words) == []


# --- slots and dead tasks -----------------------------------------------------------------------------------


def test_slots_show_what_waits_where(toc: Toc, topic: str) -> None:
    for number in range(20):
        toc.ok("submit", topic, "--biz-id", number, "--delay", "1h")
    slots = toc.json("slots", "--topic", topic)
    assert [slot["slot"] for slot in slots] == [f"{topic}_{number}" for number in range(4)]
    assert sum(slot["waiting"] for slot in slots) == 20
    assert all(slot["overdue_ms"] == 0 and slot["error"] is None for slot in slots)
    assert f"{topic}_3" in toc.ok("slots")


def kill_tasks(center: TimeoutCenter, topic: str, count: int) -> list[int]:
    """Tasks that are dead, in row and DeadQueue, as after their last try."""
    from toc.store import Failure

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


def test_dead_tasks_are_listed_shown_and_redriven(toc: Toc, center: TimeoutCenter, topic: str) -> None:
    job_ids = kill_tasks(center, topic, 5)
    listed = toc.json("dead", "list", "--topic", topic)
    assert {each["job_id"] for each in listed} == set(job_ids)
    assert {(each["status"], each["last_error"]) for each in listed} == {("dead", "no luck")}
    assert len(toc.json("dead", "list", "--limit", 2)) == 2
    assert "no luck" in toc.ok("dead", "show", job_ids[0])
    assert toc.json("dead", "redrive", *job_ids[:2]) == {"redriven": 2, "not_indexed_yet": 0}
    assert [slot["dead"] for slot in toc.json("slots")].count(0) < 4
    assert toc.json("dead", "redrive", job_ids[0], code=1)["redriven"] == 0
    assert toc.json("dead", "redrive", "--topic", topic, "--all")["redriven"] == 3
    assert toc.json("dead", "list") == []
    slots = toc.json("slots")
    assert sum(slot["dead"] for slot in slots) == 0
    assert sum(slot["waiting"] for slot in slots) == 5
    for row in center.store.read(job_ids).values():
        assert (row.status, row.attempts, row.version) == (TaskStatus.PENDING, 0, 1)


def test_more_dead_tasks_than_a_chunk_are_redriven_once_each(
    toc: Toc, center: TimeoutCenter, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toc import admin

    monkeypatch.setattr(admin, "REDRIVE_CHUNK", 7)
    job_ids = kill_tasks(center, topic, 40)
    assert toc.json("dead", "redrive", "--topic", topic, "--all")["redriven"] == 40
    assert {row.version for row in center.store.read(job_ids).values()} == {1}


def test_a_redrive_without_redis_leaves_the_index_to_the_sweep(
    toc: Toc, center: TimeoutCenter, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_ids = kill_tasks(center, topic, 3)
    monkeypatch.setenv("TOC_REDIS_URL", f"redis://127.0.0.1:{closed_port()}")
    assert toc.json("dead", "redrive", *job_ids) == {"redriven": 3, "not_indexed_yet": 3}
    assert {row.status for row in center.store.read(job_ids).values()} == {TaskStatus.PENDING}


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
    assert toc.json("sweep", "--once") == {"rows": 323, "added": 303, "not_indexed": 0}
    assert toc.json("rebuild") == {"rows": 323, "added": 0, "not_indexed": 0}
    peeks = center.queues.peek(center.catalog.get(topic).slots()).values()
    assert sum(peek.store for peek in peeks if isinstance(peek, Peek)) == 300
    assert sum(peek.dead for peek in peeks if isinstance(peek, Peek)) == len(dead)
    assert "no topic 'none'" in toc.refused("rebuild", "--topic", "none")


def test_a_rebuild_without_redis_says_what_is_not_indexed_and_ends_with_4(
    toc: Toc, center: TimeoutCenter, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    center.submit(topic, biz_id=1, delay=600)
    monkeypatch.setenv("TOC_REDIS_URL", f"redis://127.0.0.1:{closed_port()}")
    assert toc.json("rebuild", code=4) == {"rows": 1, "added": 0, "not_indexed": 1}
    assert "out of reach" in toc.err


# --- servers that are missing or not ready ----------------------------------------------------------------


def test_a_database_out_of_reach_is_named_without_its_password(
    toc: Toc, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = closed_port()
    monkeypatch.setenv("TOC_DATABASE_URLS", f"mysql+pymysql://toc:{CANARY}@127.0.0.1:{port}")
    for words in (
        ["db", "check"],
        ["db", "upgrade"],
        ["topic", "list"],
        ["submit", "t", "--biz-id", 1, "--delay", 60],
        ["dead", "list"],
        ["worker", "--app", "toc.demo.app:center"],
        ["demo", "--configured"],
    ):
        assert f"127.0.0.1:{port}" in toc.refused(*words, code=4)


def test_a_redis_out_of_reach_is_named_without_its_password(
    toc: Toc, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = closed_port()
    monkeypatch.setenv("TOC_REDIS_URL", f"redis://:{CANARY}@127.0.0.1:{port}")
    job_id = int(toc.ok("submit", topic, "--biz-id", 1, "--delay", 60))  # the row is the promise
    assert "submit_not_indexed" in toc.err
    assert toc.json("get", job_id)["status"] == "pending"
    assert toc.json("cancel", job_id)["outcome"] == "cancelled"
    slots = toc.json("slots")
    assert all(str(port) in slot["error"] and slot["waiting"] is None for slot in slots)


def test_a_zookeeper_out_of_reach_is_named(toc: Toc, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert topic
    address = f"127.0.0.1:{closed_port()}"
    monkeypatch.setenv("TOC_ZOOKEEPER", address)
    monkeypatch.setenv("TOC_CONNECT_TIMEOUT", "1")
    for words in (["workers"], ["slots"], ["drain", "h"], ["rebalance"]):
        assert address in toc.refused(*words, code=4)


def test_a_schema_that_is_behind_says_to_upgrade(
    toc: Toc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOC_DATABASE_URLS", f"sqlite:///{tmp_path / 'fresh.db'}")
    for words in (["topic", "list"], ["submit", "t", "--biz-id", 1, "--delay", 60], ["dead", "list"]):
        assert "toc db upgrade" in toc.refused(*words, code=3)
    assert "toc db upgrade" in toc.refused("worker", "--app", "toc.demo.app:center", code=3)
    checked = toc.json("db", "check", code=3)
    assert [each["behind"] for each in checked] == [True]
    toc.ok("db", "upgrade")
    assert [each["behind"] for each in toc.json("db", "check")] == [False]


def test_databases_of_a_mysql_server_are_created_and_checked(
    toc: Toc, mariadb: MariaDB, database_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOC_DATABASE_URLS", mariadb.url)
    monkeypatch.setenv("TOC_DATABASE_PREFIX", database_prefix)
    monkeypatch.setenv("TOC_DATABASES", "2")
    monkeypatch.setenv("TOC_TABLES", "4")
    assert [each["behind"] for each in toc.json("db", "check", code=3)] == [True, True]
    toc.ok("db", "upgrade")
    assert f"{database_prefix}1" in toc.err
    assert [each["behind"] for each in toc.json("db", "check")] == [False, False]
    toc.ok("topic", "create", "t", "--biz-type", 1, "--slots", 2)
    job_id = toc.json("submit", "t", "--biz-id", 1, "--delay", "1h")["job_id"]
    assert toc.json("get", job_id)["biz_id"] == 1
    monkeypatch.setenv("TOC_TABLES", "8")
    assert "cannot change" in toc.refused("db", "upgrade")


def test_what_operators_ask_of_a_cluster_stands_in_zookeeper(
    toc: Toc, topic: str, zookeeper: ZooKeeper, zookeeper_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOC_ZOOKEEPER", zookeeper.url)
    monkeypatch.setenv("TOC_CLUSTER", zookeeper_root)
    assert toc.json("workers") == []
    toc.ok("drain", "host1")
    toc.ok("pin", f"{topic}_2", "host2")
    assert {slot["owner"] for slot in toc.json("slots")} == {None}
    assert "slots 0 to 3" in toc.refused("pin", f"{topic}_4", "host2")
    assert "not a slot" in toc.refused("unpin", "nonsense")
    toc.ok("unpin", f"{topic}_2")
    assert "was not pinned" in toc("unpin", f"{topic}_2").err
    toc.ok("undrain", "host1")
    assert "was not drained" in toc("undrain", "host1").err
    assert toc.json("rebalance", "--dry-run") == []
    assert toc.json("workers") == []
