"""Rows 43, 44 and 47 of the faults, at the dialects too: what a gateway does when something ends,
hangs or is slow."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from harness import dialect, forks
from harness.dialect import arrived, ask, popped, port_of, receive, send
from harness.gateway import Gateway, Reply
from harness.patience import until
from harness.secured import Tls
from harness.system import NewSystem, System

from benchmarks.local import MariaDB, RedisServer
from toc.cli.daemons import http_processes, with_dialects
from toc.model.errors import ConfigError, InvalidInput, StoreUnavailable, UnknownTopic
from toc.model.sharding import BizId
from toc.model.task import TaskStatus
from toc.model.topic import Delivery, Topic

# Rows 43, 44 and 47 of the faults: what a gateway does when something ends, hangs or is slow.

DEATHS = """
import os, sys
if "toc.gateway.process" in sys.orig_argv:
    from toc.gateway.crowd import Crowd
    from toc.sdk.batcher import Batcher
    from toc.worker.control import ControlPipe

    def die():
        try:
            os.close(os.open(os.environ["TEST_ONCE"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        raise RuntimeError("a step went wrong")

    async def look_on(self, real=Crowd.look_on):
        die()
        await real(self)

    async def read_topics(self, real=Batcher.read_topics):
        die()
        await real(self)

    def send(self, kind, *, real=ControlPipe.send, **values):
        if kind == "beat":
            die()
        return real(self, kind, **values)

    victim = os.environ["TEST_VICTIM"]
    if victim == "connections":
        Crowd.look_on = look_on
    elif victim == "topics":
        Batcher.read_topics = read_topics
    elif victim == "beat":
        ControlPipe.send = send
"""
"""A sitecustomize by which the first HTTP process loses one of its tasks."""


@pytest.mark.parametrize("victim", ["connections", "topics", "beat"])
def test_a_process_whose_loop_task_dies_says_so_and_ends(system: System, tmp_path: Path, victim: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEATHS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    once = {"TEST_ONCE": str(tmp_path / "once"), "TEST_VICTIM": victim}
    with Gateway(system, env={"PYTHONPATH": path, **once}) as gateway:
        assert until(lambda: "thread_died" in gateway.told(), 10)
        (said,) = [json.loads(line) for line in gateway.told().splitlines() if '"thread_died"' in line]
        assert (said["thread"], Path(once["TEST_ONCE"]).exists()) == (victim, True)
        assert until(lambda: gateway.told().count('"worker_ready"') == 3, 20)
        assert until(lambda: gateway.call("GET", "/v1/topics").status == 200, 10)


def test_requests_under_way_are_answered_before_a_gateway_ends(system: System) -> None:
    gateway = Gateway(system)
    job_id = int(gateway.submit().body["job_id"])
    store = system.center.store
    table = store._shards.names[store._shards.table_of(job_id)]
    locker = store._shards.servers[0]._connect_within(5)
    try:
        locker.batch(["BEGIN", f"SELECT 1 FROM {table} WHERE job_id={job_id} FOR UPDATE"])
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(gateway.call_once, "DELETE", f"/v1/tasks/{job_id}")
            assert until(lambda: "FOR UPDATE" in str(locker.batch(["SHOW FULL PROCESSLIST"])[0].rows), 10)
            gateway.process.send_signal(signal.SIGTERM)
            assert until(lambda: "daemon_stopping" in gateway.told(), 10)
            assert until(lambda: _refuses(gateway.port), 10)
            locker.batch(["ROLLBACK"])
            assert answer.result(60).body["outcome"] == "cancelled"
        assert gateway.process.wait(60) == 0
    finally:
        locker.close()
        gateway.stop()


def test_what_is_not_done_when_the_time_to_stop_is_over_is_answered_as_busy(system: System) -> None:
    gateway = Gateway(system, "--youzan", "127.0.0.1:0", env={"TOC_SHUTDOWN_DEADLINE": "1"})
    youzan = dialect.port_of(gateway, "youzan")
    assert (
        dialect.ask(youzan, "POST", "/push", {"id": "j", "topic": "t", "delay": 3600, "ttr": 9}).status == 200
    )
    job_id = int(gateway.submit().body["job_id"])
    store = system.center.store
    every = ",".join(f"{name} WRITE" for name in store._shards.names)
    locker = store._shards.servers[0]._connect_within(5)
    try:
        locker.batch([f"LOCK TABLES {every}"])
        with ThreadPoolExecutor(2) as threads:
            native_answer = threads.submit(gateway.call_once, "DELETE", f"/v1/tasks/{job_id}")
            other_answer = threads.submit(dialect.ask, youzan, "POST", "/delete", {"id": "j"})
            assert until(lambda: dialect.arrived(gateway.port, 1) and dialect.arrived(youzan, 1), 10)
            gateway.process.send_signal(signal.SIGTERM)
            native, other = native_answer.result(60), other_answer.result(60)
        assert (native.status, native.body["type"]) == (503, "/docs#busy")
        assert native.headers["connection"] == "close"
        assert other.json == {"code": 1, "message": "删除失败", "data": None}
    finally:
        locker.batch(["UNLOCK TABLES"])
        locker.close()
        gateway.stop()


def _refuses(port: int) -> bool:
    """Whether nobody listens there any more."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return True
    return False


# --- one of two database servers hangs


WAITED_FOR = {"TOC_READ_TIMEOUT": "600"}
"""Whoever waits for the answer of a server that hangs has none before the test's patience has ended."""


@pytest.fixture
def two_servers(launch: Any, new_system: NewSystem, mariadb: MariaDB) -> tuple[System, MariaDB]:
    """The first database, with topics and tokens, on the server that the test may stop."""
    first = launch(MariaDB)
    one = new_system(database_urls=[first.url, mariadb.url])
    one.create_topics()
    return one, first


def test_a_server_that_would_remember_a_requests_name_and_hangs_holds_up_no_task_of_another(
    two_servers: tuple[System, MariaDB],
) -> None:
    system, hanging = two_servers
    gateway = Gateway(system, env=WAITED_FOR)
    try:
        there = iter([n for n in range(60_000) if BizId.of(n).crc % 8 % 2 == 1])
        tasks = [{"biz_id": next(there), "delay": 3600} for _ in range(64)]
        assert gateway.call("POST", "/v1/topics/test.sync/tasks", tasks[0]).status == 201
        hanging.pause()

        def submit(n: int) -> Reply:  # the names of half of them belong to the server that hangs
            named = {"Idempotency-Key": f"name-{n}"}
            if n % 2:
                return gateway.call("POST", "/v1/topics/test.sync/tasks", tasks[n], headers=named)
            return gateway.call(
                "POST", "/v1/topics/test.sync/tasks:batch", {"tasks": [tasks[n]]}, headers=named
            )

        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(submit, range(64)))
        assert [one.status for one in answers] == [200, 201] * 32, [
            one.body for one in answers if one.status > 201
        ]
        assert all("job_id" in one.body["tasks"][0] for one in answers[::2])
    finally:
        hanging.resume()
        gateway.stop()


def test_searches_that_wait_for_a_server_that_hangs_hold_up_no_look_and_no_pull_of_another(
    two_servers: tuple[System, MariaDB],
) -> None:
    system, hanging = two_servers
    system.center.store.topics.create(Topic("test.pulled", 9, 4, delivery=Delivery.PULL, max_runtime=30))
    gateway = Gateway(system, env=WAITED_FOR)
    try:
        there = next(n for n in range(60_000) if BizId.of(n).crc % 8 % 2 == 1)
        task = {"biz_id": there, "delay": 0.001, "body": "x"}
        stored = gateway.call("POST", "/v1/topics/test.pulled/tasks", task)
        assert stored.status == 201
        hanging.pause()
        with ThreadPoolExecutor(12) as threads:
            for _ in range(12):
                threads.submit(gateway.call, "GET", "/v1/tasks")
            assert until(lambda: dialect.arrived(gateway.port, 12)), "they wait"
            found = gateway.call("GET", f"/v1/tasks?biz_id={there}")
            assert [one["job_id"] for one in found.body["tasks"]] == [stored.body["job_id"]]
            pulled = gateway.call("POST", "/v1/topics/test.pulled:pull", {"wait": 5})
            assert [one["body"] for one in pulled.body["tasks"]] == ["x"]
            hanging.resume()
    finally:
        hanging.resume()
        gateway.stop()


def test_a_gateway_that_can_serve_no_task_is_not_ready(
    tmp_path: Path, clean_redis: RedisServer, database_prefix: str, launch: Any
) -> None:
    only = launch(MariaDB)
    system = System(
        tmp_path,
        database_urls=[only.url],
        databases=1,
        tables=4,
        database_prefix=database_prefix,
        redis_url=clean_redis.url,
    )
    gateway = Gateway(system, env={"TOC_READ_TIMEOUT": "1"})
    try:
        assert gateway.call("GET", "/readyz").body == b"ok\n"
        only.pause()
        assert gateway.call("GET", "/v1/tasks/1000000").status == 503
        assert until(lambda: gateway.call("GET", "/readyz").status == 503, 20)
        assert gateway.call("GET", "/readyz").body == b"database server 0 is out of reach\n"
        only.resume()
        assert until(lambda: gateway.call("GET", "/readyz").status == 200, 20)
    finally:
        only.resume()
        gateway.stop()
        system.stop()


# --- clients


def test_it_starts_outside_loopback_only_if_it_is_protected(system: System) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return forks.run(["gateway", "--port", "0", *options], env=system.env)

    refused = run("--host", "0.0.0.0")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--tls-cert" in refused.stderr
    assert run("--host", "localhost").returncode == 2
    assert run("--tls-cert", "/nowhere").returncode == 2
    with Gateway(system, "--host", "0.0.0.0", "--plain-from", "10.0.0.0/8") as gateway:
        assert gateway.call("GET", "/healthz").status == 403


def test_a_certificate_that_cannot_be_served_is_refused_at_first(system: System, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    tls, other = Tls.make(tmp_path), Tls.make(tmp_path / "other")
    encrypted = tmp_path / "encrypted.pem"
    key = serialization.load_pem_private_key(tls.key.read_bytes(), None)
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"canary"),
        )
    )
    for certificate, secret in (
        (tls.certificate, other.key),
        (tls.key, tls.certificate),
        (tls.certificate, encrypted),
        (tls.certificate, tmp_path / "none.pem"),
    ):
        words = ["gateway", "--port", "0", "--tls-cert", str(certificate), "--tls-key", str(secret)]
        refused = forks.run(words, env=system.env, timeout=60)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert str(secret) in refused.stderr


