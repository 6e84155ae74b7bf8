"""Fault 44: clients that leave, dawdle, stop half-way or come by thousands: others are served on time."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from fault.conftest import Build, Verdict
from fault.kit.doors import ONCE, PULLED, Clients, connect, create_pulled, memory, p99, raw, reset
from harness.gateway import Gateway
from harness.system import System

from toc import NewTask, TaskStatus

LEAVERS = 40
CROWD = 10_000
DAWDLERS = 20
MEMORY = 256 << 20
"""Most bytes by which a process may grow, whoever comes."""


@pytest.fixture
def system(build: Build) -> System:
    """A gateway is its only member."""
    one = build(slots=1)
    create_pulled(one)
    return one


@contextmanager
def gate(system: System) -> Iterator[Gateway]:
    gateway = Gateway(system)
    try:
        yield gateway
    finally:
        code = gateway.stop()
    assert code == 0


@pytest.mark.slow
def test_what_is_in_an_answer_whose_client_leaves_comes_again(system: System, verdict: Verdict) -> None:
    line = verdict(44, "clients leave in the middle of an answer")
    center = system.center
    dice = random.Random(44)
    with gate(system) as gateway:
        clients = Clients([gateway], system.recorder)
        job_ids = center.submit_many([NewTask(PULLED, n, 0.01, body=bytes(900_000)) for n in range(LEAVERS)])
        left = 0
        for _ in range(LEAVERS // 4):
            client = connect(gateway, buffer=4096)
            client.sendall(raw(gateway, "POST", f"/v1/topics/{PULLED}:pull", {"wait": 1, "ttr": 2, "max": 4}))
            with contextlib.suppress(TimeoutError):
                got = b""
                wanted = dice.choice((1, 100, 1000, 60_000))
                while len(got) < wanted and (part := client.recv(wanted - len(got))):
                    got += part
                left += b"200 OK" in got[:20] or wanted == 1
            if dice.random() < 0.5:
                client.shutdown(socket.SHUT_WR)
            reset(client)
        rows = center.store.read(job_ids).values()
        line.prove(left >= LEAVERS // 8, f"{left} left after 1 to 60,000 bytes of up to 3,600,000")
        assert not any(row.status == TaskStatus.DEAD for row in rows)
        with clients.consuming(4, PULLED, most=1, ttr=20):
            system.wait(lambda: not system.pending(job_ids), "all have ended", 40)
        rows = center.store.read(job_ids).values()
        assert {row.status for row in rows} == {TaskStatus.PROCESSED}
        assert {job_id for job_id, _ in clients.started} == set(job_ids)
        line.tasks = len(job_ids)


@pytest.mark.slow
def test_thousands_of_connections_and_slow_clients_delay_nobody_and_take_bounded_memory(
    system: System, verdict: Verdict
) -> None:
    line = verdict(44, "10,000 connections, half requests, readers of a byte a second")
    crowd: list[socket.socket] = []
    over = threading.Event()
    with gate(system) as gateway:
        (pid,) = gateway.children()
        clients = Clients([gateway], system.recorder)
        usual = served(clients, 60)
        page = {"tasks": [{"biz_id": n, "delay": 3600, "attribute": {"x": "y" * 3900}} for n in range(1000)]}
        assert gateway.call("POST", "/v1/topics/test.sync/tasks:batch", page).status == 200
        before = memory(pid)
        try:
            dawdlers = [connect(gateway, buffer=4096) for _ in range(DAWDLERS)]
            crowd += dawdlers
            for client in dawdlers:
                client.sendall(raw(gateway, "GET", "/v1/tasks?limit=1000") * 4)
            reading = threading.Thread(target=dawdle, args=(dawdlers, over))
            reading.start()
            whole = raw(gateway, "POST", f"/v1/topics/{ONCE}:pull", {"wait": 30})
            for n in range(200):
                crowd.append(connect(gateway))
                crowd[-1].sendall(whole[: 1 + n * (len(whole) - 2) // 200])
            while len(crowd) < CROWD:
                crowd.append(connect(gateway))
            slow = served(clients, 60)
            grown = memory(pid) - before
            opened = len(crowd)
        finally:
            over.set()
            reading.join()
            for client in crowd:
                client.close()
        line.prove(
            opened == CROWD,
            f"{opened:,} connections, {grown >> 20} MB more; others p99 {1000 * p99(slow):.0f} ms, "
            f"before {1000 * p99(usual):.0f} ms",
        )
        assert grown < MEMORY
        line.within(p99(slow), 5 * p99(usual) + 0.5)
        assert served(clients, 10)
        line.tasks = 130


def dawdle(clients: list[socket.socket], over: threading.Event) -> None:
    """Read a byte a second from each."""
    while not over.is_set():
        for client in clients:
            with contextlib.suppress(OSError):
                client.recv(1)
        over.wait(1.0)


def served(clients: Clients, count: int) -> list[float]:
    """Seconds from the due time of each task, one after the other, until it is in its consumer's hands."""
    found = []
    with ThreadPoolExecutor(1) as threads:
        for n in range(count):
            wanted = {"wait": 10, "ttr": 30}
            answer = threads.submit(clients.insist, "POST", f"/v1/topics/{PULLED}:pull", wanted)
            due = time.time() + 0.03
            task = {"biz_id": n, "delay": 0.03}
            assert clients.insist("POST", f"/v1/topics/{PULLED}/tasks", task).status == 201
            (got,) = answer.result(60).body["tasks"]
            found.append(max(0.0, time.time() - due))
            assert clients.insist("POST", "/v1/leases:ack", {"lease": got["lease"]}).status == 200
    return found
