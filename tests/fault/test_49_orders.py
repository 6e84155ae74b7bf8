"""Row 49: an order system without Python. Orders come in over HTTP, deadlines go out as webhooks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from fault.conftest import Verdict
from harness.gateway import Gateway
from harness.orders import REAL_ORDERS, TOPICS, lines, raced, write_plan
from harness.replay import CLOSE, CONFIRM
from harness.system import DaemonProcess, NewSystem, System

from toc import TaskStatus
from toc.dev.demo import orders as demo

LATE_MARGIN, LONG_LATE_MARGIN = 12.0, 20.0
"""The least distance, in seconds, of a payment after its deadline: what a killed worker held comes later."""
NOTE_SECONDS = 2.0
"""A try that was answered so long before the kill has been written to its row."""
CONCURRENCY = 50
Place = tuple[str, str]
"""An order and one of its topics."""


class Shop:
    """The receiver, and what it was sent."""

    def __init__(self, directory: Path) -> None:
        self._history = directory / "shop.jsonl"
        with (directory / "shop.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.notified", str(self._history)],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def tell(self, secret: str) -> None:
        """Give it the secret."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{secret}\n")
        self.process.stdin.flush()

    def requests(self) -> list[dict[str, Any]]:
        """Each request, in order, with ``status`` and ``answered`` (when) as far as it was answered."""
        found: dict[tuple[str, int, int], dict[str, Any]] = {}
        for line in lines(self._history):
            assert line["what"] != "refused", line
            key = line["id"], line["attempt"], line["port"]
            if line["what"] == "got":
                assert key not in found, f"the same try came twice over one connection: {line}"
                found[key] = {**line, "status": None, "answered": None}
            else:
                found[key] |= {"status": line["status"], "answered": line["at"]}
        return list(found.values())


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A receiver that fails one time in five."""
    one = Shop(tmp_path)
    with one.process:
        yield one
        one.process.kill()


@pytest.fixture
def system(hosts_with: NewSystem, shop: Shop) -> System:
    """Nothing yet but the servers."""
    return hosts_with(
        secret_key=[Fernet.generate_key().decode()],
        webhook_allow=["127.0.0.1", f"http://127.0.0.1:{shop.port}"],
    )


@pytest.mark.slow
def test_every_real_order_comes_out_as_the_file_says(
    system: System, shop: Shop, tmp_path: Path, verdict: Verdict
) -> None:
    if not REAL_ORDERS.exists():
        pytest.skip(f"there are no real orders at {REAL_ORDERS}")
    plan = demo.plan(demo.read_orders(REAL_ORDERS), 2.0, late_margin=LONG_LATE_MARGIN)
    replay(system, shop, tmp_path, plan, verdict)


def test_made_up_orders_come_out_right_though_a_worker_is_killed_and_their_target_fails_often(
    system: System, shop: Shop, tmp_path: Path, verdict: Verdict
) -> None:
    plan = demo.plan(demo.synthetic_orders(150, 11), 10.0, late_margin=LATE_MARGIN)
    replay(system, shop, tmp_path, plan, verdict)


def replay(system: System, shop: Shop, directory: Path, plan: demo.Plan, verdict: Verdict) -> None:
    """Play the plan with a gateway and two workers that send, of which one is killed amid its requests."""
    line = verdict(49, "an order system of webhooks alone", "worker killed, target fails one time in five")
    gateway = Gateway(system)
    try:
        set_up(gateway, shop)
        secret = gateway.make_token("orders", "produce", topics=("orders.*",))
        doomed = system.start("send-a", app=None, webhooks=True, processes=1)
        system.start("send-b", app=None, webhooks=True, processes=1)
        began = time.time() + 2.0
        write_plan(plan, directory / "plan.json", began)
        with producing(system, gateway, secret, directory) as producer:
            expected = sum(one.fires for one in plan.deadlines)

            def stopped() -> tuple[set[int], float] | None:
                """The ports of the one that is to die, halted amid its requests, and since when. Once a third
                has come."""
                assert not producer.poll(), (directory / "produce.log").read_text()
                if len({one["id"] for one in shop.requests()}) <= expected / 3:
                    return None
                (worker,) = doomed.workers()
                os.kill(worker, signal.SIGSTOP)
                since, ports = time.time(), ports_of(doomed, shop.port)
                if sum(one["port"] in ports and not one["answered"] for one in shop.requests()) > 1:
                    return ports, since
                os.kill(worker, signal.SIGCONT)
                return None

            caught = system.wait(stopped, "requests are in flight", plan.seconds + 60)
            assert caught
            ports, killed = caught
            doomed.kill()
            assert producer.wait(plan.seconds + 120) == 0, (directory / "produce.log").read_text()
        submitted = {
            (one["order"], one["topic"]): int(one["job_id"])
            for one in lines(directory / "produce.jsonl")
            if one["what"] == "submitted"
        }
        assert len(submitted) == len(plan.deadlines)
        system.wait(lambda: not system.pending(submitted.values()), "all have ended", 60)
        requests = shop.requests()
        judge(system, directory, plan, submitted, requests, began)
        line.duplicates = doubled(requests, ports, killed)
        flying = {one["id"] for one in requests if one["port"] in ports and one["answered"] > killed}
        again = flying & {one["id"] for one in requests if one["at"] > killed}
        line.prove(bool(again), f"{len(again)} requests were in flight at the kill and came again")
        failed = sum(one["status"] == 503 for one in requests)
        line.prove(failed > len(requests) / 10, f"{failed} of {len(requests)} requests failed")
        line.tasks = len(submitted)
        assert gateway.stop() == 0
    finally:
        gateway.stop()


def set_up(gateway: Gateway, shop: Shop) -> None:
    """Register the receiver and the topics, as an operator without Python does."""
    url = f"http://127.0.0.1:{shop.port}/deadlines"
    made = gateway.call("POST", "/v1/targets", {"name": "shop", "url": url, "concurrency": CONCURRENCY})
    assert made.status == 201, made
    shop.tell(made.body["secret"])
    for number, name in enumerate((CLOSE, CONFIRM)):
        topic = {
            "name": name,
            "biz_type": 20 + number,
            "slot_amount": 4,
            "retries": 16,
            "backoff_base": 0.1,
            "backoff_cap": 1.0,
            "prepare_timeout": 3,
            "delivery": "webhook",
            "target": "shop",
        }
        made = gateway.call("POST", "/v1/topics", topic)
        assert made.status == 201, made


@contextmanager
def producing(
    system: System, gateway: Gateway, secret: str, directory: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The producer, which is killed if anything goes wrong."""
    with (directory / "produce.log").open("wb") as log:
        words = ["produce", str(directory / "plan.json"), str(directory / "produce.jsonl"), str(gateway.port)]
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.replay", *words],
            env={**system.env, "TOC_TOKEN": secret},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ports_of(daemon: DaemonProcess, receiver: int) -> set[int]:
    """The ports at its end of a daemon's connections to the receiver."""
    inodes = set()
    for pid in daemon.workers():
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                inodes.add(str(one.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, here, there, *rest = line.split()
        if int(there.rpartition(":")[2], 16) == receiver and rest[6] in inodes:
            found.add(int(here.rpartition(":")[2], 16))
    return found


def judge(
    system: System,
    directory: Path,
    plan: demo.Plan,
    submitted: dict[Place, int],
    requests: list[dict[str, Any]],
    began: float,
) -> None:
    """Hold what the receiver was sent against what the orders say."""
    cancelled = {
        (one["order"], one["topic"])
        for one in lines(directory / "produce.jsonl")
        if one["what"] == "cancelled"
    }
    either = raced(plan, began, directory / "produce.jsonl")
    should_fire = {(one.order_id, TOPICS[one.topic]) for one in plan.deadlines if one.fires}
    due = {(one.order_id, TOPICS[one.topic]): began + one.due_at for one in plan.deadlines}
    came = {(one["order"], one["topic"]) for one in requests}
    done = {(one["order"], one["topic"]) for one in requests if one["status"] == 204}
    assert not came & cancelled, "sent although its cancel was confirmed"
    should_fire |= came & either
    assert came == should_fire, (len(came - should_fire), len(should_fire - came))
    stopped = came - done  # by a cancel that was asked for too late to prevent the first try
    assert stopped <= either, len(stopped - either)
    assert cancelled == set(submitted) - should_fire
    rows = system.center.store.read(submitted.values())
    wrong = {
        key: rows[job_id].status
        for key, job_id in submitted.items()
        if rows[job_id].status != (TaskStatus.PROCESSED if key in done else TaskStatus.CANCELLED)
    }
    assert not wrong
    ids = {(one["order"], one["topic"], one["id"]) for one in requests}
    assert ids == {(*key, f"{submitted[key]}_0") for key in should_fire}, "one id over all tries of a task"
    early = [one for one in requests if one["at"] < due[one["order"], one["topic"]] - 0.001]
    assert not early
    first: dict[Place, float] = {}
    for one in requests:
        first.setdefault((one["order"], one["topic"]), one["at"])
    late = sorted(1000 * (first[key] - due[key]) for key in first)
    middle, most = late[len(late) // 2], late[len(late) * 99 // 100]
    print(f"{len(submitted)} deadlines, {len(should_fire)} fired, {len(cancelled)} cancelled")
    print(f"{len(requests)} requests; late p50 {middle:.1f} ms, p99 {most:.1f} ms, most {late[-1]:.0f} ms")


def doubled(requests: list[dict[str, Any]], ports: set[int], killed: float) -> int:
    """How many tasks were sent again after an answer that was well: those in flight at the kill at most."""
    well = Counter(one["id"] for one in requests if one["status"] == 204)
    again = {task for task, times in well.items() if times > 1}
    in_flight = {
        one["id"] for one in requests if one["port"] in ports and one["answered"] > killed - NOTE_SECONDS
    }
    assert again <= in_flight, json.dumps([one for one in requests if one["id"] in again - in_flight])
    assert len(again) <= CONCURRENCY
    assert max(well.values()) <= 2
    return len(again)
