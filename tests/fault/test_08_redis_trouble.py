"""Faults 8 and 9: Redis refuses, for a while, or its replies never arrive."""

import pytest
from fault.conftest import Case
from fault.kit.load import Load, tasks
from fault.kit.servers import errors_told, info, pause_replication, promote
from harness.patience import until

from benchmarks.local import RedisServer
from toc.index.calls import Script

# Fault 8: scripts forgotten, masters demoted, data being loaded, snapshots that fail.


@pytest.mark.slow
def test_every_passing_refusal_of_redis_is_outlived(case: Case) -> None:
    line = case.verdict(8, "NOSCRIPT, READONLY, LOADING, MISCONF")
    redis = case.launch(
        RedisServer,
        aof=False,
        # "save": refuses writes when that fails. The other: answers while it loads, if only that it does.
        config=["enable-debug-command local", "save 3600 1", "loading-process-events-interval-bytes 1024"],
    )
    redis.call("DEBUG", "POPULATE", 500, "ballast", 100)
    system = case.build(redis.url)
    daemon = system.start()
    system.client.submit_many(tasks(200, ahead=(300, 400), first=5000))
    told = errors_told([])
    with Load(system.client, rate=150, ahead=(0.1, 1.0)) as load:
        load.more(50)
        with system.recorder.fault("other", note="SCRIPT FLUSH"):
            for _ in range(10):
                redis.call("SCRIPT", "FLUSH")
                load.more(10)
        with system.recorder.fault("redis_down", note="demoted"):
            pause_replication(redis)
            load.more(60)
            promote(redis)
        with system.recorder.fault("redis_down", note="cannot save"):
            (redis.directory / "dump.rdb").mkdir()  # nothing can be renamed to that
            redis.call("BGSAVE")
            assert until(lambda: info(redis, "persistence")["rdb_last_bgsave_status"] == "err", 60)
            load.more(60)
            (redis.directory / "dump.rdb").rmdir()
            redis.call("BGSAVE")
            assert until(lambda: info(redis, "persistence")["rdb_last_bgsave_status"] == "ok", 60)
        load.more(30)
        told += errors_told([redis])
        with system.recorder.fault("redis_down", note="loading"):
            redis.stop()
            redis.config.append("key-load-delay 5000")  # microseconds a key
            redis.start()
            redis.config.pop()
        told += errors_told([redis])
        load.more(30)
    line.prove(
        told["NOSCRIPT"] > 10 and told["READONLY"] > 10 and told["MISCONF"] > 10 and told["LOADING"] > 0,
        "answered " + ", ".join(f"{told[name]} {name}" for name in sorted(told) if told[name]),
    )
    assert not load.errors
    line.within(load.slowest, 2)
    assert daemon.process.poll() is None
    line.judge(system, within=8)


# Fault 9: replies of Redis that never arrive, above all those that say what a prepare has taken.

PREPARE = Script("prepare").sha.encode()


@pytest.mark.parametrize(
    ("what", "match", "probability", "count"),
    [
        ("prepare, 10 %", PREPARE, 0.1, 1500),
        pytest.param("every call, 1 %", b"", 0.01, 10_000, marks=pytest.mark.slow),
    ],
)
def test_a_lost_reply_costs_neither_a_task_nor_its_lease(
    case: Case, what: str, match: bytes, probability: float, count: int
) -> None:
    line = case.verdict(9, "reply to prepare lost", what)
    proxy = case.relay(case.redis.port, seed=9)
    system = case.build(topic_prepare_timeout=30)
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
