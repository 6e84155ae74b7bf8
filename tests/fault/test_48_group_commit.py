"""Fault 48: of many submits one conflicts, is too large or goes to a server that hangs: only it fails."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fault.conftest import Build, Verdict
from fault.kit.doors import p99
from harness.gateway import Gateway, Reply
from harness.patience import until
from harness.system import System

from benchmarks.local import MariaDB
from toc import NewTask
from toc.model.sharding import BizId

IN_FLIGHT = 64
WELL = 48
"""Of them go to the server that is well."""


@pytest.fixture
def two_servers(
    build: Build, mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[System, MariaDB]]:
    """The first database, with topics and tokens, on the server that the test may stop."""
    with MariaDB(tmp_path_factory.mktemp("first"), buffer_pool="64M") as first:
        yield build(database_urls=[first.url, mariadb.url]), first
        first.resume()


class Submitters:
    """Threads that submit, each with a biz_id of its own."""

    def __init__(self, gateway: Gateway, biz_ids: list[int]) -> None:
        self._gateway = gateway
        self._biz_ids = iter(biz_ids)
        self._lock = threading.Lock()

    def run(self, count: int, seconds: float) -> tuple[list[float], Counter[int]]:
        """How long each submit took, and how often each status was answered."""
        took: list[float] = []
        statuses: Counter[int] = Counter()

        def submit() -> None:
            over = time.monotonic() + seconds
            while time.monotonic() < over:
                with self._lock:
                    biz_id = next(self._biz_ids)
                began = time.monotonic()
                reply = self._gateway.submit(biz_id=biz_id)
                took.append(time.monotonic() - began)
                with self._lock:
                    statuses[reply.status] += 1
                time.sleep(0.25)

        with ThreadPoolExecutor(count) as threads:
            for one in [threads.submit(submit) for _ in range(count)]:
                one.result()
        return took, statuses


def test_what_conflicts_is_too_large_or_goes_to_a_server_that_hangs_harms_no_other_submit(
    two_servers: tuple[System, MariaDB], verdict: Verdict
) -> None:
    line = verdict(48, "a conflict, a body that is too large, a server that hangs", f"{IN_FLIGHT} in flight")
    system, hanging = two_servers
    gateway = Gateway(system, env={"TOC_READ_TIMEOUT": "3", "TOC_MAX_BODY": "100000"})
    there = [n for n in range(60_000) if BizId.of(n).crc % 8 % 2 == 1]
    gone = [n for n in range(60_000) if BizId.of(n).crc % 8 % 2 == 0]
    try:
        assert gateway.submit(biz_id=there[0], dedup_key="k", attribute={"a": 1}).status == 201
        gateway.make_token("revoked", "admin")
        gateway.call("DELETE", "/v1/tokens/revoked")
        assert until(lambda: gateway.call("GET", "/v1/topics", token="revoked").status == 401, 5)
        system.client.submit_many([NewTask("test.sync", n, 3600, dedup_key="k") for n in there[-40:-30]])
        well = Submitters(gateway, there[1:])
        usual, _ = well.run(WELL, 1.0)
        job_ids = []
        over = threading.Event()

        def again(**task: Any) -> Counter[int]:
            found: Counter[int] = Counter()
            while not over.is_set():
                found[gateway.submit(biz_id=there[0], **task).status] += 1
                over.wait(0.05)
            return found

        def lose(n: int) -> Reply:
            return gateway.submit(biz_id=gone[n], dedup_key="lost")

        with ThreadPoolExecutor(IN_FLIGHT - WELL) as threads:
            hanging.pause()
            lost = [threads.submit(lose, n) for n in range(12)]
            conflicts = [threads.submit(again, dedup_key="k", attribute={"a": 2}) for _ in range(2)]
            large = [threads.submit(again, body="x" * 100_001) for _ in range(2)]
            took, statuses = well.run(WELL, 4.0)
            over.set()
            kinds = Counter(one.result().body["type"] for one in lost)
            assert set(sum((one.result() for one in conflicts), Counter())) == {409}
            assert set(sum((one.result() for one in large), Counter())) == {413}
        assert set(statuses) == {201}
        assert kinds.keys() <= {"/docs#submit-unknown", "/docs#unavailable"}
        line.prove(
            sum(kinds.values()) == 12,
            f"{sum(kinds.values())} submits to the server that hangs failed; the others p99 "
            f"{1000 * p99(took):.0f} ms, before {1000 * p99(usual):.0f} ms",
        )
        line.within(p99(took), 2 * p99(usual) + 0.25)
        began = time.monotonic()
        refused = gateway.submit(biz_id=gone[50])
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        line.within(time.monotonic() - began, 0.25)
        line.prove(*_each_of_a_batch_has_its_own_outcome(gateway, there[-40:], gone[-20:]))
        ready = gateway.call("GET", "/readyz")
        assert (ready.status, ready.body) == (200, b"ok\ndatabase server 0 is out of reach\n")
        # the table of tokens is away: known tokens hold, and of an unknown one nothing can be said
        assert gateway.call("GET", "/v1/topics", token="toc_unknown").status == 503
        assert gateway.call("GET", "/v1/topics", token="nonsense").status == 401
        hanging.resume()
        assert until(lambda: gateway.submit(biz_id=gone[60]).status == 201, 30)
        assert until(lambda: gateway.call("GET", "/v1/topics", token="toc_unknown").status == 401, 10)
        job_ids = [gateway.submit(biz_id=gone[n], dedup_key="lost").body["job_id"] for n in range(12)]
        assert len(set(job_ids)) == 12
        for n in range(12):
            assert len(system.center.find(biz_id=gone[n])) == 1, "stored once, whatever was answered"
        line.tasks = statuses[201] + 12
    finally:
        hanging.resume()
        gateway.stop()


def _each_of_a_batch_has_its_own_outcome(
    gateway: Gateway, there: list[int], gone: list[int]
) -> tuple[bool, str]:
    """Of one request ten conflict, and some go to the server that hangs."""
    tasks = [
        {"biz_id": n, "delay": 3600, "dedup_key": "k", "attribute": {"n": n}, "on_conflict": "error"}
        for n in sorted(there + gone)
    ]
    reply = gateway.call("POST", "/v1/topics/test.sync/tasks:batch", {"tasks": tasks})
    assert reply.status == 200, reply
    found = Counter(
        (task["biz_id"] in gone, one["problem"]["status"] if "problem" in one else 201)
        for task, one in zip(tasks, reply.body["tasks"], strict=True)
    )
    proof = "of 60 in one request 20 went to the server that hangs, 10 conflicted, 30 were stored"
    return found == {(True, 503): 20, (False, 409): 10, (False, 201): 30}, proof
