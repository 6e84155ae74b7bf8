"""How values look in JSON that toc prints on the command line or answers with at any door.

A job_id is a text (programs whose numbers are floating-point hold 2**53 at the most), an instant
RFC 3339 in UTC with milliseconds, a duration seconds. This does not apply to logs, where a job_id
is a number.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache

from toc.model.clock import from_ms, to_ms
from toc.model.errors import InvalidInput, NaiveDatetime, shown


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
        raise InvalidInput(
            f"{shown(text)} is not a time: write RFC 3339 with a zone, 2030-01-31T12:00:00+01:00{hint}"
        )
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
