"""Fault 9: replies of Redis that never arrive, above all those that say what a prepare has taken."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks
from fault.kit.proxy import Proxy

from benchmarks.local import RedisServer
from toc.index.calls import Script

PREPARE = Script("prepare").sha.encode()


@pytest.mark.parametrize(
    ("what", "match", "probability", "count"),
    [
        ("prepare, 10 %", PREPARE, 0.1, 1500),
        pytest.param("every call, 1 %", b"", 0.01, 10_000, marks=pytest.mark.slow),
    ],
)
def test_a_lost_reply_costs_neither_a_task_nor_its_lease(
    build: Build,
    clean_redis: RedisServer,
    relay: Callable[..., Proxy],
    verdict: Verdict,
    what: str,
    match: bytes,
    probability: float,
    count: int,
) -> None:
    line = verdict(9, "reply to prepare lost", what)
    proxy = relay(clean_redis.port, seed=9)
    system = build(topic_prepare_timeout=30)
    seconds = 2 + count / 1000
    with system.recorder.fault("other", note="replies are lost"):
        system.client.submit_many(tasks(count, ahead=(2.0, 2.0 + seconds), fail=0.02))
        # The workers alone suffer; the test's own calls go straight to the server.
        proxy.eat(match, count=None, probability=probability, quiet=0.005)
        daemon = system.start(env={"TOC_REDIS_URL": f"redis://127.0.0.1:{proxy.port}"})
        with Load(system.client, rate=100, ahead=(0.1, 1.0)) as load:
            load.more(int(90 * seconds))
            # A busy machine takes many at a time: there are fewer replies to lose.
            system.wait(lambda: proxy.stats.eaten > 20, "many replies were eaten", 60)
    eaten = proxy.stats.eaten
    line.prove(
        eaten > 20 and "prepare_failed" in daemon.log.read_text(),
        f"{eaten} of {proxy.stats.matched} replies eaten",
    )
    # Far below prepare_timeout: what a lost reply had taken is adopted, not left until its lease ends.
    line.judge(system, within=8)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3, 12])
def test_what_a_redis_that_hung_executes_when_nobody_waits_any_more_is_found(
    build: Build, launch: Launch, verdict: Verdict, seconds: int
) -> None:
    line = verdict(9, "Redis hangs (SIGSTOP)", f"{seconds} s")
    redis = launch(RedisServer)
    system = build(redis.url, topic_prepare_timeout=30)
    daemon = system.start()
    # Many fall due while it hangs: each prepare that waits in its sockets then takes some.
    system.client.submit_many(tasks(1500, ahead=(0.5, 3.0 + seconds), fail=0.05))
    with Load(system.client, rate=50, ahead=(0.1, 1.0)) as load:
        load.more(50)
        with system.recorder.fault("redis_down"):
            redis.pause()
            time.sleep(seconds)
            redis.resume()
        load.more(50)
    refused = daemon.log.read_text().count("prepare_failed")
    line.prove(refused, f"prepare failed {refused} times, the slowest submit took {load.slowest:.1f} s")
    assert not load.errors
    line.judge(system, within=8)
