"""Row 52 of the faults, without a browser: what pages say while a server hangs or is gone."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.console import Browser
from harness.gateway import Gateway
from harness.patience import until
from harness.system import small_system

from benchmarks.local import MariaDB, RedisServer, ZooKeeper
from toc.model.sharding import BizId

PAGES = (
    "", "/health", "/topics", "/topics/test.sync", "/tasks", "/running", "/dead", "/workers", "/schedules",
    "/targets", "/tokens", "/audit",
)  # fmt: skip


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


def seen(browser: Browser) -> dict[str, tuple[int, str]]:
    """What each page says."""
    found = {}
    for path in PAGES:
        began = time.monotonic()
        page = browser.get(path)
        print(f"{path or '/'} {page.status} {time.monotonic() - began:.2f} s")
        found[path] = (page.status, page.text)
    return found


@pytest.mark.slow
def test_pages_say_what_is_missing_while_a_server_hangs_and_how_old_the_rest_is(cluster: Cluster) -> None:
    gateway = cluster.gateway
    browser = Browser(gateway)
    jobs = {n: gateway.submit(biz_id=n).body["job_id"] for n in range(40)}
    on_first = next(job_id for n, job_id in jobs.items() if BizId.of(n).crc % 8 % 2 == 0)
    on_second = next(job_id for n, job_id in jobs.items() if BizId.of(n).crc % 8 % 2 == 1)

    def well() -> bool:
        return all(status == 200 and "out of reach" not in text for status, text in seen(browser).values())

    assert until(well, 60), "all pages are well before anything hangs"

    cluster.redis.pause()
    pages = seen(browser)
    assert {status for status, _ in pages.values()} == {200}
    unread = re.compile(r"Slots not read\n[1-9]")
    assert until(lambda: unread.search(browser.get("/topics/test.sync").text) is not None)
    assert until(lambda: "Redis" in browser.get("/health").text), "health names Redis"
    cluster.redis.resume()
    assert until(well, 60), "all pages are well after Redis"

    cluster.zookeeper.pause()
    assert until(lambda: "this is as of" in browser.get("/workers").text), "the workers are those of before"
    assert {status for status, _ in seen(browser).values()} == {200}
    assert until(lambda: "ZooKeeper is out of reach" in browser.get("/workers").text)
    cluster.zookeeper.resume()
    assert until(well, 60), "all pages are well after ZooKeeper"

    cluster.second.pause()
    assert until(lambda: browser.get("/tasks").status == 503), "a search needs every server"
    pages = seen(browser)
    assert {path for path, (status, _) in pages.items() if status != 200} == {"/tasks"}
    assert "the database is out of reach" in pages["/tasks"][1]
    assert "acknowledged" not in pages["/tasks"][1], "nothing was asked to be"
    assert browser.get(f"/tasks/{on_first}").status == 200
    assert browser.get(f"/tasks/{on_second}").status == 503
    cluster.second.resume()
    assert until(well, 60), "all pages are well after the second database server"

    cluster.first.pause()
    assert until(lambda: "this is as of" in browser.get("/topics").text), "the topics are those of before"
    pages = seen(browser)
    assert {path for path, (status, _) in pages.items() if status != 200} <= {"/tasks", "/topics/test.sync"}
    for path in ("/topics", "/targets", "/tokens", "/audit"):
        assert "; this is as of" in pages[path][1], path
    assert "test.sync" in pages["/topics"][1]
    assert browser.get(f"/tasks/{on_second}").status == 200
    cluster.first.resume()
    assert until(well, 60), "all pages are well after the first database server"
    assert "page_failed" not in gateway.told()
