"""Fault 43: gateways are killed between any two writes, and while clients wait: nobody comes to harm."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.doors import ONCE, PULLED, Clients, create_pulled
from harness.gateway import Gateway
from harness.patience import until
from harness.system import System

from toc import NewTask, TaskStatus
from toc.model.sharding import BizId

WAITING = 100
KILLS = 3
SUBMITS = 48
CONSUMERS, MOST = 4, 5
"""Consumers of a gateway that dies between two writes, and how many tasks each pulls at once."""


@pytest.fixture
def pulled(build: Build) -> System:
    """Several gateways and nobody else."""
    system = build(hosts=True, slots=1)
    create_pulled(system)
    return system


def test_gateways_killed_while_a_hundred_pulls_wait_lose_no_task(pulled: System, verdict: Verdict) -> None:
    line = verdict(43, "gateways killed while pulls wait", f"{WAITING} consumers")
    here = Gateway(pulled)
    there = Gateway(pulled, host="away", beside=here)
    clients = Clients([here, there], pulled.recorder)
    dice = random.Random(43)
    job_ids: list[int] = []
    killed = met = number = 0
    try:
        with clients.consuming(WAITING, f"{ONCE},{PULLED}", most=2, ttr=3):
            # A kill meets fewer of them where much comes due at that instant.
            while killed < KILLS or (clients.broken < WAITING and killed < 10 * KILLS):
                pulled.wait(lambda: clients.waiting > WAITING * 0.9, "most of them wait", 30)
                tasks = [
                    NewTask((ONCE, PULLED)[n % 2], number * 1000 + n, dice.uniform(0.3, 1.5))
                    for n in range(120)
                ]
                job_ids += pulled.client.submit_many(tasks)
                time.sleep(dice.uniform(0.3, 1.2))  # in the middle of what comes due
                met += clients.waiting
                victim = (here, there)[number % 2]
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
    finally:
        codes = [there.stop(), here.stop()]
    assert codes == [0, 0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pull.taken", marks=pytest.mark.slow),
        "pull.handed-out",
        "pull.answered",
        pytest.param("pull.acked", marks=pytest.mark.slow),
    ],
)
def test_a_gateway_that_dies_between_two_writes_loses_no_task(
    pulled: System, tmp_path: Path, verdict: Verdict, name: str
) -> None:
    line = verdict(43, "gateway killed between two writes", name)
    once = tmp_path / "once"
    gateway = Gateway(pulled, env={"TOC_FAILPOINT": f"{name}:4", "TOC_FAILPOINT_ONCE": str(once)})
    clients = Clients([gateway], pulled.recorder)
    try:
        with clients.consuming(CONSUMERS, PULLED, most=MOST, ttr=1):
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
    pulled: System, verdict: Verdict, conflict: str
) -> None:
    line = verdict(43, "gateway killed between commit and answer of a submit", f"on_conflict={conflict}")
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
