"""One host is cut off from Redis while another one is not: leases on rows keep them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fault.kit.proxy import Proxy
from harness.system import System

from benchmarks.local import RedisServer
from toc import NewTask, TaskStatus
from toc.coordination.operator import Operator
from toc.index.messages import Peek


class Split:
    """Two hosts; ``host-a`` reaches Redis through a proxy that can be cut."""

    def __init__(self, system: System, proxy: Proxy) -> None:
        self.system = system
        self.proxy = proxy
        self.system.create_topics(prepare_timeout=3, backoff_base=0.1)
        self.url = str(system.settings.redis_url).replace(f":{proxy.target}", f":{proxy.port}")
        """By which host-a reaches Redis."""
        system.start("host-a", processes=1, env={"TOC_REDIS_URL": self.url})

    def cut(self) -> None:
        """Host-a loses Redis; returns when it knows."""
        self.proxy.refuse()
        self.proxy.cut()
        self.system.wait(lambda: self.logged("index_unreachable"), "host-a knows", 10)

    def join(self) -> None:
        """Another host takes every slot, host-a is drained."""
        self.system.start("host-b", processes=1)
        with self.operator() as operator:
            operator.drain("host-a", by="test")

    def operator(self) -> Operator:
        zookeeper = self.system.settings.zookeeper
        assert zookeeper is not None
        return Operator(zookeeper, cluster=self.system.settings.cluster)

    def given_back(self, host: str) -> int:
        """How many timed-out entries the host has put back into their StoreQueues."""
        (told,) = (daemon.log.read_text() for daemon in self.system.daemons if daemon.host == host)
        lines = (json.loads(line) for line in told.splitlines() if '"reclaimed"' in line)
        return sum(line["tasks"] for line in lines)

    def logged(self, event: str) -> bool:
        return f'"{event}"' in self.system.daemons[0].log.read_text()


@pytest.fixture
def split(hosts: System, clean_redis: RedisServer) -> Iterator[Split]:
    with Proxy(clean_redis.port) as proxy:
        yield Split(hosts, proxy)
        proxy.accept()  # or its worker waits in vain to move what it has finished
        hosts.stop()


def test_a_try_whose_worker_lost_redis_is_not_run_again_by_the_next_owner(split: Split) -> None:
    """Its PrepareQueue entry times out, since nobody keeps it alive; its lease does not."""
    center, enough = split.system.center, split.system.directory / "enough"
    job_ids = center.submit_many(
        [NewTask("test.sync", n, 0.5, attribute={"until": str(enough)}) for n in range(3)]
    )
    split.system.wait(lambda: len(split.system.history()) == 3, "they run on host-a", 10)
    split.cut()
    split.join()
    other = center.submit("test.sync", biz_id=50, delay=1)
    split.system.wait(lambda: _status(split, other) == TaskStatus.PROCESSED, "host-b works", 15)
    split.system.wait(lambda: split.given_back("host-b") >= 3, "host-b has found the entries", 15)
    enough.touch()
    split.system.wait(
        lambda: all(_status(split, job_id) == TaskStatus.PROCESSED for job_id in job_ids), "ended", 20
    )
    assert split.system.not_run_once(job_ids) == {}
    assert {split.system.row(job_id).crashes for job_id in job_ids} == {0}


@pytest.mark.slow
def test_a_try_whose_entry_redis_lost_is_not_run_again_by_the_next_owner(
    split: Split, clean_redis: RedisServer
) -> None:
    """The sweep puts it into the StoreQueue again, where host-b finds it while host-a still runs it."""
    center, system = split.system.center, split.system
    job_ids = center.submit_many([NewTask("test.sync", n, 0.5, attribute={"sleep": 12}) for n in range(3)])
    system.wait(lambda: len(system.history()) == 3, "they run on host-a", 10)
    split.join()
    other = center.submit("test.sync", biz_id=50, delay=0.5)
    system.wait(lambda: _status(split, other) == TaskStatus.PROCESSED, "host-b works", 15)
    assert not any(_status(split, job_id) for job_id in job_ids), "host-a is still running them"
    clean_redis.call("FLUSHALL")
    found = {slot for topic in center.store.topics.list() for slot in topic.slots()}
    system.wait(
        lambda: any(isinstance(p, Peek) and p.store for p in center.queues.peek(found).values()), "swept", 10
    )
    system.wait(lambda: all(_status(split, job_id) for job_id in job_ids), "ended", 30)
    assert split.system.not_run_once(job_ids) == {}


def _status(split: Split, job_id: int) -> int:
    return split.system.row(job_id).status
