"""When a process says that its threads hardly get the interpreter, and when that costs it its slots."""

from __future__ import annotations

from toc.worker.crowding import (
    CROWDED_SECONDS,
    LOAD_SECONDS,
    LOOK_SECONDS,
    LOOKS,
    OVER_SECONDS,
    STILL_SECONDS,
    Crowding,
    Relief,
)


class Looks:
    """Looks at a made-up process; ``told`` is what it has told."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.told: list[bool] = []
        self.stood_still = 0
        self.crowding = Crowding(
            self.told.append, self._count, monotonic=lambda: self.now, processor=lambda: self.used
        )

    def _count(self) -> None:
        self.stood_still += 1

    def look(self, waited: float, times: int, *, computes: float = 1.0) -> list[bool]:
        """Look so many times, each ``waited`` seconds late; ``computes`` is its part of a core."""
        for _ in range(times):
            self.now += LOOK_SECONDS + waited
            self.used += (LOOK_SECONDS + waited) * computes
            assert self.crowding.look() == LOOK_SECONDS
        return self.told


def test_a_process_is_crowded_when_most_looks_come_late_and_tells_once() -> None:
    looks = Looks()
    assert not looks.look(2 * CROWDED_SECONDS, LOOKS - 1)
    assert looks.look(2 * CROWDED_SECONDS, 100) == [True]


def test_it_is_over_when_it_was_not_crowded_for_a_while() -> None:
    looks = Looks()
    looks.look(2 * CROWDED_SECONDS, LOOKS)
    assert looks.look(0.0, int(OVER_SECONDS / LOOK_SECONDS) - LOOKS) == [True]
    assert looks.look(0.0, 2 * LOOKS) == [True, False]


def test_single_halts_do_not_make_it_crowded() -> None:
    looks = Looks()
    for _ in range(20):
        looks.look(5.0, 1)
        looks.look(CROWDED_SECONDS / 2, 1)
        looks.look(0.0, 1)
    assert not looks.told


def test_a_process_that_hardly_computes_stands_still_and_is_not_crowded() -> None:
    assert not Looks().look(2 * CROWDED_SECONDS, 100, computes=0.4)


def test_a_stop_is_noticed_wherever_it_comes() -> None:
    looks = Looks()
    looks.look(2 * STILL_SECONDS, 1)  # it has just begun to look
    looks.look(0.9 * STILL_SECONDS, 10)
    assert looks.stood_still == 0
    looks.look(1.1 * STILL_SECONDS, 1)
    assert looks.stood_still == 1

    def used() -> float:
        looks.now += 3 * STILL_SECONDS  # within a look
        return 0.0

    looks.crowding = Crowding(looks.told.append, looks._count, monotonic=lambda: looks.now, processor=used)
    looks.look(0.0, 2)
    assert looks.stood_still == 2


def test_a_process_that_is_crowded_alone_is_relieved() -> None:
    relief = Relief(lambda: 0.0)
    assert relief.of([], ["a", "b"]) is None
    assert relief.of(["a"], ["a", "b"]) == "a"
    assert relief.of(["a"], ["b"]) == "a", "for as long as it is crowded"


def test_the_last_that_serves_is_not_relieved() -> None:
    relief = Relief(lambda: 0.0)
    assert relief.of(["a"], ["a"]) is None
    assert relief.of(["a"], []) is None


def test_where_several_are_crowded_it_is_the_load_for_a_while() -> None:
    now = 100.0
    relief = Relief(lambda: now)
    assert relief.of(["a", "b"], ["a", "b", "c"]) is None
    now += LOAD_SECONDS - 1
    assert relief.of(["b"], ["a", "b", "c"]) is None
    now += 2
    assert relief.of(["b"], ["a", "b", "c"]) == "b"
