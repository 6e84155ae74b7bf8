"""The client for asyncio: the verbs of TimeoutCenter, on event loops, in sessions, and cancelled."""

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import structlog
import trio
import uvloop
from contract.system import Contract
from harness.patience import PATIENCE, until
from harness.rows import known
from harness.system import NewSystem
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks.local import MariaDB
from toc import AsyncTimeoutCenter, CancelOutcome, NewTask, RescheduleOutcome, Task, TimeoutCenter, TocError
from toc.model import errors
from toc.model.sharding import BizId
from toc.model.task import Submission
from toc.sdk import async_client
from toc.sdk.async_client import AsyncSchedules, AsyncTargets
from toc.sdk.batcher import Batcher
from toc.sdk.handlers import Registry
from toc.sdk.schedules import Schedules
from toc.sdk.targets import Targets

OWN = {"sync"}
"""What this class alone has."""
PARTS = {"clock", "store", "queues", "catalog", "tracing", "use", "stands_in"}
"""What a center is made of: that of ``sync``."""
INNER = {"declared", "handled", "declare", "serves", "check_usable", "refresh", "forget"}
"""What toc itself calls."""


def public(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")} - PARTS - INNER


@pytest.mark.parametrize(
    ("sync", "ours"),
    [(TimeoutCenter, AsyncTimeoutCenter), (Schedules, AsyncSchedules), (Targets, AsyncTargets)],
)
def test_each_name_is_called_alike_and_says_the_same(sync: type, ours: type) -> None:
    assert public(sync) == public(ours) - OWN
    plain = {"schedule", "worker", *public(Registry)} - {"submit"}
    for name in sorted(public(sync)):
        one, other = getattr(sync, name), getattr(ours, name)
        if not callable(one):
            continue
        assert inspect.signature(one) == inspect.signature(other), name
        assert str(one.__doc__).split("\n")[0] == str(other.__doc__).split("\n")[0], name
        assert inspect.iscoroutinefunction(other) == (name not in plain), name


def run(system: Contract, steps: Any) -> Any:
    async def go() -> Any:
        async with AsyncTimeoutCenter(system.settings) as center:
            return await steps(center)

    return asyncio.run(go())


def test_many_in_flight_share_commits_and_each_has_its_own_outcome(idle: Contract) -> None:
    async def steps(center: AsyncTimeoutCenter) -> None:
        async def submit(n: int) -> int | TocError:
            try:
                return await center.submit(
                    "c.plain", biz_id=n, delay=3600 if n % 10 else -1, attribute={"n": n}
                )
            except TocError as exc:
                return exc

        found = await asyncio.gather(*map(submit, range(300)))
        assert all(isinstance(one, errors.InvalidDelay) == (n % 10 == 0) for n, one in enumerate(found))
        job_ids = [one for one in found if isinstance(one, int)]
        assert len(set(job_ids)) == 270
        tasks = await asyncio.gather(*map(center.get, job_ids))
        assert [task and task.attribute["n"] for task in tasks] == [n for n in range(300) if n % 10]
        whole = await center.submit("c.plain", biz_id=1, delay=3600, body=b"whole")
        task = known(await center.get(whole))
        assert task.body == b"whole"

    run(idle, steps)


async def test_the_callers_of_a_batch_go_together_in_the_next(
    contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them to be answered does not go alone, nor any who asks before the next batch begins."""
    topic, store = contract.center.catalog.get("c.plain"), contract.center.store
    sizes: list[int] = []

    def counted(tasks: Sequence[Submission], put_each: Any = store.put_each) -> Any:
        sizes.append(len(tasks))
        return put_each(tasks)

    monkeypatch.setattr(store, "put_each", counted)
    batcher = Batcher(contract.center)

    async def work() -> None:
        for n in range(5):
            one = await batcher.checked(NewTask("c.plain", n, 3600), topic=topic)
            assert isinstance(one, Submission)
            await batcher.store(one)

    await asyncio.gather(*(work() for _ in range(64)))
    await batcher.close()
    assert sizes == [64] * 5


def test_a_schedule_and_a_target_are_made_and_found(idle: Contract) -> None:
    async def steps(center: AsyncTimeoutCenter) -> None:
        made = await center.schedules.create("hourly-async", topic="c.plain", every=3600, attribute={"a": 1})
        assert known(await center.schedules.get("hourly-async")).definition == made.definition
        assert await center.schedules.delete("hourly-async")
        assert await center.targets.get("nobody") is None

    run(idle, steps)


@pytest.fixture
def engine(contract: Contract) -> AsyncEngine:
    url = create_engine(contract.settings.need_database_urls()[0]).url
    database = f"{contract.prefix}0"
    return create_async_engine(url.set(drivername="mysql+aiomysql", database=database), pool_size=12)


def test_who_waits_for_a_dedup_key_lets_the_loop_go_on(either: Contract, engine: AsyncEngine) -> None:
    """The other's commit comes on the same loop: a wait that held it up would be one for itself."""

    async def steps(center: AsyncTimeoutCenter) -> None:
        await center.submit("c.plain", biz_id=4, delay=3600)  # the topic is known
        began, go_on = asyncio.Event(), asyncio.Event()

        async def click() -> list[int]:
            async with AsyncSession(engine) as session:
                found = []
                for key in ("close", "remind"):
                    found.append(
                        await center.submit("c.plain", biz_id=3, delay=3600, dedup_key=key, session=session)
                    )
                    began.set()
                    await go_on.wait()
                await session.commit()
                return found

        clicks = [asyncio.ensure_future(click())]
        await began.wait()
        clicks += [asyncio.ensure_future(click()) for _ in range(11)]  # more than the store has connections
        await asyncio.sleep(0.2)  # time to begin their waits
        go_on.set()
        first, *others = await asyncio.gather(*clicks)
        assert others == [first] * 11
        await engine.dispose()

    run(either, steps)


@pytest.mark.parametrize("commits", [True, False])
def test_what_is_done_in_an_async_session_or_connection_is_so_if_it_commits(
    idle: Contract, engine: AsyncEngine, commits: bool
) -> None:
    later = datetime.now(UTC) + timedelta(hours=2)

    async def steps(center: AsyncTimeoutCenter) -> None:
        gone, moved = await center.submit_many([NewTask("c.plain", 2, 3600), NewTask("c.plain", 2, 3600)])
        async with AsyncSession(engine) as session:
            job_id = await center.submit("c.plain", biz_id=2, delay=3600, session=session)
            cancelled = await center.cancel(gone, session=session)
            assert await center.get(job_id) is None
            await (session.commit() if commits else session.rollback())
        async with engine.connect() as connection:
            more = await center.submit_many([NewTask("c.plain", 2, 3600)], connection=connection)
            change = await center.reschedule(moved, action_time=later, connection=connection)
            await (connection.commit() if commits else connection.rollback())
        await engine.dispose()
        assert [await center.get(one) is not None for one in (job_id, *more)] == [commits] * 2
        for one in (cancelled, change):
            if commits:
                outcome = await asyncio.to_thread(getattr, one, "outcome")
                assert outcome.name in ("CANCELLED", "RESCHEDULED")
            else:
                with pytest.raises(errors.NotCommitted):
                    await asyncio.to_thread(getattr, one, "outcome")
        assert await center.cancel(gone) is CancelOutcome.CANCELLED

    run(idle, steps)


def test_a_session_that_would_hold_up_the_loop_is_refused(idle: Contract) -> None:
    async def steps(center: AsyncTimeoutCenter) -> None:
        with Session() as session, pytest.raises(errors.InvalidInput, match="sync"):
            await center.submit("c.plain", biz_id=1, delay=3600, session=session)

    run(idle, steps)


def test_a_submit_whose_await_is_cancelled_says_which_job_id_may_be_stored(either: Contract) -> None:
    async def cancelled(call: Coroutine[Any, Any, Any], waiting: int) -> asyncio.CancelledError:
        task = asyncio.ensure_future(call)
        said = (
            "SELECT COUNT(*) AS n FROM information_schema.processlist WHERE state LIKE 'Waiting for table%%'"
        )
        while either.query(said)[0]["n"] < waiting:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as raised:
            await task
        return raised.value

    async def steps(center: AsyncTimeoutCenter) -> None:
        await center.submit("c.plain", biz_id=3, delay=3600)  # everything is connected
        lock = either.connect()
        with structlog.testing.capture_logs() as logs, lock.cursor() as cursor:
            tables = [f"`{either.prefix}{n % 2}`.`timeout_task_{n:04d}` READ" for n in range(8)]
            cursor.execute(f"LOCK TABLES {', '.join(tables)}")
            error = await cancelled(center.submit("c.plain", biz_id=3, delay=3600), 1)
            await cancelled(center.submit_many([NewTask("c.plain", 3, 3600)] * 2), 2)
            lock.close()
            ended: list[Any] = []
            while not ended:
                await asyncio.sleep(0.01)
                ended = [line for line in logs if line["event"] == "call_ended_alone"]
        (said,) = [line for line in logs if line["event"] == "submit_cancelled"]
        job_id: int = error.job_id  # type: ignore[attr-defined]
        assert str(job_id) in error.__notes__[0]
        assert said["job_id"] == job_id
        assert (ended[0]["call"], ended[0]["error"]) == ("submit_many", "")
        while await center.get(job_id) is None:
            await asyncio.sleep(0.01)
        assert len(ended[0]["job_ids"]) == 2
        assert None not in [await center.get(one) for one in ended[0]["job_ids"]]

    run(either, steps)


async def test_a_change_whose_await_is_cancelled_says_what_became_of_which_task(
    either: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def waits(do: Callable[[], Any]) -> Any:
        began.set()
        go_on.wait(PATIENCE)
        return do()

    async def left(change: Coroutine[Any, Any, Any]) -> tuple[list[int], list[str]]:
        began.clear()
        go_on.clear()
        with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
            patch.setattr(async_client, "copy_context", lambda: SimpleNamespace(run=waits))
            call = asyncio.ensure_future(change)
            await asyncio.to_thread(began.wait, PATIENCE)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            go_on.set()
            while not logs:
                await asyncio.sleep(0.01)
        return sorted(logs[0]["job_ids"]), logs[0]["outcomes"]

    async with AsyncTimeoutCenter(either.settings) as center:
        one, other = sorted([await center.submit("c.plain", biz_id="left", delay=3600) for _ in range(2)])
        assert await left(center.reschedule(job_id=one, delay="2h")) == ([one], ["RESCHEDULED"])
        assert await left(center.cancel(one)) == ([one], ["CANCELLED"])
        assert await left(center.cancel_by_biz("c.plain", "left")) == ([one, other], ["CANCELLED"] * 2)
        await center.schedules.create("left", topic="c.plain", every=3600)
        (made,), _ = await left(center.schedules.trigger("left"))
        assert made in {task.job_id for task in await center.find(biz_id="left")} - {one, other}
        await center.schedules.delete("left")


def test_it_works_on_several_loops_and_after_its_close(idle: Contract) -> None:
    center = AsyncTimeoutCenter(idle.settings)

    async def submits() -> list[int]:
        return await asyncio.gather(*[center.submit("c.plain", biz_id=4, delay=3600) for _ in range(10)])

    async def closed() -> list[int]:
        found = await submits()
        await center.close()
        await center.close()
        return [*found, *await submits()]

    found: list[int] = []
    other = threading.Thread(target=lambda: found.extend(uvloop.run(submits())))
    other.start()
    found += asyncio.run(submits())
    other.join()
    found += anyio.run(closed, backend="asyncio")
    assert len(set(found)) == 40

    async def end() -> None:
        await center.close()

    asyncio.run(end())


async def _submit(center: AsyncTimeoutCenter) -> int:
    return await center.submit("c.plain", biz_id=4, delay=3600)


def test_the_batcher_of_a_loop_that_ended_without_a_close_is_let_go(contract: Contract) -> None:
    center = AsyncTimeoutCenter(contract.settings)
    before = set(threading.enumerate())
    gc.collect()
    gc.disable()  # a reference in a circle would keep the threads until it runs
    try:
        for _ in range(3):
            asyncio.run(_submit(center))
            assert len(center._batchers) == 1

        def more() -> int:
            return sum(one.name.startswith("toc-submit") for one in set(threading.enumerate()) - before)

        assert until(lambda: more() <= 1, PATIENCE), "the threads of loops that ended have ended"
    finally:
        gc.enable()
    asyncio.run(center.close())


async def test_a_call_in_the_middle_of_a_close_is_answered(contract: Contract) -> None:
    batcher = Batcher(contract.center)
    await batcher.close()
    with pytest.raises(errors.UnknownTopic):
        await batcher.topic("no.such")
    await batcher.close()


def test_handlers_of_a_worker_await_the_same_center_on_their_own_loop(either: Contract) -> None:
    center = AsyncTimeoutCenter(either.settings)
    ran: list[int | str] = []

    @center.handler("c.async")
    async def first(task: Task) -> None:
        assert await center.get(task.job_id) is not None
        await center.submit("c.now", biz_id=task.biz_id)

    @center.handler("c.now")
    def second(task: Task) -> None:
        ran.append(task.biz_id)

    async def steps() -> None:
        async with center, center.worker():
            await center.submit("c.async", biz_id=5, delay=0.01)
            async with asyncio.timeout(PATIENCE):
                while not ran:
                    await asyncio.sleep(0.01)

    asyncio.run(steps())
    assert ran == [5]


def test_trio_is_refused_by_its_name() -> None:
    center = AsyncTimeoutCenter()

    async def steps() -> None:
        calls: list[Coroutine[Any, Any, Any]] = [
            center.submit("c.plain", biz_id=1, delay=1),
            center.cancel(1),
            center.get(1),
            center.schedules.get("none"),
            center.close(),
        ]
        for call in calls:
            with pytest.raises(errors.ConfigError, match="trio is not supported"):
                await call

    trio.run(steps)


async def test_in_a_session_a_server_that_hangs_does_not_hold_up_the_loop(
    launch: Any, new_system: NewSystem, mariadb: MariaDB
) -> None:
    """toc's own connections are asked once it has answered the session, or a thread."""
    hanging = launch(MariaDB)
    system = new_system(database_urls=[mariadb.url, hanging.url], read_timeout=3)
    system.create_topics()
    engine = create_async_engine(hanging.url.replace("pymysql", "aiomysql"))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.dispose)
        center = await stack.enter_async_context(AsyncTimeoutCenter(system.settings))
        connection, store = await stack.enter_async_context(engine.connect()), center.sync.store
        there, here = (
            next(n for n in range(100) if store.server_of_biz(BizId.of(n)) == server) for server in (1, 0)
        )
        moved, one, other = await center.submit_many([NewTask("test.sync", there, 3600)] * 3)
        near = await center.submit("test.sync", biz_id=here, delay=3600)
        await center.cancel(one, connection=connection)  # all is connected, and known to be the same server
        for call in (
            lambda: center.reschedule(moved, delay=60, connection=connection),
            lambda: center.cancel(other, connection=connection),
            lambda: center.cancel_by_biz("test.sync", there, connection=connection),
        ):
            hanging.pause()
            try:
                waiting = asyncio.ensure_future(call())
                await asyncio.sleep(0.1)  # time to ask
                assert await center.get(near)
                assert not waiting.done(), "the loop has stood still for as long as it waited"
            finally:
                hanging.resume()
                await asyncio.gather(waiting, return_exceptions=True)
            waiting.result()
        await connection.commit()


async def test_calls_that_wait_for_a_server_that_hangs_hold_up_none_of_another(
    launch: Any, new_system: NewSystem, mariadb: MariaDB
) -> None:
    hanging = launch(MariaDB)
    system = new_system(database_urls=[mariadb.url, hanging.url], read_timeout=60)
    system.create_topics()
    async with AsyncTimeoutCenter(system.settings) as center:
        store = center.sync.store

        def biz_id(server: int) -> int:
            return next(n for n in range(100) if store.server_of_biz(BizId.of(n)) == server)

        def name_of(server: int) -> str:
            return next(f"s{n}" for n in range(100) if store.server_of_biz(BizId.of(f"s{n}")) == server)

        there, here = biz_id(1), biz_id(0)
        one = await center.submit("test.sync", biz_id=there, delay=3600)
        other = await center.submit("test.sync", biz_id=here, delay=3600)
        hanging.pause()
        try:
            calls = [center.cancel(one), center.find(biz_id=there), center.schedules.get(name_of(1))]
            waiting = [asyncio.ensure_future(call) for call in calls]
            waiting += [asyncio.ensure_future(center.find(biz_id=there)) for _ in range(40)]
            waiting.append(asyncio.ensure_future(center.submit_many([NewTask("test.sync", there, 3600)])))
            await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE):
                assert [task.job_id for task in await center.find(biz_id=here)] == [other]
                assert await center.reschedule(other, delay=60) is RescheduleOutcome.RESCHEDULED
                assert await center.cancel(job_id=other) is CancelOutcome.CANCELLED
                assert await center.cancel_by_biz("test.sync", here) == {other: CancelOutcome.CANCELLED}
                assert len(await center.submit_many([NewTask("test.sync", here, 3600)] * 2)) == 2
                assert await center.schedules.get(name_of(0)) is None
                assert await center.targets.get("nobody") is None
            assert not any(call.done() for call in waiting)
        finally:
            hanging.resume()
        await asyncio.gather(*waiting, return_exceptions=True)
