"""Late tasks: which started late a short while ago, and why."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from typing_extensions import TypedDict

from toc.model.access import Action as Right
from toc.model.clock import to_ms
from toc.model.lateness import CAUSES, Cause, by_cause, without_servers
from toc.operate.operation import Doing, Param, Record, Value, operation
from toc.operate.operations.tasks import TOPIC

DEFAULT_MS = 3_600_000


class LateTasks(TypedDict):
    """What made tasks late: ``causes`` by topic and cause, most tasks first, each with its worst task;
    ``episodes``, of each process and some seconds, the latest first.

    ``more``: there were further episodes, which neither counts.
    """

    causes: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    more: bool


@operation(
    "late.list", "GET /v1/late", Right.FIND_TASKS, "See which tasks were late, and why",
    TOPIC,
    Param("cause", Cause, "Only by this cause: backlog.", metavar="CAUSE"),
    Param("after", Value.PAST, "Since this time; by default an hour ago."),
    Param("limit", Value.WHOLE, "Read at most N episodes, latest first.", 1000, least=1, most=10_000),
    takes="LateQuery", gives=LateTasks,
)  # fmt: skip
def late(
    doing: Doing,
    limit: int,
    topic: str | None = None,
    cause: Cause | None = None,
    after: datetime | None = None,
) -> Record:
    """Show how many tasks started more than a second late, by topic and cause, and the worst of each."""
    center = doing.center
    since = center.clock.now_ms() - DEFAULT_MS if after is None else to_ms(after)
    names: list[str] | None = None
    if topic is not None:
        names = [center.catalog.get(topic).name]
    elif doing.token is not None and not doing.token.everywhere:
        names = [name for name in center.catalog.known() if doing.sees(name)]
    found = center.store.episodes.list(since, limit, names, cause)
    if not doing.may(Right.READ_CLUSTER):
        found = [without_servers(one)._replace(who="") for one in found]
    return {
        "causes": [{**one.shown(), "remedy": CAUSES[one.cause].remedy} for one in by_cause(found)],
        "episodes": [one.shown() for one in found],
        "more": len(found) == limit,
    }
