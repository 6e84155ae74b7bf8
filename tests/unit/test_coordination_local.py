"""The local coordinator: the processes of one daemon share the slots without any server."""

from __future__ import annotations

from collections.abc import Callable

from toc.coordination.assignment import Member
from toc.coordination.coordinator import Coordinator
from toc.coordination.local import DEAD_FOR_MS, LocalCoordinator
from toc.model.clock import Clock

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


def test_a_process_that_died_leaves_its_slots_and_is_known_to_be_dead() -> None:
    made = coordinator("w0", "w1")
    claim_all(made)
    made.leave("w1", known_dead=True)
    assert made.dead_workers() == {"w1"}
    claim_all(made)
    assert len(made.claimed()["w0"]) == 10


def test_a_known_death_is_forgotten_after_ten_minutes() -> None:
    clock = SetClock()
    made = coordinator("w0", clock=clock)
    made.leave("w0", known_dead=True)
    clock.now += DEAD_FOR_MS
    assert made.dead_workers() == {"w0"}
    clock.now += 1
    assert made.dead_workers() == frozenset()