# Rows 43 and 44 of the faults at the dialects: who dies, who leaves, who may come at all.


def test_what_was_pulled_of_delay_task_is_processed_once_answered(system: System, tmp_path: Path) -> None:
    once = tmp_path / "once"
    with Gateway(
        system,
        "--delay-task",
        "127.0.0.1:0",
        env={"TOC_FAILPOINT": "pull.sent:1", "TOC_FAILPOINT_ONCE": str(once)},
    ) as gateway:
        port = port_of(gateway, "delay-task")
        task = {"topic": "t", "timing_moment": int(time.time()) + 1, "content": "b"}
        biz_id = ask(port, "POST", "/delay/task/add", task).json["task_id"]

        def content() -> str | None:
            return ask(port, "POST", "/delay/task/pull", {"topic": "t"}).json["content"] or None

        assert popped(content) == "b"
        assert until(once.exists, 5)
        (found,) = system.center.find(biz_id=biz_id)
        assert (found.status, system.row(found.job_id).attempts) == (TaskStatus.PENDING, 1)


def test_a_client_that_sends_nothing_more_is_handed_nothing_and_told_nothing(system: System) -> None:
    gateway = Gateway(system, "--youzan", "127.0.0.1:0")
    try:
        port = port_of(gateway, "youzan")
        system.center.store.topics.create(Topic("test.pulled", 90, 4, delivery=Delivery.PULL))
        token = f"Authorization: Bearer {gateway.tokens['all']}"
        calls = [
            (port, "/pop", b'{"topic":"t"}', ()),
            (gateway.port, "/v1/topics/test.pulled:pull", b'{"wait":5}', (token,)),
        ]
        for to, path, body, headers in 5 * calls:  # the end is seen before or after the request
            with send(to, "POST", path, body, headers) as link:
                link.shutdown(socket.SHUT_WR)
                assert link.recv(1000) == b""
    finally:
        assert gateway.stop() == 0


