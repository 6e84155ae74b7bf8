"""What the owner of a slot finds there, and removes or gives back. Its loops turn when the test says so."""

from collections.abc import Collection, Iterator
from typing import Any, cast

import pytest
from harness.clocks import PushedClock
from harness.hands import SLOT, TOPIC, WorkerAtRest
from harness.system import System, buried
from structlog.testing import capture_logs

from benchmarks.local import RedisServer
from toc import TimeoutCenter
from toc.index.messages import Generation
from toc.maintenance import dead_entries as deadqueues
from toc.model.topic import Slot
from toc.model.verdict import Failure
from toc.store.tasks.batch import Guard
from toc.worker.beat import Beat
from toc.worker.entry import LOST
from toc.worker.index_watch import HOLD_SECONDS
from toc.worker.slots import OwnedSlot, SlotBook

OTHER = Slot("test.doomed", 0)
LONG_AGO = "1003"
"""The PrepareQueue score of what was taken in 1970, with three tries left, under number 0."""


def kill(system: System, job_id: int) -> None:
    """The task's row is dead."""
    row = system.center.store.read_tries([job_id])[job_id]
    at = system.center.clock.now_ms()
    failure = Failure(job_id, row.version, row.attempts, row.crashes, 1, 0, at, "as the test wants")
    assert system.center.store.die([failure]) == {job_id: Guard.APPLIED}


@pytest.fixture
def owner(system: System) -> Iterator[WorkerAtRest]:
    """A worker that has the slot."""
    system.create_topics(slots=1)
    with TimeoutCenter(system.settings, clock=PushedClock()) as center:
        for topic in (TOPIC, OTHER.topic):
            center.handler(topic)(print)
        center.catalog.refresh()
        one = WorkerAtRest(center, "owner", [SLOT])
        yield one
        one.close()


def look(owner: WorkerAtRest) -> None:
    """One pass over the DeadQueues."""
    owner.reclaim()
    for _ in range(20):
        if owner.worker.dead_check.run_once() > deadqueues.PASS_SECONDS / 2:
            return
    raise AssertionError("the pass has no end")


