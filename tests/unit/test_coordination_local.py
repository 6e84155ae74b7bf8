"""The local coordinator: the processes of one daemon share the slots without any server."""

from __future__ import annotations

from collections.abc import Callable

from toc.coordination.assignment import Member
from toc.coordination.coordinator import Coordinator
from toc.coordination.local import DEAD_FOR_MS, LocalCoordinator
from toc.model.clock import Clock
from toc.model.topic import Slot

TOPICS = {"order.close": 6, "order.remind": 4}


class SetClock(Clock):
    """A clock that stands where it is put."""

    now = 1_000_000

    def now_ms(self) -> int:
        return self.now


def coordinator(
    *worker_ids: str, clock: Clock | None = None, on_change: Callable[[], None] = lambda: None
) -> LocalCoordinator:
    made = LocalCoordinator(clock, on_change)
    made.start()
    made.set_topics(TOPICS)
    for worker_id in worker_ids:
        made.join(Member(worker_id, "h"))
    return made


def claim_all(made: Coordinator) -> None:
    for worker_id, slots in made.desired().items():
        made.claim(worker_id, slots)


def test_the_processes_share_all_slots() -> None:
    made = coordinator("w0", "w1")
    claim_all(made)
    held = made.claimed()
    assert held == made.desired()
    assert len(held["w0"]) == len(held["w1"]) == 5
    assert held["w0"] | held["w1"] == {
        Slot(topic, n) for topic, slots in TOPICS.items() for n in range(slots)
    }


def test_a_new_process_gets_a_slot_only_after_its_owner_has_released_it() -> None:
    made = coordinator("w0")
    claim_all(made)
    made.join(Member("w1", "h"))
    wanted = made.desired()["w1"]
    assert len(wanted) == 5
    assert made.claim("w1", wanted) == set()
    first = min(wanted)
    made.release("w0", {first})
    assert made.claim("w1", wanted) == {first}
    assert made.claimed()["w0"].isdisjoint({first})


def test_what_a_process_does_not_hold_it_cannot_release() -> None:
    made = coordinator("w0", "w1")
    claim_all(made)
    before = made.claimed()
    made.release("w0", before["w1"])
    assert made.claimed() == before


def test_a_process_that_died_leaves_its_slots_and_is_known_to_be_dead() -> None:
    made = coordinator("w0", "w1")
    claim_all(made)
    made.leave("w1", known_dead=True)
    assert made.dead_workers() == {"w1"}
    claim_all(made)
    assert len(made.claimed()["w0"]) == 10


def test_a_process_that_left_is_not_called_dead() -> None:
    made = coordinator("w0", "w1")
    made.leave("w1", known_dead=False)
    assert made.dead_workers() == frozenset()


def test_a_known_death_is_forgotten_after_ten_minutes() -> None:
    clock = SetClock()
    made = coordinator("w0", clock=clock)
    made.leave("w0", known_dead=True)
    clock.now += DEAD_FOR_MS
    assert made.dead_workers() == {"w0"}
    clock.now += 1
    assert made.dead_workers() == frozenset()


def test_who_did_not_join_gets_nothing() -> None:
    made = coordinator("w0")
    assert made.claim("stranger", {Slot("order.close", 0)}) == set()
    made.leave("stranger", known_dead=False)
    assert made.claimed() == {"w0": set()}


def test_each_change_wakes_the_daemon() -> None:
    calls: list[str] = []
    made = coordinator("w0", on_change=lambda: calls.append("woken"))
    calls.clear()
    made.set_topics({**TOPICS, "parcel.confirm": 2})
    made.join(Member("w1", "h"))
    assert len(calls) == 2
    made.set_topics({**TOPICS, "parcel.confirm": 2})  # as before
    assert len(calls) == 2


def test_stop_gives_everything_back_and_may_come_twice() -> None:
    made = coordinator("w0")
    claim_all(made)
    made.stop()
    made.stop()
    assert made.claimed() == made.desired() == {}
