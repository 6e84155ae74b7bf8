"""toc audit"""

from __future__ import annotations

from toc.cli.options import Json, option
from toc.cli.output import show
from toc.cli.values import moment, opened


def audit(
    by: str | None = option("WHO", "Only by this operator, user@host, or token."),
    action: str | None = option("NAME", "Only this action: topic.pause."),
    target: str | None = option("NAME", "Only on this topic, host, token, ..."),
    after: str | None = option("TIME", "Since: an age such as 2h, or RFC 3339."),
    limit: int = option("N", "At most N actions, latest first.", default=50, min=1, max=10_000),
    as_json: Json = False,
) -> None:
    """Show what operators have changed: who, when, what, and the outcome.

    An action whose outcome is `unknown` is still running, or its program ended before it could record it.

    Example: toc audit --after 1d --target order.close
    """
    from toc.operate.audit import action_record

    with opened() as center:
        since = None if after is None else moment(after, center.clock.now_ms())
        rows = center.store.audit.list(limit, actor=by, action=action, target=target, since=since)
    records = [action_record(row) for row in rows]
    if not as_json:
        for record in records:
            del record["id"], record["ended"]
    show(records, as_json=as_json, empty="no actions", spare=("details", "result"))
