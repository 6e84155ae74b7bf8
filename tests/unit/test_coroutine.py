"""Who may cancel the coroutine of a handler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog

from toc.model.handler import Handler
from toc.model.topic import Slot, Topic
from toc.worker.stages.coroutine import HandlerTask
from toc.worker.stages.entry import Entry

Call = Callable[[], Awaitable[Any]]


def started(job_id: int, call: Call) -> HandlerTask:
    """A handler that runs."""
    topic = Topic("test.topic", 1, 1)
    entry = Entry(job_id, Slot(topic.name, 0), 1.0, topic, Handler(topic.name, call, None, True), 0, 0.0)

    async def known() -> None:
        task.begin()
        await call()

    task = HandlerTask(known(), entry, asyncio.get_running_loop())
    return task


async def forever() -> None:
    await asyncio.Event().wait()


async def cancel_all() -> None:
    for task in asyncio.all_tasks():
        if isinstance(task, HandlerTask):  # not the test
            task.cancel()
    await asyncio.sleep(0)


async def timed_out() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await forever()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(forever(), 0.01)


async def one_of_a_group_fails() -> None:
    async def fail() -> None:
        raise ValueError

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await forever()

    with pytest.raises(ExceptionGroup):
        await work()


@pytest.mark.parametrize("call", [timed_out, one_of_a_group_fails])
def test_a_handler_is_cancelled_by_its_own_time_outs_and_groups(call: Call) -> None:
    async def main() -> HandlerTask:
        task = started(1, call)
        await asyncio.wait_for(asyncio.shield(task), 5)
        return task

    assert not asyncio.run(main()).disturbed


def test_another_handler_is_told_once_that_it_has_ended() -> None:
    async def main() -> None:
        others = [started(number, forever) for number in range(2, 5)]
        unbegun = started(5, forever)
        await asyncio.sleep(0)
        culprit = started(1, cancel_all)
        with structlog.testing.capture_logs() as logs:
            await asyncio.wait([culprit], timeout=60)
        assert culprit.cancelled()
        assert not culprit.disturbed
        assert [(line["event"], line["job_id"]) for line in logs] == [("cancel_refused", 1)]
        await asyncio.sleep(0)
        for task in (*others, unbegun):
            assert task.disturbed
            assert not task.done()
            task.end()
            assert not task.disturbed
        await asyncio.wait([*others, unbegun], timeout=60)
        assert all(task.cancelled() for task in (*others, unbegun))

    asyncio.run(main())


def test_none_is_cancelled_before_its_first_step() -> None:
    async def main() -> None:
        task = started(1, timed_out)
        task.cancel()
        await asyncio.wait_for(task, 5)

    asyncio.run(main())


def test_a_cancel_by_nobody_that_is_known_has_its_effect_and_its_failure_is_not_its_own() -> None:
    async def main() -> None:
        task = started(1, forever)
        await asyncio.sleep(0)
        task.cancel()
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.cancelled()
        assert task.disturbed

    asyncio.run(main())


def test_a_handler_that_leaves_the_thread_without_a_running_loop_breaks_no_later_coroutine() -> None:
    async def later() -> None:
        loop = asyncio.get_running_loop()
        task = started(1, lambda: asyncio.sleep(0.001))
        loop._ready.appendleft(asyncio.Handle(asyncio._set_running_loop, (None,), loop))  # type: ignore[attr-defined]
        await task

    asyncio.run(later())
