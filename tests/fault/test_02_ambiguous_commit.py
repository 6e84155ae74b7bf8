"""Fault 2: commits whose answer is lost, and the same submit from many threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import tasks
from fault.kit.proxy import Proxy
from harness.final import read_final
from harness.history import Client
from sqlalchemy.engine import make_url

from toc import NewTask, TimeoutCenter
from toc.errors import DedupConflict, StoreUnavailable, SubmitUnknown
from toc.local.servers import MariaDB, RedisServer


def through(proxy: Proxy, url: str) -> str:
    """The URL of a MySQL server behind a proxy that reads along (hence without TLS)."""
    changed = make_url(url).set(port=proxy.port).update_query_dict({"ssl_disabled": "true"})
    return changed.render_as_string(hide_password=False)


def test_a_commit_whose_answer_is_lost_makes_one_row_and_one_run(
    build: Build,
    clean_redis: RedisServer,
    mariadb: MariaDB,
    relay: Callable[..., Proxy],
    verdict: Verdict,
) -> None:
    line = verdict(2, "ambiguous COMMIT, double submit")
    proxy = relay(mariadb.port, seed=2)
    system = build(clean_redis.url)
    settings = system.settings.model_copy(update={"database_urls": [through(proxy, mariadb.url)]})
    with TimeoutCenter(settings) as center:
        client = Client(center, system.recorder)
        center.catalog.get("test.sync")
        proxy.eat(b"INSERT INTO", count=None, probability=0.25, quiet=0.02)
        for number, task in enumerate(tasks(80, ahead=(2.0, 3.0))):
            key = f"key-{number}" if number % 2 else None
            client.submit(task.topic, biz_id=task.biz_id, delay=task.delay, dedup_key=key)
        proxy.eat(b";COMMIT", count=2, quiet=0.02)
        client.submit_many(tasks(500, ahead=(2.0, 3.0), first=1000))
        # Nobody can tell: the server is gone after it has committed. The same submit again finds the row.
        proxy.eat(b"INSERT INTO", refuse=True, quiet=0.02)
        due = datetime.now(UTC) + timedelta(hours=1)
        with pytest.raises(SubmitUnknown) as caught:
            client.submit("test.sync", biz_id=2000, action_time=due, dedup_key="once")
        with pytest.raises(StoreUnavailable):
            client.submit("test.sync", biz_id=2000, action_time=due, dedup_key="once")
        proxy.accept()
        again = client.submit("test.sync", biz_id=2000, action_time=due, dedup_key="once")
        assert again == caught.value.job_id
    line.prove(proxy.stats.eaten >= 10, f"{proxy.stats.eaten} answers to INSERT eaten after they took effect")

    same = [NewTask("test.sync", 3000, 3.0, attribute={"n": 1}, dedup_key="d")] * 50

    def submit(task: NewTask) -> int:
        return system.client.submit(
            task.topic, biz_id=3000, delay=3.0, attribute=task.attribute, dedup_key=task.dedup_key
        )

    with ThreadPoolExecutor(50) as pool:
        (winner,) = set(pool.map(submit, same))
    with pytest.raises(DedupConflict) as conflict:
        system.client.submit("test.sync", biz_id=3000, delay=3.0, attribute={"n": 2}, dedup_key="d")
    assert conflict.value.job_id == winner
    stored = Counter(row.biz for row in read_final(system.center).rows)
    assert len(stored) == 80 + 500 + 1 + 1
    assert set(stored.values()) == {1}
    with system.recorder.fault("other", note="no worker yet"):
        system.start()
    line.judge(system, within=3)
    assert len(system.starts(winner)) == 1
