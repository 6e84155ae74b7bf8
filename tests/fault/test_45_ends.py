"""Fault 45: acks, nacks, extends, cancels and new deadlines meet at the end of ttr: no version ends twice."""

import random
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from fault.conftest import Case
from fault.kit.doors import PULLED, Clients
from harness.gateway import Gateway, Reply
from harness.system import System

from toc import NewTask, TaskStatus

TASKS = 120
ENDS = {"acked": "processed", "late": "processed", "buried": "dead", "cancelled": "cancelled"}
"""Answers that say: it was this call that ended the version."""
MORE: dict[str, dict[str, Any]] = {"extend": {"ttr": 3}, "dead": {"dead": True}}


@pytest.mark.slow
def test_whatever_meets_at_the_end_of_ttr_each_version_ends_once(
    pulled: System, gateways: tuple[Gateway, Gateway], case: Case
) -> None:
    line = case.verdict(45, "answers, cancels and new deadlines race at the end of ttr", "two gateways")
    system = pulled
    clients = Clients(gateways, system.recorder)
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    """Each version of each task -> what the calls about it were answered."""
    told: Counter[str] = Counter()
    lock = threading.Lock()

    def race(number: int) -> None:
        dice = random.Random(number)
        (lease, job_id, version, until, biz_id) = leased[number]
        how = dice.choice(
            ["ack", "ack twice", "nack", "extend", "cancel", "reschedule", "replace", "ack and dead"]
        )
        acts = {
            "ack": ["ack"], "ack twice": ["ack", "ack"], "nack": ["nack", "ack"],
            "extend": ["extend", "ack"], "cancel": ["cancel", "ack"],
            "reschedule": ["reschedule", "ack"], "replace": ["replace", "ack"],
            "ack and dead": ["dead", "ack"],
        }[how]  # fmt: skip

        def act(turn: int, what: str) -> None:
            time.sleep(max(0.0, until + dice.uniform(-0.05, 0.05) - time.time()))
            reply = self_answered(clients, turn, what, lease, job_id, biz_id)
            outcome = str(reply.body.get("outcome") if isinstance(reply.body, dict) else reply.status)
            with lock:
                told[f"{what} {outcome}"] += 1
                ended = "cancelled" if (what, outcome) == ("cancel", "may_have_started") else outcome
                if ended in ENDS and (what == "cancel" or ended != "cancelled"):
                    found[job_id, version].append(ENDS[ended])
                if what in ("ack", "nack", "dead") and outcome not in ("acked", "late", "nacked", "buried"):
                    assert outcome in ("already", "gone", "replaced", "cancelled", "dead"), reply

        with ThreadPoolExecutor(2) as two:
            list(two.map(act, range(2), acts))

    tasks = [NewTask(PULLED, n, 0.05, dedup_key="k") for n in range(TASKS)]
    system.client.submit_many(tasks)
    held: dict[int, tuple[str, int, int, float, int]] = {}  # on a busy machine some are handed out again
    while len(held) < TASKS:
        reply = clients.insist("POST", f"/v1/topics/{PULLED}:pull", {"max": 100, "wait": 5, "ttr": 2})
        for task in reply.body["tasks"]:
            started(system, task)
            until = datetime.fromisoformat(task["lease_until"]).timestamp()
            job_id = int(task["job_id"])
            held[job_id] = (task["lease"], job_id, task["version"], until, task["biz_id"])
    leased = list(held.values())
    with clients.consuming(6, PULLED, most=3, ttr=20), ThreadPoolExecutor(40) as threads:
        list(threads.map(race, range(TASKS)))
        stored = [task.job_id for n in range(TASKS) for task in system.center.find(biz_id=n)]
        system.wait(lambda: not system.pending(stored), "all have ended", 60)
    print(sorted(told.items()))
    twice = {key: ends for key, ends in found.items() if len(ends) > 1}
    assert not twice, "a version that ended twice"
    rows = system.center.store.read(stored)
    for (job_id, version), (end,) in found.items():
        row = rows[job_id]
        assert row.version == version, "an ended version is not replaced"
        assert TaskStatus(row.status).name.lower() == end
    heard = {job_id for job_id, _ in clients.started}
    for job_id, row in rows.items():
        assert row.status != TaskStatus.PROCESSED or (job_id, row.version) in found or job_id in heard
    again = sum(key[0] in heard for key in found)
    line.prove(
        told["ack late"] and again,
        f"{told['ack acked']} acks in time, {told['ack late']} late, {again} while somebody else had it",
    )
    refused = sum(told[f"ack {what}"] for what in ("already", "cancelled", "replaced", "dead"))
    line.prove(refused, f"{refused} acks of what had ended or was replaced were told so")
    line.tasks = len(stored)


def started(system: System, task: dict[str, Any]) -> None:
    names = {"job": int(task["job_id"]), "try": task["attempt"]}
    system.recorder.write("start", **names, v=task["version"], biz=task["biz_id"])


def self_answered(clients: Clients, turn: int, what: str, lease: str, job_id: int, biz_id: int) -> Reply:
    """Do it, at the gateway of that number."""
    later = {"delay": 0.3}
    if what == "cancel":
        return clients.insist("DELETE", f"/v1/tasks/{job_id}", turn=turn)
    if what == "reschedule":
        return clients.insist("PATCH", f"/v1/tasks/{job_id}", later, turn=turn)
    if what == "replace":
        task = {"biz_id": biz_id, "dedup_key": "k", "on_conflict": "replace", **later}
        headers = {"Idempotency-Key": f"replace-{biz_id}"}
        return clients.insist("POST", f"/v1/topics/{PULLED}/tasks", task, headers=headers, turn=turn)
    more = MORE.get(what, {})
    verb = "nack" if what == "dead" else what
    return clients.insist("POST", f"/v1/leases:{verb}", {"lease": lease, **more}, turn=turn)
