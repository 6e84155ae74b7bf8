"""The audit: what operators did."""

from __future__ import annotations

from datetime import datetime

from toc.model.access import Action as Right
from toc.model.clock import to_ms
from toc.operate.operation import Doing, Param, Record, Value, operation

LIMIT = Param("limit", Value.WHOLE, "At most N actions, latest first.", 100, least=1, most=1000)


@operation(
    "audit.list", "GET /v1/audit", Right.READ_AUDIT, "See what operators did",
    Param("by", Value.TEXT, "Only by this operator, user@host, or token.", most=128, metavar="WHO"),
    Param("action", Value.TEXT, "Only this action: topic.pause.", most=64, metavar="NAME"),
    Param("target", Value.TEXT, "Only on this topic, host, token, ...", most=255, metavar="NAME"),
    Param("after", Value.PAST, "Since this time."),
    LIMIT,
    Param("next", Value.WHOLE, "The next of the page before.", least=1, most=2**63 - 1),
    takes="AuditQuery",
)  # fmt: skip
def audit(
    doing: Doing,
    limit: int,
    by: str | None = None,
    action: str | None = None,
    target: str | None = None,
    after: datetime | None = None,
    next: int | None = None,  # noqa: A002 - as in the API
) -> Record:
    """Show what operators have changed: who, when, what, and the outcome.

    An action whose outcome is `unknown` is still running, or its program ended before it could record it.
    """
    from toc.operate.audit import action_record

    since = None if after is None else to_ms(after)
    rows = doing.center.store.audit.list(
        limit, actor=by, action=action, target=target, since=since, below=next
    )
    following = rows[-1].audit_id if len(rows) == limit else None
    return {"actions": [action_record(row) for row in rows], "next": following}
