"""Row 43 per dialect: orders through plain clients of each protocol; one of two gateways is killed."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.dialect_clients import TTR_SECONDS
from harness.gateway import Gateway
from harness.orders import ASK_SECONDS
from harness.patience import until
from harness.sessions import kill_session
from harness.system import System

from toc.dev.demo import orders as demo
from toc.dev.local.process import free_port

# Real orders, which are not part of this repository: looked for beside the checkout.
REAL_ORDERS = Path(
    os.environ.get("TOC_TEST_ORDERS", Path(__file__).parents[3] / "shared/data/orders_2016_2017.csv")
)
TOPICS = {demo.CLOSE: "order-close", demo.CONFIRM: "order-confirm"}
"""The same in every dialect, as nobody who uses one knows of the others."""
DOORS = ("youzan", "redis-delayed", "delay-task", "lmstfy", "lmstfy-admin")
CONSUMERS = 3
LATE_MARGIN = 10.0
"""The least distance, in seconds, of a payment after its deadline: what the killed hold comes later."""

Key = tuple[str, str]


@pytest.fixture
def system(hosts: System) -> System:
    """Nobody but gateways, and no topics: the dialects make them."""
    return hosts


def test_made_up_orders_come_out_right_through_every_dialect(system: System) -> None:
    plan = demo.plan(demo.synthetic_orders(60, 11), 5.0, late_margin=LATE_MARGIN)
    replay(system, plan, "youzan", "redis-delayed", "delay-task", "lmstfy")


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["youzan", "redis-delayed", "delay-task", "lmstfy"])
def test_every_real_order_comes_out_as_the_file_says_through(system: System, dialect: str) -> None:
    if not REAL_ORDERS.exists():
        pytest.skip(f"there are no real orders at {REAL_ORDERS}")
    replay(system, demo.plan(demo.read_orders(REAL_ORDERS), 1.0, late_margin=LATE_MARGIN), dialect)


def replay(system: System, plan: demo.Plan, *dialects: str) -> None:
    """Play the plan through each dialect at once, and kill one gateway when a third of it has fired."""
    ports = [{door: free_port() for door in DOORS} for _ in range(2)]
    options = [[word for door in DOORS for word in (f"--{door}", f"127.0.0.1:{of[door]}")] for of in ports]
    first = Gateway(system, *options[0], host="gate-a")
    gateways = [first, Gateway(system, *options[1], host="gate-b", beside=first)]
    env = {
        **system.env,
        "LMSTFY_TOKEN": lmstfy_token(ports, first.tokens["all"]),
        "REPLAY_TOPICS": json.dumps(list(TOPICS.values())),
    }
    try:
        replays = [Replay(system.directory, dialect, plan, ports, env) for dialect in dialects]
        try:
            for one in replays:
                one.begin()
            expected = len(replays) * sum(one.fires for one in plan.deadlines)

            def fired(part: float) -> bool:
                assert not any(one.broken() for one in replays), told(system.directory)
                return sum(len(one.started()) for one in replays) > part * expected

            system.wait(lambda: fired(1 / 3), "a third has fired", plan.seconds + 60)
            kill_session(gateways[0].process.pid)
            gateways[0].process.wait()
            for one in replays:
                one.await_end(plan.seconds + 120)
            for one in replays:
                one.judge()
        finally:
            for one in replays:
                one.stop()
        assert gateways[1].stop() == 0
    finally:
        for gateway in gateways:
            gateway.stop()


def lmstfy_token(ports: Sequence[dict[str, int]], secret: str) -> str:
    """A token of the namespace, as its administrators make one; returned when both gateways know it."""

    def ask(port: int, method: str, path: str, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=15)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    admin = b64encode(f"any:{secret}".encode()).decode()
    path = "/token/shop?description=orders"
    status, made = ask(ports[0]["lmstfy-admin"], "POST", path, Authorization=f"Basic {admin}")
    assert status == 201, (status, made)
    token: str = json.loads(made)["token"]
    assert until(
        lambda: all(
            ask(one["lmstfy"], "GET", "/api/shop/q/size", **{"X-Token": token})[0] == 200 for one in ports
        ),
        10,
    )
    return token


def told(directory: Path) -> str:
    return "".join(path.read_text() for path in directory.glob("*.out"))


class Replay:
    """One dialect: a producer and three consumers, programs that know nothing of toc."""

    def __init__(
        self,
        directory: Path,
        dialect: str,
        plan: demo.Plan,
        ports: Sequence[dict[str, int]],
        env: dict[str, str],
    ) -> None:
        self.dialect = dialect
        self.directory = directory
        # What cannot be deleted is not put, unless it fires.
        self.deadlines = [one for one in plan.deadlines if dialect != "delay-task" or one.fires]
        self.began = 0.0
        self._plan_path = directory / f"{dialect}.json"
        self.processes: list[subprocess.Popen[bytes]] = []

        def program(what: str, dialect: str, given: str, name: str, ports: Sequence[int]) -> None:
            words = [what, dialect, given, str(self._history(name)), ",".join(map(str, ports))]
            with (directory / f"{self.dialect}-{name}.out").open("ab") as out:
                started = subprocess.Popen(
                    [sys.executable, "-m", "harness.dialect_clients", *words],
                    env=env,
                    stdout=out,
                    stderr=out,
                )
            self.processes.append(started)

        own = [one[dialect] for one in ports]
        program("produce", dialect, str(self._plan_path), "producer", own)
        for n in range(CONSUMERS):
            # Youzan's paths and commands are two ways into the same jobs.
            spoken = "youzan-commands" if dialect == "youzan" and n == 2 else dialect
            program("consume", spoken, f"consumer-{n}", f"consumer-{n}", own if n % 2 else own[::-1])

    def begin(self) -> None:
        """Let the producer begin, once all programs run: that takes a busy machine seconds."""
        names = ["producer", *(f"consumer-{n}" for n in range(CONSUMERS))]
        assert until(lambda: all(self._history(name).exists() for name in names), 30), told(self.directory)
        self.began = time.time() + 0.5
        deadlines = [
            {
                "order": one.order_id,
                "topic": TOPICS[one.topic],
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
        for n in range(CONSUMERS):
            for line in self._lines(f"consumer-{n}", what):
                found[line["order"], line["topic"]].append(line)
        for lines in found.values():
            lines.sort(key=lambda line: line["at"])
        return found

    def started(self) -> dict[Key, list[dict[str, Any]]]:
        return self._consumed("started")

    def broken(self) -> bool:
        return bool(self.processes[0].poll()) or any(one.poll() is not None for one in self.processes[1:])

    def await_end(self, seconds: float) -> None:
        """Wait until all has been put and deleted, what fires is finished, and nothing comes any more."""
        assert self.processes[0].wait(seconds) == 0, told(self.directory)
        firing = sum(one.fires for one in self.deadlines)
        done = until(lambda: self.broken() or len(self._consumed("finished")) >= firing, 120)
        assert not self.broken(), told(self.directory)
        assert done, (self.dialect, firing, len(self._consumed("finished")), len(self.started()))
        last = max(line["at"] for lines in self._consumed("started").values() for line in lines)
        time.sleep(max(0.0, last + TTR_SECONDS + 1 - time.time()))

    def judge(self) -> None:
        """Hold what was confirmed against what the orders say."""
        due = {(one.order_id, TOPICS[one.topic]): self.began + one.due_at for one in self.deadlines}
        fires = {(one.order_id, TOPICS[one.topic]) for one in self.deadlines if one.fires}
        put = {(line["order"], line["topic"]): line for line in self._lines("producer", "submitted")}
        started, finished = self._consumed("started"), self._consumed("finished")
        assert set(put) == set(due)
        # Where ids are the server's, a put that was repeated may have made two jobs.
        doubled = {key for key, line in put.items() if line["repeated"]}
        doubled = doubled if self.dialect in ("delay-task", "lmstfy") else set()
        asked = {(line["order"], line["topic"]): line["at"] for line in self._lines("producer", "asked")}
        # On a busy machine a delete may be asked for too late: then either is right.
        raced = {key for key, at in asked.items() if at > due[key] - ASK_SECONDS}
        assert len(raced) <= len(asked) / 2, "the producer could not keep up"
        assert fires <= set(started) <= fires | doubled | raced, (
            self.dialect,
            sorted(fires - set(started)),
            sorted(set(started) - fires),
        )
        spoken = {line["dialect"] for lines in started.values() for line in lines}
        assert spoken == {self.dialect}
        early = [key for key, lines in started.items() if lines[0]["at"] < due[key] - 0.001]
        assert not early, (self.dialect, early)
        again = 0
        for key, lines in started.items():
            again += len(lines) > 1
            if key in doubled:
                continue
            ended = finished[key][0]["at"]
            after = [line for line in lines if line["asked"] > ended]
            assert not after, (self.dialect, "started after it was finished", lines, finished[key])
            for one, two in pairwise(lines):
                assert two["at"] >= one["asked"] + TTR_SECONDS or self.dialect == "delay-task", (one, two)
        late = sorted(lines[0]["at"] - due[key] for key, lines in started.items())
        print(
            f"{self.dialect}: {len(put)} deadlines, {len(started)} fired, "
            f"{len(self._lines('producer', 'deleted'))} deleted, {again} started again, "
            f"{len(doubled)} perhaps put twice; late p50 {late[len(late) // 2]:.2f} s, most {late[-1]:.2f} s"
        )

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
