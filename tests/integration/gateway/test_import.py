"""``toc import``: what other queues' Redis holds becomes tasks, on data that their layouts describe."""

import json
import struct
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import Launch
from harness import forks
from harness.gateway import Gateway
from harness.lmstfy import exchange, port_of
from harness.rows import known
from harness.system import System

from benchmarks.local import RedisServer
from toc.dialects.lmstfy_wire import new_job_id
from toc.dialects.originals import UNREADABLE, _fields
from toc.model.sharding import BizId
from toc.model.task import TaskRow, TaskStatus
from toc.model.topic import Template
from toc.sdk.submission import LATEST_MS

# A user who can but read: with it, nothing is ever changed.
READER = "user reader on >secret ~* &* -@all +@read +info +time +select +ping"


@pytest.fixture
def other(launch: Launch) -> Iterator[redis.Redis]:
    """The other queue's Redis. ``url_of`` is for a user that may only read."""
    server = launch(RedisServer, aof=False, config=[READER])
    assert isinstance(server, RedisServer)
    client = redis.Redis(port=server.port)
    yield client
    client.close()


def url_of(other: redis.Redis, database: int = 0) -> str:
    port = other.connection_pool.connection_kwargs["port"]
    return f"redis://reader:secret@127.0.0.1:{port}/{database}"


def imported(
    system: System, what: str, url: str, *options: str, code: int = 0, says: str = "", **env: str
) -> Mapping[str, Any]:
    """Run ``toc import`` and return what it reports."""
    words = ["import", what, "--redis", url, "--json", *options]
    done = forks.run(words, env={**system.env, **env}, timeout=120)
    assert done.returncode == code, done.stderr
    assert "secret" not in done.stderr
    assert says in done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return found


def row_of(system: System, key: str) -> TaskRow:
    (row,) = system.center.store.find(BizId.of(key))
    return row


def attribute_of(row: TaskRow) -> Any:
    return json.loads(row.attribute)


# --- lmstfy


def text(value: str) -> bytes:
    return struct.pack("<H", len(value)) + value.encode()


class LmstfyData:
    """Writes as lmstfy's engine does."""

    def __init__(self, to: redis.Redis) -> None:
        self.to = to
        self.now = int(time.time())

    def job(
        self,
        queue: str,
        body: bytes,
        *,
        delay: int = 0,
        ttl: int | None = None,
        ago: int = 0,
        **attributes: str,
    ) -> str:
        made = (self.now - ago) * 1000
        job_id = new_job_id(made, delay, versioned=bool(attributes))
        if attributes:
            body = json.dumps({"body": b64encode(body).decode(), "attributes": attributes}).encode()
        self.to.set(f"j/ns/{queue}/{job_id}", body, ex=ttl)
        return job_id

    def timed(self, queue: str, job_id: str, at: int, tries: int) -> None:
        member = text("ns") + text(queue) + struct.pack("<H", tries) + text(job_id)
        self.to.zadd("timer_set", {member: at})

    def listed(self, kind: str, queue: str, job_id: str, tries: int) -> None:
        self.to.lpush(f"{kind}/ns/{queue}", struct.pack("<H", tries) + text(job_id))


def test_every_state_of_lmstfy_is_taken_over_as_it_is(system: System, other: redis.Redis) -> None:
    data = LmstfyData(other)
    delayed = data.job("a", b"delayed", delay=3600, ttl=7200)
    data.timed("a", delayed, data.now + 3600, 5)
    running = data.job("a", b"running", ago=60)
    data.timed("a", running, data.now + 40, 2)
    last = data.job("a", b"last", ago=60)
    data.timed("a", last, data.now + 40, 0)
    ready = data.job("b", b"\x00\xff", ttl=600, color="red")
    data.listed("q", "b", ready, 7)
    dead = data.job("b", b"dead", ago=900)
    data.listed("d", "b", dead, 1)
    stray = data.job("c", b"stray", ago=60)
    expired = data.job("c", b"expired")
    data.listed("q", "c", expired, 1)
    other.delete(f"j/ns/c/{expired}")
    late = data.job("c", b"late", delay=600, ttl=60)
    data.timed("c", late, data.now + 600, 1)
    before = _content(other)

    report = imported(system, "lmstfy", url_of(other), "--dry-run")
    states = {"delayed": 3, "ready": 2, "dead": 2}
    assert (report["found"], report["imported"]) == (states, 0)
    assert system.center.store.find(BizId.of(delayed)) == []

    report = imported(system, "lmstfy", url_of(other))
    assert (report["found"], report["imported"]) == (states, 7)
    assert (report["there_before"], report["refused"]) == (0, {})
    assert _content(other) == before

    system.center.catalog.refresh()
    topics = {topic.biz_type: topic.name for topic in system.center.catalog.known().values()}
    rows = {name: row_of(system, key) for name, key in locals().items() if name in _JOBS}
    assert {name: topics[row.biz_type] for name, row in rows.items()} == {
        "delayed": "lmstfy.ns.a", "running": "lmstfy.ns.a", "last": "lmstfy.ns.a",
        "ready": "lmstfy.ns.b", "dead": "lmstfy.ns.b", "stray": "lmstfy.ns.c", "late": "lmstfy.ns.c",
    }  # fmt: skip
    assert [row.tries for row in rows.values()] == [5, 2, 1, 7, 1, 1, 1]
    ended = {name for name, row in rows.items() if row.status == TaskStatus.DEAD}
    assert ended == {"last", "dead"}
    assert {row.dedup_key for row in rows.values()} == {"lmstfy:job"}
    assert rows["delayed"].action_time == (data.now + 3600) * 1000
    assert abs(rows["delayed"].expires_at - (data.now + 7200) * 1000) < 5000
    assert rows["running"].action_time == (data.now + 40) * 1000
    assert rows["running"].expires_at == rows["dead"].expires_at == 0
    assert rows["late"].expires_at == rows["late"].action_time, "it expires when it is due, as there"
    assert attribute_of(rows["ready"]) == {"namespace": "ns", "queue": "b", "attributes": {"color": "red"}}
    assert known(system.center.get(rows["ready"].job_id)).body == b"\x00\xff"


