"""Rows 43, 44, 47 and 48 of the faults: what a gateway does when something ends, hangs or is slow."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness.gateway import Gateway, Reply
from harness.system import System

from toc.dev.local.process import until
from toc.dev.local.servers import MariaDB, RedisServer
from toc.model.sharding import BizId
from toc.model.task import NewTask
from toc.store import rows as sql


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
            assert answer.result(10).body["outcome"] == "cancelled"
        assert gateway.process.wait(20) == 0
    finally:
        locker.close()
        gateway.stop()


def _refuses(port: int) -> bool:
    """Whether nobody listens there any more."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return True
    return False


def _signal(server: MariaDB, number: signal.Signals) -> None:
    assert server.process is not None
    server.process.signal(number)


# --- one of two database servers hangs


@pytest.fixture
def two_servers(
    tmp_path: Path, clean_redis: RedisServer, mariadb: MariaDB, database_prefix: str, launch: Any
) -> Iterator[tuple[System, MariaDB]]:
    """The first database, with topics and tokens, on the server that the test may stop."""
    first = launch(MariaDB)
    one = System(
        tmp_path,
        database_urls=[first.url, mariadb.url],
        databases=2,
        tables=8,
        database_prefix=database_prefix,
        redis_url=clean_redis.url,
    )
    one.create_topics()
    one.center.catalog.refresh()
    yield one, first
    one.stop()


def test_a_conflict_and_a_server_that_hangs_harm_no_other_submit(
    two_servers: tuple[System, MariaDB],
) -> None:
    system, hanging = two_servers
    gateway = Gateway(system, env={"TOC_READ_TIMEOUT": "3"})
    try:
        gateway.make_token("revoked", "admin")
        there = [n for n in range(60_000) if BizId.of(n).crc % 8 % 2 == 1]
        gone = [n for n in range(60_000) if BizId.of(n).crc % 8 % 2 == 0]
        assert gateway.submit(biz_id=there[0], dedup_key="k", attribute={"a": 1}).status == 201
        gateway.call("DELETE", "/v1/tokens/revoked")
        assert until(lambda: gateway.call("GET", "/v1/topics", token="revoked").status == 401, 5)
        biz_ids = iter(there[1:])
        lock = threading.Lock()

        def submit_for(seconds: float) -> list[tuple[float, Reply]]:
            found = []
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                with lock:
                    biz_id = next(biz_ids)
                began = time.monotonic()
                reply = gateway.submit(biz_id=biz_id)
                found.append((time.monotonic() - began, reply))
                time.sleep(0.1)
            return found

        def conflict() -> list[tuple[float, Reply]]:
            return [
                (0.0, gateway.submit(biz_id=there[0], dedup_key="k", attribute={"a": 2})) for _ in range(20)
            ]

        with ThreadPoolExecutor(64) as threads:
            usual = sorted(
                took
                for one in [threads.submit(submit_for, 2.0) for _ in range(48)]
                for took, _ in one.result()
            )
            _signal(hanging, signal.SIGSTOP)
            others = [threads.submit(submit_for, 5.0) for _ in range(48)]
            lost = [threads.submit(gateway.submit, biz_id=n) for n in gone[:12]]
            conflicts = threads.submit(conflict)
            answers = [one for found in others for one in found.result()]
            assert {reply.status for _, reply in answers} == {201}
            slow = sorted(took for took, _ in answers)
            assert slow[len(slow) * 99 // 100] < usual[len(usual) * 99 // 100] + 0.25
            assert {reply.status for _, reply in conflicts.result()} == {409}
            kinds = {reply.body["type"] for reply in (one.result() for one in lost)}
            assert kinds <= {"/docs#submit-unknown", "/docs#unavailable"}
        began = time.monotonic()
        refused = gateway.submit(biz_id=gone[50])
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert time.monotonic() - began < 1.0
        assert gateway.call("GET", "/readyz").status == 503
        # the table of tokens is away: known tokens hold, and of an unknown one nothing can be said
        assert gateway.call("GET", "/v1/topics", token="toc_unknown").status == 503
        assert gateway.call("GET", "/v1/topics", token="nonsense").status == 401
        _signal(hanging, signal.SIGCONT)
        assert until(lambda: gateway.submit(biz_id=gone[60]).status == 201, 30)
        assert until(lambda: gateway.call("GET", "/v1/topics", token="toc_unknown").status == 401, 10)
    finally:
        _signal(hanging, signal.SIGCONT)
        gateway.stop()


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
            took = []

            def other(n: int) -> None:
                for each in range(10):
                    began = time.monotonic()
                    assert gateway.submit(biz_id=1 + 8 * n, dedup_key=f"{n}-{each}").status == 201
                    took.append(time.monotonic() - began)

            list(threads.map(other, range(1, 33)))
            assert sorted(took)[len(took) * 95 // 100] < 1.0
            connection.batch(["ROLLBACK"])
            assert blocked.result(20).status == 201
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
    gateway = Gateway(system)
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
        assert all(_drained(client) < 7 * 4_000_000 for client in unread)
        assert gateway.submit().status == 201
    finally:
        for client in clients:
            client.close()
        gateway.stop()


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


def test_it_starts_outside_loopback_only_if_it_is_protected(system: System) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "toc", "gateway", "--port", "0", *options],
            env=system.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

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
