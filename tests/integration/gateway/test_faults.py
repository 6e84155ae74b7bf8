"""Rows 43, 44 and 47 of the faults: what a gateway does when something ends, hangs or is slow."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import dialect, forks
from harness.gateway import Gateway, Reply
from harness.lmstfy import OPTIONS, Client, port_of
from harness.patience import until
from harness.sessions import kill_session
from harness.system import System, small_system

from toc.dev.local.servers import MariaDB, RedisServer
from toc.gateway.tasks import BATCH_BYTES
from toc.model.pull import NONCE_BYTES, PullLease
from toc.model.sharding import BizId
from toc.model.task import NewTask
from toc.model.topic import Delivery, Topic
from toc.store import rows as sql
from toc.store.server import Statement


def test_a_submit_whose_answer_was_lost_is_repeated_and_stands_once(system: System, tmp_path: Path) -> None:
    once = tmp_path / "once"
    gateway = Gateway(
        system,
        "--processes",
        "2",
        env={"TOC_FAILPOINT": "batch.rows-stored:1", "TOC_FAILPOINT_ONCE": str(once)},
    )
    try:
        before = set(gateway.children())
        task = {"biz_id": 9, "delay": 3600, "dedup_key": "close", "attribute": {"n": 1}}
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            gateway.call_once("POST", "/v1/topics/test.sync/tasks", task)
        assert once.exists()
        (row,) = system.center.store.find(BizId.of(9))
        # the new process may be the one, and not have read the tokens yet
        assert until(lambda: gateway.call("GET", "/v1/topics").status == 200, 10)
        again = gateway.call("POST", "/v1/topics/test.sync/tasks", task)
        assert (again.status, again.body) == (201, {"job_id": str(row.job_id)})
        assert len(system.center.store.find(BizId.of(9))) == 1
        assert until(lambda: len(gateway.children()) == 2 and len(before & set(gateway.children())) == 1, 20)
    finally:
        assert gateway.stop() == 0


def test_a_batch_that_replaces_is_done_once_though_the_gateway_dies_before_it_answers(
    system: System, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    env = {"TOC_FAILPOINT": "batch.rows-stored:2", "TOC_FAILPOINT_ONCE": str(once)}
    gateway = Gateway(system, env=env)

    def replace(key: str) -> list[dict[str, Any]]:
        tasks = [
            {
                "biz_id": n,
                "delay": 3600,
                "dedup_key": "k",
                "on_conflict": "replace",
                "attribute": {"key": key},
            }
            for n in range(1, 201)
        ]
        headers = {"Idempotency-Key": key}
        path = "/v1/topics/test.sync/tasks:batch"
        answer = gateway.call("POST", path, {"tasks": tasks}, headers=headers, attempts=1)
        assert answer.status == 200, answer
        found: list[dict[str, Any]] = answer.body["tasks"]
        return found

    try:
        first = replace("one")
        assert {one["outcome"] for one in first} == {"new"}
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            replace("two")
        assert once.exists()
        assert until(lambda: _serves(gateway), 60)
        again = replace("two")
        assert again == [{**one, "outcome": "replaced"} for one in first]
        rows = [system.row(int(one["job_id"])) for one in first]
        assert {row.version for row in rows} == {1}
        assert replace("one") == first, "it is remembered, and changes nothing"
        assert {system.row(int(one["job_id"])).version for one in first} == {1}
    finally:
        assert gateway.stop() == 0


def _serves(gateway: Gateway) -> bool:
    try:
        return gateway.call("GET", "/v1/topics").status == 200
    except (http.client.HTTPException, ConnectionError):
        return False


DEATHS = """
import os, sys
if "toc.gateway.process" in sys.orig_argv:
    from toc.gateway.connections import Crowd
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
def test_a_process_whose_task_on_the_event_loop_dies_says_so_and_is_replaced(
    system: System, tmp_path: Path, victim: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEATHS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    once = {"TEST_ONCE": str(tmp_path / "once"), "TEST_VICTIM": victim}
    gateway = Gateway(system, env={"PYTHONPATH": path, **once})
    try:
        assert until(lambda: "thread_died" in gateway.told(), 10)
        (said,) = [json.loads(line) for line in gateway.told().splitlines() if '"thread_died"' in line]
        assert (said["thread"], Path(once["TEST_ONCE"]).exists()) == (victim, True)
        assert until(lambda: gateway.told().count('"worker_ready"') == 3, 20)
        assert until(lambda: gateway.call("GET", "/v1/topics").status == 200, 10)
    finally:
        gateway.stop()


DIES = """
import sys
if "toc.gateway.process" in sys.orig_argv and "http1" in " ".join(sys.orig_argv):
    from toc.gateway.connections import Crowd

    async def look_on(self):
        raise RuntimeError("a step went wrong")

    Crowd.look_on = look_on
"""
"""A sitecustomize by which the second HTTP process dies soon after each start."""


def test_a_process_that_dies_again_and_again_comes_back_ever_later_while_another_serves(
    system: System, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIES)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    gateway = Gateway(system, "--processes", "2", env={"PYTHONPATH": path})

    def pauses() -> list[float]:
        lines = [line for line in gateway.told().splitlines() if '"worker_died"' in line]
        return [json.loads(line)["again_in_seconds"] for line in lines]

    try:
        assert until(lambda: max(pauses(), default=0.0) > 1.0, 120)
        for _ in range(20):
            assert gateway.call("GET", "/v1/topics").status == 200
    finally:
        gateway.stop()


STARTS_FOR_EVER = """
import os, sys, time
if "toc.gateway.process" in sys.orig_argv:
    open(os.environ["TEST_STARTING"], "w").close()
    time.sleep(3600)
"""
"""A sitecustomize by which an HTTP process takes an hour to start."""


def test_a_gateway_whose_process_is_just_starting_ends_in_good_order(system: System, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STARTS_FOR_EVER)
    starting, log = tmp_path / "starting", str(tmp_path / "gateway.log")
    env = {
        **system.env,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), system.env["PYTHONPATH"]]),
        "TEST_STARTING": str(starting),
        "TOC_SHUTDOWN_DEADLINE": "0",
    }
    streams = dict.fromkeys(("stdout", "stderr"), log)
    gateway = forks.start(["gateway", "--port", "0"], env=env, session=True, streams=streams, whole=True)
    try:
        assert until(starting.exists, 20)
        gateway.terminate()
        assert gateway.wait(60) == 0, Path(log).read_text()
    finally:
        kill_session(gateway.pid)
    assert "worker_killed" not in Path(log).read_text()


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
def two_servers(
    tmp_path: Path, clean_redis: RedisServer, mariadb: MariaDB, database_prefix: str, launch: Any
) -> Iterator[tuple[System, MariaDB]]:
    """The first database, with topics and tokens, on the server that the test may stop."""
    first = launch(MariaDB)
    urls = [first.url, mariadb.url]
    one = small_system(tmp_path, clean_redis, mariadb, database_prefix, database_urls=urls)
    one.create_topics()
    one.center.catalog.refresh()
    yield one, first
    one.stop()


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