_JOBS = ("delayed", "running", "last", "ready", "dead", "stray", "late")


def _content(other: redis.Redis) -> dict[bytes, bytes | None]:
    return {key: other.dump(key) for key in other.scan_iter()}


def test_an_import_that_is_killed_goes_on_and_nothing_is_lost_or_doubled(
    system: System, other: redis.Redis, tmp_path: Path
) -> None:
    data = LmstfyData(other)
    jobs = {data.job(f"q{number % 3}", b"%d" % number): number for number in range(1200)}
    for job_id, number in jobs.items():
        queue = f"q{number % 3}"
        if number % 5 == 0:
            data.listed("d", queue, job_id, 1)
        elif number % 2:
            data.timed(queue, job_id, data.now + 3600 + number, 3)
        else:
            data.listed("q", queue, job_id, 3)
    once = str(tmp_path / "died")
    for place in ("3", "1"):
        Path(once).unlink(missing_ok=True)
        armed = {"TOC_FAILPOINT": f"import.stored:{place}", "TOC_FAILPOINT_ONCE": once}
        imported(system, "lmstfy", url_of(other), code=-9, **armed)
        assert Path(once).exists()
    report = imported(system, "lmstfy", url_of(other))
    assert report["imported"] + report["there_before"] == 1200
    assert report["there_before"] > 0
    rows = {job_id: system.center.store.find(BizId.of(job_id)) for job_id in jobs}
    assert all(len(found) == 1 for found in rows.values())
    dead = {job_id for job_id, (row,) in rows.items() if row.status == TaskStatus.DEAD}
    assert dead == {job_id for job_id, number in jobs.items() if number % 5 == 0}


def test_what_became_of_a_job_here_is_left_by_a_further_import(system: System, other: redis.Redis) -> None:
    data = LmstfyData(other)
    ready, dead = data.job("a", b"x"), data.job("a", b"y")
    data.listed("q", "a", ready, 3)
    data.listed("d", "a", dead, 1)
    imported(system, "lmstfy", url_of(other))
    center = system.center
    center.cancel(row_of(system, ready).job_id)
    center.store.redrive([row_of(system, dead).job_id], center.clock.now_ms())
    new = data.job("a", b"new")  # the other queue still runs
    data.listed("q", "a", new, 3)
    report = imported(system, "lmstfy", url_of(other))
    assert (report["imported"], report["there_before"]) == (1, 2)
    assert row_of(system, ready).status == TaskStatus.CANCELLED
    assert (row_of(system, dead).status, row_of(system, dead).version) == (TaskStatus.PENDING, 1)
    other.set(f"j/ns/a/{new}", b"changed")
    report = imported(system, "lmstfy", url_of(other), code=1)
    assert (report["different"], report["there_before"]) == (1, 2)


def test_entries_that_cannot_be_read_are_named_and_fail_an_import(system: System, other: redis.Redis) -> None:
    data = LmstfyData(other)
    other.zadd("timer_set", {b"\x05\x00ns": data.now, b"": data.now})
    other.lpush("q/ns/a", b"\x01\x00\xff\xff")
    other.lpush("q/ns", b"x")
    other.set("j/ns/a/1" + "0" * 26, b"{")
    other.set("j/strange", b"x")
    report = imported(system, "lmstfy", url_of(other), code=1)
    assert report["imported"] == 0
    assert sum(report["refused"].values()) == 6
    assert report["examples"]


