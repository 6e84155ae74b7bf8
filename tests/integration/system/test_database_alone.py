"""The database alone: no index, so the rows say what is due, what has begun, and that it is so."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest
from harness import forks
from harness.clocks import PushedClock
from harness.console import Browser
from harness.gateway import Gateway
from harness.hands import SLOT, TOPIC, PausedClock, WorkerAtRest, in_five_minutes, meanwhile, submit_due
from harness.hooked import Hooked
from harness.metrics import ANY_ADDRESS, samples
from harness.patience import PATIENCE, until
from harness.receiver import Receiver
from harness.system import System
from harness.tables import raw, refused

from benchmarks.local import RedisServer
from toc import CancelOutcome, NewTask, RescheduleOutcome, Settings, TaskStatus, TimeoutCenter, Topic
from toc.model.errors import ConfigError, StoreUnavailable
from toc.model.sharding import table_of_job
from toc.model.topic import Delivery, Slot
from toc.operate import doctor
from toc.operate.top import Top
from toc.store.servers.shards import Answers
from toc.store.tasks.scan import Position
from toc.worker.take import by_rows
from toc.worker.take.by_rows import GATHER_SECONDS, RETRY_SECONDS

NOBODY = "redis://127.0.0.1:1"
"""No Redis."""


def test_a_process_whose_settings_disagree_is_named(alone: System, clean_redis: RedisServer) -> None:
    alone.create_topics()
    identity = alone.center.store.identity
    assert not identity.indexed()
    indexed = Settings(**{**alone.settings.model_dump(), "redis_url": clean_redis.url})

    def refused(*words: str, **more: str) -> str:
        done = forks.run(list(words), env={**alone.env, **more}, directory=alone.directory)
        assert done.returncode == ConfigError.exit_code, done.stdout
        return done.stderr

    worker = ["worker", "--app", "harness.app:center"]
    for words in (worker, ["gateway", "--port", "0"]):
        told = refused(*words, TOC_REDIS_URL=clean_redis.url)
        assert "TOC_REDIS_URL is set, and the tasks on" in told
        assert "are not indexed: unset it, or run `toc index on`" in told
    with TimeoutCenter(indexed) as ahead:  # what it indexes is not looked at
        assert ahead.cancel(ahead.submit("test.sync", biz_id=1, delay=60)) is CancelOutcome.CANCELLED
        alone.center.submit("test.sync", biz_id=2, delay=60)
        told = forks.run(["slots", "--json"], env={**alone.env, "TOC_REDIS_URL": clean_redis.url}).stdout
        assert sum(slot["scheduled"] for slot in json.loads(told)) == 1, "so the rows are counted"
    with TimeoutCenter(Settings(**{**alone.settings.model_dump(), "redis_url": NOBODY})) as ahead:
        ahead.catalog.refresh()
        (cancelled, moved), soon = (
            (ahead.submit("test.sync", biz_id=1, delay=0.001) for _ in range(2)),
            in_five_minutes(),
        )
        assert ahead.cancel(cancelled) is CancelOutcome.CANCELLED, "nor is it asked"
        assert ahead.reschedule(moved, action_time=soon) is RescheduleOutcome.RESCHEDULED
    due = alone.center.submit("test.sync", biz_id=1, delay=0.05)
    identity.set_indexed(True)
    with (
        TimeoutCenter(alone.settings) as behind,
        pytest.raises(ConfigError, match="TOC_REDIS_URL is not set"),
    ):
        behind.submit("test.sync", biz_id=2, delay=60)
    for words in (worker, ["gateway", "--port", "0"], ["slots"]):
        assert "TOC_REDIS_URL is not set" in refused(*words)
    # The application that goes on meanwhile cannot know what a worker has taken by the index.
    assert alone.center.cancel(due) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_between_due_time_and_lease_counts(alone: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a reschedule: the lease is refused, and the task does not run before its new time."""
    alone.create_topics(slots=1)
    center = TimeoutCenter(alone.settings)
    center.handler(TOPIC)(print)
    center.catalog.refresh()
    worker = WorkerAtRest(center, "a:1", [SLOT])
    try:
        cancelled, moved = submit_due(alone), submit_due(alone)
        outcomes: list[object] = []

        def change() -> None:
            outcomes.append(alone.center.cancel(cancelled))
            outcomes.append(alone.center.reschedule(moved, action_time=in_five_minutes()))

        meanwhile(monkeypatch, worker.store.leases, "take", change)
        worker.worker.rows.run_once(0)
        worker.turn()
        assert outcomes == [CancelOutcome.CANCELLED, RescheduleOutcome.RESCHEDULED]
        worker.finish()
        assert not len(worker.inflight)
        assert alone.center.cancel(moved) is CancelOutcome.CANCELLED
    finally:
        worker.close()
        center.close()


