"""The audit of operators' changes: a row of intent before each, one of the result after it.

    with audited(store, "ann@host1", "topic.pause", "order.close") as record:
        ...
        record["tasks"] = 3        # becomes part of the result

If the intent cannot be written, nothing is changed. If the result cannot be written, that is logged, and the
change remains: its intent says who began it. Neither row contains a secret. Each change that was made, in
whole or in part and by whichever door, is a line of the log.

All doors use the same names for an action; docs/run.md lists them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from toc.model import documents
from toc.model.access import Action as Right
from toc.model.clock import to_ms
from toc.model.documents import parse_object
from toc.model.errors import InvalidDocument, StoreUnavailable, TocError
from toc.observe.log import get_logger, redact
from toc.operate.operation import Doing, Param, Record, Value, operation

if TYPE_CHECKING:
    from toc.store.records.access import AuditRow
    from toc.store.store import Store

log = get_logger(__name__)

DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"
MAX_ERROR = 1000


def action_record(row: AuditRow) -> dict[str, Any]:
    """Return how an action is shown. Its ``outcome`` is "unknown" while it is running, or if its end was not
    recorded. What cannot be read of its row is {"unreadable": why}."""
    result = {} if row.result is None else _read(row.result)
    return {
        "id": row.action_id,
        "at": documents.instant(row.began or 0),
        "by": row.actor,
        "action": row.action,
        "target": row.target,
        "outcome": result.pop("outcome", "unknown"),
        "details": _read(row.details),
        "result": result,
        "ended": None if row.ended is None else documents.instant(row.ended),
    }


class Change(NamedTuple):
    """A change that somebody makes: ``by`` is ``user@host`` at the command line, the token's name at a
    gateway."""

    store: Store
    action_id: str
    by: str
    action: str
    target: str

    def intend(self, **details: object) -> None:
        """Record that it is about to be made. Raises StoreUnavailable: then it must not be."""
        try:
            target = _storable(self.target)
            self.store.audit.intend(self.action_id, self.by, self.action, target, _text(details))
        except StoreUnavailable as exc:
            raise StoreUnavailable(
                f"nothing was changed: the audit, which is in the first database, cannot be written: {exc}"
            ) from exc

    def conclude(self, outcome: Mapping[str, str], record: Mapping[str, Any]) -> None:
        """Record what came of it, also in the log unless it was refused."""
        about = {"action": self.action, "target": _storable(self.target)}
        if record or outcome["outcome"] == DONE:  # else it was refused
            told = {key: value for key, value in record.items() if isinstance(value, int | str)}
            log.info("change_made", **{**told, "by": self.by, **about, "outcome": outcome["outcome"]})
        try:
            text = _text({**outcome, **record})
            self.store.audit.conclude(self.action_id, self.by, self.action, about["target"], text)
        except TocError as exc:
            log.warning("audit_result_not_written", **about, error=str(exc))


@contextmanager
def audited(
    store: Store, by: str, action: str, target: str, /, **details: object
) -> Iterator[dict[str, Any]]:
    """Record a change: who makes it, what changes, and the outcome.

    Raises StoreUnavailable before the block is entered if the intent cannot be written.
    """
    change = Change(store, secrets.token_hex(16), by, action, target)
    change.intend(**details)
    record: dict[str, Any] = {}
    outcome = {"outcome": INTERRUPTED}
    try:
        yield record
        outcome = {"outcome": DONE}
    except TocError as exc:
        outcome = {"outcome": FAILED, "error": redact(str(exc))[:MAX_ERROR]}
        raise
    except Exception as exc:  # of a command that ends with a code, or a bug: its text may hold anything
        outcome = {"outcome": FAILED, "error": type(exc).__name__}
        raise
    finally:
        change.conclude(outcome, record)


def _text(values: dict[str, Any]) -> str:
    """Return values as JSON that fits its column."""
    from toc.store.records.access import MAX_TEXT

    text = _storable(json.dumps(values, ensure_ascii=False, default=_as_text))
    size = len(text.encode())
    return text if size <= MAX_TEXT else json.dumps({"too_long": size, "begins": text[:2000]})


def _read(text: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except InvalidDocument as exc:  # another program has changed the row
        return {"unreadable": str(exc)}


def _as_text(value: object) -> str:
    return documents.instant(to_ms(value)) if isinstance(value, datetime) else str(value)


def _storable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode: what was typed may be no text."""
    return text.encode(errors="backslashreplace").decode()


LIMIT = Param("limit", Value.WHOLE, "At most N actions, latest first.", 100, least=1, most=1000)


@operation("audit.list", "GET /v1/audit", Right.READ_AUDIT, "See what operators did",
           Param("by", Value.TEXT, "Only by this operator, user@host, or token.", most=128, metavar="WHO"),
           Param("action", Value.TEXT, "Only this action: topic.pause.", most=64, metavar="NAME"),
           Param("target", Value.TEXT, "Only on this topic, host, token, ...", most=255, metavar="NAME"),
           Param("after", Value.PAST, "Since this time."), LIMIT,
           Param("next", Value.WHOLE, "The next of the page before.", least=1, most=2**63 - 1),
           takes="AuditQuery")  # fmt: skip
def audit(
    doing: Doing, limit: int, by: str | None = None, action: str | None = None, target: str | None = None,
    after: datetime | None = None, next: int | None = None,  # noqa: A002 - as in the API
) -> Record:  # fmt: skip
    """Show what operators have changed: who, when, what, and the outcome.

    An action whose outcome is `unknown` is still running, or its program ended before it could record it.

    toc: Example: toc audit --after 1d --target order.close
    """
    since = None if after is None else to_ms(after)
    rows = doing.center.store.audit.list(
        limit, actor=by, action=action, target=target, since=since, below=next
    )
    following = rows[-1].audit_id if len(rows) == limit else None
    return {"actions": [action_record(row) for row in rows], "next": following}
