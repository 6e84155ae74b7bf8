"""Moves of many entries at once."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.scores import store_score
from toc.model.topic import Slot, Topic
from toc.model.verdict import Place
from toc.worker.entry import Entry, Inflight
from toc.worker.settle.moves import EntryMover, Move

TOPIC = Topic("order.close", 1, 1, horizon=60)
SLOT = Slot(TOPIC.name, 0)
MANY = 2000


@dataclass(eq=False)
class Compared(Entry):
    """An entry that counts how often entries are compared."""

    times: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return self is other

    __hash__ = Entry.__hash__


class Took:
    """Queues that count what they are asked to move."""

    def __init__(self) -> None:
        self.moved = {"commit": 0, "rollback": 0, "bury": 0}

    def __getattr__(self, name: str) -> Any:
        def take(entries: dict[Slot, list[Any]]) -> dict[Slot, list[bool]]:
            self.moved[name] += sum(map(len, entries.values()))
            return {slot: [True] * len(some) for slot, some in entries.items()}

        return take


def test_twice_as_many_moves_take_twice_as_much_work() -> None:
    """Half of what goes back lies beyond the horizon: it waits in its row alone."""

    async def call(_task: object) -> None:
        raise AssertionError

    handler, clock, inflight, queues = Handler(TOPIC.name, call, None, True), Clock(), Inflight(), Took()
    now = clock.now_ms()
    entries = [Compared(n, SLOT, 1.0, TOPIC, handler, now, 0.0) for n in range(MANY)]
    for entry in entries:
        inflight.hold(entry)
    moves = [
        Move(entry, Place.STORE_QUEUE, store_score(now + entry.job_id % 2 * 3_600_000, 0, 0))
        for entry in entries
    ]
    tools: Any = SimpleNamespace(queues=queues, inflight=inflight, clock=clock)
    mover = EntryMover(tools)
    Compared.times = 0
    assert not mover.make(moves)
    assert queues.moved == {"commit": MANY // 2, "rollback": MANY // 2, "bury": 0}
    assert Compared.times < MANY, "each entry is compared with few others"
