"""Fault 21: slot_amount grows while tasks are submitted, cancelled and run."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load, tasks

AMOUNTS = (8, 16)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["clean_redis", "clean_cluster"], ids=["one Redis", "Redis Cluster"])
def test_slots_doubled_under_load_lose_and_double_nothing(
    build: Build, index: str, verdict: Verdict, request: pytest.FixtureRequest
) -> None:
    line = verdict(21, "slot_amount raised while live", f"4, 8, 16 slots, {request.node.callspec.id}")
    system = build(request.getfixturevalue(index).url, hosts=True, slots=4)
    for host in ("host-a", "host-b"):
        system.start(host, processes=1)
    topics = system.center.store.topics
    far = system.client.submit_many(tasks(500, ahead=(8.0, 16.0), first=500_000))
    with Load(system.client, rate=120, ahead=(0.2, 4.0)) as load:
        for amount in AMOUNTS:
            load.more(300)
            with system.recorder.fault("move", note=f"{amount} slots"):
                for topic in TOPICS:
                    topics.alter(topic, slot_amount=amount)
        load.more(300)
    rows = system.center.store.read([*load.job_ids, *far])
    stamped = {amount: sum(row.slot_amount == amount for row in rows.values()) for amount in (4, 8, 16)}
    line.prove(
        all(count > 100 for count in stamped.values()),
        "tasks stamped with " + ", ".join(f"{amount} slots: {count}" for amount, count in stamped.items()),
    )
    judged = line.judge(system, within=10)
    assert not judged.duplicates
    assert not load.errors
