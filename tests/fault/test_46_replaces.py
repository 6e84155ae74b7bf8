"""Fault 46: replaces meet consumers, readers and their own repetitions: one task, the right body."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from base64 import b64decode, b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fault.conftest import Build, Verdict
from fault.kit.doors import PULLED, Clients, create_pulled
from harness.gateway import Gateway, Reply
from harness.system import System

from toc import TaskStatus
from toc.model.sharding import BizId

NAMES = 40
CONSUMERS = 12
READERS = 4


@pytest.fixture
def system(build: Build) -> System:
    """Gateways and nobody else."""
    one = build(hosts=True, slots=1)
    create_pulled(one)
    return one


def sealed(dice: random.Random) -> bytes:
    """A body that can be told from a mixture of two."""
    content = dice.randbytes(dice.choice((0, 10, 3000)))
    return hashlib.sha256(content).digest() + content


def whole(body: bytes) -> bool:
    return hashlib.sha256(body[32:]).digest() == body[:32]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_each_name_is_one_task_with_the_body_of_its_version_whoever_replaces_or_reads_it(
    system: System, verdict: Verdict, count: int
) -> None:
    line = verdict(46, "replaces race with consumers, readers and repetitions", f"{count:,} replaces")
    here = Gateway(system)
    there = Gateway(system, host="away", beside=here)
    clients = Clients([here, there], system.recorder)
    over = threading.Event()
    told: Counter[str] = Counter()
    ends: Counter[tuple[str, int]] = Counter()
    bodies: dict[tuple[str, int], str] = {}
    """(job_id, version) -> the hash of the body that a consumer was handed with it."""
    ids: dict[int, str] = {}
    wrong: list[Any] = []

    def replace(name: int) -> tuple[str, str]:
        """Replace one name again and again; every other time the request is sent twice, beside itself."""
        dice = random.Random(name)
        job_id = seal = ""
        for n in range(count // NAMES):
            body = sealed(dice)
            task = {
                "biz_id": name, "dedup_key": "k", "on_conflict": "replace",
                "delay": dice.choice((0.001, 0.02, 2.0)),
                "attribute": {"sha": hashlib.sha256(body).hexdigest()},
                "body_base64": b64encode(body).decode(),
            }  # fmt: skip

            def send(turn: int, task: dict[str, Any] = task, key: str = f"{name}-{n}") -> Reply:
                path, headers = f"/v1/topics/{PULLED}/tasks", {"Idempotency-Key": key}
                return clients.insist("POST", path, task, headers=headers, turn=turn)

            if n % 2:
                with ThreadPoolExecutor(2) as two:
                    replies = list(two.map(send, range(2)))
            else:
                replies = [send(name)]
            if len({str(reply.body) for reply in replies}) != 1 or replies[0].status not in (200, 201):
                wrong.append(replies)
                break
            outcome = replies[0].body["outcome"]
            if (replies[0].body["job_id"] != job_id) != (outcome == "new"):
                wrong.append((job_id, replies[0]))
            told[outcome] += 1
            told["repeated"] += len(replies) - 1
            ids[name] = job_id = replies[0].body["job_id"]
            seal = hashlib.sha256(body).hexdigest()
        return job_id, seal

    def consume(turn: int) -> None:
        dice = random.Random(turn)
        while not over.is_set():
            reply = clients.insist(
                "POST", f"/v1/topics/{PULLED}:pull", {"max": 2, "wait": 1, "ttr": 1}, turn=turn
            )
            for task in reply.body["tasks"]:
                body = b64decode(task["body_base64"])
                key = task["job_id"], task["version"]
                if hashlib.sha256(body).hexdigest() != task["attribute"]["sha"]:
                    wrong.append(("another's body", key))
                if bodies.setdefault(key, task["attribute"]["sha"]) != task["attribute"]["sha"]:
                    wrong.append(("two contents of one version", key))
                how = dice.choice((*["ack"] * 8, "nack", "dead", "lose"))
                if how == "lose":
                    continue
                verb, more = ("nack", {"dead": True}) if how == "dead" else (how, {})
                outcome = clients.insist(
                    "POST", f"/v1/leases:{verb}", {"lease": task["lease"], **more}, turn=turn + 1
                ).body["outcome"]
                told[f"{how} {outcome}"] += 1
                ends[key] += outcome in ("acked", "late", "buried")

    def read(turn: int) -> None:
        dice = random.Random(turn)
        while not over.is_set():
            if not ids:
                over.wait(0.05)
                continue
            reply = clients.insist("GET", f"/v1/tasks/{dice.choice(list(ids.values()))}/body", turn=turn)
            told[f"read {reply.status}"] += 1
            if reply.status == 200 and not whole(reply.body):
                wrong.append("a body of two")
            over.wait(0.002)

    try:
        with ThreadPoolExecutor(CONSUMERS + READERS) as others:
            running = [others.submit(consume, n) for n in range(CONSUMERS)]
            running += [others.submit(read, n) for n in range(READERS)]
            try:
                with ThreadPoolExecutor(NAMES) as threads:
                    last = list(threads.map(replace, range(NAMES)))
                stored = [row for name in range(NAMES) for row in system.center.store.find(BizId.of(name))]
                system.wait(lambda: not system.pending([row.job_id for row in stored]), "all have ended", 60)
            finally:
                over.set()
            for one in running:
                one.result()
    finally:
        codes = [there.stop(), here.stop()]
    assert codes == [0, 0]
    print(sorted(told.items()))
    assert not wrong, wrong[:5]
    assert max(ends.values()) == 1, "a version that ended twice"
    for name, (job_id, seal) in enumerate(last):
        rows = system.center.store.find(BizId.of(name))
        (named,) = [row for row in rows if row.dedup_key]
        assert (str(named.job_id), json.loads(named.attribute or "{}")["sha"]) == (job_id, seal), (
            "the last acknowledged one stands"
        )
        assert {row.status for row in rows} <= {TaskStatus.PROCESSED, TaskStatus.DEAD}
        assert named.status == TaskStatus.DEAD or ends[job_id, named.version] == 1
    line.prove(
        told["replaced"] and told["may_have_started"] and told["new"] > NAMES,
        f"{told['replaced']} of pending tasks, {told['may_have_started']} of leased, "
        f"{told['new'] - NAMES} of ended or dead",
    )
    line.prove(told["read 200"], f"{told['repeated']} sent twice, {told['read 200']} bodies read meanwhile")
    line.tasks = len(stored)
