"""The audit of operators' changes: a row of intent before each, one of the result after it.

    with audited(store, "ann@host1", "topic.pause", "order.close") as record:
        ...
        record["tasks"] = 3        # becomes part of the result

If the intent cannot be written, nothing is changed. If the result cannot be written, that is logged, and the
change remains: its intent says who began it. Neither row contains a secret. Each change that was made, in
whole or in part and by whichever door, is a line of the log.

All doors use the same names for an action. docs/run.md lists them, and a test does each action through
both doors.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from toc.model import documents
from toc.model.clock import to_ms
from toc.model.documents import parse_object
from toc.model.errors import InvalidDocument, StoreUnavailable, TocError
from toc.observe.log import get_logger, redact
from toc.store.records.access import MAX_TEXT, AuditRow
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


@contextmanager
def audited(
    store: Store, by: str, action: str, target: str, /, **details: object
) -> Iterator[dict[str, Any]]:
    """Record a change: who makes it, what changes, and the outcome.

    ``by`` is ``user@host`` at the command line, the token's name at a gateway. Raises StoreUnavailable before
    the block is entered if the intent cannot be written.
    """
    action_id = secrets.token_hex(16)
    intend(store, action_id, by, action, target, **details)
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
        conclude(store, action_id, by, action, target, outcome, record)


def intend(store: Store, action_id: str, by: str, action: str, target: str, /, **details: object) -> None:
    """Record that a change is about to be made. Raises StoreUnavailable: then it must not be."""
    try:
        store.audit.intend(action_id, by, action, _storable(target), _text(details))
    except StoreUnavailable as exc:
        raise StoreUnavailable(
            f"nothing was changed: the audit, which is in the first database, cannot be written: {exc}"
        ) from exc


def conclude(
    store: Store,
    action_id: str,
    by: str,
    action: str,
    target: str,
    outcome: Mapping[str, str],
    record: Mapping[str, Any],
) -> None:
    """Record what came of a change, also in the log unless it was refused."""
    target = _storable(target)
    if record or outcome["outcome"] == DONE:  # else it was refused
        told = {key: value for key, value in record.items() if isinstance(value, int | str)}
        about = {"by": by, "action": action, "target": target, "outcome": outcome["outcome"]}
        log.info("change_made", **{**told, **about})
    try:
        store.audit.conclude(action_id, by, action, target, _text({**outcome, **record}))
    except TocError as exc:
        log.warning("audit_result_not_written", action=action, target=target, error=str(exc))


def _text(values: dict[str, Any]) -> str:
    """Return values as JSON that fits its column."""
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
