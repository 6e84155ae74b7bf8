"""What a handler raised, in words.

An exception is the handler's own code: its ``__str__`` may take its time, or raise, or be as large as memory.
So what is needed of it is put into words on the handler's thread, before others have to do with it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from toc.model.task import MAX_RETRY_SECONDS, Dead, Retry

MAX_ERROR_CHARS = 1000


class Raised(NamedTuple):
    """How a try failed."""

    name: str
    """Its class."""
    text: str
    """As it is kept on the row."""
    dead: bool = False
    """Whether the task can never succeed."""
    after_ms: int | None = None
    """When it is to run again, if the handler said so with Retry."""
    crashed: bool = False
    """Whether the task ended the process in which it ran alone: its crashes stay on the row."""
    disturbed: bool = False
    """Whether it is another handler's doing, see ``Disturbed``."""


class Disturbed(Exception):
    """A handler did to its process what ended the try of another, and nobody can tell whose task did it.

    No try is used up, and the task runs again at once. But it counts as a crash, so that a task that this
    happens to again and again runs alone, where it is its own doing or does not happen.
    """


def raised(error: BaseException) -> Raised:
    """An error in words, whatever it does when it is asked. Takes as long as it takes."""
    kind = type(error)
    name = type.__dict__["__name__"].__get__(kind)[:MAX_ERROR_CHARS]  # what a metaclass says may be anything
    dead, retry = issubclass(kind, Dead), issubclass(kind, Retry)
    text = _text(error)
    disturbed = kind is Disturbed
    if not dead and not retry and not disturbed:
        text = f"{name}: {text}" if text else name
    text = text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()
    return Raised(name, text, dead, _after_ms(error) if retry else None, disturbed=disturbed)


def overran(max_runtime: float) -> Raised:
    """That a handler ran for longer than it may."""
    return raised(TimeoutError(f"the handler ran longer than max_runtime ({max_runtime} s)"))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_ERROR_CHARS]
    except BaseException:
        return "(its text cannot be made)"


def _after_ms(error: BaseException) -> int | None:
    try:
        after = error.after  # type: ignore[attr-defined]  # it is a Retry; a subclass may say anything
        if isinstance(after, timedelta) and timedelta() <= after <= timedelta(seconds=MAX_RETRY_SECONDS):
            return int(-(-after // timedelta(milliseconds=1)))
    except BaseException:
        return None
    return None
