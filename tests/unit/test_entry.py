"""The states of an entry: what each call of Inflight makes of them."""

from types import SimpleNamespace
from typing import cast

import pytest

from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.topic import Slot, Topic
from toc.model.verdict import Place
from toc.worker.entry import NO_LEASE, SETTLE, START, UNREAD, Entry, Inflight, State
from toc.worker.settle.moves import EntryMover, Move
from toc.worker.tools import Tools

ROW = UNREAD._replace(job_id=1)


def held_in(state: State, inflight: Inflight) -> Entry:
    topic = Topic("t", 1, 1)
    entry = Entry(1, Slot("t", 0), 5.0, topic, Handler.of("t", lambda _: None, None), 0, 0.0)
    entry.row, entry.lease = ROW, NO_LEASE._replace(possible=True)
    assert inflight.hold_if_free(entry)
    if state is State.RUNS:
        assert inflight.start(entry, 0.5)
    elif state is State.REFUSED:
        assert not inflight.start(entry, 1e6)
    elif state is State.SETTLED:
        assert inflight.settle(entry)
    elif state is State.GONE:
        inflight.drop([entry])
    assert entry.state is state
    return entry


@pytest.mark.parametrize("state", list(State))
def test_an_entry_goes_only_where_the_table_says(state: State) -> None:
    inflight = Inflight()
    started = held_in(state, inflight)
    assert inflight.waiting("t") == (state in (State.WAITS, State.REFUSED))
    assert inflight.start(started, 0.5) == (state in START)
    inflight = Inflight()
    settled = held_in(state, inflight)
    assert inflight.settle(settled) == (state in SETTLE)
    assert not inflight.settle(settled), "only one caller reports an outcome"
    inflight = Inflight()
    late = held_in(state, inflight)
    assert inflight.refused(1e6) == ([late] if state in (State.WAITS, State.REFUSED) else [])
    assert not inflight.refused(1e6)
    assert inflight.waiting("t") == 0
    assert inflight.depart([late]) == [late]
    assert late.state is State.GONE


def test_a_move_of_many_entries_compares_none_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a burst would take the square of its size."""
    compared: list[object] = []

    def compare(one: Entry, other: object) -> bool:
        compared.append(other)
        return one is other

    inflight, slot, handler = Inflight(), Slot("t", 0), Handler.of("t", lambda _: None, None)
    entries = [Entry(n, slot, 5.0, Topic("t", 1, 1), handler, 0, 0.0) for n in range(50)]
    assert all(map(inflight.hold_if_free, entries))
    queues = SimpleNamespace(commit=lambda some: some, rollback=None, bury=None)
    tools = cast(Tools, SimpleNamespace(clock=Clock(), inflight=inflight, queues=queues))
    monkeypatch.setattr(Entry, "__eq__", compare)
    assert EntryMover(tools).make([Move(entry, Place.NOWHERE) for entry in entries]) == []
    assert not compared
