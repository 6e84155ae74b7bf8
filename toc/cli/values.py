"""What people type: options, one line for each; durations, times, biz_ids, attributes; and the settings."""

from __future__ import annotations

import os
import pwd
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.output import say
from toc.model import errors
from toc.model.clock import from_ms, parse_duration
from toc.model.documents import parse_instant, parse_object
from toc.model.errors import InvalidDelay, InvalidInput, shown
from toc.model.sharding import valid_job_id

if TYPE_CHECKING:
    from toc.config import Settings
    from toc.sdk.client import TimeoutCenter

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

OLDEST = 36_525 * 86_400.0
"""The greatest age that is accepted: a hundred years, in seconds."""
_JOB_ID = re.compile(r"[0-9]{1,19}")
_WHOLE_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)")
MAX_HEADERS_FILE = 100_000
"""Bytes that a file of headers may have."""
_MAX_DIGITS = 25
"""Digits that are read of a whole number: with more it is out of range just the same."""


def option(metavar: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return an option that takes a value, as the default of the parameter by which it is named.

    ``names`` replace that name. A ``default`` of ``...`` makes it required.
    """
    return typer.Option(default, *names, metavar=metavar, help=text, **more)


def flag(name: str, text: str) -> Any:
    """Return an option without a value, as the default of a parameter."""
    return typer.Option(False, name, help=text)


def number(text: str, name: str = "", least: float | None = None, most: float | None = None) -> float:
    """Return a number. Raises InvalidInput, also for one that is out of range."""
    try:
        value = float(text)
    except ValueError:
        value = nan
    low, high = -inf if least is None else least, inf if most is None else most
    if not (isfinite(value) and low <= value <= high):
        bounds = "" if least is None else f" of at least {least:g}"
        bounds += "" if most is None else f" and at most {most:g}"
        raise InvalidInput(f"{name} must be a number{bounds}, not {shown(text)[1:-1]}")
    return value


def whole_seconds(text: str) -> int:
    """Return a duration such as ``30m`` as whole seconds. Raises InvalidDelay."""
    seconds = parse_duration(text)
    if seconds != int(seconds):
        raise InvalidDelay(f"{shown(text)} must be a whole number of seconds")
    return int(seconds)


def past(text: str, now_ms: int) -> datetime:
    """Return a past time: an age with its unit such as ``2h``, or RFC 3339. Raises InvalidInput."""
    try:
        if text.strip()[-1:].isdigit():  # a number alone is no age: of what?
            raise InvalidDelay(text)  # noqa: TRY301 - as any other text that is none
        age = parse_duration(text)
    except InvalidDelay:
        try:
            return parse_instant(text)
        except InvalidInput as exc:
            raise type(exc)(f"{exc}; or an age with its unit, such as 2h") from None
    if age > OLDEST:
        raise InvalidInput(f"{shown(text)} is not an age: it must be at most a hundred years")
    return from_ms(max(0, now_ms - round(age * 1000)))


def job_number(text: str) -> int:
    """Return a job_id. Raises InvalidInput."""
    number = int(text) if _JOB_ID.fullmatch(text) else 0
    if not valid_job_id(number):
        raise InvalidInput(
            f"{shown(text)} is not a job_id, the number that `toc submit` prints; "
            "`toc find --biz-id ID` lists those of a biz_id"
        )
    return number


def biz_id(text: str, *, as_text: bool) -> int | str:
    """Return the number 42 for ``42``, unless ``as_text``; ``007`` and ``order-42`` stay texts."""
    if not as_text and _WHOLE_NUMBER.fullmatch(text):
        return int(text[:_MAX_DIGITS])
    return text


def attribute(text: str | None) -> dict[str, Any] | None:
    """Parse a JSON object. Raises InvalidAttribute."""
    if text is None:
        return None
    try:
        return parse_object(text, surrogates=True)
    except errors.InvalidDocument as exc:
        write = """write a JSON object such as '{"reason": "unpaid"}'"""
        raise errors.InvalidAttribute(f"--attribute {shown(text[:40])}: {exc}; {write}") from None


def headers(source: str) -> dict[str, str]:
    """Read lines ``Name: value``. Raises InvalidInput, which quotes no value."""
    data = file_bytes("headers:", source, MAX_HEADERS_FILE)
    if len(data) > MAX_HEADERS_FILE:
        raise errors.InvalidTarget(f"headers: the file has more than {MAX_HEADERS_FILE} bytes")
    found: dict[str, str] = {}
    for count, line in enumerate(data.decode("latin-1").split("\n"), 1):
        if not line.strip():
            continue
        name, colon, value = line.removesuffix("\r").partition(":")
        if not colon or name.lstrip().startswith("{"):
            what = "is not 'Name: value'; write one header a line, no JSON"
            raise errors.InvalidTarget(f"headers: line {count} {what}")
        if name in found:
            raise errors.InvalidTarget(f"headers: {shown(name)} is given twice")
        found[name] = value.strip(" ")
    return found


def file_bytes(what: str, file: str, most: int) -> bytes:
    """Return the bytes of a file, or of stdin for ``-``. A byte more than ``most`` is enough to refuse it.

    Raises InvalidInput, which begins with ``what``.
    """
    try:
        if file == "-":
            return sys.stdin.buffer.read(most + 1)
        with Path(file).open("rb") as source:
            return source.read(most + 1)
    except (OSError, ValueError) as exc:  # a ValueError for a NUL in its name
        why = getattr(exc, "strerror", exc)
        raise InvalidInput(f"{what} {shown(file)} cannot be read: {why}") from exc


def load_settings(*, daemon: bool = False) -> Settings:
    """Load the settings and set up logging. Raises ConfigError.

    Unless TOC_LOG_LEVEL is set, a ``daemon`` logs at level info, and other commands log only warnings.
    """
    from toc.config import Settings, misspelt
    from toc.observe import log

    settings = Settings()
    for name, meant in misspelt().items():
        if meant != "TOC_DATABASE_URLS" or settings.database_urls:  # else the error tells
            say(f"warning: {name} is not a setting; did you mean {meant}?")
    chatty = daemon or "log_level" in settings.model_fields_set
    log.configure(settings.log_level if chatty else "warning", settings.log_format)
    return settings


def daemon_settings(**given: object) -> Settings:
    """Load the settings of a daemon, with those ``given`` instead, and detach its log. Raises ConfigError."""
    from toc.config import Settings
    from toc.observe.log import detach

    detach()
    return Settings(**(load_settings(daemon=True).model_dump() | given))  # refuses what the variables refuse


@contextmanager
def opened(*, account: bool = False) -> Iterator[TimeoutCenter]:
    """Yield a TimeoutCenter with the settings, closed at the end. Connects to servers on first use.

    ``account``: log at level info too, since that records who did what.
    """
    from toc.sdk.client import TimeoutCenter

    with TimeoutCenter(load_settings(daemon=account)) as center:
        yield center


def who() -> str:
    """Return the operator as ``user@host``: the user of the operating system, whatever LOGNAME says."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container the user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
