"""Whether a process has descriptors left, and has its own still."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from toc.sockets import none_left
from toc.worker import descriptors


@pytest.fixture
def most() -> Iterator[int]:
    """The number of descriptors that there may be: some hundred more than there are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what is opened."""
    with ExitStack() as stack:
        yield stack


def _open_up_to(number: int, opened: ExitStack) -> None:
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) < number:
        opened.callback(os.close, descriptor)
    opened.callback(os.close, descriptor)


def test_a_process_is_short_of_descriptors_before_there_are_none(most: int, opened: ExitStack) -> None:
    _open_up_to(most - 2 * descriptors.LEFT, opened)
    assert not descriptors.short()
    assert not none_left()
    _open_up_to(most - descriptors.LEFT // 2, opened)
    assert descriptors.short()
    assert not none_left()
    _open_up_to(most - 1, opened)
    assert descriptors.short()
    assert none_left()


def test_a_descriptor_that_somebody_has_given_a_high_number_is_no_lack_of_them(
    most: int, opened: ExitStack
) -> None:
    os.dup2(2, most - descriptors.LEFT)
    opened.callback(os.close, most - descriptors.LEFT)
    assert not descriptors.short()


@pytest.mark.parametrize("reused", [False, True])
def test_a_guarded_descriptor_that_was_closed_is_found(monkeypatch: pytest.MonkeyPatch, reused: bool) -> None:
    monkeypatch.setattr(descriptors, "_guarded", None)
    descriptors.check()
    receiver, sender = os.pipe()
    descriptors.guard(sender)
    descriptors.check()
    os.close(sender)
    if reused:
        os.dup2(2, sender)
    with pytest.raises(RuntimeError, match="closed descriptors"):
        descriptors.check()
    if reused:
        os.close(sender)
    os.close(receiver)
