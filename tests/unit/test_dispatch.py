"""The dispatcher while its event loop does not turn, as when a coroutine blocks it."""

from __future__ import annotations

from typing import Any

from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.topic import Slot, Topic
from toc.worker.stages.dispatch import Dispatcher
from toc.worker.stages.entry import Entry

TOPIC = Topic("test.async", 1, 2)


class Known:
    """A catalog of one topic."""

    def known(self) -> dict[str, Topic]:
        return {TOPIC.name: TOPIC}


def test_what_waits_for_the_event_loop_can_be_withdrawn() -> None:
    async def call(_task: object) -> None:
        raise AssertionError

    nothing: Any = None
    catalog: Any = Known()
    handler = Handler(TOPIC.name, call, None, True)
    dispatcher = Dispatcher(
        handlers={TOPIC.name: handler},
        inflight=nothing,
        finisher=nothing,
        catalog=catalog,
        clock=Clock(),
        threads=1,
        async_limit=100,
        early=nothing,
        inbox=nothing,
        bodies=nothing,
        on_room=(),
        recycle=nothing,
    )
    slots = [Slot(TOPIC.name, number) for number in range(2)]
    entries = [Entry(n, slots[n % 2], 1.0, TOPIC, handler, 0, 0.0) for n in range(10)]
    dispatcher.put(entries)
    assert dispatcher.load() == {TOPIC.name: (0, 10)}
    assert dispatcher.room(TOPIC.name) == 90
    assert dispatcher.withdraw({slots[0]}) == entries[::2]
    assert dispatcher.withdraw() == entries[1::2]
    assert dispatcher.room(TOPIC.name) == 100
    dispatcher.close()
