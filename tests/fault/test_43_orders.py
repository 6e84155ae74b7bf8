"""Rows 43, 45 and 49: one plan of orders through every door; a gateway and a worker that sends are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from fault.conftest import Case
from fault.kit.table import Line
from harness import orders
from harness.gateway import Gateway
from harness.order_clients import TTR_SECONDS
from harness.patience import until
from harness.sessions import kill_session
from harness.system import NewSystem, System

from benchmarks.private import free_port

# Real orders, which are not part of this repository: looked for beside the checkout.
REAL_ORDERS = Path(
    os.environ.get("TOC_TEST_ORDERS", Path(__file__).parents[3] / "shared/data/orders_2016_2017.csv")
)
DOORS = ("native", "webhook", "youzan", "redis-delayed", "delay-task", "lmstfy")
PORTS = DOORS[2:]
CONSUMERS = 2
LATE_MARGIN = 10.0
"""The least distance, in seconds, of a payment after its deadline: what the killed hold comes later."""
MAX_SENT = 50
"""How many requests a worker has in flight, and a killed one sends again."""

Key = tuple[str, str]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A receiver of webhooks."""
    one = Shop(tmp_path)
    with one.process:
        yield one
        one.process.kill()


@pytest.fixture
def system(hosts_with: NewSystem, shop: Shop) -> System:
    """No topics yet: operators and dialects make them."""
    allow = ["127.0.0.1", f"http://127.0.0.1:{shop.port}"]
    return hosts_with(secret_key=[Fernet.generate_key().decode()], webhook_allow=allow)


@pytest.mark.slow
def test_made_up_orders_come_out_right_through_every_door(system: System, shop: Shop, case: Case) -> None:
    plan = orders.plan(orders.synthetic_orders(40, 11), 4.0, late_margin=LATE_MARGIN)
    line = case.verdict(43, "orders through every door, a gateway and a worker killed")
    replay(system, shop, plan, line, *DOORS)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_every_real_order_comes_out_as_the_file_says_through(
    system: System, shop: Shop, door: str, case: Case
) -> None:
    if not REAL_ORDERS.exists():
        pytest.skip(f"there are no real orders at {REAL_ORDERS}")
    plan = orders.plan(orders.read_orders(REAL_ORDERS), 1.0, late_margin=LATE_MARGIN)
    replay(system, shop, plan, case.verdict(43, "real orders, a gateway and a worker killed", door), door)


def replay(system: System, shop: Shop, plan: orders.Plan, line: Line, *doors: str) -> None:
    """Play the plan through each door at once; kill a gateway and a worker when a third of it has fired."""
    ports = [{door: free_port() for door in PORTS} for _ in range(2)]
    options = [[word for door in PORTS for word in (f"--{door}", f"127.0.0.1:{of[door]}")] for of in ports]
    first = Gateway(system, *options[0], host="gate-a")
    gateways = [first, Gateway(system, *options[1], host="gate-b", beside=first)]
    for of, gateway in zip(ports, gateways, strict=True):
        of["native"] = of["webhook"] = gateway.port
    try:
        env = {
            **system.env,
            "TOC_TOKEN": make_topics(first, shop),
            "LMSTFY_TOKEN": first.make_token("lmstfy", "admin", topics=("lmstfy.shop.*",)),
            "REPLAY_TOPICS": json.dumps([orders.CLOSE, orders.CONFIRM]),
        }
        assert until(lambda: gateways[1].call("GET", "/v1/tasks/1", token="lmstfy").status != 401)
        doomed = system.start("send-a", app=None, webhooks=True, processes=1)
        system.start("send-b", app=None, webhooks=True, processes=1)
        replays = [Replay(system.directory, door, plan, ports, env) for door in doors]
        try:
            for one in replays:
                one.begin()
            expected = len(replays) * sum(one.fires for one in plan.deadlines)

            def fired(part: float) -> bool:
                assert not any(one.broken() for one in replays), told(system.directory)
                return sum(len(one.started()) for one in replays) > part * expected

            system.wait(lambda: fired(1 / 3), "a third has fired", plan.seconds + 60)
            kill_session(first.process.pid)
            first.process.wait()
            doomed.kill()
            for one in replays:
                one.await_end(plan.seconds + 120)
            for one in replays:
                line.tasks += len(one.deadlines)
                line.duplicates += one.judge()
            # Where nothing is acknowledged nothing comes again, but a call to the killed gateway breaks off.
            broken_off = sum(one.broken_off() for one in replays)
            found = f"killed amid {expected} starts, {broken_off} calls were broken off"
            line.prove(line.duplicates + broken_off, found)
        finally:
            for one in replays:
                one.stop()
        assert gateways[1].stop() == 0
    finally:
        for gateway in gateways:
            gateway.stop()


