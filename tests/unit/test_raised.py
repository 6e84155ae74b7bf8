"""What handlers raise, in words."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from toc import Dead, Retry
from toc.model.raised import MAX_ERROR_CHARS, Raised, raised


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
    ],
)
def test_an_error_is_put_into_words_whatever_it_is(error: BaseException, words: Raised) -> None:
    assert raised(error) == words


def test_no_text_is_longer_than_what_a_row_keeps() -> None:
    assert len(raised(ValueError("x" * 10**6)).text) == MAX_ERROR_CHARS
    long = type("X" * 10**6, (Exception,), {})
    assert len(raised(long()).text) == len(raised(long()).name) == MAX_ERROR_CHARS