def test_what_may_be_of_a_new_topic_is_not_called_unknown_while_the_topics_cannot_be_read(
    two_servers: tuple[System, MariaDB],
) -> None:
    system, hanging = two_servers
    gateway = Gateway(system)
    try:
        biz_id = next(n for n in range(60_000) if BizId.of(n).crc % 8 % 2 == 1)
        job_id = int(gateway.submit(biz_id=biz_id).body["job_id"])
        store = system.center.store
        table = store._shards.names[store._shards.table_of(job_id)]
        store._shards.servers[1].run([Statement(f"UPDATE {table} SET biz_type=999 WHERE job_id={job_id}")])
        gateway.make_token("some", "admin", topics=("test.*",))
        lease = PullLease(job_id, 1, 999, 0, bytes(NONCE_BYTES)).text(store.identity.lease_secret())
        task = f"/v1/tasks/{job_id}"
        hanging.pause()
        for name, more in {"ack": {}, "nack": {}, "extend": {"ttr": 60}}.items():
            one = gateway.call("POST", f"/v1/leases:{name}", {"lease": lease, **more}, token="some")
            assert (one.status, "retry-after" in one.headers) == (503, True), one.body
            both = {"leases": [lease, "no lease"], **more}
            many = gateway.call("POST", f"/v1/leases:{name}", both, token="some")
            assert [each["outcome"] for each in many.body["leases"]] == ["failed", "unknown"]
        looked = gateway.call("GET", task, token="some")
        assert (looked.status, "retry-after" in looked.headers) == (503, True), looked.body
        hanging.resume()

        def known() -> bool:
            ended = gateway.call("POST", "/v1/leases:ack", {"lease": lease}, token="some")
            return {ended.status, gateway.call("GET", task, token="some").status} == {404}

        assert until(known)
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
            time.sleep(0.2)
            found = gateway.call("GET", f"/v1/tasks?biz_id={there}")
            assert [one["job_id"] for one in found.body["tasks"]] == [stored.body["job_id"]]
            pulled = gateway.call("POST", "/v1/topics/test.pulled:pull", {"wait": 5})
            assert [one["body"] for one in pulled.body["tasks"]] == ["x"]
            hanging.resume()
    finally:
        hanging.resume()
        gateway.stop()


