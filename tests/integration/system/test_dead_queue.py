"""DeadQueues: what stands there and is dead no more goes. Only the owner of the slot would ever know."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from harness.system import System
from structlog.testing import capture_logs

from toc import TimeoutCenter
from toc.store.batch import Failure, Guard
from toc.task import TryRow
from toc.topic import Slot
from toc.worker import deadqueues
from toc.worker.link import Link
from toc.worker.process import Worker

TOPIC = "test.sync"
SLOT = Slot(TOPIC, 0)


def kill(system: System, job_id: int) -> None:
    """The task's row is dead."""
    row = system.center.store.read_tries([job_id])[job_id]
    at = system.center.clock.now_ms()
    failure = Failure(job_id, row.version, row.attempts, row.crashes, 1, 0, at, "as the test wants")
    assert system.center.store.die([failure]) == {job_id: Guard.APPLIED}


def in_dead_queue(system: System) -> set[int]:
    return {job_id for job_id, _ in system.center.queues.dead(SLOT, 100)}


@pytest.fixture
def owner(system: System) -> Iterator[Worker]:
    """A worker that has the slot; its loops turn when the test says so."""
    system.create_topics(slots=1)
    center = TimeoutCenter(system.settings)
    center.handler(TOPIC)(print)
    center.catalog.refresh()
    here, there = socket.socketpair()
    there.close()
    link = Link(here)
    worker = Worker(center, "owner", link, app="unused:center", threads=1)
    worker.book.want([SLOT])
    worker.book.claim_missing()
    yield worker
    worker.dispatcher.close()
    for end in (link, worker._wake_receiver, worker._wake_sender):
        end.close()
    center.close()


def look(owner: Worker) -> None:
    """One pass over the DeadQueues."""
    owner.reclaimer.look_now()
    owner.reclaimer.run_once()
    for _ in range(20):
        if owner.dead_check.run_once() > deadqueues.PASS_SECONDS / 2:
            return
    raise AssertionError("the pass has no end")


def test_what_is_dead_no_more_leaves_the_dead_queue(
    system: System, owner: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, dying, pending, cancelled = (system.center.submit(TOPIC, biz_id=1, delay=900) for _ in range(4))
    gone = pending + 1  # no row has this id
    kill(system, dead)
    system.center.cancel(cancelled)
    entries = [(job_id, died) for died, job_id in enumerate((cancelled, dead, dying, gone, pending))]
    system.center.queues.restore_dead({SLOT: entries})
    monkeypatch.setattr(deadqueues, "PAGE", 2)  # several pages, of which some shrink
    store = owner.dead_check._store
    read, first = store.read_tries, [dying]

    def read_tries(job_ids: list[int]) -> dict[int, TryRow]:
        rows = read(job_ids)
        if dying in job_ids and first:
            kill(system, first.pop())  # between the first look at it and the second
        return rows

    monkeypatch.setattr(store, "read_tries", read_tries)
    with capture_logs() as said:
        look(owner)
    assert in_dead_queue(system) == {dead, dying}
    assert [line["job_id"] for line in said if line["event"] == "orphan_dropped"] == [gone]
    assert sum(line["tasks"] for line in said if line["event"] == "dead_entries_removed") == 3
    assert owner.dead_check.loop in owner._loops, "a worker does so by itself"
