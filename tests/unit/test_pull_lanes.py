"""Lanes of the pull room: a thread that handles in batches what others put."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from toc.pull.lanes import Lane


class Held:
    """A handler that waits, in each batch, until it is let go on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, batch: list[int]) -> None:
        self.batches.append(list(batch))
        self.begun.release()
        assert self.go.acquire(timeout=20)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def lane(held: Held) -> Iterator[Lane[int]]:
    lane = Lane("test", held, 4)
    lane.start()
    yield lane
    for _ in range(20):
        held.go.release()
    lane.stop(20)


def test_what_comes_during_a_batch_goes_with_the_next_in_order_and_at_most_so_many(
    held: Held, lane: Lane[int]
) -> None:
    asked = [1]
    assert lane.put(asked)
    assert held.begun.acquire(timeout=20)
    assert lane.waiting == 0
    for some in [2, 3], [], [4, 5, 6, 7, 8], [9]:
        assert lane.put(some)
    assert lane.waiting == 8
    for waiting in 4, 0:
        held.go.release()
        assert held.begun.acquire(timeout=20)
        assert lane.waiting == waiting
    assert held.batches == [[1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert asked == [1], "a caller's list stays as it was"


def test_what_was_put_before_the_end_is_handled_and_the_rest_refused(held: Held, lane: Lane[int]) -> None:
    lane.put([1])
    assert held.begun.acquire(timeout=20)
    lane.put([2, 3, 4, 5, 6])
    for _ in range(3):
        held.go.release()
    lane.stop(20)
    lane.stop(20)
    assert held.batches == [[1], [2, 3, 4, 5], [6]]
    assert not lane.put([7])
