"""Fault 39: somebody else writes into Redis under the names of toc's queues."""

from __future__ import annotations

import time
from itertools import cycle

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load
from harness.patience import until
from harness.system import System

from benchmarks.local import RedisServer
from toc.model.topic import Slot
from toc.operate import doctor

SLOTS = 8
BROKEN = (0, 4)
"""Of each topic: a quarter of all slots."""
STRAYS = ("abc", "-1", "", "1" + "0" * 30, "\0", "007", "\N{ARABIC-INDIC DIGIT THREE}")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_slots_with_keys_of_another_type_run_from_the_rows_and_the_others_as_ever(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(39, "keys of a wrong type, members that are no ids")
    redis = clean_redis
    system = build(redis.url, slots=SLOTS, topic_prepare_timeout=5)
    daemon = system.start()
    system.wait(system.whole, "the index is recorded as whole", 30)
    broken = [Slot(topic, number) for topic in TOPICS for number in BROKEN]
    with Load(system.client, rate=60, ahead=(0.1, 1.0), fail=0.02) as load:
        time.sleep(3)
        before = time.time()
        with system.recorder.fault("redis_loss", note="keys of a wrong type"):
            keys = _break(system, redis, broken)
            for slot in (Slot(topic, number) for topic in TOPICS for number in (1, 2)):
                for member in STRAYS:
                    redis.call("ZADD", system.center.queues.keys(slot).store, "1", member)
            found = until(lambda: "slots_broken" in daemon.told(), 15)
            time.sleep(2)
            settled = time.time()
            time.sleep(6)
            meanwhile = time.time()
            said = [line for line in doctor.examine(system.center) if line.of in keys]
            redis.call("DEL", *keys.values())
        until(lambda: "slots_mended" in daemon.told(), 15)
        system.wait(system.whole, "all is whole", 30)
        after = time.time()
        time.sleep(3)
    rows = system.center.store.read(load.job_ids).values()
    topics = {topic.biz_type: topic for topic in system.center.store.topics.list()}
    slots = {row.job_id: topics[row.biz_type].slot(row.slot_crc, row.slot_amount) for row in rows}
    own, others = (
        system.late([one for one in slots if (slots[one] in broken) == inside], settled, meanwhile)
        for inside in (True, False)
    )
    line.prove(
        found and len(said) == len(keys) and all(keys[each.of] in each.what for each in said),
        f"{len(keys)} keys of a wrong type, each named by doctor; from the rows: {own}; others: {others}",
    )
    strays = daemon.told().count("orphan_dropped")
    line.prove(strays >= 6, f"{strays} times members that are no ids were dropped")
    usual = system.late(since=before - 2, before=before)
    assert own.most < 2500, "they waited for their key"
    assert others.p50 <= usual.p50 + 50
    assert system.late(since=after, before=after + 2).p50 <= usual.p50 + 50
    assert "prepare_failed" not in daemon.told(), "said once, not at each round"
    assert not load.errors
    assert daemon.process.poll() is None
    line.judge(system, within=6, at_most=8)


def test_a_topic_whose_keys_are_forbidden_makes_no_task_of_another_late(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    """Somebody grants keys by the names of topics, and forgets a new topic."""
    line = verdict(39, "the account may not touch a topic's keys")
    redis = clean_redis
    system = build(redis.url)
    daemon = system.start()
    system.wait(system.whole, "the index is recorded as whole", 30)
    keys = ["~*toc_owner", "~*test.sync_*", "~*test.async_*"]
    with (
        Load(system.client, rate=40, ahead=(0.1, 0.5), topics=("test.sync", "test.async")) as rest,
        Load(system.client, rate=20, ahead=(0.1, 0.5), topics=("test.batch",), first=2_000_000) as its_own,
    ):
        rest.more(40)
        before = len(rest.job_ids)
        with system.recorder.fault("redis_down", note="NOPERM"):
            redis.call("ACL", "SETUSER", "default", "resetkeys", *keys)
            try:
                assert until(lambda: "slots_broken" in daemon.told(), 15)
                rest.more(80)
            finally:
                redis.call("ACL", "SETUSER", "default", "~*")
        during = rest.job_ids[before:]
        assert until(lambda: "slots_mended" in daemon.told(), 15)
    system.wait(lambda: not system.pending(rest.job_ids + its_own.job_ids), "all have run", 30)
    late = system.late(during)
    line.prove(
        "NOPERM" in daemon.told(),
        f"others meanwhile: {late}",
    )
    assert "index_unreachable" not in daemon.told(), "Redis answers"
    line.on_time(late, p50=10)
    line.judge(system, within=6)


def _break(system: System, redis: RedisServer, slots: list[Slot]) -> dict[str, str]:
    """Let each slot have a key of another type, each time of another kind; the keys by their slot."""
    names = cycle(("store", "prepare", "dead", "claims", "generation"))
    keys = {}
    for slot, name in zip(slots, names, strict=False):
        key = keys[str(slot)] = getattr(system.center.queues.keys(slot), name)
        redis.call("DEL", key)
        redis.call(*(("LPUSH", key, "other") if name == "generation" else ("SET", key, "other")))
    return keys


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_clusters_on_one_redis_and_namespace_are_told_and_lose_nothing(
    build: Build, database_prefix: str, verdict: Verdict
) -> None:
    line = verdict(39, "two clusters on one Redis and namespace")
    first = build()
    one = first.start("host-a", processes=1)
    first.wait(first.whole, "the index is recorded as whole", 30)
    second = build(database_prefix=f"{database_prefix}b_")
    other = second.start("host-b", processes=1)
    with (
        Load(first.client, rate=40, ahead=(0.1, 1.0), fail=0.02) as ours,
        Load(second.client, rate=40, ahead=(0.1, 1.0), fail=0.02, seed=1) as theirs,
    ):
        began = time.time()
        time.sleep(8)
        until(lambda: "index_not_ours" in other.told(), 15)
        told = other.told()
        said = [
            [each.what for each in doctor.examine(system.center) if "another cluster" in each.what]
            for system in (first, second)
        ]
        meanwhile = time.time()
        usual, without = (each.late(since=began, before=meanwhile - 2) for each in (first, second))
    line.prove(
        "index_not_ours" in told,
        f"the second told; the first's {usual}; the other's, from the rows, {without}",
    )
    assert [len(lines) for lines in said] == [0, 1], said
    assert "orphan_dropped" not in told, "it took what is the first's"
    assert without.most < 2500
    assert not ours.errors
    assert not theirs.errors
    line.judge(first, within=6)
    one.stop()
    with Load(second.client, rate=40, ahead=(0.1, 1.0), seed=2, first=3_000_000):
        second.wait(lambda: "index_ours" in other.told(), "the other one has the index", 30)
        second.wait(second.whole, "and it is whole", 30)
    line.judge(second, within=6)