def test_sizes_of_queues_that_wait_for_a_server_that_hangs_hold_up_no_other_door(
    tmp_path: Path, clean_redis: RedisServer, mariadb: MariaDB, database_prefix: str, launch: Any
) -> None:
    hanging = launch(MariaDB)
    system = System(
        tmp_path,
        database_urls=[mariadb.url, hanging.url],
        databases=2,
        tables=8,
        database_prefix=database_prefix,
        redis_url=clean_redis.url,
    )
    system.create_topics()
    system.center.catalog.refresh()
    gateway = Gateway(system, *OPTIONS, env=WAITED_FOR)
    try:
        token = gateway.make_token("ns", "admin", topics=("lmstfy.ns.*",))
        client = Client(port_of(gateway, "lmstfy"), token)
        client.publish("sized", delay=3600)
        here = next(n for n in range(60_000) if BizId.of(n).crc % 8 % 2 == 0)
        stored = gateway.call("POST", "/v1/topics/test.sync/tasks", {"biz_id": here, "delay": 3600})
        hanging.pause()
        with ThreadPoolExecutor(12) as threads:
            sizes = [threads.submit(client.call, "GET", "/api/ns/sized/size") for _ in range(12)]
            time.sleep(0.2)
            assert not any(one.done() for one in sizes), "they wait"
            alive = gateway.call("POST", "/v1/dead:redrive", {"job_ids": [stored.body["job_id"]]})
            hanging.resume()
        assert (alive.status, alive.body["left"]) == (200, 1), "it is not dead"
    finally:
        hanging.resume()
        gateway.stop()
        system.stop()


def test_dead_jobs_of_lmstfy_are_deleted_or_it_says_that_they_were_not(
    system: System, clean_redis: RedisServer
) -> None:
    gateway = Gateway(system, *OPTIONS)
    client = Client(port_of(gateway, "lmstfy"), gateway.make_token("ns", "admin", topics=("lmstfy.ns.*",)))
    dead, many = client.path("q/deadletter/size"), client.path("q/deadletter", limit=100_000)

    def size() -> int:
        return int(client.call("GET", dead).content["size"])

    try:
        job_id, _ = (client.publish("q") for _ in range(2))
        for _ in range(2):
            assert client.consume("q", ttr=1, timeout=30)
        assert until(lambda: size() == 2, 15)
        clean_redis.pause()
        for path in (many, client.path(f"q/job/{job_id}")):
            answer = client.call("DELETE", path)
            assert (answer.status, answer.content) == (503, {"error": "internal error"})
        assert size() == 2
        clean_redis.resume()
        assert until(lambda: client.call("DELETE", many).status == 204)
        assert size() == 0
    finally:
        clean_redis.resume()
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


