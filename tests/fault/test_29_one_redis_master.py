"""Fault 29, of Redis: one of three masters hangs, dies, refuses connections or is slow."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load
from fault.kit.proxy import Proxy
from harness.system import System

from benchmarks.local import RedisCluster, RedisServer
from toc.model.sharding import BizId
from toc.model.topic import Slot

AWAY_SECONDS = {"hangs": 30, "dies": 12, "refuses connections": 12, "is slow": 12}
SLOW_SECONDS = 0.3
"""Of each answer: longer than any caller waits for one of several nodes."""


class Picked(Load):
    """A load whose tasks all lie in the slots that are told: nobody else's calls wait for them."""

    def __init__(self, system: System, slots: set[Slot], *, rate: float, first: int) -> None:
        super().__init__(system.client, rate=rate, ahead=(0.1, 1.0), fail=0.02, first=0)
        topics = [system.center.catalog.get(name) for name in TOPICS]
        self._biz_ids: Iterator[int] = (
            biz_id
            for biz_id in itertools.count(first)
            if topics[biz_id % len(topics)].slot(BizId.of(biz_id).crc) in slots
        )

    def _submit(self, biz_id: int) -> None:  # noqa: ARG002 - its own are others
        super()._submit(next(self._biz_ids))


@contextmanager
def away(how: str, node: RedisServer, proxy: Proxy) -> Iterator[None]:
    """The node does what is told, until the block is left."""
    if how == "hangs":
        node.pause()
    elif how == "dies":
        node.kill()
    elif how == "is slow":
        proxy.delay(SLOW_SECONDS)
    else:
        proxy.refuse()
    try:
        yield
    finally:
        if how == "hangs":
            node.resume()
        elif how == "dies":
            node.start()
        elif how == "is slow":
            proxy.delay(0.0)
        else:
            proxy.accept()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", AWAY_SECONDS)
def test_what_lies_on_two_masters_does_not_notice_the_third(
    build: Build,
    launch: Callable[..., RedisCluster],
    relay: Callable[[int], Proxy],
    verdict: Verdict,
    how: str,
) -> None:
    line = verdict(29, "one of three Redis masters away", how)
    cluster = launch(RedisCluster)
    node = cluster.nodes[1]
    proxy = relay(node.port)
    node.call("CONFIG", "SET", "cluster-announce-port", proxy.port)
    node.config.append(f"cluster-announce-port {proxy.port}")
    system = build(cluster.url, topic_prepare_timeout=5)
    system.wait(
        # A worker may ask any of them, and would pass by the proxy for as long as nothing breaks.
        lambda: all(f":{proxy.port}@" in str(one.call("CLUSTER", "NODES")) for one in cluster.nodes),
        "all nodes tell by which port it is reached",
        20,
    )
    system.center.queues.nodes.rediscover()
    daemon = system.start()
    system.wait(system.whole, "the index is recorded as whole", 30)
    queues = system.center.queues
    slots = {slot for topic in system.center.store.topics.list() for slot in topic.slots()}
    there = {
        slot for slot in slots if queues.nodes.master(queues.keys(slot).hash_slot).address.port == proxy.port
    }
    with (
        Picked(system, slots - there, rate=35, first=1_000_000) as rest,
        Picked(system, there, rate=15, first=2_000_000) as its_own,
    ):
        time.sleep(6)
        before, usual_slowest, rest.slowest = time.time(), rest.slowest, 0.0
        with system.recorder.fault("redis_down", note=how), away(how, node, proxy):
            time.sleep(AWAY_SECONDS[how])
            meanwhile = time.time()
        time.sleep(5)
        after, slowest = time.time(), rest.slowest
    usual = late(system, rest.job_ids, before - 5, before)
    others = late(system, rest.job_ids, before, after)
    own = late(system, its_own.job_ids, before + 3, meanwhile - 1)
    told = daemon.told()
    line.prove(
        len(daemon.events("index_unreachable")) >= 2 and "index_reachable" in told,  # both processes miss it
        f"away {meanwhile - before:.0f} s; on the others {shown(others)} (before {shown(usual)}), slowest "
        f"submit {slowest * 1000:.0f} ms (before {usual_slowest * 1000:.0f}); its own from the rows "
        f"{shown(own)}",
    )
    # Promised are 10, 100 and 50 ms. A busy machine is slower by itself; who waits for a node, by 500 ms.
    assert at(others, 0.99) <= max(50.0, 3 * at(usual, 0.99))
    assert others[-1] <= max(250.0, 3 * usual[-1])
    assert slowest <= max(0.25, 3 * usual_slowest)
    assert own[-1] < 1000 * (meanwhile - before), "they waited for the node"
    assert middle(own) < 2500
    assert not rest.errors
    assert not its_own.errors
    assert daemon.process.poll() is None
    line.judge(system, within=6, at_most=8)


def late(system: System, job_ids: list[int], since: float, before: float) -> list[float]:
    """By how many milliseconds those started late that were due between two instants, sorted."""
    rows = system.center.store.read(job_ids)
    picked = [one for one in job_ids if since * 1000 <= rows[one].action_time < before * 1000]
    found = system.late(picked)
    assert found, "nothing was due then"
    return found


def shown(sorted_ms: list[float]) -> str:
    p50, p99 = middle(sorted_ms), at(sorted_ms, 0.99)
    return f"{len(sorted_ms)} tasks, late p50 {p50:.1f}, p99 {p99:.1f}, most {sorted_ms[-1]:.1f} ms"


def middle(sorted_ms: list[float]) -> float:
    return at(sorted_ms, 0.5)


def at(sorted_ms: list[float], share: float) -> float:
    return sorted_ms[min(int(len(sorted_ms) * share), len(sorted_ms) - 1)]
