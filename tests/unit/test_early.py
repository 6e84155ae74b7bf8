"""Entries that wait for this machine's clock: released in the order of their times, or taken back."""

from __future__ import annotations

import random
import threading
from typing import Any

from toc.model.task import TryRow
from toc.model.topic import Slot, Topic
from toc.worker.slots import NEVER
from toc.worker.stages.early import EarlyEntries
from toc.worker.stages.entry import Entry

TOPIC = Topic("order.close", 7, 2)
NOTHING: Any = None


def entry(number: int, due: int) -> Entry:
    made = Entry(number, TOPIC.slots()[number % 2], 1.0, TOPIC, NOTHING, 0, 0.0)
    made.row = TryRow(number, 1, 7, 0, due, due, 0, 0, 0, 0, None, "{}")
    return made


def test_what_is_due_comes_out_in_order_and_what_is_withdrawn_never_does() -> None:
    wakes: list[None] = []
    early = EarlyEntries(lambda: wakes.append(None))
    entries = [entry(number, due=100 + number // 2) for number in range(40)]
    early.put(random.Random(3).sample(entries, 40))
    early.put(entries[:1])  # an id may wait twice
    assert len(wakes) == 2
    assert early.next_due() == 100
    assert early.release(99) == []
    taken = early.withdraw({Slot(TOPIC.name, 1)})
    assert sorted(one.job_id for one in taken) == list(range(1, 40, 2))
    first = early.release(105)
    assert [one.job_id for one in first] == [0, 0, 2, 4, 6, 8, 10]
    assert early.next_due() == 106
    assert sorted(one.job_id for one in early.withdraw()) == list(range(12, 40, 2))
    assert early.next_due() == NEVER


def test_what_stays_is_seen_while_others_are_withdrawn() -> None:
    early = EarlyEntries(lambda: None)
    early.put([entry(0, due=200), entry(1, due=100), entry(2, due=300)])
    seen: list[int] = []

    class Looks(set[Slot]):
        def __contains__(self, slot: object) -> bool:
            poller = threading.Thread(target=lambda: seen.append(early.next_due()))
            poller.start()
            poller.join(0.05)  # it may wait for the end of the withdrawal
            pollers.append(poller)
            return super().__contains__(slot)

    pollers: list[threading.Thread] = []
    assert [one.job_id for one in early.withdraw(Looks({Slot(TOPIC.name, 1)}))] == [1]
    for poller in pollers:
        poller.join()
    assert seen == [200, 200, 200], "a poller that sees nothing sleeps for a minute"
