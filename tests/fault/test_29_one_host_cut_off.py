"""Fault 29, of one host alone: it does not reach a server that the others reach, so they take its slots."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import pytest
from fault.conftest import Build, Verdict
from fault.kit.proxy import Proxy
from harness.system import System
from sqlalchemy.engine import make_url

from toc import NewTask
from toc.coordination import cut_off
from toc.coordination.operator import Operator
from toc.dev.local.servers import MariaDB, RedisServer, ZooKeeper
from toc.operate import doctor

MOVED = 20
"""Seconds in which a host's slots are with others: 2 until it says so, 5 until the leader believes it."""


def _through(url: str, proxy: Proxy) -> str:
    return make_url(url).set(port=proxy.port).render_as_string(hide_password=False)


@pytest.mark.parametrize("what", ["database", "redis"])
def test_what_one_host_alone_does_not_reach_is_served_by_others(
    build: Build,
    clean_redis: RedisServer,
    mariadb: MariaDB,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
    verdict: Verdict,
    what: str,
) -> None:
    line = verdict(29, "one host alone is cut off", what)
    with ExitStack() as stack:
        system = build(clean_redis.url, zookeeper=zookeeper.url, cluster=zookeeper_root)
        port = clean_redis.port if what == "redis" else mariadb.port
        proxy = stack.enter_context(Proxy(port))
        stack.callback(proxy.accept)
        if what == "redis":
            own = {"TOC_REDIS_URL": system.settings.need_redis_url().replace(f":{port}", f":{proxy.port}")}
        else:
            urls = [_through(url, proxy) for url in system.settings.database_urls]
            own = {"TOC_DATABASE_URLS": ",".join(urls)}
        daemon = system.start("host-a", processes=1, env=own)
        system.start("host-b", processes=1)
        system.wait(lambda: all(_owned(system, host) for host in ("host-a", "host-b")), "both have slots", 20)
        with system.recorder.fault("store_down"):
            proxy.refuse()
            proxy.cut()
            meanwhile = system.client.submit_many(
                [NewTask("test.sync", biz_id, 0.25 * (biz_id + 1)) for biz_id in range(40)]
            )
            system.wait(lambda: not _owned(system, "host-a"), "host-b has every slot", MOVED)
            said = [each for each in doctor.examine(system.center) if "does not reach" in each.what]
            job_ids = [system.client.submit("test.sync", biz_id=biz_id, delay=1) for biz_id in range(40)]
            system.wait(lambda: not system.pending(job_ids), "all have run", 15)
            late = system.late(job_ids)
            system.wait(lambda: not system.pending(meanwhile), "those due meanwhile have run", 15)
            moved = system.late(meanwhile)[-1] / 1000
        proxy.accept()
        system.wait(lambda: _owned(system, "host-a"), "host-a has slots again", 40)
    told = daemon.log.read_text()
    line.prove(
        "database_away" in told if what == "database" else "index_unreachable" in told,
        f"host-b served all slots while host-a did not reach it: {late[-1]:.0f} ms late at most; "
        f"those due while the slots moved at most {moved:.1f} s",
    )
    print(line.proof)
    assert [(each.part, each.of.startswith("host-a-")) for each in said] == [("workers", True)]
    assert moved < MOVED + line.slack
    assert late[-1] < 500 + 1000 * line.slack
    line.judge(system, within=6)


def _owned(system: System, host: str) -> int:
    """How many slots the host's workers have."""
    zookeeper = system.settings.zookeeper
    assert zookeeper is not None
    with Operator(zookeeper, cluster=system.settings.cluster) as operator:
        return sum(worker.owned for worker in operator.workers() if worker.member.host == host)


def test_a_database_that_no_host_reaches_moves_no_slot(
    build: Build,
    clean_redis: RedisServer,
    mariadb: MariaDB,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
    verdict: Verdict,
) -> None:
    """Not even if one worker alone has tasks, so that it notices long before the others, some of which sweep
    no table either; and if one begins during the outage."""
    line = verdict(29, "no host reaches the database", "most workers are idle, one begins meanwhile")
    with Proxy(mariadb.port) as proxy:
        system = build(
            clean_redis.url, zookeeper=zookeeper.url, cluster=zookeeper_root, databases=1, tables=1
        )
        urls = [_through(url, proxy) for url in system.settings.database_urls]
        own = {"TOC_DATABASE_URLS": ",".join(urls)}
        daemons = [system.start(host, processes=2, env=own) for host in ("host-a", "host-b")]
        system.wait(lambda: all(_owned(system, host) for host in ("host-a", "host-b")), "both have slots", 20)
        time.sleep(3)  # all have told what they reach
        job_ids = system.client.submit_many(
            [NewTask("test.sync", 1, 1 + 0.3 * number) for number in range(60)]  # all of one slot
        )
        with system.recorder.fault("store_down"):
            proxy.stall()
            time.sleep(8)
            killed = daemons[1].workers()[0]
            with system.recorder.fault("kill", pids=[killed]):
                os.kill(killed, signal.SIGKILL)
                time.sleep(12)
        proxy.flow()
        system.wait(lambda: not system.pending(job_ids), "all have run", 30)
        told = [daemon.log.read_text() for daemon in daemons]
        line.prove(
            all("database_away" in each for each in told) and "worker_died" in told[1],
            "both hosts said that it was away; one of their workers was killed",
        )
        print(line.proof)
        line.judge(system, within=6)
        time.sleep(cut_off.APART_SECONDS + 2)  # nor when it is back
        assert not any("worker_cut_off" in daemon.log.read_text() for daemon in daemons)
