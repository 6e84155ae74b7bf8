"""What a handler changes for its whole interpreter is undone."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from toc.worker import interpreter


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    """The switch interval; it is as before after the test, and nothing is kept."""
    before, hooks = sys.getswitchinterval(), (threading.gettrace(), threading.getprofile())
    setters = threading.settrace, threading.setprofile
    yield before
    sys.setswitchinterval(before)
    threading.settrace, threading.setprofile = setters
    threading.settrace(hooks[0])
    threading.setprofile(hooks[1])
    interpreter._kept.clear()


def test_functions_of_time_and_the_switch_interval_are_put_back(
    usual: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.monotonic
    interpreter.keep()
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    sys.setswitchinterval(1000.0)
    interpreter.restore()
    assert time.monotonic is real
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_what_the_application_has_set_before_stays(usual: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)  # as libraries do that replace threads
    sys.setswitchinterval(usual / 10)
    interpreter.keep()
    ours = time.sleep
    interpreter.restore()
    assert time.sleep is ours
    assert sys.getswitchinterval() == pytest.approx(usual / 10)


@pytest.mark.parametrize("setter", ["settrace", "setprofile"])
def test_what_is_called_in_each_new_thread_is_not_called_in_ours(setter: str) -> None:
    called: list[object] = []
    interpreter.keep()
    getattr(threading, setter)(lambda *event: called.append(event))
    for name in ("toc-late", "theirs"):
        assert not called
        thread = threading.Thread(target=int, name=name)
        thread.start()
        thread.join()
    assert called
    getattr(threading, setter)(None)
    assert getattr(threading, setter.replace("set", "get"))() is None