def test_a_stopping_gateway_answers_its_holds(system: System) -> None:
    gateway = Gateway(system, "--youzan", "127.0.0.1:0")
    port = port_of(gateway, "youzan")
    ask(port, "POST", "/push", {"id": "j", "topic": "t", "delay": 3600, "ttr": 60, "body": ""})
    holds = [send(port, "POST", "/pop", b'{"topic":"%b"}' % topic) for topic in (b"t", b"unknown")]
    assert until(lambda: arrived(port, len(holds)))
    assert gateway.stop() == 0
    for link in holds:
        assert receive(link).body.decode() == '{"code":0,"message":"操作成功","data":null}'
        link.close()


def test_ports_of_dialects_open_outside_loopback_only_to_named_networks(system: System) -> None:
    plain = http_processes("127.0.0.1", 0, 1, None, None, [])
    with pytest.raises(ConfigError, match="--dialect-from"):
        with_dialects(plain, {"youzan": "0.0.0.0:0"}, [], [])
    with pytest.raises(InvalidInput, match="numeric address"):
        with_dialects(plain, {"youzan": "localhost:0"}, [], [])
    with pytest.raises(InvalidInput, match="network"):
        with_dialects(plain, {"youzan": "0.0.0.0:0"}, ["nonsense"], [])
    gateway = Gateway(
        system,
        env={
            "TOC_GATEWAY_YOUZAN": "0.0.0.0:0",
            "TOC_GATEWAY_DIALECT_FROM": "192.0.2.0/24 198.51.100.0/24",
            "TOC_GATEWAY_DIALECT_HOST": "queue.example",
        },
    )
    try:
        port = port_of(gateway, "youzan")
        answer = ask(port, "POST", "/get", {"id": "x"}, ["Host: queue.example"])
        assert answer.status == 200, "this machine may always"
        assert ask(port, "POST", "/get", {"id": "x"}, ["Host: other.example"]).status == 403
    finally:
        assert gateway.stop() == 0


