"""The exception of a handler, reduced to bounded text.

An exception is the handler's own code: its ``__str__`` may be slow, raise, or return a huge text. So it is
converted on the handler's thread, and no other thread touches the exception.
"""

import os
import traceback
from bdb import BdbQuit
from collections.abc import Iterable
from datetime import timedelta
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from toc.model.task import MAX_RETRY_SECONDS, Dead, Retry

MAX_ERROR_CHARS = 1000
STACK_CHARS = 600
"""So the history of a row has room for four tries at least."""
OVERRAN = "the handler ran longer than max_runtime ({} s)"
_OURS = f"{Path(__file__).parents[1]}/"
LIBRARIES = (f"{Path(os.__file__).parent}/", _OURS, "<frozen ", "<string>")
"""Where Python's and toc's own modules are, and what a dataclass makes."""


class Sent(NamedTuple):
    """A request that a try has made: the status of its answer (0: none), and how long it took, in ms."""

    status: int
    ms: int


class Delivered(NamedTuple):
    """What the handler of webhooks returns, for the history: the request, and what its receiver answered."""

    sent: Sent
    text: str


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
    until: int | None = None
    """The try did not take place (``Postponed``): the task waits until then (ms)."""
    misfit: str = ""
    """It did not because of these fields of the task's payload (``Misfit``), which the row tells."""
    sent: Sent | None = None
    """The request that the try made, if it was a webhook's."""
    at: str = ""
    """Where it was raised, as FILE:LINE; empty if it was not."""
    stack: str = ""
    """The innermost lines of code that it passed, for the history."""


EXPIRED = Raised("Expired", "", expired=True)


class Disturbed(Exception):
    """Another handler of the process broke off this try; which task did so is unknown.

    The try is not used up, and the task runs again at once. But it counts as a crash: after several of them
    the task runs alone, which shows whether it is the cause itself.
    """


class Postponed(Exception):
    """The try could not take place now, for a reason outside its task. Nothing is charged.

    The task waits until ``until`` (ms), which is written to its row. ``misfit``: of a Misfit, which fields.
    """

    def __init__(self, until: int, reason: str, misfit: str = "") -> None:
        super().__init__(reason)
        self.until, self.misfit = until, misfit


class Misfit(Postponed):
    """The payload does not fit this version of the handler; another one may run elsewhere."""


class Undelivered(Exception):
    """A webhook's request failed. The text is what its receiver answered, or why there was no answer.

    ``dead``: it can never succeed. ``after_ms``: when to try again, instead of the topic's backoff.
    """

    def __init__(self, text: str, sent: Sent, *, dead: bool = False, after_ms: int | None = None) -> None:
        super().__init__(text)
        self.sent = sent
        self.dead = dead
        self.after_ms = after_ms


def raised(error: BaseException) -> Raised:
    """Convert an exception to text, however it misbehaves. May take as long as the exception's own code
    does."""
    # Nothing asks the exception itself, not even isinstance: its attributes may be properties that raise.
    kind = type(error)
    if type(error) is Postponed or type(error) is Misfit:
        text = str(error)[:MAX_ERROR_CHARS]
        return Raised(kind.__name__, text, until=error.until, misfit=error.misfit)
    if type(error) is Undelivered:
        text = str(error)[:MAX_ERROR_CHARS]
        return Raised("Undelivered", text, error.dead, error.after_ms, sent=error.sent)
    name = _cut(type.__dict__["__name__"].__get__(kind))  # a metaclass may give any name
    dead, retry = issubclass(kind, Dead), issubclass(kind, Retry)
    text = _text(error)
    disturbed = kind is Disturbed
    if kind is BdbQuit:
        text = "a debugger needs a terminal, which a worker does not have"
    if not dead and not retry and not disturbed:
        text = f"{name}: {text}" if text else name
    after_ms = _after_ms(error) if retry else None
    return Raised(name, _cut(text), dead, after_ms, disturbed=disturbed, at=where(error), stack=stack(error))


def field_of(error: BaseException, name: str) -> Any:
    """A field as BaseException keeps it. The error's class may have a property of this name that raises."""
    return vars(BaseException)[name].__get__(error)


def where(error: BaseException) -> str:
    """Return the innermost line of the application that this exception passed, as FILE:LINE: of no library,
    unless it passed nothing else. Empty if that is toc's, as of one that a handler returned."""
    found = ""
    own = False
    for frame, line in traceback.walk_tb(field_of(error, "__traceback__")):
        file = frame.f_code.co_filename
        outside = not file.startswith(LIBRARIES) and "site-packages" not in file
        if outside or not (own or file.startswith(_OURS)):
            found, own = f"{file}:{line}", outside
    return _cut(found)


def stack(error: BaseException) -> str:
    """Return the lines of code that this exception passed, from the first one of the application on, as
    ``FILE:LINE in FUNCTION > ...``: the innermost STACK_CHARS of them. No messages, no variables."""
    return lines(traceback.walk_tb(field_of(error, "__traceback__")))


def lines(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Do as ``stack``, for frames with their lines, the outermost first."""
    passed = dropwhile(lambda of: of[0].f_code.co_filename.startswith(LIBRARIES), frames)
    found = [f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in passed]
    return _cut(" > ".join(found)[-STACK_CHARS:])


def overran(max_runtime: float, runs: str) -> Raised:
    """Return the failure of a handler that exceeded ``max_runtime`` seconds, and what it ``runs``."""
    error = raised(TimeoutError(OVERRAN.format(max_runtime)))
    return error._replace(stack=runs)


def _text(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except BaseException:
        return "(its text cannot be made)"


def _cut(text: str) -> str:
    """The beginning of a text as a plain str, of which UTF-8 can encode every character."""
    return str.encode(str.__getitem__(text, slice(MAX_ERROR_CHARS)), "utf-8", "replace").decode()


def _after_ms(error: BaseException) -> int | None:
    try:
        after = error.after  # type: ignore[attr-defined]  # it is a Retry; a subclass may say anything
        if isinstance(after, timedelta) and timedelta() <= after <= timedelta(seconds=MAX_RETRY_SECONDS):
            return int(-(-after // timedelta(milliseconds=1)))
    except BaseException:
        return None
    return None
