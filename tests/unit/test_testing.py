"""The kit for tests of applications: the stages of production on a clock that the test moves."""

import asyncio
import datetime as clock
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import freezegun
import pytest
import sqlalchemy as sa
import time_machine
from harness.patience import until
from harness.rows import known
from harness.tables import engine_of
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from toc import (
    AsyncTimeoutCenter,
    CancelOutcome,
    InvalidInput,
    NewTask,
    SubmitUnknown,
    Task,
    TaskStatus,
    TimeoutCenter,
    Unavailable,
    outbox,
)
from toc.cli.main import app
from toc.model.errors import ConfigError, DuplicateHandler
from toc.sdk.client import all_centers
from toc.testing import KitError, NeedsAwait, Toc, TooManyCalls, running
from toc.testing import clock as testing_clock

PROCESSED, PENDING, DEAD = TaskStatus.PROCESSED, TaskStatus.PENDING, TaskStatus.DEAD


class Shop:
    """An application: its center was made without any setting, at import."""

    def __init__(self) -> None:
        self.center = center = TimeoutCenter()
        self.runs: list[tuple[str, Any, datetime]] = []
        self.raises: BaseException | None = None
        self.kit: Toc | None = None
        center.handler("order.close")(self.close)
        center.handler("member.remind")(self.remind)
        center.handler("parcel.confirm", batch=10)(self.confirm)

    def close(self, task: Task) -> None:
        assert self.kit is not None
        self.runs.append((task.topic, task.biz_id, self.kit.now))
        if self.raises is not None:
            raise self.raises

    async def remind(self, task: Task) -> None:
        await asyncio.sleep(0)
        self.close(task)

    def confirm(self, tasks: list[Task]) -> dict[int, Exception | None]:
        for task in tasks:
            self.close(task)
        return {task.job_id: ValueError("no parcel") if task.biz_id == "lost" else None for task in tasks}

    @property
    def ran(self) -> list[Any]:
        return [biz_id for _, biz_id, _ in self.runs]


@pytest.fixture
def shop(toc: Toc) -> Shop:
    one = Shop()
    one.kit = toc
    toc.use(one.center)
    return one


def test_a_deadline_of_seven_days_runs_at_its_time(toc: Toc, shop: Shop) -> None:
    job_id = shop.center.submit(
        "order.close", biz_id=42, delay=timedelta(days=7), attribute={"why": "unpaid"}
    )
    task = toc.assert_submitted("order.close", biz_id=42, due_in="7d", attribute={"why": "unpaid"})
    assert task.job_id == job_id
    assert toc.advance("6d") == 0
    assert toc.advance("1d") == 1
    ((_, biz_id, at),) = shop.runs
    assert biz_id == 42
    assert timedelta(0) <= at - task.action_time <= timedelta(milliseconds=2)
    assert known(shop.center.get(job_id)).status is PROCESSED
    toc.refute_submitted("order.close")


def test_a_deadline_that_the_application_computes_itself_is_the_same(toc: Toc, shop: Shop) -> None:
    began = toc.now
    assert until(lambda: datetime.now(UTC) > began + timedelta(milliseconds=50)), "time passes"
    shop.center.submit("order.close", biz_id=1, action_time=datetime.now(UTC) + timedelta(days=7))
    toc.assert_submitted("order.close", biz_id=1, due_in="7d")
    assert toc.advance("7d") == 1


@pytest.fixture
def slow(toc: Toc, monkeypatch: pytest.MonkeyPatch) -> timedelta:  # noqa: ARG001 - it was made before
    """How much of the machine's time the set-up of a test takes."""
    machine = testing_clock._machine_ms
    monkeypatch.setattr(testing_clock, "_machine_ms", lambda: machine() + 5000)
    return timedelta(seconds=5)


def test_a_long_set_up_has_no_task_run_before_its_time(toc: Toc, shop: Shop, slow: timedelta) -> None:
    with time_machine.travel(datetime.now(UTC) + slow):
        shop.center.submit("order.close", biz_id=1, delay="30m")
        shop.center.submit("order.close", biz_id=2, action_time=datetime.now(UTC) + timedelta(days=1))
        assert [toc.advance(step) for step in (1799, 1, "23h", "30m")] == [0, 1, 0, 1]


