"""What a worker has taken and not finished is bounded, whatever is slow: if it dies, others wait for that."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
from harness.hands import SLOT, TOPIC, Pair
from harness.patience import PATIENCE, until
from harness.system import System

from toc import NewTask
from toc.index.messages import Peek
from toc.model.clock import to_ms
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot
from toc.store.servers.shards import Trouble
from toc.store.tasks.batch import Finish
from toc.worker.entry import UNLEASED_SECONDS
from toc.worker.run import handler_threads
from toc.worker.settle import flush
from toc.worker.take import agenda
from toc.worker.take.agenda import TAKE_LIMIT


def submit(system: System, count: int) -> list[int]:
    """Submit tasks; returns once they are due."""
    due = datetime.now(UTC)
    job_ids = system.center.submit_many([NewTask(TOPIC, number, 0.001) for number in range(count)])
    assert until(lambda: system.center.clock.now_ms() > to_ms(due) + 1, PATIENCE)
    return job_ids


def test_what_is_refused_for_want_of_a_lease_makes_no_room_for_more(
    system: System, hands: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers are slow and no lease comes: each second the whole line is refused, and comes back."""
    worker, _ = hands
    monkeypatch.setattr(handler_threads, "START_WITHIN_SECONDS", 100)
    monkeypatch.setattr(agenda, "MAX_UNSTARTED", 300)
    submit(system, 1600)
    worker.begin()
    while worker.inflight.waiting(TOPIC) <= 300:
        assert until(lambda: worker.dispatcher.load()[TOPIC][0] == 1, PATIENCE), "none has started"
        worker.clock.slept += 2 * UNLEASED_SECONDS
        worker.end()  # so the thread meets the rest of the line
        assert until(lambda: worker.dispatcher.load()[TOPIC] == (0, 0), PATIENCE)
        worker.take()
    assert worker.inflight.waiting(TOPIC) < 300 + TAKE_LIMIT
    prepared = len(worker.snapshot())
    worker.take()
    assert len(worker.snapshot()) == prepared, "nothing more is taken"
    worker.leases.look(0)
    worker.finish()
    worker.take()
    assert until(lambda: worker.dispatcher.load()[TOPIC][0] == 1, PATIENCE), "they come back"
    worker.end()


def test_entries_of_ended_rows_do_not_pile_up_behind_a_flush_that_hangs(system: System, hands: Pair) -> None:
    worker, _ = hands
    job_ids = submit(system, 400)
    ended = system.center.store.finish([(job_id, 0) for job_id in job_ids])
    assert set(ended.values()) == {Finish.DONE}
    most = 0
    for _ in range(40):  # a round takes 21 at most
        worker.take()
        most = max(most, len(worker.snapshot()))
    assert most < 300
    worker.finish()
    assert not worker.snapshot()
    peek = worker.queues.peek([SLOT])[SLOT]
    assert isinstance(peek, Peek)
    assert peek.store == 0, "not all were taken"


def test_who_gives_back_an_entry_with_a_lease_does_not_wait_for_its_row(
    system: System, hands: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever it is may serve other servers: the entry waits for the thread of its own."""
    worker, _ = hands
    monkeypatch.setattr(flush, "MAX_QUEUED", 0)
    submit(system, 1)
    worker.take()
    (entry,) = worker.inflight.snapshot()
    asked: list[int] = []

    def release(job_ids: Iterable[int]) -> dict[int, Trouble]:
        asked.extend(job_ids)
        return {}

    monkeypatch.setattr(worker.store.leases, "release", release)
    assert not worker.leases.take([entry])
    worker.finisher.give_back([entry])
    assert not asked
    worker.finish()
    assert asked == [entry.job_id]


@pytest.mark.parametrize("by", ["flush", "thread that takes"])
def test_who_asks_while_a_move_fails_is_not_told_that_nothing_is_left_to_write(
    system: System, hands: Pair, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Its slot would be handed over although an entry is still there, or its process would end."""
    worker, _ = hands
    submit(system, 1)
    worker.take()
    (entry,) = worker.inflight.snapshot()
    worker.dispatcher.withdraw()
    looked, failed = threading.Event(), threading.Event()
    idle: list[bool] = []
    asks = threading.Thread(target=lambda: idle.append(worker.finisher.idle))

    class Queue(deque[Any]):
        """Who asks looks into it before the move has failed, and goes on after that."""

        def __bool__(self) -> bool:
            found = len(self) > 0
            if threading.current_thread() is asks:
                looked.set()
                assert failed.wait(PATIENCE)
            return found

    def rollback(entries: Iterable[Slot]) -> dict[Slot, IndexUnavailable]:
        worker.inflight.arrived([entry])
        asks.start()
        assert until(lambda: looked.is_set() or not asks.is_alive(), PATIENCE)
        return dict.fromkeys(entries, IndexUnavailable("as the test wants"))

    (flusher,) = worker.finisher.flushers
    monkeypatch.setattr(flusher, "_moves", Queue())
    monkeypatch.setattr(worker.queues, "rollback", rollback)
    if by == "flush":
        worker.finisher.give_back([entry])
        flusher.run_once()
    else:
        worker.finisher.put_away([(entry, worker.clock.now_ms())])
    failed.set()
    asks.join()
    assert idle == [False]
    assert not worker.finisher.idle