def test_what_is_dead_no_more_leaves_the_dead_queue(
    system: System, owner: WorkerAtRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, pending, cancelled = (system.center.submit(TOPIC, biz_id=1, delay=900) for _ in range(3))
    gone = max(dead, pending, cancelled) + 1  # no row has this id
    kill(system, dead)
    system.center.cancel(cancelled)
    entries = [(job_id, died) for died, job_id in enumerate((cancelled, dead, gone, pending))]
    system.center.queues.restore_dead({SLOT: entries})
    monkeypatch.setattr(deadqueues, "PAGE", 2)  # several pages, of which some shrink
    with capture_logs() as said:
        look(owner)
    assert buried(system.center, [SLOT]) == {dead}
    assert [line["job_id"] for line in said if line["event"] == "orphan_dropped"] == [gone]
    assert sum(line["tasks"] for line in said if line["event"] == "dead_entries_removed") == 3
    assert "dead" in {loop.name for loop in owner.worker.loops}, "a worker does so by itself"


def test_a_slot_that_is_claimed_as_a_look_begins_is_peeked_at_soon(
    owner: WorkerAtRest, monkeypatch: pytest.MonkeyPatch
) -> None:
    peeked: list[Slot] = []
    peek, meanwhile = owner.queues.peek, [OTHER]

    def record(slots: Collection[Slot]) -> Any:
        peeked.extend(slots)
        return peek(slots)

    def owned(book: SlotBook) -> dict[Slot, OwnedSlot]:
        known: dict[Slot, OwnedSlot] = vars(book)["owned"]
        if meanwhile:
            owner.own([meanwhile.pop()])
            owner.reclaimer.look_now()
        return known

    def replace(book: SlotBook, owned: dict[Slot, OwnedSlot]) -> None:
        vars(book)["owned"] = owned

    monkeypatch.setattr(owner.queues, "peek", record)
    monkeypatch.setattr(SlotBook, "owned", property(owned, replace), raising=False)
    owner.reclaimer.run_once()
    assert set(owner.book.owned) == {SLOT, OTHER}
    owner.reclaimer.run_once()
    assert OTHER in peeked


def test_an_entry_without_a_row_that_times_out_alarms(
    system: System, owner: WorkerAtRest, clean_redis: RedisServer
) -> None:
    gone = system.center.submit(TOPIC, biz_id=1, delay=900) + 1  # no row has this id
    clean_redis.call("ZADD", system.center.queues.keys(SLOT).prepare, LONG_AGO, str(gone))
    with capture_logs() as said:
        owner.reclaimer.run_once()
    assert not clean_redis.call("ZCARD", system.center.queues.keys(SLOT).prepare)
    assert [line["job_id"] for line in said if line["event"] == "orphan_dropped"] == [gone]


@pytest.mark.parametrize("hidden_by", ["a task that runs on here and is ours no more", "one that we took"])
def test_what_a_silent_worker_left_is_given_back_beside_what_runs_here(
    system: System, owner: WorkerAtRest, clean_redis: RedisServer, hidden_by: str
) -> None:
    """As many entries are held here as stand in the PrepareQueue, but it is another one that stands there."""
    ours, left = (system.center.submit(TOPIC, biz_id=1, delay=900) for _ in range(2))
    clean_redis.call("ZADD", system.center.queues.keys(SLOT).prepare, LONG_AGO, str(left))
    entry = owner.entry(ours, 3.0)
    owner.inflight.hold(entry)
    if hidden_by == "one that we took":
        owner.book.owned[SLOT].others = {0: "silent"}
    else:
        entry.kept = LOST
    owner.reclaimer.run_once()
    assert not clean_redis.call("ZCARD", system.center.queues.keys(SLOT).prepare)


def test_a_loss_seen_in_one_slot_has_every_slot_claimed_anew_at_once(
    system: System, owner: WorkerAtRest, clean_redis: RedisServer
) -> None:
    """Each look asks some of the slots. What is taken under a number that is lost, another may hold too."""
    slots = system.slots()
    owner.own(slots)
    found = owner.queues.generations(slots)
    owner.queues.set_generations({slot: cast(Generation, found[slot]).serving for slot in slots})
    owner.worker.watch.run_once()
    clean_redis.call("FLUSHALL")
    owner.worker.watch.run_once()
    assert all(clean_redis.call("EXISTS", system.center.queues.keys(slot).claims) for slot in slots)


def test_a_slot_that_is_recorded_as_whole_is_claimed_whatever_was_lost_meanwhile(
    system: System, owner: WorkerAtRest, clean_redis: RedisServer
) -> None:
    """Its generation is missing already, so nobody sees that it was emptied once more."""
    keys, watch = system.center.queues.keys(SLOT), owner.worker.watch
    clean_redis.call("FLUSHALL")
    watch.run_once()
    clean_redis.call("FLUSHALL")
    cast(PushedClock, owner.center.clock).pushed += HOLD_SECONDS
    watch.run_once()
    assert clean_redis.call("EXISTS", keys.generation)
    assert clean_redis.call("HGET", keys.claims, str(owner.book.owned[SLOT].claim)) == "owner"


def test_slots_of_a_full_node_run_from_their_rows_until_it_has_room_and_it_does_not_count_as_away(
    owner: WorkerAtRest, clean_redis: RedisServer
) -> None:
    watch = owner.worker.watch
    watch.run_once()
    clean_redis.call("CONFIG", "SET", "maxmemory", "1mb")
    try:
        with capture_logs() as said:
            watch.run_once()
        assert watch.out_of_reach([SLOT]) == [SLOT]
        assert ["OOM" in line["error"] for line in said if line["event"] == "index_unreachable"] == [True]
        told: list[Any] = []
        owner.worker.tools.tell = lambda *_, **more: told.append(more)
        Beat(owner.worker).run_once()
        assert told[-1]["out_of_reach"] == []
    finally:
        clean_redis.call("CONFIG", "SET", "maxmemory", "0")
    watch.run_once()
    assert not watch.out_of_reach([SLOT])
