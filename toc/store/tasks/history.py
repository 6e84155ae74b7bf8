"""The tries kept on a row: failed ones, and those of webhooks. One line of JSON each, newest last, oldest cut
off.

    {"attempt":2,"crashes":0,"version":0,"at":1700000000000,"error":"ConnectionError: refused"}

``attempt`` is the number of tries used up then, ``crashes`` the consecutive tries that had ended with their
worker, ``at`` milliseconds. ``stack``, if something was raised, is the innermost lines of code that this
passed, without any values. A webhook's line has more: the ``status`` of the answer (0: none), the ``ms``
that the request took, and when the ``next`` try was due (milliseconds; 0: none). Where ``status`` is 2xx the
try succeeded, and ``error`` is the beginning of the answer. To change the format, add keys and accept lines
without them. Beside it a row keeps its late starts, in ``late`` (``toc.model.lateness``).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from toc.model.documents import instant, parse_object, seconds
from toc.model.lateness import MAX_LATE_CHARS
from toc.store.schema import ERROR_COLUMN_CHARS, MAX_HISTORY_CHARS
from toc.store.servers.server import DatabaseServer

LINE_CHARS = 200
"""Characters kept of each error; the last error is kept in full."""


class FailedTry(NamedTuple):
    """A failed try or a crash, or a webhook's try that succeeded. ``at`` is in milliseconds.

    Only webhooks have the three fields after ``error``, only handlers a ``stack``.
    """

    attempt: int
    crashes: int
    version: int
    at: int
    error: str
    status: int | None = None
    ms: int | None = None
    next: int | None = None
    stack: str | None = None

    def shown(self) -> dict[str, Any]:
        """Return it for display: its times as texts, and ``ms`` as ``seconds``. ``next`` is None if there is
        none; without a ``stack`` this is left out."""
        shown = self._asdict()
        del shown["ms"], shown["next"]
        if not self.stack:
            del shown["stack"]
        return shown | {
            "at": instant(self.at),
            "seconds": None if self.ms is None else seconds(self.ms),
            "next": instant(self.next) if self.next else None,
        }


_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def line(failed: FailedTry) -> str:
    """Encode a failed try as appended to the row."""
    values = {name: value for name, value in failed._asdict().items() if value is not None}
    values["error"] = failed.error[:LINE_CHARS].encode(errors="replace").decode()
    return _text(values) + "\n"


def added(server: DatabaseServer, failed: FailedTry) -> str:
    """Return the SQL of a row's history with one more try."""
    return server.appended("history", line(failed), MAX_HISTORY_CHARS)


def error_text(error: str) -> str:
    """Truncate an error for ``last_error``, without characters that UTF-8 cannot encode."""
    return error[:ERROR_COLUMN_CHARS].encode(errors="replace").decode()


def parse(text: str | None) -> list[FailedTry]:
    """Parse what is left of the history, oldest first."""
    found = []
    for each in (text or "").split("\n"):
        try:
            values = parse_object(each)
            first = (values[name] for name in FailedTry._fields[:5])
            one = FailedTry(*first, *(values.get(name) for name in FailedTry._fields[5:]))
            one.shown()
            found.append(one)
        except (ValueError, KeyError, TypeError, OverflowError):  # the first line, cut off, or foreign data
            continue
    return found


Late = Mapping[int, str]
"""What is added to ``late`` of rows, by job_id: ``LateStart.line`` of a try."""


def with_late(server: DatabaseServer, job_ids: Iterable[int], late: Late, before: str = "") -> str:
    """Return the SQL that adds late starts to those of the rows that have one, after ``before``; else
    nothing."""
    cases = [
        f"WHEN {job_id:d} THEN {server.appended('late', late[job_id], MAX_LATE_CHARS)}"
        for job_id in job_ids
        if job_id in late
    ]
    return f"{before}late=CASE job_id {' '.join(cases)} ELSE late END" if cases else ""
