"""The dispatcher while its event loop does not turn, as when a coroutine blocks it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.topic import Slot, Topic
from toc.worker.stages import handler_loop
from toc.worker.stages.dispatch import Dispatcher
from toc.worker.stages.entry import Entry
from toc.worker.stages.feedback import WantedRoom
from toc.worker.stages.handler_loop import AHEAD, HandlerLoop

TOPIC = Topic("test.async", 1, 2)


class Known:
    """A catalog of one topic."""

    def known(self) -> dict[str, Topic]:
        return {TOPIC.name: TOPIC}


async def call(_task: object) -> None:
    raise AssertionError


def dispatcher_of(handler: Handler, async_limit: int) -> Dispatcher:
    """A dispatcher that was not started."""
    nothing: Any = None
    catalog: Any = Known()
    return Dispatcher(
        handlers={TOPIC.name: handler},
        inflight=nothing,
        finisher=nothing,
        catalog=catalog,
        clock=Clock(),
        threads=1,
        async_limit=async_limit,
        early=nothing,
        let_go=nothing,
        bodies=nothing,
        on_room=(),
        recycle=nothing,
    )


def test_what_waits_for_the_event_loop_can_be_withdrawn() -> None:
    handler = Handler(TOPIC.name, call, None, True)
    dispatcher = dispatcher_of(handler, 100)
    slots = [Slot(TOPIC.name, number) for number in range(2)]
    entries = [Entry(n, slots[n % 2], 1.0, TOPIC, handler, 0, 0.0) for n in range(10)]
    dispatcher.put(entries)
    assert dispatcher.load() == {TOPIC.name: (0, 10)}
    assert dispatcher.room(TOPIC.name) == 90
    assert dispatcher.withdraw({slots[0]}) == entries[::2]
    assert dispatcher.withdraw() == entries[1::2]
    assert dispatcher.room(TOPIC.name) == 100
    dispatcher.close()


def test_of_tasks_that_do_not_wait_for_others_few_are_taken_ahead() -> None:
    waiting = 0
    handler = Handler(TOPIC.name, call, None, True, waiting_remotely=lambda: waiting)
    dispatcher = dispatcher_of(handler, 1000)
    entries = [Entry(n, Slot(TOPIC.name, 0), 1.0, TOPIC, handler, 0, 0.0) for n in range(AHEAD)]
    assert dispatcher.room(TOPIC.name) == AHEAD
    dispatcher.put(entries)
    assert dispatcher.room(TOPIC.name) == 0
    waiting = 100
    assert dispatcher.room(TOPIC.name) == 100
    assert len(dispatcher.withdraw()) == AHEAD
    assert dispatcher.room(TOPIC.name) == AHEAD + 100
    dispatcher.close()


def test_room_is_told_of_when_tasks_begin_to_wait_for_others_although_none_has_ended() -> None:
    waiting = 0
    told = threading.Event()
    handler = Handler(TOPIC.name, call, None, True, waiting_remotely=lambda: waiting)
    nothing: Any = None
    wanted = WantedRoom(lambda topic: loop.room(topic) or 0, [told.set])
    loop = HandlerLoop(
        [handler], 1000, calls=nothing, bodies=nothing, clock=Clock(), wanted=wanted, concurrency=lambda _: 0
    )
    turning = threading.Thread(target=loop._loop.run_forever)
    loop._shared_taken = AHEAD
    turning.start()
    wanted.add(TOPIC.name)
    loop.look_for_room(TOPIC.name)
    assert not told.wait(0.05)
    waiting = AHEAD
    assert told.wait(60)
    loop.close()
    turning.join()
    loop._loop.close()


def test_a_topic_may_be_given_up_before_the_event_loop_gets_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(handler_loop, "end_process", lambda _, error: ended.append(error))
    nothing: Any = None
    handler = Handler(TOPIC.name, call, None, True)
    loop = HandlerLoop(
        [handler], 1000, calls=nothing, bodies=nothing, clock=Clock(), wanted=nothing, concurrency=lambda _: 0
    )
    loop.limits_changed()
    assert loop.serve(Handler(TOPIC.name, print, None, False))
    loop._loop.call_soon(loop._loop.stop)
    loop._loop.run_forever()
    loop._loop.close()
    assert ended == []