def test_a_dedup_key_of_an_open_transaction_holds_up_nobody_else(system: System) -> None:
    gateway = Gateway(system)
    store = system.center.store
    connection = store._shards.servers[0]._connect_within(5)
    try:
        biz = BizId.of(1)
        row = system.center._row(_task(1))
        server = store._shards.servers[0]
        insert = sql.insert(server, store._shards.names[biz.crc % 8], [row])
        connection.batch(["BEGIN"])
        text = insert.sql % tuple(map(connection.escape, insert.params))
        connection.batch([text])
        with ThreadPoolExecutor(33) as threads:
            blocked = threads.submit(gateway.submit, biz_id=1, dedup_key="k")

            def other(n: int) -> None:
                for each in range(10):
                    assert gateway.submit(biz_id=1 + 8 * n, dedup_key=f"{n}-{each}").status == 201

            list(threads.map(other, range(1, 33)))
            assert not blocked.done(), "it waits still"
            connection.batch(["ROLLBACK"])
            assert blocked.result(60).status == 201
    finally:
        connection.close()
        gateway.stop()


def _task(biz_id: int) -> Any:
    return NewTask("test.sync", biz_id, 3600, dedup_key="k")


# --- clients


def _memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.mark.slow
def test_slow_clients_and_crowds_are_bounded_and_harm_nobody(system: System) -> None:
    gateway = Gateway(system, whole=True)  # its memory is measured
    clients: list[socket.socket] = []
    try:
        (pid,) = gateway.children()
        token = gateway.tokens["all"]
        head = f"POST /v1/topics/test.sync/tasks HTTP/1.1\r\nAuthorization: Bearer {token}\r\n".encode()

        def connect(sent: bytes) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", gateway.port), 10)
            client.sendall(sent)
            clients.append(client)
            return client

        half_head = connect(head)
        half_body = connect(head + b"Content-Length: 100\r\nContent-Type: application/json\r\n\r\n{")
        pipelined = connect(b"GET /healthz HTTP/1.1\r\n\r\n" * 50)
        trickling = connect(b"GET /healthz HT")
        # an answer of megabytes that nobody reads
        tasks = [{"biz_id": n, "delay": 3600, "attribute": {"x": "y" * 3900}} for n in range(1000)]
        assert gateway.call("POST", "/v1/topics/test.sync/tasks:batch", {"tasks": tasks}).status == 200
        get = f"GET /v1/tasks?limit=1000 HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        unread = [connect(get * 8) for _ in range(8)]
        crowd = 4200  # more than a process has
        before = _memory(pid)
        for _ in range(crowd):
            connect(b"")
        began = time.monotonic()
        assert gateway.submit().status == 201
        assert time.monotonic() - began < 2.0
        assert _memory(pid) - before < 200 << 20
        with socket.create_connection(("127.0.0.1", gateway.port), 10) as fresh:
            fresh.sendall(b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert fresh.recv(12) == b"HTTP/1.1 200"
        closed = 0
        for client in clients[-crowd:]:
            client.setblocking(False)
            try:
                closed += client.recv(1) == b""
            except BlockingIOError:
                pass
            except ConnectionResetError:
                closed += 1
        assert closed >= 100
        answered = b""
        while answered.count(b"200 OK") < 50:
            answered += pipelined.recv(65536)
        trickling.settimeout(0.2)
        got = b""
        end = time.monotonic() + 25
        while time.monotonic() < end and not got:
            try:
                trickling.sendall(b"T")
                got = trickling.recv(100)
            except TimeoutError:
                continue
        assert got.startswith((b"HTTP/1.1 408", b"HTTP/1.1 400")), got
        half_head.settimeout(30)
        assert half_head.recv(100).startswith(b"HTTP/1.1 408")
        half_body.settimeout(40)
        assert half_body.recv(100).startswith(b"HTTP/1.1 408")
        assert until(lambda: not any(map(_connected, unread)), 60)
        assert all(_drained(client) < 7 * 4_000_000 for client in unread)
        assert gateway.submit().status == 201
    finally:
        for client in clients:
            client.close()
        gateway.stop()


def _connected(client: socket.socket) -> bool:
    """Whether neither end has closed it."""
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1


def _drained(client: socket.socket) -> int:
    """How many bytes come until the end."""
    client.settimeout(30)
    count = 0
    try:
        while part := client.recv(1 << 20):
            count += len(part)
    except ConnectionResetError:
        pass
    return count


def test_a_token_whose_requests_never_end_keeps_out_no_body_of_another(system: System) -> None:
    gateway = Gateway(system)
    gateway.make_token("other", "produce")
    head = (
        "POST /v1/topics/test.sync/tasks:batch HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {gateway.tokens['all']}\r\nContent-Length: {BATCH_BYTES}\r\n\r\n"
    )
    clients: list[socket.socket] = []
    refused = False
    try:
        while not refused and len(clients) < 20:
            client = socket.create_connection(("127.0.0.1", gateway.port), 10)
            clients.append(client)
            try:
                client.sendall(head.encode() + b" " * (BATCH_BYTES - 1))
                refused = bool(select.select(clients, [], [], 0.2)[0])
            except ConnectionError:
                refused = True
        assert refused
        tasks = [{"biz_id": n, "delay": 3600, "attribute": {"x": "y" * 3900}} for n in range(1000)]
        path = "/v1/topics/test.sync/tasks:batch"
        assert gateway.call("POST", path, {"tasks": tasks}, token="other").status == 200
    finally:
        for client in clients:
            client.close()
        gateway.stop()


def test_a_client_whose_requests_never_end_keeps_out_no_body_of_another_client(system: System) -> None:
    gateway = Gateway(system, "--youzan", "127.0.0.1:0")
    port = dialect.port_of(gateway, "youzan")
    head = "POST /push HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6000000\r\n\r\n"
    body = "\\u0078" * 980_000
    job = '{"id": "j", "topic": "t", "delay": 3600, "ttr": 9, "body": "%s"}' % body  # noqa: UP031 - braces
    request = f"POST /push HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(job)}\r\n\r\n{job}"
    clients: list[socket.socket] = []
    refused = False
    try:
        while not refused and len(clients) < 30:
            client = socket.create_connection(("127.0.0.1", port), 10)
            clients.append(client)
            try:
                client.sendall(head.encode() + b" " * 5_999_999)
                refused = bool(select.select(clients, [], [], 0.2)[0])
            except ConnectionError:
                refused = True
        assert refused
        with socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.2", 0)) as other:
            other.sendall(request.encode())
            assert dialect.receive(other).json["code"] == 0
    finally:
        for client in clients:
            client.close()
        gateway.stop()


def test_it_starts_outside_loopback_only_if_it_is_protected(system: System) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return forks.run(["gateway", "--port", "0", *options], env=system.env)

    refused = run("--host", "0.0.0.0")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--tls-cert" in refused.stderr
    assert run("--host", "localhost").returncode == 2
    assert run("--tls-cert", "/nowhere").returncode == 2
    gateway = Gateway(system, "--host", "0.0.0.0", "--plain-from", "10.0.0.0/8")
    try:
        assert gateway.call("GET", "/healthz").status == 403
    finally:
        gateway.stop()


def test_a_gateway_of_a_test_that_is_not_ready_in_time_leaves_no_process(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    start = forks.start

    def started(*args: Any, **options: Any) -> forks.Forked:
        made.append(start(*args, **options))
        return made[-1]

    def wait(*_: object) -> None:
        raise AssertionError("not within 0 s: ready")

    monkeypatch.setattr(forks, "start", started)
    monkeypatch.setattr(system, "wait", wait)
    with pytest.raises(AssertionError, match="ready"):
        Gateway(system)
    assert [one.poll() for one in made] == [-signal.SIGKILL]