class Shop:
    """The receiver of webhooks, a program that fails one time in five."""

    def __init__(self, directory: Path) -> None:
        history = directory / "webhook-consumer-0.jsonl"
        with (directory / "shop.out").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.notified", str(history)],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def tell(self, secret: str) -> None:
        """Give it the secret that requests are signed with."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{secret}\n")
        self.process.stdin.flush()


def make_topics(gateway: Gateway, shop: Shop) -> str:
    """Make what the native doors need, as an operator without Python does; returns a client's token."""
    url = f"http://127.0.0.1:{shop.port}/deadlines"
    made = gateway.call("POST", "/v1/targets", {"name": "shop", "url": url, "concurrency": MAX_SENT})
    assert made.status == 201, made
    shop.tell(made.body["secret"])
    policies = {"slot_amount": 4, "retries": 16, "backoff_base": 0.1, "backoff_cap": 1, "prepare_timeout": 3}
    for number, name in enumerate((orders.CLOSE, orders.CONFIRM)):
        for topic in (
            {"name": name, "biz_type": 20 + number, "delivery": "pull"},
            {"name": f"hook-{name}", "biz_type": 30 + number, "delivery": "webhook", "target": "shop"},
        ):
            made = gateway.call("POST", "/v1/topics", topic | policies)
            assert made.status == 201, made
    return gateway.make_token("orders", "produce", "consume", topics=("order-*", "hook-*"))


def told(directory: Path) -> str:
    return "".join(path.read_text() for path in directory.glob("*.out"))