def test_a_job_that_is_never_due_is_a_task_of_the_last_moment(system: System, other: redis.Redis) -> None:
    data = LmstfyData(other)
    now = data.now
    for place, at in enumerate((float("inf"), float("-inf"), 1e18, now + 60)):
        job_id = data.job("a", b"x")
        member = text("ns") + text("a") + struct.pack("<H", 1 + place) + text(job_id)
        other.zadd("timer_set", {member: at})
    assert imported(system, "lmstfy", url_of(other))["imported"] == 4
    other.flushall()
    for job_id, at, score in (
        ("far", 2**60, now + 60),
        ("inf", now, float("inf")),
        ("-inf", now, float("-inf")),
        ("good", now + 60, now + 60),
    ):
        youzan_job(other, job_id, at=at)
        other.zadd("dq_bucket_1", {job_id: score})
    assert imported(system, "youzan", url_of(other))["imported"] == 4
    assert {row_of(system, name).action_time for name in ("far", "inf")} == {LATEST_MS}


def test_a_url_that_leads_nowhere_is_refused_without_being_shown(system: System) -> None:
    assert imported(system, "lmstfy", "redis://u:secret@127.0.0.1:1/0", code=4) == {}
    assert imported(system, "lmstfy", "http://u:secret@x", code=2) == {}
    assert imported(system, "youzan", "redis+cluster://u:secret@127.0.0.1:1", code=2) == {}


# --- youzan


def packed(values: Mapping[str, str | int]) -> bytes:
    """A map as Go's msgpack writes a struct: numbers in full."""
    found = bytes([0x80 | len(values)])
    for name, value in values.items():
        found += bytes([0xA0 | len(name)]) + name.encode()
        if isinstance(value, int):
            found += b"\xd3" + struct.pack(">q", value)
        else:
            data = value.encode()
            found += (
                bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xda" + struct.pack(">H", len(data))
            ) + data
    return found


KEYS_OF = {"0.3": ("Topic", "Id", "Delay", "TTR", "Body"), "0.4": ("1", "2", "3", "4", "5")}


def youzan_job(
    to: redis.Redis, job_id: str, *, at: int, ttr: int = 60, body: str = "body", release: str = "0.4"
) -> None:
    values = ("order", job_id, at, ttr, body)
    to.set(job_id, packed(dict(zip(KEYS_OF[release], values, strict=True))))


def test_a_job_of_the_original_is_read_byte_for_byte() -> None:
    # What delay-queue v0.4 (putJob) writes: numbers as short as they can be.
    stored = b"\x85\xa11\xa5order\xa12\xa1j\xa13\xcekI\xd2\x00\xa14\x3c\xa15\xa1b"
    assert _fields(b"j", stored) == ("j", "order", 1_800_000_000, 60, "b")


def test_ids_of_jobs_that_cannot_be_read_are_counted_and_fail_it(system: System, other: redis.Redis) -> None:
    now = int(time.time())
    youzan_job(other, "good", at=now + 60)
    other.set("text", b"value")
    other.set("short", packed({"1": "order", "2": "short", "3": 1}))
    other.set("another's", b"value")
    other.rpush("a list", b"value")
    other.set("renamed", packed({"a": "order", "b": "renamed", "c": now, "d": 60, "e": ""}))
    other.zadd("dq_bucket_1", dict.fromkeys(("good", "text", "short", "a list", "deleted"), now + 60))
    other.rpush("dq_queue_order", "renamed", "deleted")
    other.config_set("slowlog-log-slower-than", 0)
    for options in ((), ("--dry-run",)):
        report = imported(system, "youzan", url_of(other), *options, code=1)
        assert report["refused"] == {UNREADABLE: 4}
        assert (report["found"], sum(report["passed_by"].values())) == ({"delayed": 1}, 1)
    asked = [one["command"] for one in other.slowlog_get(1000)]
    assert {one.split()[0] for one in asked} >= {b"SCAN", b"TYPE"}
    assert not any(one.startswith(b"SCAN") and b"TYPE" in one for one in asked), (
        "Redis knows that from 6.0 on"
    )
    other.flushall()
    assert imported(system, "youzan", url_of(other), says="no job was found")["found"] == {}


