"""Row 52 of the faults, in a real browser: what pages say while a server hangs, and once it is back."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.chromium import Visitor
from harness.gateway import Gateway
from harness.patience import until
from harness.system import small_system
from playwright.sync_api import Browser

from benchmarks.local import MariaDB, RedisServer, ZooKeeper
from toc.model.sharding import BizId

PAGES = (
    "", "/health", "/topics", "/topics/test.sync", "/tasks", "/running", "/late", "/dead", "/workers",
    "/schedules", "/targets", "/tokens", "/audit",
)  # fmt: skip
SEARCHES = {"/tasks"}
"""Pages that need every database server."""
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


def seen(visitor: Visitor) -> dict[str, tuple[int, str]]:
    """What each page says."""
    found = {}
    for path in PAGES:
        began = time.monotonic()
        found[path] = (visitor.go(path), visitor.text)
        print(f"{path or '/'} {found[path][0]} {time.monotonic() - began:.2f} s")
    return found


def failed(pages: dict[str, tuple[int, str]]) -> set[str]:
    return {path for path, (status, _) in pages.items() if status != 200}


def told(visitor: Visitor, path: str, said: str) -> None:
    """An open page comes to say something, without being loaded anew; and stays readable, with one stream."""
    visitor.go(path)
    visitor.wait("(said) => document.body.innerText.includes(said)", said)
    assert visitor.violations() == []
    assert until(lambda: visitor.beat() == 1)


@pytest.mark.slow
def test_pages_say_what_is_missing_while_a_server_hangs_and_how_old_the_rest_is(
    cluster: Cluster, browser: Browser
) -> None:
    gateway = cluster.gateway
    visitor = Visitor(browser, gateway)
    jobs = {n: gateway.submit(biz_id=n).body["job_id"] for n in range(40)}
    on_first = next(job_id for n, job_id in jobs.items() if BizId.of(n).crc % 8 % 2 == 0)
    on_second = next(job_id for n, job_id in jobs.items() if BizId.of(n).crc % 8 % 2 == 1)

    def well() -> bool:
        return all(status == 200 and "out of reach" not in text for status, text in seen(visitor).values())

    assert until(well, 60), "all pages are well before anything hangs"

    visitor.go("/topics/test.sync")
    cluster.redis.pause()
    assert until(lambda: UNREAD.search(visitor.text) is not None)
    assert failed(seen(visitor)) == set()
    told(visitor, "/health", "Redis")
    cluster.redis.resume()
    assert until(well, 60), "all pages are well after Redis"

    visitor.go("/workers")
    cluster.zookeeper.pause()
    visitor.wait("document.body.innerText.includes('this is as of')")
    assert failed(seen(visitor)) == set()
    told(visitor, "/workers", "ZooKeeper is out of reach")
    cluster.zookeeper.resume()
    visitor.wait("!document.body.innerText.includes('out of reach')")
    assert until(well, 60), "all pages are well after ZooKeeper"

    cluster.second.pause()
    assert until(lambda: visitor.go("/tasks") == 503), "a search needs every server"
    pages = seen(visitor)
    assert failed(pages) == SEARCHES
    assert "the database is out of reach" in pages["/tasks"][1]
    assert "acknowledged" not in pages["/tasks"][1], "nothing was asked to be"
    told(visitor, "", f"127.0.0.1:{cluster.second.port}")
    assert visitor.go(f"/tasks/{on_first}") == 200
    assert visitor.go(f"/tasks/{on_second}") == 503
    cluster.second.resume()
    assert until(well, 60), "all pages are well after the second database server"

    cluster.first.pause()
    assert until(lambda: visitor.go("/topics") > 0 and "this is as of" in visitor.text), "those of before"
    pages = seen(visitor)
    assert failed(pages) <= {*SEARCHES, "/topics/test.sync"}
    for path in ("/topics", "/targets", "/tokens", "/audit"):
        assert "; this is as of" in pages[path][1], path
    assert "test.sync" in pages["/topics"][1]
    assert visitor.go(f"/tasks/{on_second}") == 200
    cluster.first.resume()
    assert until(well, 60), "all pages are well after the first database server"
    assert "call_failed" not in gateway.told()
    assert visitor.complaints == []
    visitor.close()
