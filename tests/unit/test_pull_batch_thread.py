"""A thread that handles in batches what others put."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from toc.pull.batch_thread import BatchThread


class Held:
    """A handler that waits, in each batch, until it is let go on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, batch: list[int]) -> None:
        self.batches.append(list(batch))
        self.begun.release()
        assert self.go.acquire(timeout=60)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def thread(held: Held) -> Iterator[BatchThread[int]]:
    thread = BatchThread("test", held, 4)
    thread.start()
    yield thread
    for _ in range(20):
        held.go.release()
    thread.stop(20)


def test_what_comes_during_a_batch_goes_with_the_next_in_order_and_at_most_so_many(
    held: Held, thread: BatchThread[int]
) -> None:
    asked = [1]
    assert thread.put(asked)
    assert held.begun.acquire(timeout=60)
    assert thread.waiting == 0
    for some in [2, 3], [], [4, 5, 6, 7, 8], [9]:
        assert thread.put(some)
    assert thread.waiting == 8
    for waiting in 4, 0:
        held.go.release()
        assert held.begun.acquire(timeout=60)
        assert thread.waiting == waiting
    assert held.batches == [[1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert asked == [1], "a caller's list stays as it was"


def test_what_was_put_before_the_end_is_handled_and_the_rest_refused(
    held: Held, thread: BatchThread[int]
) -> None:
    thread.put([1])
    assert held.begun.acquire(timeout=60)
    thread.put([2, 3, 4, 5, 6])
    for _ in range(3):
        held.go.release()
    thread.stop(20)
    thread.stop(20)
    assert held.batches == [[1], [2, 3, 4, 5], [6]]
    assert not thread.put([7])
