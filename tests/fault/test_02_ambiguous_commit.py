"""Fault 2: commits whose answer is lost, and the same submit from many threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks
from fault.kit.proxy import Proxy, through
from harness.final import read_final
from harness.history import Client

from benchmarks.local import MariaDB, RedisServer
from toc import TimeoutCenter
from toc.model.errors import DedupConflict, StoreUnavailable, SubmitUnknown
from toc.store.tasks import write


def test_a_commit_whose_answer_is_lost_makes_one_row_and_one_run(
    build: Build,
    mariadb: MariaDB,
    relay: Callable[..., Proxy],
    verdict: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = verdict(2, "ambiguous COMMIT, double submit")
    proxy = relay(mariadb.port, seed=2)
    system = build()
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
        monkeypatch.setattr(write, "RESEND_SECONDS", 1.0)  # how long it tries to find out
        proxy.eat(b"INSERT INTO", refuse=True, quiet=0.02)
        due = datetime.now(UTC) + timedelta(hours=1)
        submit = partial(client.submit, "test.sync", biz_id=2000, action_time=due, dedup_key="once")
        with pytest.raises(SubmitUnknown) as caught:
            submit()
        with pytest.raises(StoreUnavailable):
            submit()
        proxy.accept()
        assert submit() == caught.value.job_id
    line.prove(proxy.stats.eaten >= 10, f"{proxy.stats.eaten} answers to INSERT eaten after they took effect")

    same = partial(system.client.submit, "test.sync", biz_id=3000, delay=3.0, dedup_key="d")
    with ThreadPoolExecutor(50) as pool:
        (winner,) = set(pool.map(lambda _: same(attribute={"n": 1}), range(50)))
    with pytest.raises(DedupConflict) as conflict:
        same(attribute={"n": 2})
    assert conflict.value.job_id == winner
    stored = Counter(row.biz for row in read_final(system.center).rows)
    assert len(stored) == 80 + 500 + 1 + 1
    assert set(stored.values()) == {1}
    with system.recorder.fault("other", note="no worker yet"):
        system.start()
    line.judge(system, within=3)
    assert len(system.starts(winner)) == 1


@pytest.mark.slow
def test_cancels_and_submits_whose_answers_are_lost_close_to_the_due_time_keep_their_word(
    build: Build, clean_redis: RedisServer, mariadb: MariaDB, relay: Callable[..., Proxy], verdict: Verdict
) -> None:
    line = verdict(2, "ambiguous COMMIT", "cancel and submit near the due time, Redis and MySQL")
    table, index = relay(mariadb.port, seed=3), relay(clean_redis.port, seed=4)
    system = build(topic_prepare_timeout=5)
    system.start()
    changed = {
        "database_urls": [through(table, mariadb.url)],
        "redis_url": f"redis://127.0.0.1:{index.port}",
    }
    with TimeoutCenter(system.settings.model_copy(update=changed)) as center:
        client = Client(center, system.recorder)
        center.catalog.get("test.sync")
        for proxy in (table, index):
            proxy.eat(b"", count=None, probability=0.03, quiet=0.005)
        loads = [
            Load(client, rate=80, ahead=(0.02, 0.3), cancel=0.8, fail=0.2, seed=seed, first=seed * 1_000_000)
            for seed in (1, 2, 3)
        ]
        with loads[0], loads[1], loads[2]:
            system.wait(lambda: all(len(load.job_ids) > 400 for load in loads), "the load is in", 60)
        for proxy in (table, index):
            proxy.eat_nothing()
    line.prove(
        table.stats.eaten > 20 and index.stats.eaten > 20,
        f"{table.stats.eaten} answers of MySQL and {index.stats.eaten} of Redis eaten",
    )
    judged = line.judge(system, within=4)
    assert judged.counts["cancelled"] > 200
