"""slot_amount is lowered while tasks come and go: nothing is lost or run twice, old slots are given up."""

from __future__ import annotations

import time

from fault.kit.load import TOPICS as LOADED
from fault.kit.load import Load
from harness.system import System

from toc import TaskStatus
from toc.coordination.operator import Operator
from toc.model.errors import IndexUnavailable
from toc.model.task import TaskRow
from toc.model.topic import Slot, Topic
from toc.operate import admin


def _topic(system: System, name: str = "test.sync") -> Topic:
    topic = system.center.store.topics.get(name)
    assert topic is not None
    return topic


def _settled(system: System) -> bool:
    return not any(_topic(system, name).former_slots for name in LOADED)


def test_halving_twice_and_doubling_under_load_loses_nothing_and_runs_nothing_twice(cluster: System) -> None:
    cluster.create_topics(slots=16, backoff_base=0.2)
    cluster.start("host-a", processes=1)
    cluster.start("host-b", processes=1)
    store, center = cluster.center.store, cluster.center
    far = [cluster.client.submit("test.sync", biz_id=n, delay=3600) for n in range(64)]
    with Load(cluster.client, rate=100, ahead=(0.2, 3.0)) as load:

        def more() -> None:
            count = len(load.job_ids)
            cluster.wait(lambda: len(load.job_ids) > count + 100, "the load goes on", 30)

        more()
        for amount in (8, 4):
            for name in LOADED:
                store.topics.alter(name, slot_amount=amount)
            more()
        assert {_topic(cluster, name).former_slots for name in LOADED} == {16}
        assert admin.pending_by_slots(store, _topic(cluster)).tasks[16] >= 64  # those of the far future
        views = admin.slot_views(store, center.queues, [], topic="test.sync")
        assert [view.going for view in views] == [False] * 4 + [True] * 12
        for job_id in far:
            cluster.client.cancel(job_id)
        cluster.wait(lambda: _settled(cluster), "the former slots are given up", 30)
        more()
        for name in LOADED:
            store.topics.alter(name, slot_amount=8)
        more()
    cluster.wait(lambda: not cluster.pending(load.job_ids), "everything has ended", 30)
    verdict = cluster.verdict()
    assert verdict.clean, f"{verdict}\n{cluster.logs()}"
    assert not verdict.duplicates
    assert verdict.counts["acknowledged"] > 600
    with Operator(
        cluster.settings.zookeeper or "", cluster=cluster.settings.cluster, connect_timeout=5
    ) as operator:
        cluster.wait(
            lambda: (
                {(row.topic, row.number) for row in operator.slots() if row.owner and row.topic in LOADED}
                == {(name, number) for name in LOADED for number in range(8)}
            ),
            "eight slots of each are owned",
            10,
        )
    for peek in center.queues.peek([Slot(name, n) for name in LOADED for n in range(8, 16)]).values():
        assert not isinstance(peek, IndexUnavailable)
        assert (peek.store, peek.prepared) == (0, 0)


def test_what_comes_late_or_is_redriven_opens_its_slots_again(system: System) -> None:
    """A submit that had read the topic long ago, and a dead task of then."""
    store, center = system.center.store, system.center
    system.create_topics(slots=8, retries=1)
    system.start(processes=1)
    crc = {n: center.submit("test.sync", biz_id=n, delay=3600) for n in range(64)}
    rows = {n: row for n, job_id in crc.items() if (row := store.get(job_id)) and row.slot_crc % 8 >= 2}
    late, doomed = list(rows.values())[:2]
    dead = center.submit("test.sync", biz_id=doomed.biz_id, delay=0.1, attribute={"fail": 1})
    system.wait(lambda: system.row(dead).status == TaskStatus.DEAD, "it is dead", 10)
    for job_id in crc.values():
        center.cancel(job_id)
    store.topics.alter("test.sync", slot_amount=2)
    system.wait(lambda: not _topic(system).former_slots, "six slots are given up", 20)

    going = [Slot("test.sync", number) for number in range(2, 8)]
    system.wait(lambda: not any(center.queues.claims(going).values()), "nobody holds them", 10)
    now = center.clock.now_ms()
    stale = late._replace(
        job_id=late.job_id ^ 1, status=0, action_time=now + 500, next_time=now + 500, slot_amount=8
    )
    assert isinstance(stale, TaskRow)
    job_id = store.insert(stale)
    began = time.monotonic()
    system.wait(lambda: _topic(system).former_slots == 8, "its slots are open again", 10)
    system.wait(lambda: system.row(job_id).status == TaskStatus.PROCESSED, "what came late has run", 10)
    print(f"a late task ran after {time.monotonic() - began:.1f} s")

    system.wait(lambda: not _topic(system).former_slots, "they are given up once more", 20)
    again = admin.redrive(store, center.queues, store.topics.list(), [dead], now_ms=center.clock.now_ms())
    assert again.tasks == 1
    assert _topic(system).former_slots == 8  # at once: nobody waits for the sweep
    system.wait(lambda: len(system.starts(dead)) == 2, "the dead one has run again", 10)


def test_a_backlog_is_resumed_at_the_rate_asked_for_the_oldest_first_and_then_all_is_as_ever(
    system: System,
) -> None:
    store, center = system.center.store, system.center
    system.create_topics(slots=4)
    store.topics.alter("test.async", paused=True)
    system.start(processes=2)
    job_ids = [center.submit("test.async", biz_id=n, delay=0.2 + n / 100) for n in range(150)]
    last = center.submit("test.sync", biz_id=1, delay=2.0)
    system.wait(lambda: system.row(last).status == TaskStatus.PROCESSED, "all are due", 10)
    admin.resume_topic(store, "test.async", rate=50, now_ms=center.clock.now_ms())
    fresh = center.submit("test.async", biz_id=7, delay=0.5)
    system.wait(lambda: not system.pending([*job_ids, fresh]), "all have run", 30)
    starts = [event for event in system.history() if event.event == "start" and event.job_id != last]
    assert len(starts) == 151
    seconds = (starts[-1].at - starts[0].at) / 1e9
    assert seconds > 150 / 50 * 0.7, f"{seconds:.1f} s for 150 tasks at 50 a second"
    for pid in {event.pid for event in starts}:  # each has slots of its own, and starts its oldest first
        order = [
            job_ids.index(event.job_id) for event in starts if event.pid == pid and event.job_id != fresh
        ]
        places = [sorted(order).index(number) for number in order]
        assert max(abs(place - number) for place, number in enumerate(places)) < 40, order
    began = time.monotonic()
    many = [center.submit("test.async", biz_id=n, delay=0.2) for n in range(150)]
    system.wait(lambda: not system.pending(many), "what is due later runs at once", 10)
    print(f"150 tasks at 50 a second took {seconds:.1f} s; 150 later ones {time.monotonic() - began:.1f} s")
