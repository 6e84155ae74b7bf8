"""Faults 43 and 44: gateways are killed between any two writes; clients leave, dawdle, come by thousands."""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from fault.conftest import Case
from fault.kit.doors import ONCE, PULLED, Clients, connect, create_pulled, memory, p99, raw, reset
from harness.gateway import Gateway
from harness.patience import until
from harness.system import System

from toc import NewTask, TaskStatus
from toc.model.sharding import BizId

# Fault 43: gateways are killed between any two writes, and while clients wait: nobody comes to harm.

WAITING = 100
KILLS = 3
SUBMITS = 48
CONSUMERS, MOST = 4, 5
"""Consumers of a gateway that dies between two writes, and how many tasks each pulls at once."""


def test_gateways_killed_while_a_hundred_pulls_wait_lose_no_task(
    pulled: System, gateways: tuple[Gateway, Gateway], case: Case
) -> None:
    line = case.verdict(43, "gateways killed while pulls wait", f"{WAITING} consumers")
    clients = Clients(gateways, pulled.recorder)
    dice = random.Random(43)
    job_ids: list[int] = []
    killed = met = number = 0
    with clients.consuming(WAITING, f"{ONCE},{PULLED}", most=2, ttr=3):
        # A kill meets fewer of them where much comes due at that instant.
        while killed < KILLS or (clients.broken < WAITING and killed < 10 * KILLS):
            pulled.wait(lambda: clients.waiting > WAITING * 0.9, "most of them wait", 30)
            tasks = [
                NewTask((ONCE, PULLED)[n % 2], number * 1000 + n, dice.uniform(0.3, 1.5)) for n in range(120)
            ]
            job_ids += pulled.client.submit_many(tasks)
            time.sleep(dice.uniform(0.3, 1.2))  # in the middle of what comes due
            met += clients.waiting
            victim = gateways[number % 2]
            pids = victim.children()
            with pulled.recorder.fault("kill", pids=[os.getpid(), *pids]):
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                killed += len(pids)
            assert until(lambda: bool(set(victim.children()) - set(pids)), 30)  # noqa: B023
            number += 1
        pulled.wait(lambda: not pulled.pending(job_ids), "all have ended", 60)
    line.prove(
        clients.broken >= WAITING,
        f"{killed} HTTP processes killed with {met} pulls waiting, {clients.broken} calls broken off",
    )
    # What was handed out, and no consumer has heard of, was charged.
    judged = line.judge(pulled, within=15, but="R", at_most=WAITING)
    assert judged.breaches["R"] <= WAITING
    rows = pulled.center.store.read(job_ids).values()
    unheard = [row for row in rows if row.status != TaskStatus.PROCESSED]
    assert all(row.status == TaskStatus.DEAD and row.attempts == 1 for row in unheard), "a single try"
    assert len(unheard) <= WAITING


@pytest.mark.parametrize("name", [
    pytest.param("pull.taken", marks=pytest.mark.slow),
    "pull.handed-out",
    "pull.answered",
    pytest.param("pull.acked", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_gateway_that_dies_between_two_writes_loses_no_task(pulled: System, case: Case, name: str) -> None:
    line = case.verdict(43, "gateway killed between two writes", name)
    once = case.path / "once"
    gateway = Gateway(pulled, env={"TOC_FAILPOINT": f"{name}:4", "TOC_FAILPOINT_ONCE": str(once)})
    clients = Clients([gateway], pulled.recorder)
    try:
        with clients.consuming(CONSUMERS, PULLED, most=MOST, ttr=3):
            with pulled.recorder.fault("kill", pids=[os.getpid(), *gateway.children()]):
                tasks = [NewTask(PULLED, n, 1.0 + n / 100) for n in range(120)]
                job_ids = pulled.client.submit_many(tasks)
                pulled.wait(once.exists, "its process has died", 30)
            pulled.wait(lambda: not pulled.pending(job_ids), "all have ended", 30)
        line.prove(once.exists(), "the process died there")
        # A try that was handed out and of which no consumer has heard is charged, though nobody has started
        # it. The gateway serves still: it puts away what the process has left.
        judged = line.judge(pulled, within=10, but="R", at_most=CONSUMERS * MOST)
        assert judged.breaches["R"] <= CONSUMERS * MOST, str(judged)
    finally:
        code = gateway.stop()
    assert code == 0
    rows = pulled.center.store.read(job_ids).values()
    assert {row.status for row in rows} == {TaskStatus.PROCESSED}


def _all_know_the_token(gateway: Gateway) -> bool:
    """Whether every one of many connections, which go to all its processes, is let in."""
    with ThreadPoolExecutor(16) as threads:
        return 401 not in threads.map(lambda _: gateway.call("GET", "/v1/tasks/1").status, range(16))


@pytest.mark.slow
@pytest.mark.parametrize("conflict", ["keep", "replace"])
def test_submits_whose_process_is_killed_after_their_commit_get_one_job_id_for_each_key(
    pulled: System, case: Case, conflict: str
) -> None:
    line = case.verdict(43, "gateway killed between commit and answer of a submit", f"on_conflict={conflict}")
    names = range(1000, 1000 + SUBMITS)
    if conflict == "replace":
        pulled.client.submit_many([NewTask("test.sync", n, 3600, dedup_key="k") for n in names])
    gateway = Gateway(pulled, "--processes", "2", env={"TOC_FAILPOINT": "batch.rows-stored:2"})
    clients = Clients([gateway], pulled.recorder)
    try:
        assert until(lambda: _all_know_the_token(gateway))
        born = set(gateway.children())
        submit = _submitter(clients, conflict)
        with ThreadPoolExecutor(SUBMITS) as threads:
            first = list(threads.map(submit, names))
        line.prove(clients.broken > 0, f"{clients.broken} submits lost their answer")
        with ThreadPoolExecutor(8) as threads:
            again = list(threads.map(submit, names[:8]))
        assert again == first[:8], "the same key, the same answer"
        dead = len(born - set(gateway.children()))
        line.prove(dead > 0, f"{dead} processes and more died between commit and answer")
    finally:
        gateway.stop()
    for name, job_id in zip(names, first, strict=True):
        (row,) = pulled.center.store.find(BizId.of(name))
        assert row.job_id == job_id
        assert row.version == int(conflict == "replace"), "replaced once"
    line.tasks = SUBMITS


def _submitter(clients: Clients, conflict: str) -> Callable[[int], int]:
    def submit(name: int) -> int:
        task = {"biz_id": name, "delay": 3600, "body": f"of {name}"}
        if conflict == "replace":
            task |= {"dedup_key": "k", "on_conflict": "replace"}
        reply = clients.insist(
            "POST", "/v1/topics/test.sync/tasks", task, headers={"Idempotency-Key": f"key-{name}"}
        )
        assert reply.status in (200, 201), reply
        return int(reply.body["job_id"])

    return submit


# Fault 44: clients that leave, dawdle, stop half-way or come by thousands: others are served on time.

LEAVERS = 40
CROWD = 10_000
DAWDLERS = 20
MEMORY = 256 << 20
"""Most bytes by which a process may grow, whoever comes."""


@pytest.fixture
def system(case: Case) -> System:
    """A gateway is its only member."""
    one = case.build(slots=1)
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
def test_what_is_in_an_answer_whose_client_leaves_comes_again(system: System, case: Case) -> None:
    line = case.verdict(44, "clients leave in the middle of an answer")
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
def test_crowds_and_slow_clients_delay_nobody_and_take_bounded_memory(system: System, case: Case) -> None:
    line = case.verdict(44, "10,000 connections, half requests, readers of a byte a second")
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