def test_a_long_set_up_with_a_frozen_clock_has_no_task_run_before_its_time(
    toc: Toc, shop: Shop, slow: timedelta
) -> None:
    with freezegun.freeze_time("2050-01-01") as frozen:
        when = clock.datetime.now(UTC) + timedelta(days=1)
        shop.center.submit("order.close", biz_id=1, action_time=when)
        frozen.tick(timedelta(days=1) - slow / 2)
        assert toc.run_due() == 0
        frozen.tick(slow / 2)
        assert toc.run_due() == 1


def test_a_command_reschedules_from_the_time_of_the_kit(toc: Toc, shop: Shop) -> None:
    job_id = shop.center.submit("order.close", biz_id=1, delay=timedelta(days=3))
    toc.advance("1d")
    done = CliRunner().invoke(app, ["reschedule", str(job_id), "--delay", "2h"])
    assert done.exit_code == 0, done.output
    due = known(shop.center.get(job_id)).action_time
    assert timedelta(hours=1) < due - toc.now <= timedelta(hours=2)


def test_tasks_run_in_the_order_of_their_times_and_the_clock_stands_at_each(toc: Toc, shop: Shop) -> None:
    began = toc.now
    for hours in (3, 1, 2):
        shop.center.submit("order.close", biz_id=hours, delay=timedelta(hours=hours))
    assert toc.advance("1d") == 3
    assert shop.ran == [1, 2, 3]
    assert [round((at - began) / timedelta(hours=1), 1) for *_, at in shop.runs] == [1, 2, 3]
    assert toc.now - began >= timedelta(days=1)


def test_an_error_of_a_handler_fails_the_test_and_the_try(toc: Toc, shop: Shop) -> None:
    job_id = shop.center.submit("order.close", biz_id=1, delay=10)
    shop.raises = RuntimeError("no such order")
    with pytest.raises(RuntimeError, match="no such order") as caught:
        toc.advance("1m")
    assert "in close" in "".join(str(entry) for entry in caught.traceback)
    shop.raises = None
    toc.advance("1m")
    task = known(shop.center.get(job_id))
    assert (task.status, task.attempt, shop.ran) == (PROCESSED, 2, [1, 1])


def test_all_tries_of_a_task_that_keeps_failing_pass_in_one_step(toc: Toc, shop: Shop) -> None:
    toc.topic("order.close", retries=3)
    job_id = shop.center.submit("order.close", biz_id=1, delay=10)
    toc.fail("order.close", times=3)
    assert toc.advance("1d") == 0
    assert shop.ran == []
    assert [task.job_id for task in toc.tasks(status=DEAD)] == [job_id]
    assert toc.tasks(status="dead") == toc.tasks(status=DEAD)
    with pytest.raises(InvalidInput, match="pending, processed, cancelled, dead"):
        toc.tasks(status="ended")


def test_coroutines_run_in_a_loop_of_the_kit_or_of_the_test(toc: Toc, shop: Shop) -> None:
    shop.center.submit("member.remind", biz_id=1, delay=10)
    assert toc.advance("1m") == 1

    async def test() -> None:
        shop.center.submit("member.remind", biz_id=2, delay=10)
        with pytest.raises(NeedsAwait):
            toc.advance("1m")
        assert await toc.aadvance("1m") == 1
        shop.center.submit("member.remind", biz_id=3, action_time=toc.now - timedelta(1), past="run")
        assert await toc.arun_due() == 1

    asyncio.run(test())
    assert shop.ran == [1, 2, 3]


def test_the_event_loop_of_the_test_is_still_its_threads_when_the_kit_has_ended() -> None:
    shop, own = Shop(), asyncio.new_event_loop()
    asyncio.set_event_loop(own)
    try:
        with Toc() as shop.kit:
            shop.kit.use(shop.center)
            shop.center.submit("member.remind", biz_id=1, delay=10)
            assert shop.kit.advance("1m") == 1
        assert asyncio.get_event_loop() is own
    finally:
        asyncio.set_event_loop(None)
        own.close()


