"""The row of a try as one text: what to SELECT for it, and how to read it.

Each column of a result has a description to be read, and each value its length and type: a dozen columns
would cost several times as much as splitting one text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from operator import itemgetter

from toc.model.clock import to_ms
from toc.model.task import TryRow
from toc.store.servers.server import DatabaseServer, Result
from toc.store.tasks.rows import NO_INSTANT, understood

_SHARED = (
    "biz_type",
    "status",
    "version",
    "attempts",
    "crashes",
    "lease",
    "tries",
    "expires_at",
    "begun",
    "body_length",
    "redrives",
)
"""Fields of TryRow that have the same values in most rows, in the order of their text.

Rows with the same text share one parsed result.
"""
_EXPIRES_AT = _SHARED.index("expires_at")
_SQL = {
    "lease": "COALESCE(lease_owner,0)",
    "expires_at": "COALESCE(expires_at,'')",
    "begun": "(last_error IS NOT NULL)",
    "body_length": "COALESCE(body_length,-1)",
    "biz_key": "CASE WHEN biz_key IS NULL THEN '-' ELSE HEX(biz_key) END",
}
"""What to SELECT for fields that are not columns as they are stored."""
_OWN = ("job_id", "biz_id", "action_time", "next_time", "biz_key", "attribute")
"""The other fields: each row has its own. The text of the shared ones is between next_time and biz_key."""
_BY_FIELD = itemgetter(*map([*_OWN, *_SHARED].index, TryRow._fields))
"""Arranges the values of _OWN and _SHARED as TryRow has them."""
_PRINTED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
"""An instant as a server prints it, without the milliseconds; or a zero date."""


def try_columns(server: DatabaseServer) -> str:
    """Return what to SELECT for ``try_rows``: one text per row, the attribute last, as it may hold commas.

    Instants are as the server prints them: for one row, a server takes a fifth more time to parse and
    evaluate a conversion.
    """
    shared = server.joined([_SQL.get(name, name) for name in _SHARED], by=";")
    own = [_SQL.get(name, name) for name in _OWN]
    return server.joined([*own[:4], shared, *own[4:]])


def try_rows(results: Iterable[Result]) -> list[TryRow]:
    """Parse all results of ``try_columns``. ``lease`` is the number of the lease's worker, 0 for none.

    What is no instant is read as NO_INSTANT, or as no time to expire at.
    """
    rows = []
    with understood():
        for result in results:
            for (text,) in result.rows:
                job_id, biz_id, action, following, shared, key, attribute = text.split(",", 6)
                action_time = _parse_instant(action)
                own = (
                    int(job_id),
                    int(biz_id),
                    action_time,
                    action_time if following == action else _parse_instant(following),
                    None if key == "-" else bytes.fromhex(key).decode(errors="replace"),
                    attribute,
                )
                rows.append(TryRow._make(_BY_FIELD(own + _parse_shared(shared))))
    return rows


@lru_cache(256)
def _parse_shared(text: str) -> tuple[int, ...]:
    values: list[str | int] = [*text.split(";")]
    expires = str(values[_EXPIRES_AT])
    values[_EXPIRES_AT] = max(_parse_instant(expires), 0) if expires else 0
    if len(values) != len(_SHARED):
        raise ValueError
    return tuple(map(int, values))


def _parse_instant(text: str) -> int:
    """Milliseconds of an instant that a server prints: ``2026-11-25 22:27:19.280``, or SQLite's number."""
    return _parse_second(text[:19]) + int(text[20:]) if len(text) == 23 else int(text)


@lru_cache(1024)
def _parse_second(text: str) -> int:
    try:
        return to_ms(datetime.fromisoformat(text).replace(tzinfo=UTC))
    except ValueError:
        if not _PRINTED.fullmatch(text):  # the answer is damaged, not the row
            raise
        return NO_INSTANT
