"""Names of topics that a process does not know, while the server that holds the topics hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.gateway import Gateway
from harness.patience import until
from harness.system import NewSystem

from benchmarks.local import MariaDB
from toc.model.errors import StoreUnavailable, UnknownTopic
from toc.model.topic import Delivery
from toc.pull.pulls import Pulls
from toc.sdk.batcher import Batcher

HANGS = 200.0
"""Seconds for which an answer of the server would be waited for."""
SOON = 60.0
"""Seconds within which everybody has an answer: long before the server's."""


def test_who_names_an_unknown_topic_does_not_wait_until_the_server_of_the_topics_is_back(
    new_system: NewSystem, mariadb: MariaDB
) -> None:
    system = new_system(read_timeout=HANGS)
    system.create_topics(delivery=Delivery.PULL)
    center = system.center
    gateway = Gateway(system)
    http: list[tuple[str, object]] = [
        ("/v1/topics/test.new/tasks", {"biz_id": 1, "delay": 60}),
        ("/v1/topics/test.new:pull", {"wait": 0}),
        ("/v1/topics/test.sync,test.new:pull", {"wait": 0}),
    ]

    secret = center.store.identity.lease_secret()

    async def pull() -> object:
        pulls = Pulls(center, secret)
        try:
            return await pulls.pull(["test.new"])
        finally:
            await pulls.stop()

    async def batched() -> object:
        batcher = Batcher(center)
        try:
            return await batcher.topic("test.new")
        finally:
            await batcher.close()

    calls: list[Callable[[], object]] = [
        lambda: center.submit("test.new", biz_id=1, delay=60),
        lambda: center.catalog.of_type(4711),
        lambda: asyncio.run(pull()),
        lambda: asyncio.run(batched()),
    ]
    try:
        assert [gateway.call("POST", path, body).status for path, body in http] == [404, 404, 404]
        with ThreadPoolExecutor(len(http) * 5 + len(calls)) as threads:
            mariadb.pause()
            try:
                answers = [threads.submit(gateway.call, "POST", path, body) for path, body in http * 5]
                errors = [threads.submit(call) for call in calls]
                for answer in answers:
                    reply = answer.result(SOON)
                    assert (reply.status, reply.body["type"]) == (503, "/docs#unavailable")
                for error in errors:
                    with pytest.raises(StoreUnavailable):
                        error.result(SOON)
            finally:
                mariadb.resume()

        def told() -> bool:
            try:
                center.catalog.get("test.new")
            except UnknownTopic:
                return True
            except StoreUnavailable:  # the read that hung has yet to end
                return False
            return False

        assert until(told)
    finally:
        gateway.stop()
