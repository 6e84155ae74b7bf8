"""The exception of a handler, reduced to bounded text.

An exception is the handler's own code: its ``__str__`` may be slow, raise, or return a huge text. So it is
converted on the handler's thread, and no other thread touches the exception.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from toc.model.task import MAX_RETRY_SECONDS, Dead, Retry

MAX_ERROR_CHARS = 1000


class Raised(NamedTuple):
    """How a try failed, or why it did not start."""

    name: str
    """Name of the exception's class."""
    text: str
    """The error text kept on the row."""
    dead: bool = False
    """The task can never succeed."""
    after_ms: int | None = None
    """Milliseconds until the next try, if the handler raised Retry with a delay."""
    crashed: bool = False
    """The task ended the process in which it ran alone. Its crash count stays on the row."""
    disturbed: bool = False
    """Another handler caused the failure (``Disturbed``)."""
    expired: bool = False
    """No try was started, as the task had expired."""


EXPIRED = Raised("Expired", "", expired=True)


class Disturbed(Exception):
    """Another handler of the process broke off this try; which task did so is unknown.

    The try is not used up, and the task runs again at once. But it counts as a crash: after several of them
    the task runs alone, which shows whether it is the cause itself.
    """


def raised(error: BaseException) -> Raised:
    """Convert an exception to text, however it misbehaves. May take as long as the exception's own code
    does."""
    kind = type(error)
    name = type.__dict__["__name__"].__get__(kind)[:MAX_ERROR_CHARS]  # a metaclass may give any name
    dead, retry = issubclass(kind, Dead), issubclass(kind, Retry)
    text = _text(error)
    disturbed = kind is Disturbed
    if not dead and not retry and not disturbed:
        text = f"{name}: {text}" if text else name
    text = text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()
    return Raised(name, text, dead, _after_ms(error) if retry else None, disturbed=disturbed)


def overran(max_runtime: float) -> Raised:
    """Return the failure of a handler that exceeded ``max_runtime`` seconds."""
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
