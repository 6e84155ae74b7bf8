"""Limits that handlers lower are raised again; where that is refused, the process is told to leave."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from toc.worker import limits

FSIZE = resource.RLIMIT_FSIZE


@pytest.fixture
def most() -> Iterator[int]:
    """The hard limit of the size of files; both are as before after the test."""
    before = resource.getrlimit(FSIZE)
    limits.keep()
    yield before[1]
    resource.setrlimit(FSIZE, before)
    limits._kept.clear()


def test_what_a_handler_has_lowered_is_raised_and_what_it_has_raised_stays(most: int) -> None:
    resource.setrlimit(FSIZE, (1 << 40, most))
    limits.keep()
    resource.setrlimit(FSIZE, (1 << 30, most))
    assert not limits.restore()
    assert resource.getrlimit(FSIZE) == (1 << 40, most)
    resource.setrlimit(FSIZE, (1 << 50, most))
    assert not limits.restore()
    assert resource.getrlimit(FSIZE) == (1 << 50, most)


def test_a_limit_that_cannot_be_raised_is_told(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resource.setrlimit(FSIZE, (1 << 40, most))
    monkeypatch.setattr(limits, "_kept", {"RLIMIT_FSIZE": (1 << 41, most)})

    def refuse(_which: int, _limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert limits.restore()
    monkeypatch.undo()
