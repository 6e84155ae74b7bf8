"""Rows 43 and 45: real orders through gateways, their consumers in programs of their own; some are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fault.conftest import Verdict
from fault.kit.table import Line
from harness.gateway import Gateway
from harness.orders import REAL_ORDERS, TOPICS, lines, write_plan
from harness.patience import until
from harness.replay import CLOSE, CONFIRM
from harness.sessions import kill_session
from harness.system import NewSystem, System

from toc import TaskStatus, Topic
from toc.dev.demo import orders as demo
from toc.model.topic import Backoff, Delivery

CONSUMERS = 3
LATE_MARGIN = 15.0
"""The least distance, in seconds, of a payment after its deadline: what the killed hold comes later."""


@pytest.fixture
def system(hosts_with: NewSystem) -> System:
    """Two topics that are pulled, and nobody but gateways."""
    one = hosts_with()
    one.create_topics(slots=2)
    for number, name in enumerate((CLOSE, CONFIRM)):
        topic = Topic(
            name,
            20 + number,
            4,
            retries=16,
            backoff=Backoff.IMMEDIATE,
            delivery=Delivery.PULL,
            prepare_timeout=3,
        )
        one.center.store.topics.create(topic)
    one.center.catalog.refresh()
    return one


@pytest.mark.slow
def test_every_real_order_comes_out_as_the_file_says(
    system: System, tmp_path: Path, verdict: Verdict
) -> None:
    if not REAL_ORDERS.exists():
        pytest.skip(f"there are no real orders at {REAL_ORDERS}")
    line = verdict(43, "orders over gateways, one is killed", "real orders")
    replay(system, tmp_path, demo.plan(demo.read_orders(REAL_ORDERS), 2.0, late_margin=LATE_MARGIN), line)


def test_made_up_orders_come_out_right_over_gateways_that_are_killed(
    system: System, tmp_path: Path, verdict: Verdict
) -> None:
    line = verdict(43, "orders over gateways, one is killed", "made-up orders")
    replay(system, tmp_path, demo.plan(demo.synthetic_orders(150, 11), 5.0, late_margin=LATE_MARGIN), line)


def replay(system: System, directory: Path, plan: demo.Plan, line: Line) -> None:
    """Play the plan with two gateways, of which one is killed, and three consumers, of which one is."""
    first = Gateway(system, host="gate-a")
    gateways = [first, Gateway(system, host="gate-b", beside=first)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        ports = [gateway.port for gateway in gateways]
        secret = gateways[0].make_token("orders", "produce", "consume", topics=("orders.*",))
        assert until(lambda: gateways[1].call("GET", "/v1/tasks/1", token=secret).status != 401, 10)

        def program(what: str, first: str, ports: Sequence[int], *more: str) -> subprocess.Popen[bytes]:
            name = first if what == "consume" else what
            words = [what, first, str(directory / f"{name}.jsonl"), ",".join(map(str, ports)), *more]
            with (directory / f"{name}.log").open("ab") as log:
                started = subprocess.Popen(
                    [sys.executable, "-m", "harness.replay", *words],
                    env={**system.env, "TOC_TOKEN": secret},
                    stdout=log,
                    stderr=log,
                )
            processes.append(started)
            return started

        expected = sum(one.fires for one in plan.deadlines)
        # The first consumer is killed about a quarter through, while it works on a task.
        dies_at = [str(max(1, expected // 4 // CONSUMERS)), "0", "0"]
        consumers = [
            program("consume", f"consumer-{n}", ports if n % 2 else ports[::-1], dies_at[n])
            for n in range(CONSUMERS)
        ]
        began = time.time() + 2.0
        plan_path = directory / "plan.json"
        write_plan(plan, plan_path, began)
        producer = program("produce", str(plan_path), ports)

        def started() -> list[dict[str, Any]]:
            return [
                line
                for n in range(CONSUMERS)
                for line in lines(directory / f"consumer-{n}.jsonl")
                if line["what"] == "started"
            ]

        def fired(part: float) -> bool:
            if producer.poll():
                raise AssertionError("".join(path.read_text() for path in directory.glob("*.log")))
            return len(started()) > part * expected

        assert consumers[0].wait(plan.seconds + 120) == -signal.SIGKILL
        program("consume", "consumer-0", ports)
        system.wait(lambda: fired(1 / 2), "half has fired", plan.seconds + 60)
        kill_session(gateways[0].process.pid)
        gateways[0].process.wait()
        assert producer.wait(plan.seconds + 120) == 0, (directory / "produce.log").read_text()

        submitted = {
            (line["order"], line["topic"]): int(line["job_id"])
            for line in lines(directory / "produce.jsonl")
            if line["what"] == "submitted"
        }
        assert len(submitted) == len(plan.deadlines)
        system.wait(lambda: not system.pending(submitted.values()), "all have ended", 60)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(60)
        judge(system, directory, plan, submitted, started(), line)
        assert gateways[1].stop() == 0
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for gateway in gateways:
            gateway.stop()


def judge(
    system: System,
    directory: Path,
    plan: demo.Plan,
    submitted: dict[tuple[str, str], int],
    started: list[dict[str, Any]],
    line: Line,
) -> None:
    """Hold what was confirmed against what the orders say."""
    began = json.loads((directory / "plan.json").read_text())["began"]
    cancelled = {
        (line["order"], line["topic"]): line["at"]
        for line in lines(directory / "produce.jsonl")
        if line["what"] == "cancelled"
    }
    fired = Counter((line["order"], line["topic"]) for line in started)
    should_fire = {(one.order_id, TOPICS[one.topic]) for one in plan.deadlines if one.fires}
    due = {(one.order_id, TOPICS[one.topic]): began + one.due_at for one in plan.deadlines}
    assert set(fired) == should_fire, (len(set(fired) - should_fire), len(should_fire - set(fired)))
    assert set(cancelled) == set(submitted) - should_fire
    rows = system.center.store.read(submitted.values())
    wrong = {
        key: rows[job_id].status
        for key, job_id in submitted.items()
        if rows[job_id].status != (TaskStatus.PROCESSED if key in should_fire else TaskStatus.CANCELLED)
    }
    assert not wrong
    early = [line for line in started if line["at"] < due[line["order"], line["topic"]] - 0.001]
    assert not early
    first: dict[tuple[str, str], float] = {}
    for one in started:
        first.setdefault((one["order"], one["topic"]), one["at"])
    late = sorted(1000 * (first[key] - due[key]) for key in first)
    again = [key for key, times in fired.items() if times > 1]
    # Whoever was killed held at most what one pull gives, and a gateway what its waiting consumers get.
    assert 1 <= len(again) <= 5 * (CONSUMERS + 1), again
    line.prove(again, f"a gateway and a consumer killed, {len(again)} tasks that they held came again")
    line.tasks, line.duplicates, line.explained = len(submitted), len(again), f"{len(again)} by kill"
    middle, most = late[len(late) // 2], late[len(late) * 99 // 100]
    print(f"{len(submitted)} deadlines, {len(should_fire)} fired, {len(cancelled)} cancelled")
    print(f"{len(again)} twice; late p50 {middle:.1f} ms, p99 {most:.1f} ms, most {late[-1]:.0f} ms")
