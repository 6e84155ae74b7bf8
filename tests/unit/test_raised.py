"""What handlers raise, in words."""

from __future__ import annotations

import json
from bdb import BdbQuit
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from toc import Dead, Retry
from toc.model.raised import MAX_ERROR_CHARS, STACK_CHARS, Raised, raised
from toc.observe.log import stack


class Unnamed(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("it has no name")


class Unspeakable(Exception, metaclass=Unnamed):
    def __str__(self) -> str:
        raise SystemExit("it has no text")


class Fickle(Retry):
    @property
    def after(self) -> Any:
        raise RuntimeError("it does not know")

    @after.setter
    def after(self, value: Any) -> None: ...


class Text(str):
    def __getitem__(self, _key: Any) -> str:
        raise RuntimeError("it has no beginning")

    __format__ = encode = __getitem__  # type: ignore[assignment]


def nothing(*_args: object) -> Any:
    raise RuntimeError("it tells nothing")


class Closed(Exception):
    """Nothing can be asked of it."""

    __class__ = __traceback__ = __cause__ = __context__ = __suppress_context__ = property(nothing)
    __repr__ = __reduce__ = __reduce_ex__ = __eq__ = __hash__ = __bool__ = nothing

    def __str__(self) -> str:
        return Text("no")


class ClosedRetry(Closed, Retry):
    """Nor of this one."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no"), Raised("ValueError", "ValueError: no")),
        (KeyError(), Raised("KeyError", "KeyError")),
        (Dead("never"), Raised("Dead", "never", dead=True)),
        (Retry(timedelta(microseconds=1500), "soon"), Raised("Retry", "soon", after_ms=2)),
        (Fickle(1.0, "some day"), Raised("Fickle", "some day")),
        (Unspeakable(), Raised("Unspeakable", "Unspeakable: (its text cannot be made)")),
        (ValueError("\ud800"), Raised("ValueError", "ValueError: ?")),
        (BdbQuit(), Raised("BdbQuit", "BdbQuit: a debugger needs a terminal, which a worker does not have")),
    ],
)
def test_an_error_is_put_into_words_whatever_it_is(error: BaseException, words: Raised) -> None:
    assert raised(error) == words


def test_no_text_is_longer_than_what_a_row_keeps() -> None:
    assert len(raised(ValueError("x" * 10**6)).text) == MAX_ERROR_CHARS
    long = type("X" * 10**6, (Exception,), {})
    assert len(raised(long()).text) == len(raised(long()).name) == MAX_ERROR_CHARS


def test_an_error_of_which_nothing_can_be_asked_is_put_into_words() -> None:
    assert raised(Closed()) == Raised("Closed", "Closed: no")
    assert raised(ClosedRetry(1.0)) == Raised("ClosedRetry", "no", after_ms=1000)


def raise_closed() -> None:
    raise Closed


@pytest.mark.parametrize("do", [nothing, raise_closed, lambda: json.loads("{")])
def test_what_was_raised_says_where_in_the_application_and_not_in_which_library(
    do: Callable[[], object],
) -> None:
    at = trace = ""
    try:
        do()
    except BaseException as exc:
        at, trace = raised(exc).at, stack(exc)
    assert at.startswith(f"{__file__}:")
    assert __file__ in trace


def test_a_stack_has_the_innermost_lines_and_nothing_of_what_was_said() -> None:
    def deep(left: int) -> None:
        if left == 0:
            raise KeyError("card 4711")
        deep(left - 1)

    for left in (1, 100):
        with pytest.raises(KeyError) as caught:
            deep(left)
        found = raised(caught.value).stack
        assert len(found) <= STACK_CHARS
        assert found.endswith(" in deep")
        assert "4711" not in found
