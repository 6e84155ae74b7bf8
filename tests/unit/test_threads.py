"""The threads of the store."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from harness.patience import until

from toc.store.servers.threads import Threads


def test_work_is_done_by_the_threads_that_there_are_if_no_other_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(3, "toc-store")
    assert threads.begin(lambda: 1)() == 1

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    release = threading.Event()
    ends = [threads.begin(release.wait), threads.begin(lambda: 2), threads.begin(lambda: 3)]
    release.set()
    assert [end() for end in ends] == [True, 2, 3]
    monkeypatch.undo()
    threads.close()


def test_an_error_says_so_if_there_is_no_thread_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        Threads(3, "toc-store").begin(lambda: 1)


def test_what_is_opened_and_closed_again_and_again_leaves_nothing_behind_for_forks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **calls: registered.append(calls))
    for _ in range(3):
        Threads(1, "test").close()
    assert not registered


def test_work_that_is_begun_while_another_thread_closes_is_done() -> None:
    threads, done, interval = Threads(3, "test"), [0] * 4, sys.getswitchinterval()
    over = threading.Event()

    def work(number: int) -> None:
        for _ in range(1000):
            done[number] += threads.begin(lambda: 1)()

    def close() -> None:
        while not over.is_set():
            threads.close()

    callers = [threading.Thread(target=work, args=[number], daemon=True) for number in range(4)]
    closer = threading.Thread(target=close)
    sys.setswitchinterval(1e-6)
    try:
        for thread in (closer, *callers):
            thread.start()
        assert until(lambda: not any(caller.is_alive() for caller in callers)), f"{done} of 1000 each"
    finally:
        over.set()
        sys.setswitchinterval(interval)
        closer.join()
    assert done == [1000] * 4