def test_a_reschedule_after_a_try_that_its_worker_broke_off_says_so(alone: System) -> None:
    """Only the row tells of that try. One for an earlier deadline than the last is none for that."""
    alone.create_topics(slots=1)
    daemon = alone.start(processes=1)
    job_id = alone.center.submit(TOPIC, biz_id=1, delay=0.1, attribute={"sleep": 3600})
    alone.wait(lambda: bool(alone.starts(job_id)), "it runs", 30)
    while daemon.process.poll() is None:  # the second one has it wait for no handler
        daemon.terminate()
        time.sleep(0.5)
    assert alone.row(job_id).last_error == "its worker stopped before it had ended"
    for outcome in (RescheduleOutcome.MAY_HAVE_STARTED, RescheduleOutcome.RESCHEDULED):
        assert alone.center.reschedule(job_id, action_time=in_five_minutes()) is outcome


def test_a_read_that_took_longer_than_it_read_ahead_is_made_again_at_once(
    alone: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server was frozen, and answers again: what comes due while the taker rests has been read before."""
    alone.create_topics(slots=1)
    clock = PausedClock()
    with TimeoutCenter(alone.settings, clock=clock) as center:
        center.handler(TOPIC)(print)
        center.catalog.refresh()
        with closing(WorkerAtRest(center, "a:1", [SLOT])) as worker:
            scans, ahead = worker.store.scans, list[int]()
            read = scans.page

            def slow(starts: Mapping[int, Position], until_ms: int, most: int, *, where: str) -> Any:
                ahead.append(until_ms - clock.now_ms())
                clock.slept += 9
                return read(starts, until_ms, most, where=where)

            monkeypatch.setattr(scans, "page", slow)
            for _ in range(3):
                worker.worker.rows.run_once(0)
            assert len(ahead) == 2, "then it rests"
            assert ahead[1] > 1000 * (clock.slept - 9)


def test_what_is_not_due_by_the_database_waits_on_a_host_whose_clock_is_ahead(alone: System) -> None:
    alone.create_topics(slots=1)
    far = alone.client.submit(TOPIC, biz_id=1, delay=1800)
    due = submit_due(alone)
    with TimeoutCenter(alone.settings, clock=PushedClock(3_600_000)) as center:
        center.handler(TOPIC)(print)
        center.catalog.refresh()
        with closing(WorkerAtRest(center, "a:1", [SLOT])) as worker:
            worker.worker.rows.run_once(0)
            assert list(center.store.leases.living([far, due])) == [due]


def test_the_backlog_of_one_topic_lets_others_have_their_turn(
    alone: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of it can start: a take has an end, and the next begins with those that had nothing."""
    monkeypatch.setattr(by_rows, "MAX_TAKEN", 4)
    others = ("test.async", "test.batch")
    with beside_a_backlog(alone, others, 40) as (worker, become_due):
        worker.worker.rows.run_once(0)
        assert {entry.slot for entry in worker.inflight.snapshot()} == {SLOT}
        job_ids = become_due(*(NewTask(name, 1, 0.5) for name in others))
        worker.worker.rows.look_now()
        take(worker, 2)
        assert all(worker.inflight.get(job_id) for job_id in job_ids)


def test_the_backlog_of_one_topic_lets_the_tables_be_read_to_the_last(
    alone: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Much of it is read from the first of them, and taken before the last one's turn comes."""
    tables = alone.settings.tables
    for name, few in (("MAX_TAKEN", 8), ("TABLES", 2), ("PAGE", 8), ("ENOUGH", 8)):
        monkeypatch.setattr(by_rows, name, few)
    with beside_a_backlog(alone, ("test.async",), 100 * tables) as (worker, become_due):
        take(worker, 2 * tables)  # what it has read of all tables while it knew nothing
        job_ids = become_due(*(NewTask("test.async", n, 1.0) for n in range(8 * tables)))
        assert {table_of_job(job_id, tables) for job_id in job_ids} == set(range(tables))
        worker.worker.rows.look_now()
        take(worker, 4 * tables)
        taken = {table_of_job(one.job_id, tables) for one in worker.inflight.snapshot() if one.slot != SLOT}
        assert taken == set(range(tables))


@contextmanager
def beside_a_backlog(
    alone: System, others: Sequence[str], count: int
) -> Iterator[tuple[WorkerAtRest, Callable[..., list[int]]]]:
    """A worker of these topics and one with so many due tasks. The second lets tasks become due."""
    alone.create_topics(slots=1)
    clock = PausedClock()

    def become_due(*tasks: NewTask) -> list[int]:
        job_ids = alone.client.submit_many(tasks)
        due = max(row.action_time for row in alone.center.store.read(job_ids).values())
        assert until(lambda: clock.now_ms() > due, PATIENCE)
        return job_ids

    become_due(*(NewTask(TOPIC, n, 2.0) for n in range(count)))
    with TimeoutCenter(alone.settings, clock=clock) as center:
        for name in (TOPIC, *others):
            center.handler(name)(print)
        center.catalog.refresh()
        with closing(WorkerAtRest(center, "a:1", [SLOT, *(Slot(name, 0) for name in others)])) as worker:
            yield worker, become_due


def take(worker: WorkerAtRest, times: int) -> None:
    """Take by rows so often."""
    clock = worker.center.clock
    assert isinstance(clock, PausedClock)
    for _ in range(times):
        worker.worker.rows.run_once(0)
        clock.slept += GATHER_SECONDS


@pytest.mark.parametrize("unsure", [False, True])
def test_a_row_that_refuses_its_lease_holds_up_no_other(
    alone: System, monkeypatch: pytest.MonkeyPatch, unsure: bool
) -> None:
    """Not even if it was asked for one when the server was away, so that it may have it."""
    alone.create_topics(slots=1)
    clock = PausedClock()
    with TimeoutCenter(alone.settings, clock=clock) as center, raw(alone.settings) as sql:
        center.handler(TOPIC)(print)
        center.catalog.refresh()
        with closing(WorkerAtRest(center, "a:1", [SLOT])) as worker:
            leases = center.store.leases

            def leased(*job_ids: int) -> list[int]:
                worker.worker.rows.look_now()
                worker.worker.rows.run_once(0)
                return sorted(leases.living(job_ids))

            one = submit_due(alone)
            with refused(sql, center.store, one):
                if unsure:
                    away = Answers[bool](unanswered={one: StoreUnavailable("as the test wants")})
                    with monkeypatch.context() as patch:
                        patch.setattr(leases, "take", lambda *_: away)
                        assert not leased(one)
                    clock.slept += RETRY_SECONDS
                before = submit_due(alone)
                assert leased(one, before) == [before]
                after = submit_due(alone)
                assert leased(one, after) == [after]

            def given_back() -> bool:
                worker.leases.look(0)
                worker.finish()
                return worker.inflight.get(one) is None

            assert until(given_back, PATIENCE)
            assert leased(one) == [one]


@pytest.mark.slow
def test_a_suspect_dies_alone_and_a_backlog_starts_at_its_rate(alone: System) -> None:
    alone.create_topics(prepare_timeout=3, backoff_base=0.01)
    alone.start(processes=2, env={"TOC_MAX_CRASHES": "1"})
    alone.center.store.topics.alter("test.async", paused=True)
    late = alone.client.submit_many([NewTask("test.async", n, 4) for n in range(60)])
    kills = alone.client.submit("test.sync", biz_id=1, delay=5, attribute={"die": 9})
    alone.wait(lambda: bool(alone.starts(kills)), "it has killed a process", 30)
    assert not alone.late(late)
    words = ["topic", "resume", "test.async", "--rate", "20"]
    assert forks.run(words, env=alone.env, directory=alone.directory).returncode == 0
    alone.wait(lambda: not alone.pending([*late, kills]), "all have ended", 60)
    assert alone.row(kills).status == TaskStatus.DEAD
    starts = sorted(alone.starts(one)[0].at for one in late)
    assert starts[-1] - starts[0] > 2e9, "60 tasks at 20 a second"
    alone.stop()
    verdict = alone.verdict(crash_limit=1)
    assert verdict.clean, verdict


def test_operators_see_what_the_rows_say(alone: System) -> None:
    alone.create_topics(slots=2)
    daemon = alone.start(processes=1, env=ANY_ADDRESS)
    center = alone.center
    job_ids = center.submit_many([NewTask("test.sync", n, 3600) for n in range(10)])
    enough = alone.directory / "enough"
    runs = center.submit("test.sync", biz_id=1, delay=0.05, attribute={"until": str(enough)})
    alone.wait(lambda: bool(alone.starts(runs)), "it runs", 30)

    def shown(*words: str, code: int = 0) -> Any:
        done = forks.run([*words, "--json"], env=alone.env, directory=alone.directory)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    slots = shown("slots", "--topic", "test.sync")
    assert sum(slot["scheduled"] for slot in slots) == len(job_ids)
    assert sum(slot["prepared"] for slot in slots) == 1
    running = {"job_id": str(runs), "host": "host-a"}
    assert [{key: task[key] for key in running} for task in shown("running")] == [running]
    assert not doctor.problems(doctor.examine(center))
    picture = Top(center).look()
    (view,) = [view for view in picture.topics if view["topic"] == "test.sync"]
    assert (view["scheduled"], view["prepared"]) == (len(job_ids), 1)
    prepared = 'toc_prepared_tasks{topic="test.sync"}'
    alone.wait(lambda: samples(daemon.told()).get(prepared), "the daemon measures it", 30)
    enough.touch()


@pytest.mark.slow
def test_a_backlog_of_a_paused_topic_is_read_in_part_and_pages_say_so(alone: System) -> None:
    alone.create_topics()
    alone.center.store.topics.alter("test.async", paused=True)
    tables = alone.settings.tables
    for first in range(0, 20_000, 1000):  # more than are counted, in every table
        alone.client.submit_many(
            [NewTask("test.async", n % (8 * tables), 0.1) for n in range(first, first + 1000)]
        )
    alone.start(processes=1)
    enough = alone.directory / "enough"
    runs = alone.client.submit("test.sync", biz_id=1, delay=0.1, attribute={"until": str(enough)})
    held = alone.center.store.leases.living
    alone.wait(lambda: runs in held([runs]), "it runs", 30)
    words = ["running", "--topic", "test.sync", "--json"]
    shown = json.loads(forks.run(words, env=alone.env, directory=alone.directory).stdout)
    assert [task["job_id"] for task in shown] == [str(runs)]
    with Gateway(alone) as gateway:
        for page, said in (
            ("", "Only the first tasks of each table are counted"),
            ("/topics/test.async", "Only the first tasks of each table are counted"),
            ("/running", "Others may run"),
        ):
            assert said in Browser(gateway).get(page).text, page
    enough.touch()


def test_gateways_consumers_and_webhooks_need_no_index(alone: System) -> None:
    alone.center.store.topics.create(Topic("test.pulled", 90, 4, delivery=Delivery.PULL))
    alone.create_topics()
    receiver = Receiver()
    hooked = Hooked(alone, receiver)
    gateway = Gateway(alone)
    try:
        hooked.center.targets.create("shop", receiver.url("/hook"))
        hooked.start(app="harness.app:center")

        def pull(**wanted: object) -> list[dict[str, Any]]:
            answer = gateway.call("POST", "/v1/topics/test.pulled:pull", {"max": 10, **wanted})
            assert answer.status == 200, answer
            tasks: list[dict[str, Any]] = answer.body["tasks"]
            return tasks

        assert pull() == [], "nothing is due, and it is said at once"
        job_ids = [gateway.submit("test.pulled", biz_id=n, delay=0.3).body["job_id"] for n in range(3)]
        got: list[dict[str, Any]] = []
        while len(got) < 3:
            got += pull(wait=20, ttr=30)
        assert sorted(task["job_id"] for task in got) == sorted(job_ids)
        acked = gateway.call("POST", "/v1/leases:ack", {"leases": [got[0]["lease"]]})
        assert acked.body["leases"][0]["outcome"] == "acked", acked
        hook = hooked.submit(target="shop")
        assert hooked.ended(hook).status == TaskStatus.PROCESSED
    finally:
        hooked.center.close()
        gateway.stop()
        receiver.close()


@pytest.mark.parametrize("indexed", [True, False])
def test_workers_end_that_nobody_saw_as_the_index_was_switched(
    alone: System, clean_redis: RedisServer, indexed: bool
) -> None:
    """They were starting, or paused. A row tells of no try of theirs that a cancel would have to know of."""
    alone.create_topics()
    url = {"TOC_REDIS_URL": clean_redis.url} if indexed else {}
    settings = Settings(**{**alone.settings.model_dump(), "redis_url": clean_redis.url if indexed else None})
    identity = alone.center.store.identity
    identity.set_indexed(indexed)
    daemon = alone.start(processes=1, env=url)
    with TimeoutCenter(settings) as center:
        center.handler("test.sync")(print)
        with center.worker() as embedded:
            alone.wait(embedded.ready.is_set, "the embedded one works", 30)
            identity.set_indexed(not indexed)
            alone.wait(lambda: daemon.process.poll() is not None, "the daemon ends", 30)
            alone.wait(
                lambda: all(one.name != "toc-embedded" for one in threading.enumerate()),
                "the embedded one ends",
                30,
            )
    assert daemon.events("index_switched")
    told = forks.run(
        ["worker", "--app", "harness.app:center"], env={**alone.env, **url}, directory=alone.directory
    )
    assert told.returncode == ConfigError.exit_code