@pytest.mark.parametrize("release", KEYS_OF)
def test_every_state_of_youzans_queue_is_taken_over(system: System, other: redis.Redis, release: str) -> None:
    now = int(time.time())
    youzan_job = partial(globals()["youzan_job"], release=release)
    youzan_job(other, "delayed", at=now + 3600, body="é" * 40)
    other.zadd("dq_bucket_1", {"delayed": now + 3600})
    youzan_job(other, "ready", at=now - 5)
    other.rpush("dq_queue_order", "ready")
    youzan_job(other, "reserved", at=now - 50, ttr=120)
    other.zadd("dq_bucket_2", {"reserved": now + 70})
    other.zadd("dq_bucket_3", {"deleted": now + 10})
    other.set("foreign", b"value")
    other.set("foreign2", packed({"1": "order", "2": "another", "3": 1, "4": 1, "5": ""}))
    before = _content(other)
    states = {"delayed": 2, "ready": 1}
    assert imported(system, "youzan", url_of(other), "--dry-run")["found"] == states
    report = imported(system, "youzan", url_of(other))
    assert (report["found"], report["imported"]) == (states, 3)
    assert sum(report["passed_by"].values()) == 2
    assert _content(other) == before
    rows = {name: row_of(system, name) for name in ("delayed", "ready", "reserved")}
    assert rows["delayed"].action_time == (now + 3600) * 1000
    assert rows["reserved"].action_time == (now + 70) * 1000
    assert rows["ready"].action_time - rows["ready"].gmt_create < 2000
    assert {row.tries for row in rows.values()} == {65_535}
    assert {row.dedup_key for row in rows.values()} == {"youzan:job"}
    assert attribute_of(rows["reserved"])["ttr"] == 120_000
    report = imported(system, "youzan", url_of(other))
    assert (report["imported"], report["there_before"]) == (0, 3)


def test_what_a_run_would_refuse_a_dry_run_tells_and_a_run_that_breaks_off_how_far_it_came(
    system: System, other: redis.Redis
) -> None:
    now = int(time.time())
    for n in range(5):
        values = (f"topic{n}", f"job{n}", now + 3600, 60, "body" if n else "x" * 2000)
        other.set(f"job{n}", packed(dict(zip(KEYS_OF["0.4"], values, strict=True))))
    small = {"TOC_MAX_BODY": "1024"}
    for options, count in (((), 4), (("--dry-run",), 0)):
        report = imported(system, "youzan", url_of(other), *options, code=1, **small)
        assert (report["refused"], report["imported"]) == ({"BodyTooLarge": 1}, count)
    other.set(
        "job1", packed(dict(zip(KEYS_OF["0.4"], ("topic1", "job1", now + 3600, 60, "other"), strict=True)))
    )
    report = imported(system, "youzan", url_of(other), "--dry-run", code=1)
    assert (report["different"], report["there_before"]) == (1, 3)
    system.center.store.templates.alter("youzan.*", {}, 7)
    # which fits better
    system.center.store.templates.create(Template("youzan.topic*", {"slot_amount": 4, "delivery": "pull"}, 6))
    for n in range(200):
        values = (f"topic{n % 20}", f"more{n}", now + 3600, 60, "body")
        other.set(f"more{n}", packed(dict(zip(KEYS_OF["0.4"], values, strict=True))))
    for options in (("--dry-run",), ()):
        report = imported(
            system, "youzan", url_of(other), *options, code=1, says="as many topics as it allows (6)"
        )
        assert sum(report["found"].values()) >= 100
    (done,) = system.center.store.audit.list(1)
    assert json.loads(done.result or "")["found"] == report["found"]


def test_a_job_that_was_pushed_to_the_new_port_meanwhile_is_left(system: System, other: redis.Redis) -> None:
    now = int(time.time())
    for name in ("moved", "kept"):
        youzan_job(other, name, at=now + 3600)
        other.zadd("dq_bucket_1", {name: now + 3600})
    with Gateway(system, "--youzan", "127.0.0.1:0") as gateway:
        job = {"id": "moved", "topic": "order", "delay": 7200, "ttr": 60, "body": "newer"}
        assert youzan(gateway, "push", job)["code"] == 0
        for there_before in (0, 1):
            report = imported(system, "youzan", url_of(other), code=1)
            assert (report["different"], report["there_before"]) == (1, there_before)
            pending = [
                row for row in system.center.store.find(BizId.of("moved")) if row.status == TaskStatus.PENDING
            ]
            assert [attribute_of(row)["delay"] for row in pending] == [7_200_000]
            assert youzan(gateway, "get", {"id": "moved"})["data"]["body"] == "newer"
        assert youzan(gateway, "delete", {"id": "moved"})["code"] == 0
        assert youzan(gateway, "get", {"id": "moved"})["data"] is None
        assert row_of(system, "kept").status == TaskStatus.PENDING


# --- with the dialects


def youzan(gateway: Gateway, command: str, values: Mapping[str, Any]) -> Any:
    body = json.dumps(values).encode()
    head = f"POST /{command} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return exchange(port_of(gateway, "youzan"), head.encode() + body).json
