"""Calls about dead tasks: list them, redrive or purge some, by job_id or all that filters select."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from toc.gateway import tasks
from toc.gateway.calls import Answer, Asked, HttpCall, Instant, Model
from toc.gateway.problems import INVALID, Problem
from toc.model.access import Action
from toc.model.task import TaskRow, TaskStatus
from toc.operate import bulk
from toc.sdk.client import TimeoutCenter
from toc.store.select import cursor_text

JobId = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,18}$")]


class Chosen(Model):
    """Which dead tasks: job_ids, or all that the filters select. Those that are not dead, or not the token's
    to see, are left alone.

    A call does at most ``limit`` of the selected tasks, in the order of their deaths. It may do none although
    more follow: while ``next`` of its answer is not null, call again with it.
    """

    job_ids: list[JobId] | None = Field(None, min_length=1, max_length=tasks.MOST_IN_BATCH)
    all: bool = Field(False, description="Every task that the filters select; without filters, every one.")
    topic: str | None = Field(None, description="Only this topic.")
    biz_id: tasks.TaskBizId | None = None
    due_after: Instant | None = Field(None, description="Died from this time on, RFC 3339.")
    due_before: Instant | None = Field(None, description="Died before this time, RFC 3339.")
    error: str | None = Field(None, min_length=1, max_length=1000, description="A part of the last error.")
    limit: int = Field(tasks.MOST_ON_PAGE, ge=1, le=tasks.MOST_ON_PAGE)
    next: str | None = Field(None, max_length=100, description="The next of the call before.")
    dry_run: bool = Field(False, description="Only count.")

    @property
    def biz(self) -> int | str | None:
        """The biz_id, with its type."""
        return self.biz_id

    def check(self) -> None:
        """Raise Problem unless it says either way which tasks are meant."""
        filters = (self.topic, self.biz_id, self.due_after, self.due_before, self.error, self.next)
        if (self.job_ids is None) != self.all or (
            self.job_ids is not None and any(one is not None for one in filters)
        ):
            raise Problem(INVALID, "give job_ids, or all: true with any filters, not both", field="job_ids")


class Counts(TypedDict, total=False):
    """How many tasks had each outcome. ``left`` counts tasks that were left alone: they are
    unknown, not dead or out of reach. After a selection ``next`` is where the next call begins; it
    is null at the end."""

    redriven: int
    not_indexed_yet: int
    purged: int
    left: int
    would_redrive: int
    would_purge: int
    next: str | None


async def list_dead(asked: Asked) -> Answer:
    """Show dead tasks, a page at a time, in the order of their deaths."""
    if asked.query.status not in (None, "dead"):
        raise Problem(INVALID, "dead tasks have the status dead", field="status")
    wanted = await tasks.selection(asked, asked.query, "dead")
    found = await tasks.found_page(asked, wanted, asked.query.next, asked.query.limit)
    return Answer(await tasks.shown_page(asked, found))


async def redrive(asked: Asked) -> Answer:
    """Make dead tasks pending again, due now, with all their tries."""
    return await _bulk(asked, "tasks.redrive", bulk.redrive)


async def purge(asked: Asked) -> Answer:
    """Delete dead tasks for good."""
    return await _bulk(asked, "tasks.purge", bulk.purge_dead)


async def _bulk(
    asked: Asked, what: str, do: Callable[[TimeoutCenter, Sequence[int]], Iterator[bulk.BulkStep]]
) -> Answer:
    service, body = asked.service, asked.body
    body.check()
    more: dict[str, Any] = {}
    if body.job_ids is None:
        wanted = await tasks.selection(asked, body, "dead")
        page = await tasks.found_page(asked, wanted, body.next, body.limit)
        rows: Sequence[TaskRow] = page.rows
        asked_for = len(rows)
        more["next"] = cursor_text(page.next)
    else:
        job_ids = sorted({int(text) for text in body.job_ids})
        rows = list((await service.at_all(service.center.store.read, job_ids)).values())
        asked_for = len(job_ids)
    await service.read_through(rows)
    chosen = [row.job_id for row in rows if row.status == TaskStatus.DEAD and asked.topic_of(row) is not None]
    if body.dry_run:
        return Answer({f"would_{what.removeprefix('tasks.')}": len(chosen)} | more)

    center = service.center
    counts = await service.at_length(bulk.changed, center, asked.token.name, what, do(center, chosen), chosen)
    return Answer({**counts, "left": counts.get("left", 0) + asked_for - len(chosen)} | more)


CALLS = (
    HttpCall(
        "GET", "/v1/dead", Action.READ_DEAD, list_dead, "List dead tasks",
        query=tasks.Search, gives=tasks.TaskPage,
    ),
    HttpCall(
        "POST", "/v1/dead:redrive", Action.REDRIVE, redrive, "Redrive dead tasks", body=Chosen, gives=Counts
    ),
    HttpCall("POST", "/v1/dead:purge", Action.PURGE, purge, "Purge dead tasks", body=Chosen, gives=Counts),
)  # fmt: skip
