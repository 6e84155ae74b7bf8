"""Fault 7: hash slots of a Redis Cluster move from node to node while tasks run."""

from __future__ import annotations

import random
import time

import pytest
from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks
from fault.kit.servers import Reshard, errors_told
from harness.system import System

from benchmarks.local import RedisCluster


def hash_slots(system: System) -> list[int]:
    """The hash slots of all slots of the test topics."""
    topics = system.center.store.topics.list()
    slots = [topic.slot(number) for topic in topics for number in range(topic.slot_amount)]
    return sorted({system.center.queues.keys(slot).hash_slot for slot in slots})


@pytest.mark.slow
def test_moving_slots_of_the_cluster_under_load_loses_and_doubles_nothing(
    build: Build, launch: Launch, verdict: Verdict
) -> None:
    line = verdict(7, "cluster reshard: MOVED, ASK, TRYAGAIN")
    cluster = launch(RedisCluster)
    system = build(cluster.url, topic_prepare_timeout=5)
    reshard = Reshard(cluster)
    dice = random.Random(7)
    system.start()
    system.client.submit_many(tasks(1500, ahead=(0.5, 3.0), fail=0.1))
    wanted = dice.sample(hash_slots(system), 12)
    with Load(system.client, rate=100, ahead=(0.1, 2.0)) as load, system.recorder.fault("move"):
        for number in wanted:
            target = dice.choice([n for n in range(3) if n != reshard.owner(number)])
            source = reshard.begin(number, target)
            # Half-way some keys are here, some there: who asks for both has to wait (TRYAGAIN). When all are
            # there but nobody has said so, one is sent on (ASK). Each state lasts, for requests to meet it.
            reshard.carry(number, source, target, limit=1)
            time.sleep(0.02)
            reshard.carry(number, source, target)
            time.sleep(0.02)
            reshard.end(number, source, target)
    told = errors_told(cluster.nodes)
    line.prove(
        told["MOVED"] and told["ASK"] and told["TRYAGAIN"],
        f"{reshard.moved_slots} slots moved; answered {told['MOVED']} MOVED, {told['ASK']} ASK, "
        f"{told['TRYAGAIN']} TRYAGAIN",
    )
    assert not load.errors
    line.judge(system, within=3)
