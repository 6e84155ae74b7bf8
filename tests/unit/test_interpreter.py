"""What a handler changes for its whole interpreter is undone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from toc.worker import interpreter


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    """The switch interval; it is as before after the test, and nothing is kept."""
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)
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