class Replay:
    """One door: a producer and its consumers, programs that know nothing of toc."""

    def __init__(
        self,
        directory: Path,
        dialect: str,
        plan: orders.Plan,
        ports: Sequence[Mapping[str, int]],
        env: Mapping[str, str],
    ) -> None:
        self.dialect = dialect
        self.directory = directory
        # What cannot be deleted is not put, unless it fires.
        self.deadlines = [one for one in plan.deadlines if dialect != "delay-task" or one.fires]
        self.began = 0.0
        self._plan_path = directory / f"{dialect}.json"
        self.processes: list[subprocess.Popen[bytes]] = []

        def program(what: str, given: str, name: str, ports: Sequence[int]) -> None:
            words = [what, dialect, given, str(self._history(name)), ",".join(map(str, ports))]
            command = [sys.executable, "-m", "harness.order_clients", *words]
            with (directory / f"{self.dialect}-{name}.out").open("ab") as out:
                self.processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))

        own = [one[dialect] for one in ports]
        program("produce", str(self._plan_path), "producer", own)
        self._consumers = 1 if dialect == "webhook" else CONSUMERS
        for n in range(CONSUMERS if dialect != "webhook" else 0):  # else it is the shop
            program("consume", f"consumer-{n}", f"consumer-{n}", own if n % 2 else own[::-1])

    def begin(self) -> None:
        """Let the producer begin, once all programs run: that takes a busy machine seconds."""
        names = ["producer", *(f"consumer-{n}" for n in range(self._consumers))]
        assert until(lambda: all(self._history(name).exists() for name in names), 30), told(self.directory)
        self.began = time.time() + 0.5
        deadlines = [
            {
                "order": one.order_id,
                "topic": one.topic,
                "submit_at": one.submit_at,
                "due_at": one.due_at,
                "cancel_at": None if self.dialect == "delay-task" else one.cancel_at,
            }
            for one in self.deadlines
        ]
        written = self._plan_path.with_suffix(".new")
        written.write_text(json.dumps({"began": self.began, "deadlines": deadlines}))
        written.rename(self._plan_path)

    def _history(self, name: str) -> Path:
        return self.directory / f"{self.dialect}-{name}.jsonl"

    def _lines(self, name: str, what: str) -> list[dict[str, Any]]:
        """What a program has confirmed; it may be in the middle of a line."""
        text = path.read_text() if (path := self._history(name)).exists() else ""
        told = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in told if line["what"] == what]

    def _consumed(self, what: str) -> dict[Key, list[dict[str, Any]]]:
        """What the consumers have confirmed, of each deadline in the order of time."""
        found = defaultdict(list)
        for n in range(self._consumers):
            for line in self._lines(f"consumer-{n}", what):
                found[line["order"], line["topic"]].append(line)
        for lines in found.values():
            lines.sort(key=lambda line: line["at"])
        return found

    def started(self) -> dict[Key, list[dict[str, Any]]]:
        return self._consumed("started")

    def broken_off(self) -> int:
        """How many pulls were sent again, as their answer did not come."""
        programs = [self._lines(f"consumer-{n}", "started") for n in range(self._consumers)]
        return sum(max((line.get("repeated", 0) for line in lines), default=0) for lines in programs)

    def broken(self) -> bool:
        return bool(self.processes[0].poll()) or any(one.poll() is not None for one in self.processes[1:])

    def await_end(self, seconds: float) -> None:
        """Wait until all has been put and deleted, what fires is finished, and nothing comes any more."""
        assert self.processes[0].wait(seconds) == 0, told(self.directory)
        fires = {(one.order_id, one.topic) for one in self.deadlines if one.fires} - self._asked()
        done = until(lambda: self.broken() or fires <= set(self._consumed("finished")), 120)
        assert not self.broken(), told(self.directory)
        assert done, (self.dialect, fires - set(self._consumed("finished")), len(self.started()))
        last = max(line["at"] for lines in self._consumed("started").values() for line in lines)
        time.sleep(max(0.0, last + TTR_SECONDS + 1 - time.time()))

    def _asked(self) -> set[Key]:
        """Those that were to be deleted. On a busy machine they may not have ended before."""
        return {(line["order"], line["topic"]) for line in self._lines("producer", "asked")}

    def judge(self) -> int:
        """Hold what was confirmed against what the orders say. Returns how many started again."""
        due = {(one.order_id, one.topic): self.began + one.due_at for one in self.deadlines}
        fires = {(one.order_id, one.topic) for one in self.deadlines if one.fires}
        put = {(line["order"], line["topic"]): line for line in self._lines("producer", "submitted")}
        started, finished = self._consumed("started"), self._consumed("finished")
        assert set(put) == set(due)
        # Where ids are the server's, a put that was repeated may have made two jobs.
        doubled = {key for key, line in put.items() if line["repeated"]}
        doubled = doubled if self.dialect in ("delay-task", "lmstfy") else set()
        assert not self._lines("consumer-0", "refused")
        asked = self._asked()
        # On a busy machine a delete may be answered after the deadline: then either is right.
        deleted = {(line["order"], line["topic"]): line["at"] for line in self._lines("producer", "deleted")}
        raced = {key for key in asked if key not in deleted or deleted[key] > due[key]}
        assert len(raced) < len(asked) or not asked, "none was deleted in time"
        assert fires - raced <= set(started) <= fires | doubled | raced, (self.dialect, fires ^ set(started))
        assert {line["dialect"] for lines in started.values() for line in lines} == {self.dialect}
        early = [key for key, lines in started.items() if lines[0]["at"] < due[key] - 0.001]
        assert not early, (self.dialect, early)
        again = sum(len(lines) > 1 for lines in started.values())
        after_end = 0
        for key, lines in started.items():
            if key in doubled or (key in raced and key not in finished):  # it was deleted while it ran
                continue
            ended = finished[key][0]["at"]
            after = [line for line in lines if line["asked"] > ended]
            if self.dialect == "webhook":
                after_end += bool(after)  # its answer was lost with the worker
                continue
            assert not after, (self.dialect, "started after it was finished", lines, finished[key])
            for one, two in pairwise(lines):
                assert two["at"] >= one["asked"] + TTR_SECONDS or self.dialect == "delay-task", (one, two)
        assert after_end <= MAX_SENT
        return again

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