# Names of topics that a process does not know, while the server that holds the topics hangs.

HANGS = 200.0
"""Seconds for which an answer of the server would be waited for."""
SOON = 60.0
"""Seconds within which everybody has an answer: long before the server's."""


def test_who_names_an_unknown_topic_does_not_wait_until_the_server_of_the_topics_is_back(
    new_system: NewSystem, mariadb: MariaDB
) -> None:
    system = new_system(read_timeout=HANGS)
    system.create_topics(delivery=Delivery.PULL)
    center = system.center
    gateway = Gateway(system)
    http: list[tuple[str, object]] = [
        ("/v1/topics/test.new/tasks", {"biz_id": 1, "delay": 60}),
        ("/v1/topics/test.new:pull", {"wait": 0}),
        ("/v1/topics/test.sync,test.new:pull", {"wait": 0}),
    ]

    calls: list[Callable[[], object]] = [
        lambda: center.submit("test.new", biz_id=1, delay=60),
        lambda: center.catalog.of_type(4711),
    ]
    try:
        assert [gateway.call("POST", path, body).status for path, body in http] == [404, 404, 404]
        with ThreadPoolExecutor(len(http) * 5 + len(calls)) as threads:
            mariadb.pause()
            try:
                answers = [threads.submit(gateway.call, "POST", path, body) for path, body in http * 5]
                errors = [threads.submit(call) for call in calls]
                for answer in answers:
                    reply = answer.result(SOON)
                    assert (reply.status, reply.body["type"]) == (503, "/docs#unavailable")
                for error in errors:
                    with pytest.raises(StoreUnavailable):
                        error.result(SOON)
            finally:
                mariadb.resume()

        def told() -> bool:
            try:
                center.catalog.get("test.new")
            except UnknownTopic:
                return True
            except StoreUnavailable:  # the read that hung has yet to end
                return False
            return False

        assert until(told)
    finally:
        gateway.stop()
