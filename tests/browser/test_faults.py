"""Row 52 of the faults, in a real browser: what pages say while a server hangs, and once it is back."""

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.chromium import Visitor
from harness.gateway import Gateway
from harness.machine import Machine
from harness.patience import until
from harness.system import small_system
from playwright.sync_api import Browser

from benchmarks.local import MariaDB, RedisServer, ZooKeeper
from toc import NewTask, TimeoutCenter
from toc.model.sharding import BizId
from toc.model.verdict import Failure

PAGES = (
    "", "/health", "/topics", "/topics/test.sync", "/tasks", "/running", "/late", "/dead", "/workers",
    "/schedules", "/targets", "/tokens", "/audit",
)  # fmt: skip
SEARCHES = {"/tasks"}
"""Pages that need every database server."""
WELL = 0.3
"""Seconds within which 95 of 100 pages are there while all servers answer."""
AWAY = WELL + 2 * 1.5
"""Seconds within which each page is there while one hangs: a topic's waits twice for Redis."""
UNREAD = re.compile(r"Slots not read\s+[1-9]")


class Cluster(NamedTuple):
    """A gateway and the servers of its system, which the test may stop."""

    gateway: Gateway
    redis: RedisServer
    zookeeper: ZooKeeper
    first: MariaDB
    second: MariaDB


@pytest.fixture
def cluster(tmp_path: Path, launch: Any) -> Iterator[Cluster]:
    """A system of four servers of its own, with a gateway."""
    redis, zookeeper = launch(RedisServer), launch(ZooKeeper)
    first, second = launch(MariaDB), launch(MariaDB)
    with small_system(
        tmp_path, redis, first, "toc_", database_urls=[first.url, second.url], zookeeper=zookeeper.url,
        read_timeout=2, connect_timeout=1,
    ) as system:  # fmt: skip
        system.create_topics()
        gateway = Gateway(system)
        yield Cluster(gateway, redis, zookeeper, first, second)
        for server in (redis, zookeeper, first, second):
            server.resume()
        gateway.stop()


class Seen(NamedTuple):
    """What a page says, and after how many seconds."""

    status: int
    text: str
    seconds: float


def seen(visitor: Visitor) -> dict[str, Seen]:
    """What each page says."""
    found = {}
    for path in PAGES:
        began = time.monotonic()
        status = visitor.go(path)
        found[path] = Seen(status, visitor.text, time.monotonic() - began)
        print(f"{path or '/'} {status} {found[path].seconds:.2f} s")
    return found


def failed(pages: dict[str, Seen]) -> set[str]:
    return {path for path, one in pages.items() if one.status != 200}


def in_time(pages: Mapping[str, Seen], machine: Machine, bound: float) -> None:
    """In a run that measures, each page was there in time."""
    bound += machine.slack
    assert {path: one.seconds for path, one in pages.items() if one.seconds > bound} == {}


def fill(center: TimeoutCenter, count: int) -> list[int]:
    """Store so many tasks that wait, and a tenth as many dead ones; returns those that wait."""
    tasks = [NewTask("test.sync", n, 7200 + 86_400 * n // count) for n in range(count)]
    waiting = center.submit_many(tasks)
    doomed = center.submit_many([NewTask("test.doomed", n, 7200) for n in range(count // 10)])
    now = center.clock.now_ms()
    died = [Failure(one, 0, 0, 0, 2, 0, now, f"no luck with {one % 9}") for one in doomed]
    for first in range(0, len(died), 500):
        center.store.die(died[first : first + 500])
    return waiting


def told(visitor: Visitor, path: str, said: str) -> None:
    """An open page comes to say something, without being loaded anew; and stays readable, with one stream."""
    visitor.go(path)
    visitor.wait("(said) => document.body.innerText.includes(said)", said)
    assert visitor.violations() == []
    assert until(lambda: visitor.beat() == 1)


@pytest.mark.slow
def test_pages_say_what_is_missing_while_a_server_hangs_and_how_old_the_rest_is(
    cluster: Cluster, browser: Browser, machine: Machine, request: pytest.FixtureRequest
) -> None:
    gateway = cluster.gateway
    visitor = Visitor(browser, gateway)
    jobs = fill(gateway.system.center, 100_000 if request.config.getoption("measure") else 40)
    on_first = next(job_id for n, job_id in enumerate(jobs) if BizId.of(n).crc % 8 % 2 == 0)
    on_second = next(job_id for n, job_id in enumerate(jobs) if BizId.of(n).crc % 8 % 2 == 1)

    def well() -> bool:
        pages = seen(visitor)
        calm = all(one.status == 200 and "out of reach" not in one.text for one in pages.values())
        if calm:
            calmly.extend(one.seconds for one in pages.values())
        return calm

    calmly: list[float] = []
    assert until(well, 60), "all pages are well before anything hangs"

    visitor.go("/topics/test.sync")
    cluster.redis.pause()
    assert until(lambda: UNREAD.search(visitor.text) is not None)
    pages = seen(visitor)
    assert failed(pages) == set()
    in_time(pages, machine, AWAY)
    told(visitor, "/health", "Redis")
    cluster.redis.resume()
    assert until(well, 60), "all pages are well after Redis"

    visitor.go("/workers")
    cluster.zookeeper.pause()
    visitor.wait("document.body.innerText.includes('this is as of')")
    pages = seen(visitor)
    assert failed(pages) == set()
    in_time(pages, machine, AWAY)
    told(visitor, "/workers", "ZooKeeper is out of reach")
    cluster.zookeeper.resume()
    visitor.wait("!document.body.innerText.includes('out of reach')")
    assert until(well, 60), "all pages are well after ZooKeeper"

    cluster.second.pause()
    assert until(lambda: visitor.go("/tasks") == 503), "a search needs every server"
    pages = seen(visitor)
    assert failed(pages) == SEARCHES
    in_time(pages, machine, AWAY)
    assert "the database is out of reach" in pages["/tasks"].text
    assert "acknowledged" not in pages["/tasks"].text, "nothing was asked to be"
    told(visitor, "", f"127.0.0.1:{cluster.second.port}")
    assert visitor.go(f"/tasks/{on_first}") == 200
    assert visitor.go(f"/tasks/{on_second}") == 503
    cluster.second.resume()
    assert until(well, 60), "all pages are well after the second database server"

    cluster.first.pause()
    assert until(lambda: visitor.go("/topics") > 0 and "this is as of" in visitor.text), "those of before"
    pages = seen(visitor)
    assert failed(pages) <= {*SEARCHES, "/topics/test.sync"}
    in_time(pages, machine, AWAY)
    for path in ("/topics", "/targets", "/tokens", "/audit"):
        assert "; this is as of" in pages[path].text, path
    assert "test.sync" in pages["/topics"].text
    assert visitor.go(f"/tasks/{on_second}") == 200
    cluster.first.resume()
    assert until(well, 60), "all pages are well after the first database server"
    assert sorted(calmly)[len(calmly) * 95 // 100] < WELL + machine.slack
    assert "call_failed" not in gateway.told()
    assert visitor.complaints == []
    visitor.close()
