"""When a daemon starts a process again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from toc.worker.daemon.successors import LIVED_SECONDS, RESTART_CAP_SECONDS, SERVED_CAP_SECONDS, Successors


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def process(born: float, *, heard: bool = True, unfit: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(index=0, born=born, heard=heard, unfit=unfit)


def test_all_are_started_at_first_and_each_once() -> None:
    successors = Successors(3, Time())
    assert successors.take_due() == [0, 1, 2]
    assert successors.take_due() == []
    assert successors.next_at() == float("inf")


def test_a_process_is_started_when_its_time_has_come() -> None:
    time = Time()
    successors = Successors(2, time)
    successors.take_due()
    successors.start_in(1, 2.0)
    assert successors.next_at() == 1002.0
    assert successors.take_due() == []
    time.now += 2.0
    assert successors.take_due() == [1]


def test_those_that_die_soon_are_waited_for_longer_each_time_until_one_lives() -> None:
    time = Time()
    successors = Successors(1, time)
    waits = [successors.backoff(process(time.now, heard=False)) for _ in range(12)]
    assert [round(wait, 1) for wait in waits[:4] if wait is not None] == [0.1, 0.3, 0.7, 1.5]
    assert waits[-1] == RESTART_CAP_SECONDS
    assert successors.backoff(process(time.now - LIVED_SECONDS - 1)) == 0.0
    assert successors.backoff(process(time.now)) == 0.1 * (2.0 - 1)


def test_one_that_has_served_is_not_waited_for_long() -> None:
    successors = Successors(1, Time())
    for _ in range(12):
        served = successors.backoff(process(1000.0))
    assert served == SERVED_CAP_SECONDS


def test_an_application_that_never_loaded_is_not_tried_again_but_one_that_has() -> None:
    successors = Successors(1, Time())
    unfit = process(1000.0, heard=False, unfit={"wrong": True})
    assert successors.backoff(unfit) is None
    successors.loaded = True
    assert successors.backoff(unfit) is not None
