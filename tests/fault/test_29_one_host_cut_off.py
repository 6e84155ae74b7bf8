"""Fault 29, of one host alone: what does not reach a server that the others reach keeps its slots until a
person drains it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from fault.conftest import Build, Verdict
from fault.kit.owners import operator_of
from fault.kit.proxy import Proxy, through
from harness.system import System

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask
from toc.operate import doctor


@pytest.mark.parametrize("what", ["database", pytest.param("redis", marks=pytest.mark.slow)])
def test_a_host_that_alone_does_not_reach_a_server_is_named_and_keeps_its_slots_until_it_is_drained(
    build: Build, clean_redis: RedisServer, mariadb: MariaDB, verdict: Verdict, what: str
) -> None:
    line = verdict(29, "one host alone is cut off", what)
    with ExitStack() as stack:
        system = build(hosts=True)
        proxy = stack.enter_context(Proxy(clean_redis.port if what == "redis" else mariadb.port))
        stack.callback(proxy.accept)
        own = {"TOC_REDIS_URL": f"redis://127.0.0.1:{proxy.port}"}
        if what == "database":
            own = {"TOC_DATABASE_URLS": through(proxy, mariadb.url)}
        daemon = system.start("host-a", processes=1, env=own)
        system.start("host-b", processes=1)
        system.wait(lambda: all(_owned(system, host) for host in ("host-a", "host-b")), "both have slots", 20)
        owned = _owned(system, "host-a")
        with system.recorder.fault("store_down"):
            proxy.refuse()
            meanwhile = system.client.submit_many(
                [NewTask("test.sync", biz_id, 0.25 * (biz_id + 1)) for biz_id in range(40)]
            )
            said = system.wait(lambda: _named(system), "doctor names it", 30)
            assert _owned(system, "host-a") == owned
            operator = stack.enter_context(operator_of(system))
            operator.want("drain", "host-a", by="ann")
            system.wait(lambda: not _owned(system, "host-a"), "host-b has every slot", 20)
            job_ids = [system.client.submit("test.sync", biz_id=biz_id, delay=1) for biz_id in range(40)]
            system.wait(lambda: not system.pending([*job_ids, *meanwhile]), "all have run", 30)
        proxy.accept()
        operator.unwant("drain", "host-a")
        system.wait(lambda: _owned(system, "host-a"), "host-a has slots again", 40)
    told = daemon.log.read_text()
    line.prove(
        "database_away" in told if what == "database" else "index_unreachable" in told,
        "doctor named host-a, which kept its slots; host-b served all once it was drained",
    )
    assert [each.of.startswith("host-a-") for each in said] == [True]
    line.judge(system, within=6)


def _named(system: System) -> list[doctor.Line]:
    """What doctor says of workers that do not reach a server."""
    return [each for each in doctor.examine(system.center) if "does not reach" in each.what]


def _owned(system: System, host: str) -> int:
    """How many slots the host's workers have."""
    with operator_of(system) as operator:
        return sum(worker.owned for worker in operator.workers() if worker.member.host == host)