def test_a_task_that_resubmits_itself_for_ever_ends_in_an_error(
    toc: Toc, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MAX_CALLS", 100)

    def again(task: Task) -> None:
        shop.center.submit("loop", biz_id=task.biz_id, delay=0.001)

    shop.center.handler("loop")(again)
    shop.center.submit("loop", biz_id=1, delay=1)
    with pytest.raises(TooManyCalls, match="'loop' the most"):
        toc.advance("1d")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_is_killed_is_followed_by_another(toc: Toc, shop: Shop, when: str) -> None:
    job_id = shop.center.submit("order.close", biz_id=1, delay=10)
    toc.kill_worker(before="order.close") if when == "before" else toc.kill_worker(after="order.close")
    toc.advance("1h")
    assert known(shop.center.get(job_id)).status is PROCESSED
    assert len(shop.runs) == (1 if when == "before" else 2), "at least once: its outcome was lost"


def test_a_task_that_kills_every_worker_ends_dead(toc: Toc, shop: Shop) -> None:
    job_id = shop.center.submit("order.close", biz_id=1, delay=10)
    toc.kill_worker(before="order.close", times=50)
    toc.advance("1d")
    assert toc.tasks(status=DEAD)[0].job_id == job_id
    assert shop.ran == []


def test_a_database_that_is_away_and_an_answer_that_is_lost(toc: Toc, shop: Shop) -> None:
    with toc.database_away(), pytest.raises(Unavailable):
        shop.center.submit("order.close", biz_id=1, delay=10)
    with toc.lose_reply(), pytest.raises(SubmitUnknown):
        shop.center.submit("order.close", biz_id=2, delay=10)
    assert [task.biz_id for task in toc.tasks()] == [2]
    toc.lose_reply()
    with pytest.raises(SubmitUnknown):
        shop.center.submit("order.close", biz_id=3, delay=10)
    shop.center.submit("order.close", biz_id=4, delay=10)
    with toc.database_away():
        assert toc.advance("1m") == 0
    assert toc.run_due() == 3


@pytest.mark.parametrize("by", ["session", "connection"])
@pytest.mark.parametrize("fault", ["database_away", "lose_reply"])
def test_a_fault_meets_a_submit_in_a_transaction_before_the_application_has_committed(
    toc: Toc, shop: Shop, tmp_path: Path, by: str, fault: str
) -> None:
    with engine_of(f"sqlite:///{tmp_path / 'shop.db'}") as engine:
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE orders (id INT)")
        for early in (True, False):
            with Session(engine) if by == "session" else engine.connect() as place:
                place.execute(sa.text("INSERT INTO orders VALUES (1)"))
                within: Any = {by: place}
                submit = partial(shop.center.submit, "order.close", biz_id=1, delay=10, **within)
                if not early:
                    submit()
                with getattr(toc, fault)(), pytest.raises(Unavailable):
                    (submit if early else place.commit)()
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT * FROM orders").all() == []
    assert toc.tasks() == []


def test_one_handler_alone(toc: Toc, shop: Shop) -> None:
    shop.center.submit("order.close", biz_id=7, delay=0.001)
    task = toc.run(shop.close, biz_id=8, attribute={"a": [1, 2]})
    assert (task.status, task.attribute) == (PROCESSED, {"a": [1, 2]})
    assert shop.ran == [8]
    with pytest.raises(InvalidInput):
        toc.run(print)
    assert asyncio.run(toc.arun(shop.remind, biz_id=9)).status is PROCESSED
    assert shop.ran == [8, 9]


def test_a_misspelt_topic_fails_the_test() -> None:
    with Toc() as toc:
        toc.use(Shop().center)
        for call in (toc.fail, toc.refute_submitted, toc.tasks, lambda topic: toc.kill_worker(before=topic)):
            with pytest.raises(InvalidInput, match=r"'order.clos'; did you mean 'order\.close'\?"):
                call("order.clos")


def _asking(ask: Callable[[Toc], object], error: BaseException | None = None) -> None:
    with Toc() as toc:
        toc.use(Shop().center)
        ask(toc)
        if error is not None:
            raise error


def test_a_fault_that_nothing_meets_fails_a_test_that_has_not_failed_otherwise() -> None:
    for ask in (lambda toc: toc.fail("order.close"), lambda toc: toc.kill_worker(after="order.close")):
        with pytest.raises(AssertionError, match=r"no try of 'order\.close'"):
            _asking(ask)
    with pytest.raises(ZeroDivisionError):
        _asking(lambda toc: toc.fail("order.close"), ZeroDivisionError())


def test_a_passed_deadline_runs_at_once_if_that_is_meant(toc: Toc, shop: Shop) -> None:
    long_ago = toc.now - timedelta(days=30)
    with pytest.raises(InvalidInput, match="past='run'"):
        shop.center.submit("order.close", biz_id=1, action_time=long_ago)
    with pytest.raises(InvalidInput, match="refuse or run"):
        shop.center.submit("order.close", biz_id=1, action_time=long_ago, past="skip")
    now = toc.now
    one = shop.center.submit("order.close", biz_id=1, action_time=long_ago, past="run")
    assert known(shop.center.get(one)).action_time == now, "it is late from now on only"
    shop.center.submit_many([NewTask("order.close", 2, action_time=long_ago, past="run")])
    later = toc.now + timedelta(hours=1)
    shop.center.submit("order.close", biz_id=3, action_time=later, past="run")
    assert toc.run_due() == 2
    toc.assert_submitted("order.close", biz_id=3, due_in="1h")


def test_a_failure_shows_what_there_is_instead_nearest_first(toc: Toc, shop: Shop) -> None:
    shop.center.submit("member.remind", biz_id=42, delay=1800)
    shop.center.submit("order.close", biz_id=42, delay=3600)
    shop.center.submit("order.close", biz_id=43, delay=3600)
    with pytest.raises(AssertionError) as caught:
        toc.assert_submitted("order.close", biz_id=42, due_in="30m")
    head, first, second, third = str(caught.value).splitlines()
    assert "'order.close', biz_id=42, due in 30 min" in head
    assert "biz_id=42" in first
    assert first.endswith(": it is due 30 min later")
    assert "its biz_id is 43; it is due 30 min later" in second
    assert "its topic is 'member.remind'" in third
    shop.center.submit("order.close", biz_id=44, delay=1800.4)
    with pytest.raises(AssertionError, match=r"biz_id=44 pending, .*: it is due 400 ms later"):
        toc.assert_submitted("order.close", biz_id=44, due_in="30m")
    toc.topic("order.cancel")
    with pytest.raises(InvalidInput, match=r"'order\.cancel' is not the handler of one topic"):
        toc.assert_submitted("order.cancel", attribute=shop)
    with pytest.raises(AssertionError, match=r"there is a task 'order\.close', biz_id=43"):
        toc.refute_submitted("order.close", biz_id=43)
    shop.center.cancel_by_biz("order.close", 43)
    with pytest.raises(AssertionError, match=r"biz_id=43 cancelled, .*: it is cancelled"):
        toc.assert_submitted("order.close", biz_id=43)


def test_schedules_fire(toc: Toc, shop: Shop) -> None:
    @shop.center.schedule("nightly", topic="order.close", cron="0 3 * * *", zone="UTC")
    def nightly(_task: Task) -> None:
        raise AssertionError("the handler of its topic runs")

    assert toc.advance("3d") == 3
    assert shop.ran == ["nightly"] * 3
    assert {at.hour for *_, at in shop.runs} == {3}


def test_a_schedule_that_fires_often_is_stopped_for_long_times(
    toc: Toc, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MAX_CALLS", 20)
    monkeypatch.setattr(running, "MAX_IDLE", 20)
    shop.center.schedule("tick", topic="order.close", every=60)(print)
    toc.run_due()
    shop.center.schedules.pause("tick")
    assert toc.advance("7d") == 0
    shop.center.schedules.resume("tick")
    toc.topic("order.close", paused=True)
    assert toc.advance("1h") == 0
    toc.topic("order.close", paused=False)
    with pytest.raises(TooManyCalls, match=r"toc\.run_due\(\) and center\.schedules\.pause"):
        toc.advance("1h")


def test_time_that_other_libraries_move_moves_the_kit(shop: Shop, toc: Toc) -> None:
    with time_machine.travel(datetime(2040, 1, 1, tzinfo=UTC), tick=False) as traveller:
        shop.center.submit("order.close", biz_id=1, action_time=datetime(2040, 1, 2, tzinfo=UTC))
        assert toc.run_due() == 0
        traveller.shift(timedelta(days=1))
        assert toc.run_due() == 1
    with freezegun.freeze_time("2050-01-01") as frozen:
        when = clock.datetime.now(UTC) + timedelta(days=1)
        shop.center.submit("order.close", biz_id=2, action_time=when)
        frozen.tick(timedelta(days=1))
        assert toc.run_due() == 1
    assert shop.ran == [1, 2]


def test_two_centers_with_one_topic_are_told_apart(toc: Toc) -> None:
    one, other = Shop(), Shop()
    one.kit = other.kit = toc
    one.center.submit("order.close", biz_id=1, delay=1)
    with pytest.raises(DuplicateHandler, match=r"toc\.use"):
        toc.advance(1)
    toc.use(other.center)
    assert toc.advance(1) == 1
    assert (one.ran, other.ran) == ([], [1])


OF_DJANGO = """
import django
from django.conf import settings

settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
django.setup()

import shop
from django.db import transaction
from django.test import TestCase
from toc.testing import Toc


class Deadlines(TestCase):
    def test_a_task_is_there_after_the_commit_that_is_never_made(self):
        toc = self.enterContext(Toc())
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            transaction.on_commit(lambda: shop.deliver(7))
            toc.refute_submitted("parcel.confirm")
        toc.assert_submitted("parcel.confirm", biz_id=7, due_in="7d")
        with self.captureOnCommitCallbacks(execute=True), self.assertRaises(KeyError), transaction.atomic():
            transaction.on_commit(lambda: shop.deliver(8))
            raise KeyError
        toc.refute_submitted("parcel.confirm", biz_id=8)
"""


def test_the_example_of_the_page_passes_and_django_has_it_too(tmp_path: Path) -> None:
    (tmp_path / "test_django.py").write_text(OF_DJANGO)
    page = (Path(__file__).parents[2] / "docs/testing.md").read_text()
    test, error, shop = re.findall(r"^```(?:python)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "test_shop.py").write_text(test)

    def told(application: str) -> str:
        (tmp_path / "shop.py").write_text(application)
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    assert error in told(re.sub(r" +center\.submit.*\n", "", shop))
    assert "4 passed" in (found := told(shop)), found


def test_a_handler_cannot_move_the_time(toc: Toc, shop: Shop) -> None:
    shop.center.handler("odd")(lambda _task: toc.advance(1))
    shop.center.submit("odd", biz_id=1, delay=1)
    with pytest.raises(KitError, match="cannot move the time"):
        toc.advance(1)


def test_a_kit_within_another_and_a_time_without_a_zone_are_refused(toc: Toc, shop: Shop) -> None:
    with pytest.raises(KitError, match="another Toc"):
        Toc()
    shop.center.submit("order.close", biz_id=1, delay=10)
    with pytest.raises(InvalidInput, match=r"due_at .* has no time zone"):
        toc.assert_submitted("order.close", due_at=datetime(2030, 1, 1))  # noqa: DTZ001


def test_afterwards_a_center_has_its_own_settings_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOC_DATABASE_URLS", "nonsense://")
    center = TimeoutCenter()
    center.handler("order.close")(print)
    with Toc() as toc:
        center.submit("order.close", biz_id=1, delay=1)
        with pytest.raises(InvalidInput):
            toc.kill_worker()
    with pytest.raises(ConfigError):
        center.submit("order.close", biz_id=1, delay=1)


def test_the_center_of_a_kit_is_none_of_the_process_any_more_when_it_is_closed() -> None:
    """Else its handlers would run in the next test, also where something still refers to it."""
    with Toc() as toc:
        assert toc.center in all_centers()
    assert toc.center not in all_centers()


def test_a_worker_of_the_application_leaves_its_tasks_to_the_test(toc: Toc) -> None:
    """As a web application has one, whose test client starts it."""
    center, ran = TimeoutCenter(), list[Any]()
    center.handler("site.expire")(lambda task: ran.append(task.biz_id))

    async def lifespan() -> int:
        async with center.worker() as worker:
            assert worker.ready.is_set()
            assert "toc-embedded" not in {thread.name for thread in threading.enumerate()}
            center.submit("site.expire", biz_id=1, delay=60)
            return await toc.aadvance("1m")

    toc.use(center)
    assert asyncio.run(lifespan()) == 1
    assert ran == [1]
    assert toc.tasks(status=PENDING) == []


def test_an_outbox_counts_from_the_time_of_the_kit(toc: Toc, shop: Shop, tmp_path: Path) -> None:
    with engine_of(f"sqlite:///{tmp_path / 'shop.db'}") as engine:
        outbox.metadata.create_all(engine)
        toc.advance("1d")
        with engine.begin() as connection:
            outbox.submit(connection, "order.close", biz_id=1, delay="30m")
        assert outbox.drain(engine, shop.center) == 1
    toc.assert_submitted("order.close", due_in="30m")


@pytest.mark.parametrize("commits", [True, False])
def test_a_session_commits_also_where_the_test_rolls_everything_back(
    toc: Toc, shop: Shop, tmp_path: Path, commits: bool
) -> None:
    """The recipe of SQLAlchemy for test suites."""
    with engine_of(f"sqlite:///{tmp_path / 'shop.db'}") as engine:
        with engine.connect() as connection:
            around = connection.begin()
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                shop.center.submit("order.close", biz_id=1, delay=60, session=session)
                session.commit() if commits else session.rollback()
                assert [task.biz_id for task in toc.tasks()] == [1] * commits
            around.rollback()
        assert toc.advance("1m") == commits


def test_an_application_of_coroutines_is_tested_as_it_is() -> None:
    center = AsyncTimeoutCenter()
    reminded: list[int] = []

    @center.handler("order.close")
    async def close(task: Task) -> None:
        await center.submit("member.remind", biz_id=task.biz_id, delay=60)
        await center.schedules.create("nightly", topic="member.remind", cron="0 3 * * *")

    @center.handler("member.remind")
    def remind(task: Task) -> None:
        reminded.append(task.attribute.get("n", 0))
        center.sync.cancel(task.job_id)

    async def order(kit: Toc) -> None:
        job_ids = await center.submit_many([NewTask("order.close", n, 1800) for n in (1, 2)])
        assert await center.cancel(job_ids[1]) is CancelOutcome.CANCELLED
        with pytest.raises(InvalidInput, match=r"did you mean 'order\.close'\?.*toc\.topic\("):
            await center.submit("order.clos", biz_id=3, delay=1800)
        with kit.database_away(), pytest.raises(Unavailable):
            await center.submit("order.close", biz_id=3, delay=1800)
        await kit.aadvance("30m")
        assert known(await center.get(job_ids[0])).status is PROCESSED

    with Toc() as kit:
        kit.use(center)
        asyncio.run(order(kit))
        kit.assert_submitted("member.remind", biz_id=1, due_in=60)
        kit.advance("24h")  # and without a loop of the test's own
        assert len(reminded) == 2
        asyncio.run(center.close())


def test_an_application_is_told_of_its_calls_also_of_awaited_ones() -> None:
    center = AsyncTimeoutCenter()
    told: list[tuple[str, type | None]] = []
    center.handler("order.close")(lambda _task: None)

    @center.on_call
    def measured(call: str, seconds: float, error: BaseException | None) -> None:
        assert seconds >= 0
        told.append((call, None if error is None else type(error)))
        raise ZeroDivisionError  # changes nothing for the caller

    async def order() -> None:
        job_id = await center.submit("order.close", biz_id=1, delay=60)
        await center.get(job_id)
        with pytest.raises(InvalidInput):
            await center.put(NewTask("order.close", 1))
        await center.cancel_by_biz("order.close", biz_id=1)
        await center.close()

    with Toc() as kit:
        kit.use(center)
        asyncio.run(order())
        center.sync.submit_many([])
    assert told == [
        ("submit", None),
        ("get", None),
        ("put", InvalidInput),
        ("cancel_by_biz", None),
        ("submit_many", None),
    ]
