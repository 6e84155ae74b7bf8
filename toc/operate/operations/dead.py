"""Dead tasks: list, redrive or purge some, by job_id or all that filters select."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from toc.model.access import Action as Right
from toc.model.errors import InvalidInput
from toc.model.task import TaskStatus
from toc.model.wire import instant
from toc.operate.operation import Doing, Param, Place, Record, Value, operation
from toc.operate.operations.tasks import (
    BIZ_ID,
    DRY_RUN,
    ERROR,
    FILTERS,
    LIMIT,
    MAX_ON_PAGE,
    NEXT,
    RATE,
    TOPIC,
    TYPED_TEXT,
    TaskPage,
    chosen_by,
    page,
    selection,
    shown,
    topics_of,
)

if TYPE_CHECKING:
    from toc.model.task import TaskRow
    from toc.operate.bulk import BulkStep

MAX_ERROR = 200
"""Characters of an error that tell it from others."""
NUMBERS = re.compile(r"[0-9#]+")

CHOSEN = (
    Param("job_ids", Value.JOB_ID, "Which tasks.", least=1, most=1000, many=True, metavar="[JOB_ID]..."),
    TOPIC, BIZ_ID, TYPED_TEXT,
    Param("due_after", Value.PAST, "Died from this time on.", option="--after"),
    Param("due_before", Value.PAST, "Died before this time.", option="--before"),
    ERROR,
    Param("all", Value.FLAG, "Every task that the filters select.", default=False),
    Param("limit", Value.WHOLE, "At most N of the selected tasks, in the order of their deaths.",
          MAX_ON_PAGE, least=1, most=MAX_ON_PAGE),
    NEXT,
    RATE, DRY_RUN,
)  # fmt: skip


class Counts(TypedDict, total=False):
    """How many tasks had each outcome. ``left`` counts tasks that were left alone: they are
    unknown, not dead or out of reach. After a selection ``next`` is where the next call begins; it
    is null at the end. It may do none although more follow."""

    redriven: int
    not_indexed_yet: int
    purged: int
    left: int
    would_redrive: int
    would_purge: int
    next: str | None


@operation(
    "dead.list", "GET /v1/dead", Right.READ_DEAD, "List dead tasks",
    *FILTERS, takes="Search", gives=TaskPage, place=Place.TASKS,
)  # fmt: skip
def list_dead(
    doing: Doing,
    *,
    limit: int,
    newest: bool = False,
    next: str | None = None,  # noqa: A002
    **which: Any,
) -> Record:
    """Show dead tasks, a page at a time; at the command line the latest first."""
    if which.pop("status", "dead") != "dead":
        raise InvalidInput("dead tasks have the status dead", "status")
    wanted = selection(doing, "dead", **which)
    return shown(doing, page(doing, wanted, next, limit, newest=newest or doing.token is None))


class DeadGroups(TypedDict):
    """Groups of dead tasks, the largest first: topic, error without its numbers, how many tasks, when the
    first and last of them died, one of them, and a text that is in all their errors, null if there is none.
    They are those of the latest ``read`` deaths; ``more``: there are earlier ones."""

    groups: list[dict[str, Any]]
    read: int
    more: bool


@operation(
    "dead.groups", "GET /v1/dead:groups", Right.READ_DEAD, "See why tasks are dead",
    TOPIC, replace(LIMIT, about="Of the latest N deaths.", default=MAX_ON_PAGE),
    takes="WhichDead", gives=DeadGroups, place=Place.ALL,
)  # fmt: skip
def groups(doing: Doing, limit: int, topic: str | None = None) -> Record:
    """Group the dead tasks by topic and error, of the latest deaths."""
    found = page(doing, selection(doing, "dead", topic), None, limit, newest=True)
    grouped: dict[tuple[str, str], list[TaskRow]] = {}
    for row, name in topics_of(doing, found.rows):
        error = (row.last_error or "").partition("\n")[0][:MAX_ERROR]
        grouped.setdefault((name, NUMBERS.sub("#", error)), []).append(row)
    shown = [
        {
            "topic": name,
            "error": error,
            "tasks": len(rows),
            "first": instant(min(row.next_time for row in rows)),
            "last": instant(max(row.next_time for row in rows)),
            "job_id": str(rows[-1].job_id),
            "contains": max(error.split("#"), key=len) or None,
        }
        for (name, error), rows in sorted(grouped.items(), key=lambda one: -len(one[1]))
    ]
    return {"groups": shown, "read": len(found.rows), "more": found.next is not None}


@operation(
    "tasks.redrive", "POST /v1/dead:redrive", Right.REDRIVE, "Redrive dead tasks",
    *CHOSEN, takes="Chosen", gives=Counts, place=Place.LONG, audited=False,
)  # fmt: skip
def redrive(doing: Doing, **given: Any) -> Record:
    """Make dead tasks pending again, due now, with all their tries. First repair the cause.

    Those that are not dead are left alone.
    """
    from toc.operate import bulk

    return _change(doing, "redrive", bulk.redrive, {"redriven": 0, "not_indexed_yet": 0}, **given)


@operation(
    "tasks.purge", "POST /v1/dead:purge", Right.PURGE, "Purge dead tasks",
    *CHOSEN, takes="Chosen", gives=Counts, place=Place.LONG, audited=False, asks=True,
)  # fmt: skip
def purge(doing: Doing, **given: Any) -> Record:
    """Delete dead tasks and their rows for good."""
    from toc.operate import bulk

    return _change(doing, "purge", bulk.purge_dead, {"purged": 0, "left": 0}, **given)


def _change(
    doing: Doing,
    verb: str,
    begin: Callable[..., Iterator[BulkStep]],
    nothing: Record,
    job_ids: Sequence[int] | None = None,
    *,
    all: bool,  # noqa: A002 - as in the API
    dry_run: bool,
    limit: int | None = None,
    next: str | None = None,  # noqa: A002
    rate: float | None = None,
    **which: Any,
) -> Record:
    """Do it to the tasks that are meant. Without a ``limit``, as at the command line, to all of them."""
    from toc.operate import bulk
    from toc.store.tasks.select import cursor_text

    store, typed = doing.center.store, doing.token is None
    more: Record = {}
    if (job_ids is None) != all or (job_ids is not None and (which or next)) or (typed and all and not which):
        by_filter = "JOB_IDs, or --topic NAME (or another filter) together with --all"
        how = by_filter if typed else "job_ids, or all: true with any filters, not both"
        raise InvalidInput(f"give {how}", "job_ids")
    store.check_layout()
    if job_ids is not None:
        asked = len(set(job_ids))
        rows = [row for row in store.read(sorted(set(job_ids))).values() if row.status == TaskStatus.DEAD]
        chosen: Sequence[int] = [row.job_id for row, _ in topics_of(doing, rows)]
    elif limit is None:
        chosen = store.selections.ids(selection(doing, "dead", **which))
        asked = len(chosen)
    else:
        found = page(doing, selection(doing, "dead", **which), next, limit)
        asked, more["next"] = len(found.rows), cursor_text(found.next)
        chosen = [row.job_id for row, _ in topics_of(doing, found.rows)]
    if dry_run:
        return {f"would_{verb}": len(chosen)} | more
    if chosen and job_ids is None:  # job_ids are a choice already
        doing.confirm(f"{verb} {len(chosen)} dead tasks for good")
    counts: Record = bulk.changed(
        doing.center, doing.by, f"tasks.{verb}", begin(doing.center, chosen, rate), chosen,
        target=which.get("topic", "tasks"), progress=lambda step: doing.progress(f"{step.done} of {asked}"),
        **({"selected": chosen_by(which)} if which else {}),
    )  # fmt: skip
    unknown = asked - len(chosen)
    if typed:
        return (counts or nothing) | {"unknown": unknown}
    return {**counts, "left": counts.get("left", 0) + unknown} | more
