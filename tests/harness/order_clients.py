"""Plain clients of each door, by its own words, and orders replayed through them.

    python -m harness.order_clients produce DOOR PLAN HISTORY PORT[,PORT...]
    python -m harness.order_clients consume DOOR NAME HISTORY PORT[,PORT...]

They know nothing of toc. Each goes on at the next port when a gateway does not answer, and repeats what it
asked, as plain clients do. PLAN is a JSON file of the deadlines, whose times count from ``began``, an instant
in seconds. HISTORY gets one JSON line for each thing, on the disk before the program goes on: ``submitted``,
``asked`` (a delete, before it is) and ``deleted`` of the producer, ``started`` (before its work) and
``finished`` of a consumer. The token of the native API is in TOC_TOKEN, lmstfy's in LMSTFY_TOKEN.
"""

import base64
import heapq
import http.client
import json
import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlencode

TTR_SECONDS = 3
WORK_SECONDS = 0.005
POLL_SECONDS = 0.1
"""Between polls that found nothing, where the protocol has none that waits."""
GIVE_UP_SECONDS = 60.0
SENDERS = 8
FORGET_ONE_IN = 16
"""A consumer forgets to finish one order of so many when it starts it first."""


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


class Job(NamedTuple):
    id: str
    body: str


class Wire:
    """One connection to whichever gateway answers."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = cycle(ports)
        self.port = next(self._ports)
        self._connection: http.client.HTTPConnection | None = None
        self.repeated = 0
        """How many requests were sent again without knowing what became of them."""

    def ask(
        self,
        method: str,
        path: str,
        body: str | None = None,
        *,
        holds: float = 0.0,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        """Ask until a gateway answers otherwise than that it cannot now."""
        end = time.monotonic() + GIVE_UP_SECONDS
        data = None if body is None else body.encode()
        while True:
            try:
                if self._connection is None:
                    self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=15 + holds)
                self._connection.request(method, path, data, headers or {})
                answer = self._connection.getresponse()
                found = answer.read().decode()
                if answer.status < 500 and answer.status != 429:
                    return answer.status, found
                if time.monotonic() > end:
                    raise TimeoutError(f"{method} {path}: {answer.status} {found}")
            except (OSError, http.client.HTTPException):
                if time.monotonic() > end + holds:
                    raise
                self.close()
                self.port = next(self._ports)
            self.repeated += 1
            time.sleep(0.05)

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def ask_json(self, method: str, path: str, content: Any = None, *, holds: float = 0.0) -> Any:
        body = None if content is None else json.dumps(content)
        headers = {} if content is None else {"Content-Type": "application/json"}
        status, found = self.ask(method, path, body, holds=holds, headers=headers)
        assert status == 200, (method, path, status, found)
        return json.loads(found)


class Dialect(Protocol):
    """What the dialects have in common: a job is put for an instant, popped, finished or deleted."""

    wire: Wire

    def __init__(self, ports: list[int]) -> None: ...

    def push(self, number: int, topic: str, due: float, body: str, /) -> str:
        """Put the job of this number, due not before an instant in seconds. Returns its id."""
        ...

    def pop(self, topics: list[str]) -> Job | None: ...

    def finish(self, job: Job) -> None: ...

    def delete(self, job_id: str) -> None: ...


class Native:
    """The API of toc: an Idempotency-Key for each submit, leases that are acknowledged."""

    BEFORE = ""
    """What the names of topics begin with."""

    def __init__(self, ports: list[int]) -> None:
        self.wire = Wire(ports)

    def ask(self, method: str, path: str, content: Any = None, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {os.environ['TOC_TOKEN']}"}
        headers |= {} if content is None else {"Content-Type": "application/json"}
        headers |= {} if key is None else {"Idempotency-Key": key}
        body = None if content is None else json.dumps(content)
        status, found = self.wire.ask(method, path, body, holds=10, headers=headers)
        return status, json.loads(found) if found else None

    def push(self, number: int, topic: str, due: float, body: str) -> str:
        at = math.ceil(1000 * due)
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at // 1000))
        task = {"biz_id": f"order-{number}", "action_time": f"{whole}.{at % 1000:03d}Z", "body": body}
        path = f"/v1/topics/{self.BEFORE}{topic}/tasks"
        status, answer = self.ask("POST", path, task, f"{self.BEFORE}{number}")
        assert status == 201, (status, answer)
        job_id: str = answer["job_id"]
        return job_id

    def pop(self, topics: list[str]) -> Job | None:
        wanted = {"max": 1, "wait": 2, "ttr": TTR_SECONDS}
        status, answer = self.ask("POST", f"/v1/topics/{','.join(topics)}:pull", wanted)
        assert status == 200, (status, answer)
        return next((Job(task["lease"], task["body"]) for task in answer["tasks"]), None)

    def finish(self, job: Job) -> None:
        status, answer = self.ask("POST", "/v1/leases:ack", {"lease": job.id})
        assert status in (200, 409), (status, answer)  # 409: it was asked again, and has ended

    def delete(self, job_id: str) -> None:
        status, answer = self.ask("DELETE", f"/v1/tasks/{job_id}")
        assert status == 200, (status, answer)


class Hooks(Native):
    """The API of toc, for topics whose tasks are sent to a receiver (harness.notified)."""

    BEFORE = "hook-"


def _seconds(due: float) -> int:
    """The delay from now, in whole seconds, that ends not before the instant."""
    return max(1, math.ceil(due - time.time()))


class Youzan:
    """The paths of ouqiang/delay-queue."""

    def __init__(self, ports: list[int]) -> None:
        self.wire = Wire(ports)

    def _ask(self, path: str, content: Any, message: str, holds: float = 0.0) -> Any:
        answer = self.wire.ask_json("POST", path, content, holds=holds)
        assert (answer["code"], answer["message"]) == (0, message), (path, content, answer)
        return answer["data"]

    def push(self, number: int, topic: str, due: float, body: str) -> str:
        job: dict[str, Any] = {"topic": topic, "id": f"order-{number}", "body": body}
        job |= {"delay": _seconds(due), "ttr": TTR_SECONDS}
        assert self._ask("/push", job, "添加成功") is None
        return f"order-{number}"

    def pop(self, topics: list[str]) -> Job | None:
        data = self._ask("/pop", {"topic": ",".join(topics)}, "操作成功", holds=178)
        return None if data is None else Job(data["id"], data["body"])

    def finish(self, job: Job) -> None:
        assert self._ask("/finish", {"id": job.id}, "操作成功") is None

    def delete(self, job_id: str) -> None:
        assert self._ask("/delete", {"id": job_id}, "操作成功") is None


class RedisDelayed:
    """Form or query parameters, times in milliseconds; nothing waits."""

    def __init__(self, ports: list[int]) -> None:
        self.wire = Wire(ports)

    def push(self, number: int, topic: str, due: float, body: str) -> str:
        job = {
            "id": number + 1,
            "topic": topic,
            "delayTime": max(1, math.ceil(1000 * (due - time.time()))),
            "ttrTime": 1000 * TTR_SECONDS,
            "message": body,
        }
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        status, found = self.wire.ask("POST", "/delay/add", urlencode(job), headers=kind)
        assert status == 200, (status, found)
        answer = json.loads(found)
        assert answer == {"delayDate": answer["delayDate"], "jodId": number + 1, "topic": topic}, answer
        assert answer["delayDate"] >= 1000 * due - 1, (answer, due)
        return str(number + 1)

    def pop(self, topics: list[str]) -> Job | None:
        for topic in topics:
            answer = self.wire.ask_json("GET", f"/delay/pop?topic={quote(topic)}")
            if answer != {"delayTime": 0, "retryCount": 0, "ttrTime": 0}:
                assert (answer["topic"], answer["ttrTime"]) == (topic, 1000 * TTR_SECONDS), answer
                return Job(answer["id"], answer["message"])
        time.sleep(POLL_SECONDS)
        return None

    def _end(self, verb: str, job_id: str) -> None:
        answer = self.wire.ask("DELETE", f"/delay/{verb}?jobId={job_id}")
        assert answer == (200, "success"), answer

    def finish(self, job: Job) -> None:
        self._end("finish", job.id)

    def delete(self, job_id: str) -> None:
        self._end("delete", job_id)


class DelayTask:
    """The Go service: a moment in whole seconds, nothing waits, what was pulled is done."""

    def __init__(self, ports: list[int]) -> None:
        self.wire = Wire(ports)

    def push(self, _: int, topic: str, due: float, body: str) -> str:
        task = {"topic": topic, "timing_moment": math.ceil(due), "content": body}
        answer = self.wire.ask_json("POST", "/delay/task/add", task)
        task_id = answer["task_id"]
        assert answer == {"dm_error": 0, "error_msg": "操作成功", "task_id": task_id}, answer
        assert task_id // 10_000 == math.ceil(due), (task_id, due)
        return str(task_id)

    def pop(self, topics: list[str]) -> Job | None:
        for topic in topics:
            answer = self.wire.ask_json("POST", "/delay/task/pull", {"topic": topic})
            if answer["dm_error"] == 0:
                return Job("", answer["content"])
            assert (answer["dm_error"], answer["content"]) == (1, ""), answer
        time.sleep(POLL_SECONDS)
        return None

    def finish(self, job: Job) -> None:
        """There is no such call: what was pulled is processed once its answer was written."""

    def delete(self, job_id: str) -> None:
        raise NotImplementedError(f"delay/task has no delete: {job_id}")


class Lmstfy:
    """Namespace ``shop``; data in base64, whole seconds, and an ack is a delete."""

    def __init__(self, ports: list[int]) -> None:
        self.wire = Wire(ports)
        self._headers = {"X-Token": os.environ["LMSTFY_TOKEN"]}

    def push(self, _: int, topic: str, due: float, body: str) -> str:
        query = {"delay": _seconds(due), "ttl": 3600, "tries": 16}
        path = f"/api/shop/{topic}?{urlencode(query)}"
        status, found = self.wire.ask("PUT", path, body, headers=self._headers)
        assert status == 201, (status, found)
        answer = json.loads(found)
        assert answer == {"msg": "published", "job_id": answer["job_id"]}, answer
        return f"{topic}/job/{answer['job_id']}"

    def pop(self, topics: list[str]) -> Job | None:
        path = f"/api/shop/{','.join(topics)}?{urlencode({'timeout': 10, 'ttr': TTR_SECONDS})}"
        status, found = self.wire.ask("GET", path, holds=10, headers=self._headers)
        answer = json.loads(found)
        if status == 404:
            assert answer == {"msg": "no job available"}, answer
            return None
        assert (status, answer["msg"], answer["namespace"]) == (200, "new job", "shop"), answer
        job_id = f"{answer['queue']}/job/{answer['job_id']}"
        return Job(job_id, base64.b64decode(answer["data"], validate=True).decode())

    def finish(self, job: Job) -> None:
        self.delete(job.id)

    def delete(self, job_id: str) -> None:
        answer = self.wire.ask("DELETE", f"/api/shop/{job_id}", headers=self._headers)
        assert answer == (204, ""), answer


DIALECTS: dict[str, type[Dialect]] = {
    "native": Native, "webhook": Hooks, "youzan": Youzan, "redis-delayed": RedisDelayed,
    "delay-task": DelayTask, "lmstfy": Lmstfy,
}  # fmt: skip


def produce(dialect: str, plan_path: str, history: History, ports: list[int]) -> None:
    """Wait for the plan, push every deadline at its time, and delete those that are paid for."""
    while not Path(plan_path).exists():
        time.sleep(0.01)
    plan = json.loads(Path(plan_path).read_text())
    here = threading.local()
    job_ids: dict[int, str] = {}
    known = {number: threading.Event() for number in range(len(plan["deadlines"]))}

    def client() -> Dialect:
        if not hasattr(here, "client"):
            here.client = DIALECTS[dialect](ports)
        made: Dialect = here.client
        return made

    def submit(number: int, deadline: dict[str, Any]) -> None:
        body = json.dumps({name: deadline[name] for name in ("order", "topic")} | {"dialect": dialect})
        before = client().wire.repeated
        job_ids[number] = client().push(number, deadline["topic"], plan["began"] + deadline["due_at"], body)
        repeated = client().wire.repeated > before
        history.write("submitted", deadline["order"], deadline["topic"], repeated=repeated)
        known[number].set()

    def cancel(number: int, deadline: dict[str, Any]) -> None:
        assert known[number].wait(GIVE_UP_SECONDS)
        history.write("asked", deadline["order"], deadline["topic"])
        client().delete(job_ids[number])
        history.write("deleted", deadline["order"], deadline["topic"])

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


def consume(dialect: str, name: str, history: History, ports: list[int]) -> None:
    """Pop, note, finish, until killed; of some it forgets to finish the first that it gets."""
    client = DIALECTS[dialect](ports)
    topics = json.loads(os.environ["REPLAY_TOPICS"])
    seen: set[tuple[str, str]] = set()
    while True:
        asked = time.time()
        job = client.pop(topics)
        if job is None:
            continue
        told = json.loads(job.body)
        order, topic = told["order"], told["topic"]
        told |= {"asked": asked, "repeated": client.wire.repeated, "by": name}
        history.write("started", **told)
        time.sleep(WORK_SECONDS)
        first = (order, topic) not in seen
        seen.add((order, topic))
        if first and zlib.crc32(order.encode()) % FORGET_ONE_IN == 0 and dialect != "delay-task":
            continue
        client.finish(job)
        history.write("finished", order, topic, by=name)


if __name__ == "__main__":
    _, what, which, given, history_path, port_list = sys.argv
    chosen = [int(port) for port in port_list.split(",")]
    (produce if what == "produce" else consume)(which, given, History(history_path), chosen)
