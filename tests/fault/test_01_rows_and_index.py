"""Faults 1 and 2: crashes between a row and its index entry, submits without Redis,
COMMITs whose answer is lost."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from fault.conftest import Case
from fault.kit.load import Load, in_another_process, tasks
from fault.kit.proxy import through
from harness.final import read_final
from harness.history import Client
from harness.patience import until

from benchmarks.local import RedisServer
from toc import TimeoutCenter
from toc.model.errors import DedupConflict, StoreUnavailable, SubmitUnknown
from toc.store.tasks import write

# Fault 1: crashes between a row and its index entry, and submits while Redis is down.

CALLS: dict[str, dict[str, object]] = {
    "submit.row-stored:31": {"do": "submit", "count": 60, "ahead": [2.0, 3.0]},
    "submit.row-stored": {"do": "submit_many", "count": 400, "first": 1000, "ahead": [2.0, 3.0]},
    "cancel.row-written:10": {"do": "cancel"},
    "reschedule.row-written:10": {"do": "reschedule", "ahead": 1.5},
}
"""Where a producer dies, and what it calls."""


def test_what_a_producer_stored_before_it_died_runs_although_nobody_indexed_it(case: Case) -> None:
    line, system = case.begin(1, "crash between row and index", "submit, submit_many, cancel, reschedule")
    victims = system.client.submit_many(tasks(40, ahead=(4.0, 4.5), first=5000))

    def die_at(name: str) -> bool:
        once = case.path / f"died-{name}"
        env = {"TOC_FAILPOINT": name, "TOC_FAILPOINT_ONCE": str(once)}
        job_ids = victims[:20] if name.startswith("cancel") else victims[20:]
        done = in_another_process(system, [{"job_ids": job_ids, **CALLS[name]}], env=env)
        return done.returncode == -9 and once.exists()

    with ThreadPoolExecutor(2) as pool:
        died = sum(pool.map(die_at, CALLS))
    final = read_final(system.center)
    stored = {row.job_id: row.status for row in final.rows}
    entries = {one for one, places in final.index.items() if any(place.queue == "store" for place in places)}
    assert len(stored) == 31 + 400 + 40
    unindexed = {job_id for job_id, status in stored.items() if status == 0} - entries
    # The entry of a cancelled row still stands; that of a rescheduled one stands at its old, later time.
    stale = {job_id for job_id, status in stored.items() if status == 3} & entries
    line.prove(
        (died, len(unindexed), len(stale)) == (4, 401, 1),
        f"killed {died} times; {len(unindexed)} rows without an entry, {len(stale)} cancelled with one",
    )
    with system.recorder.fault("other", note="no worker yet"):
        system.start()
    line.judge(system, within=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["poll.taken", "finish.rows-written:3", "reclaim.rows-written", "sweep.rows-read"]
)
def test_a_worker_that_dies_between_rows_and_index_repeats_nothing_that_ended(case: Case, name: str) -> None:
    line, system = case.begin(1, "crash between row and index", f"worker at {name}", topic_prepare_timeout=3)
    ahead = (4.0, 6.0) if name.startswith("sweep") else (0.5, 1.5)
    system.client.submit_many(tasks(600, ahead=ahead, fail=0.1))
    once = case.path / "died"
    with system.recorder.fault("other", note="no worker yet"):
        daemon = system.start(env={"TOC_FAILPOINT": name, "TOC_FAILPOINT_ONCE": str(once)})
    if name.startswith("reclaim"):  # which needs something to reclaim
        system.client.submit("test.sync", biz_id=9_000_000, delay=0.2, attribute={"die": 1})
    assert until(lambda: once.exists() and once.read_text().endswith("\n")), system.logs()
    pid = int(once.read_text().split()[1])
    with system.recorder.fault("kill", pids=[pid], note=name):
        system.wait(
            lambda: pid in {event["pid"] for event in daemon.events("worker_died")}, "its death is seen", 60
        )
    line.prove(True, f"process {pid} was killed at {name}")
    line.judge(system, within=5, at_most=600, write=10)


def test_submits_while_redis_is_down_are_acknowledged_and_run_on_time_or_soon_after(case: Case) -> None:
    line = case.verdict(1, "Redis down at submit")
    redis = case.launch(RedisServer)
    system = case.build(redis.url)
    daemon = system.start()
    with Load(system.client, rate=150, ahead=(0.3, 1.0)) as load:
        load.more(40)
        with system.recorder.fault("redis_down"):
            redis.kill()
            load.more(200)
            redis.start()
    refused = daemon.log.read_text().count("prepare_failed")
    line.prove(refused, f"200 submits acknowledged while Redis was down; prepare failed {refused} times")
    assert not load.errors
    line.within(load.slowest, 2)
    line.judge(system, within=4)


# Fault 2: commits whose answer is lost, and the same submit from many threads.


def test_an_unanswered_commit_makes_one_row_and_one_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    line = case.verdict(2, "ambiguous COMMIT, double submit")
    proxy = case.relay(case.mariadb.port, seed=2)
    system = case.build()
    settings = system.settings.model_copy(update={"database_urls": [through(proxy, case.mariadb.url)]})
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

    due = datetime.now(UTC) + timedelta(seconds=12)
    same = partial(system.client.submit, "test.sync", biz_id=3000, action_time=due, dedup_key="d")
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
