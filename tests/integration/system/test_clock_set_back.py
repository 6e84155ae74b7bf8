"""A worker whose clock is set back by an hour: what it meant to do in a moment it does in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest
from harness.hands import SLOT, Hands, Pair, submit_due
from harness.system import System

from toc.index.messages import Peek, PrepareRequest
from toc.model.errors import StoreUnavailable
from toc.store.servers.shards import Answers, Trouble
from toc.worker.entry import NO_LEASE
from toc.worker.slots import instant_of

HOUR_MS = 3_600_000


@contextmanager
def an_hour_ahead(worker: Hands) -> Iterator[pytest.MonkeyPatch]:
    """Its clock is ahead; it is set back when this ends."""
    clock, now_ms, time = worker.clock, worker.clock.now_ms, worker.clock.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now_ms", lambda: now_ms() + HOUR_MS)
        patch.setattr(clock, "time", lambda: time() + HOUR_MS / 1000)
        yield patch


def unanswered(worker: Hands, error: Trouble, *, leased: bool = False) -> Callable[..., None]:
    """How the database server does not tell of rows."""

    def ask(job_ids: Iterable[int], take: Callable[..., None]) -> None:
        asked = list(job_ids)
        for entry in worker.inflight.snapshot():
            entry.lease = NO_LEASE._replace(possible=leased)
        take(asked, Answers({}, dict.fromkeys(asked, error)))

    return ask


def test_a_prepare_that_redis_serves_late_is_looked_for(system: System, hands: Pair) -> None:
    worker, _ = hands
    claim = worker.book.owned[SLOT].claim
    with an_hour_ahead(worker):
        worker.adopter.reply_lost(SLOT, claim)
        worker.adopt()
    submit_due(system)
    worker.queues.prepare([PrepareRequest(SLOT, 10, 3, claim)])
    worker.clock.slept += 1.0
    assert worker.adopter.run_once() < 10
    worker.turn()
    worker.start_and_wait()


def test_what_has_a_lease_and_waits_for_its_row_is_checked_again(system: System, hands: Pair) -> None:
    worker, _ = hands
    submit_due(system)
    error = StoreUnavailable("away")
    with an_hour_ahead(worker) as patch:
        patch.setattr(worker.checker.reader, "ask", unanswered(worker, error, leased=True))
        worker.take()
    assert worker.turn() < 1
    worker.clock.slept += 1.0
    worker.turn()
    worker.start_and_wait()


def test_what_is_put_away_comes_back(system: System, hands: Pair) -> None:
    worker, _ = hands
    away = unanswered(worker, StoreUnavailable("away"))
    submit_due(system)
    with an_hour_ahead(worker) as patch:
        patch.setattr(worker.checker.reader, "ask", away)
        worker.take()
    submit_due(system)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.checker.reader, "ask", away)
        worker.take()
    peek = worker.queues.peek([SLOT])[SLOT]
    assert isinstance(peek, Peek)
    assert (peek.store, peek.prepared) == (2, 0)
    assert peek.next_due is not None
    assert instant_of(peek.next_due) < worker.clock.now_ms() + 60_000
