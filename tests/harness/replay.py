"""Orders replayed over HTTP: a producer and pull consumers, programs of their own without toc.

    python -m harness.replay produce PLAN HISTORY PORT[,PORT...]
    python -m harness.replay consume NAME HISTORY PORT[,PORT...] [DIES_AT]

The token is in TOC_TOKEN. PLAN is a JSON file of the deadlines, whose times count from ``began``, an instant
in seconds. HISTORY gets one JSON line for each thing, on the disk before the program goes on: ``submitted``,
``asked`` (a cancel, before it is) and ``cancelled`` by the producer; ``started`` (before its work) and
``acked`` by a consumer. A consumer with DIES_AT ends itself by SIGKILL when it has started so many tasks, at
work on the last of them. Each program goes on at the next port when a gateway does not answer, and repeats
what it asked.
"""

from __future__ import annotations

import heapq
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle
from pathlib import Path
from typing import Any

CLOSE, CONFIRM = "orders.close", "orders.confirm"
TTR_SECONDS = 2
WORK_SECONDS = 0.05
GIVE_UP_SECONDS = 60.0
SENDERS = 8

Step = Callable[[int, dict[str, Any]], None]
"""Does something with the deadline of this number."""


class History:
    """Lines that are on the disk before the call returns."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, order: str, topic: str, **more: Any) -> None:
        line = {"what": what, "order": order, "topic": topic, "at": time.time(), **more}
        os.write(self._file, json.dumps(line).encode() + b"\n")
        os.fsync(self._file)


class Client:
    """One connection to whichever gateway answers."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = cycle(ports)
        self.port = next(self._ports)
        self._connection: http.client.HTTPConnection | None = None
        self.moved = 0

    def ask(self, method: str, path: str, content: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Ask until a gateway answers with anything but 429 and 503."""
        headers = {"Authorization": f"Bearer {os.environ['TOC_TOKEN']}"}
        data = None
        if content is not None:
            data = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        if key is not None:
            headers["Idempotency-Key"] = key
        end = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                if self._connection is None:
                    self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=15)
                self._connection.request(method, path, data, headers)
                answer = self._connection.getresponse()
                found = answer.read()
                if answer.status not in (429, 503):
                    return answer.status, json.loads(found) if found else None
                if time.monotonic() > end:
                    raise TimeoutError(f"{method} {path}: {answer.status} {found!r}")
            except (OSError, http.client.HTTPException):
                if time.monotonic() > end:
                    raise
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                self.port = next(self._ports)
                self.moved += 1
            time.sleep(0.05)


def produce(plan_path: str, history: History, ports: list[int]) -> None:
    """Submit every deadline at its time, and cancel those that are paid for."""
    plan = json.loads(Path(plan_path).read_text())
    began = plan["began"]
    here = threading.local()
    job_ids: dict[int, str] = {}
    known = {number: threading.Event() for number in range(len(plan["deadlines"]))}

    def client() -> Client:
        if not hasattr(here, "client"):
            here.client = Client(ports)
        made: Client = here.client
        return made

    def submit(number: int, deadline: dict[str, Any]) -> None:
        due = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(began + deadline["due_at"]))
        task = {
            "biz_id": deadline["order"],
            "action_time": f"{due}.{int((began + deadline['due_at']) * 1000) % 1000:03d}Z",
            "attribute": {"note": f"deadline of {deadline['order']}"},
        }
        topic = deadline["topic"]
        status, answer = client().ask(
            "POST", f"/v1/topics/{topic}/tasks", task, f"{topic}/{deadline['order']}"
        )
        assert status == 201, (status, answer)
        job_ids[number] = answer["job_id"]
        history.write("submitted", deadline["order"], topic, job_id=answer["job_id"])
        known[number].set()

    def cancel(number: int, deadline: dict[str, Any]) -> None:
        assert known[number].wait(GIVE_UP_SECONDS)
        history.write("asked", deadline["order"], deadline["topic"])
        status, answer = client().ask("DELETE", f"/v1/tasks/{job_ids[number]}")
        if status == 200 and answer["outcome"] == "cancelled":
            history.write("cancelled", deadline["order"], deadline["topic"])

    play(plan, submit, cancel)


def play(plan: dict[str, Any], submit: Step, cancel: Step) -> None:
    """Submit every deadline of the plan at its time, and cancel those that have a time for it."""
    order = count()
    steps: list[tuple[float, int, Step, int, dict[str, Any]]] = []
    for number, deadline in enumerate(plan["deadlines"]):
        heapq.heappush(steps, (deadline["submit_at"], next(order), submit, number, deadline))
        if deadline["cancel_at"] is not None:
            heapq.heappush(steps, (deadline["cancel_at"], next(order), cancel, number, deadline))
    asked = []
    with ThreadPoolExecutor(SENDERS) as senders:
        while steps:
            at, _, do, number, deadline = heapq.heappop(steps)
            time.sleep(max(0.0, plan["began"] + at - time.time()))
            asked.append(senders.submit(do, number, deadline))
    for one in asked:
        one.result()


def consume(name: str, history: History, ports: list[int], dies_at: int = 0) -> None:
    """Pull, note, ack; until SIGTERM, and then no more than what is held. ``dies_at``: 0 is never."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    client = Client(ports)
    starts = 0
    while not stopping:
        status, answer = client.ask(
            "POST", f"/v1/topics/{CLOSE},{CONFIRM}:pull", {"max": 5, "wait": 2, "ttr": TTR_SECONDS}
        )
        assert status == 200, (status, answer)
        for task in answer["tasks"]:
            assert task["attribute"]["note"] == f"deadline of {task['biz_id']}", task
            history.write("started", task["biz_id"], task["topic"], by=name, attempt=task["attempt"])
            starts += 1
            if starts == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        if answer["tasks"]:
            time.sleep(WORK_SECONDS)
            leases = {"leases": [task["lease"] for task in answer["tasks"]]}
            status, outcomes = client.ask("POST", "/v1/leases:ack", leases)
            assert status == 200, (status, outcomes)
            for task, outcome in zip(answer["tasks"], outcomes["leases"], strict=True):
                history.write("acked", task["biz_id"], task["topic"], by=name, outcome=outcome["outcome"])


if __name__ == "__main__":
    _, what, first, history_path, port_list, *more = sys.argv
    chosen = [int(port) for port in port_list.split(",")]
    if what == "produce":
        produce(first, History(history_path), chosen)
    else:
        consume(first, History(history_path), chosen, *map(int, more))
