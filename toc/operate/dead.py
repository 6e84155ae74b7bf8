"""Dead tasks: list them, also in groups; redrive or purge those that are named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toc.model.access import Action as Right
from toc.model.bulk import BulkKind
from toc.model.documents import instant
from toc.model.errors import InvalidInput
from toc.model.task import TaskStatus
from toc.operate import tasks
from toc.operate.audit import audited
from toc.operate.operation import Doing, Param, Place, Record, Value, operation

if TYPE_CHECKING:
    from toc.store.tasks.select import Death

MAX_ERROR = 200
"""Characters of an error that tell it from others."""
PARTS = 3
"""How many parts of an error, the longest, are tried to tell it from others."""
NUMBERS = re.compile(r"[0-9#]+")
CHOSEN = (
    Param("job_ids", Value.JOB_ID, "Which tasks.", least=1, most=tasks.MAX_ON_PAGE, many=True,
          metavar="[JOB_ID]..."),
    tasks.DRY_RUN,
)  # fmt: skip


@operation("dead.list", "GET /v1/dead", Right.READ_DEAD, "List dead tasks",
           *tasks.FILTERS, takes="Search", gives=tasks.TaskPage, place=Place.TASKS)  # fmt: skip
def list_dead(
    doing: Doing, *, limit: int, newest: bool = False, next: str | None = None, **which: Any  # noqa: A002
) -> Record:  # fmt: skip
    """Show dead tasks, a page at a time; at the command line the latest first.

    toc: Examples: toc dead list --topic order.close --limit 20
    toc dead list --after 2h --error "connection refused"
    """
    if which.pop("status", "dead") != "dead":
        raise InvalidInput("dead tasks have the status dead", "status")
    wanted = tasks.selection(doing, "dead", **which)
    return tasks.shown(doing, tasks.page(doing, wanted, next, limit, newest=newest or doing.token is None))


@operation("dead.groups", "GET /v1/dead:groups", Right.READ_DEAD, "See why tasks are dead",
           tasks.TOPIC, replace(tasks.LIMIT, about="Of the latest N deaths.", default=tasks.MAX_ON_PAGE),
           takes="WhichDead", place=Place.ALL)  # fmt: skip
def groups(doing: Doing, limit: int, topic: str | None = None) -> Record:
    """Group the dead tasks by topic and error, of the latest deaths.

    The largest group comes first, each with one of its tasks, and in `contains` a text that is in all its
    errors: one that no other group has, if there is one; `others`: how many deaths of other groups have it.
    `more`: there are earlier deaths than those `read`.

    toc: Example: toc dead groups --topic order.close
    """
    read, more = doing.center.store.selections.deaths(tasks.selection(doing, "dead", topic), limit)
    grouped: dict[tuple[str, str], list[Death]] = {}
    errors: dict[str, list[str]] = {}
    for row, name in tasks.topics_of(doing, read):
        error = (row.last_error or "").partition("\n")[0][:MAX_ERROR]
        grouped.setdefault((name, NUMBERS.sub("#", error)), []).append(row)
        errors.setdefault(name, []).append(row.last_error or "")
    shown = [
        {
            "topic": name,
            "error": error,
            "tasks": len(rows),
            "first": instant(rows[-1].next_time),
            "last": instant(rows[0].next_time),
            "job_id": str(rows[-1].job_id),
            **_text_of(error, errors[name], len(rows)),
        }
        for (name, error), rows in sorted(grouped.items(), key=lambda one: -len(one[1]))
    ]
    return {"groups": shown, "read": len(read), "more": more}


def _text_of(error: str, errors: Sequence[str], own: int) -> Record:
    """Return the part of a group's error that the fewest of all errors have, and how many others have it."""
    parts = sorted(error.split("#"), key=len)[-PARTS:]
    matches, _, text = min((sum(part in one for one in errors), -len(part), part) for part in parts)
    return {"contains": text, "others": matches - own}


@operation("tasks.redrive", "POST /v1/dead:redrive", Right.REDRIVE, "Redrive dead tasks",
           *CHOSEN, takes="Chosen", place=Place.LONG, audited=False)  # fmt: skip
def redrive(doing: Doing, **given: Any) -> Record:
    """Make dead tasks pending again, due now, with all their tries. First repair the cause.

    Those that are not dead are left alone; `left` counts them, and those that are out of reach.

    toc: `toc bulk redrive` takes all that match.

    Example: toc dead redrive 912510244313854036
    """
    return _change(doing, BulkKind.REDRIVE, **given)


@operation("tasks.purge", "POST /v1/dead:purge", Right.PURGE, "Purge dead tasks",
           *CHOSEN, takes="Chosen", place=Place.LONG, audited=False)  # fmt: skip
def purge(doing: Doing, **given: Any) -> Record:
    """Delete dead tasks and their rows for good. `left` counts those that are not dead or out of reach.

    toc: Exits with 4 if some were left because their Redis server or table was out of reach. `toc bulk purge`
    takes all that match.

    Example: toc dead purge 912510244313854036
    """
    return _change(doing, BulkKind.PURGE, **given)


def _change(doing: Doing, kind: BulkKind, *, dry_run: bool, job_ids: Sequence[int] | None = None) -> Record:
    """Do it to the tasks that are named."""
    from toc.operate import bulk_jobs

    do = bulk_jobs.redrive if kind is BulkKind.REDRIVE else bulk_jobs.purge_dead
    store, typed = doing.center.store, doing.token is None
    store.check_layout()
    if job_ids is None:
        what, how = ("JOB_IDs", f"`toc bulk {kind}`") if typed else ("job_ids", f"POST /v1/bulk:{kind}")
        raise InvalidInput(f"give {what}; for all that match there is {how}", "job_ids")
    asked = sorted(set(job_ids))
    if len(asked) > tasks.MAX_ON_PAGE:
        raise InvalidInput(
            f"{len(asked)} job_ids; at most {tasks.MAX_ON_PAGE}: select more by filters", "job_ids"
        )
    rows = [row for row in store.read(asked).values() if row.status == TaskStatus.DEAD]
    chosen = [row.job_id for row, _ in tasks.topics_of(doing, rows)]
    if dry_run:
        return {f"would_{kind}": len(chosen)}
    told = {"tasks": len(chosen), "job_ids": list(map(str, chosen))}
    with audited(store, doing.by, f"tasks.{kind}", "tasks", **told) as record:
        counts = do(doing.center, chosen)
        record.update(counts)
    unknown = len(asked) - len(chosen)
    return counts | ({"unknown": unknown} if typed else {"left": counts["left"] + unknown})
