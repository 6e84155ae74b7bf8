"""JSON: what others wrote (requests, arguments, what is read from servers), and how values look in ours.

One parser with one error, so that no text ends the thread that reads it: neither by its depth, which would
exhaust the stack, nor by values that cannot be written as JSON again.

In what toc prints on the command line or answers with at any door, a job_id is a text (programs whose numbers
are floating-point hold 2**53 at the most), an instant RFC 3339 in UTC with milliseconds, a duration seconds.
This does not apply to logs, where a job_id is a number.
"""

import json
import re
from datetime import datetime
from functools import lru_cache
from math import isfinite
from typing import Any, NoReturn

from toc.model.clock import from_ms, to_ms
from toc.model.errors import InvalidDocument, InvalidInput, NaiveDatetime, shown

MAX_DEPTH = 64
"""How many arrays and objects may be within each other: ``[[1]]`` has a depth of 2."""
MAX_CHARS = 1 << 20
"""Characters of a document, unless its reader says otherwise. ZooKeeper's nodes and our columns hold no
more."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string, or one without an end: it then reaches to the end, so that this takes one pass."""
_BRACES = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def parse(text: str | bytes, *, most: int = MAX_CHARS, surrogates: bool = False) -> Any:
    """Parse JSON. Raises InvalidDocument, whose message quotes nothing of the text.

    It refuses what has more than ``most`` characters, is nested more than MAX_DEPTH deep, or could not be
    shown as JSON: NaN, numbers that are infinite, and lone surrogates unless ``surrogates``.
    """
    if len(text) > most:
        raise InvalidDocument(f"it is longer than {most} characters")
    try:
        text = text.decode() if isinstance(text, bytes) else text
        # The fast path: what has so few brackets cannot be deeper.
        if text.count("[") + text.count("{") > MAX_DEPTH:
            check_depth(text.encode(errors="surrogatepass"))
        value = _DECODER.decode(text)
        if not surrogates and "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidDocument("it has a lone surrogate, which UTF-8 cannot encode") from None
    except InvalidDocument:
        raise
    except json.JSONDecodeError as exc:
        raise InvalidDocument(f"it is not JSON: {exc.msg} at character {exc.pos}") from None
    except (ValueError, RecursionError) as exc:  # such as no UTF-8; a number of thousands of digits
        raise InvalidDocument(f"it is not JSON ({type(exc).__name__})") from None
    return value


def parse_object(text: str | bytes, *, most: int = MAX_CHARS, surrogates: bool = False) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidDocument as ``parse`` does."""
    value = parse(text, most=most, surrogates=surrogates)
    if not isinstance(value, dict):
        raise InvalidDocument("it is not a JSON object")
    return value


def whole_text(value: str) -> str:
    """Return a text with its lone surrogates replaced, which UTF-8 cannot encode."""
    if value.isascii():
        return value
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def check_depth(data: bytes) -> None:
    """Raise InvalidDocument if JSON is nested more than MAX_DEPTH deep. Builds nothing of it.

    What is not JSON may pass; a parser then gets at most twice as deep before it finds that out.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    rest = _STRING.sub(b"", data).translate(_BRACES, _OTHERS)
    for _ in range(MAX_DEPTH):  # each turn takes away the innermost level
        if b"[" * (MAX_DEPTH + 1) in rest or b"[]" not in rest:
            break
        rest = rest.replace(b"[]", b"")
    if b"[]" in rest or rest.count(b"[") > MAX_DEPTH:
        raise InvalidDocument(f"it is nested more than {MAX_DEPTH} deep")


def check_values(data: bytes, most: int) -> None:
    """Raise InvalidDocument if JSON has more than ``most`` values. Builds none of them.

    It takes about a millisecond for each MiB, less if they come early. Of what is not JSON it counts the part
    that a parser reads before it finds that out.
    """
    end = 4 * most
    while end < 4 * len(data):  # a part first, which may be enough to tell
        if _values(data[:end], most) > most:
            raise InvalidDocument(f"it has more than {most} values")
        end *= 4


def _values(data: bytes, most: int) -> int:
    """Count the values of the beginning of a JSON text, roughly if there are many more than ``most``."""
    found = data.count(b",") + data.count(b"[") + data.count(b"{")
    if found <= most:  # even if none of these is within a text
        return found
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') > 4 * most:  # at most a name and a text for each value
        return most + 1
    outside = b"".join(data.split(b'"')[::2])
    return outside.count(b",") + outside.count(b"[") + outside.count(b"{")


def _refuse(_: str) -> NoReturn:
    raise ValueError


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def instant(milliseconds: float) -> str:
    """Return an instant: ``2026-11-23T07:00:00.000Z``."""
    second, rest = divmod(int(milliseconds), 1000)
    return f"{_second(second)}.{rest:03d}Z"


MAX_EXACT = 2**53 - 1
"""The largest whole number that programs hold exactly whose numbers are floating-point."""


def parse_instant(text: object) -> datetime:
    """Return the time that a text of RFC 3339 names. Raises InvalidInput, NaiveDatetime.

    Nothing else is a time: digits alone may be seconds, milliseconds or a date.
    """
    found = _RFC_3339.fullmatch(text) if isinstance(text, str) else None
    try:
        at = datetime.fromisoformat(f"{found[1]}T{found[2].upper()}") if found else None
    except ValueError:
        at = None
    if at is None or found is None:
        lost = isinstance(text, str) and _PLUS_LOST.search(text)
        hint = "; in a query a + is a space: write +01:00 as %2B01:00" if lost else ""
        do = f"write RFC 3339 with a zone, 2030-01-31T12:00:00+01:00{hint}"
        raise InvalidInput(f"{shown(text)} is not a time: {do}")
    if at.tzinfo is None:
        raise NaiveDatetime(f"{shown(text)} has no time zone; append Z or an offset such as +01:00")
    try:
        from_ms(to_ms(at))
    except OverflowError:
        raise InvalidInput(f"{shown(text)} is not in the years 1 to 9999 in UTC") from None
    return at


_RFC_3339 = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|z|[+-]\d\d:\d\d)?)", re.ASCII)
_PLUS_LOST = re.compile(r" \d\d:?\d\d$", re.ASCII)


@lru_cache(4096)
def _second(second: int) -> str:
    """A second without a zone. Instants that are shown together share many."""
    return from_ms(second * 1000).isoformat()[:19]


def biz_id(value: int | str) -> int | str:
    """Return a biz_id. A number beyond MAX_EXACT, which other programs might round, becomes a text: in
    requests a text of digits is that number."""
    return str(value) if isinstance(value, int) and value > MAX_EXACT else value


def seconds(milliseconds: float) -> float:
    """Return a duration."""
    return milliseconds / 1000
