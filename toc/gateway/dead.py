"""Calls about dead tasks: list them, redrive or purge some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from toc.gateway import tasks
from toc.gateway.calls import Answer, Asked, HttpCall, Model
from toc.gateway.problems import INVALID, Problem
from toc.model.access import Call
from toc.model.task import TaskStatus
from toc.operate import bulk
from toc.operate.audit import tasks_chosen
from toc.sdk.client import TimeoutCenter

JobId = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,18}$")]


class Chosen(Model):
    """Which tasks. Those that are not dead, or not the token's to see, are left alone."""

    job_ids: list[JobId] = Field(min_length=1, max_length=tasks.MOST_IN_BATCH)


class Counts(TypedDict, total=False):
    """How many tasks had which outcome; ``left`` alone were those that are unknown or not dead."""

    redriven: int
    not_indexed_yet: int
    purged: int
    left: int


async def list_dead(asked: Asked) -> Answer:
    """Show dead tasks, a page at a time, in the order of their deaths."""
    if asked.query.status not in (None, "dead"):
        raise Problem(INVALID, "dead tasks have the status dead", field="status")
    wanted = await tasks.selection(asked, "dead")
    service = asked.service
    found = await service.at_all(
        service.center.store.selections.page, wanted, tasks.place(asked.query.next), asked.query.limit
    )
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
    service = asked.service
    job_ids = sorted({int(text) for text in asked.body.job_ids})
    rows = await service.at_all(service.center.store.read, job_ids)
    await service.read_through(rows.values())
    chosen = [
        job_id
        for job_id, row in rows.items()
        if row.status == TaskStatus.DEAD and asked.topic_of(row) is not None
    ]

    def run() -> dict[str, int]:
        counts: dict[str, int] = {}
        for step in do(service.center, chosen):
            counts = step.counts
        return counts

    async with asked.audit(what, "tasks", tasks_chosen(chosen)) as result:
        counts: dict[str, Any] = await service.at_length(run) if chosen else {}
        result |= counts
    counts["left"] = counts.get("left", 0) + len(job_ids) - len(chosen)
    return Answer(counts)


CALLS = (
    HttpCall(
        "GET", "/v1/dead", Call.READ_DEAD, list_dead, "List dead tasks", query=tasks.Search, gives=tasks.Page
    ),
    HttpCall(
        "POST", "/v1/dead:redrive", Call.REDRIVE, redrive, "Redrive dead tasks", body=Chosen, gives=Counts
    ),
    HttpCall("POST", "/v1/dead:purge", Call.PURGE, purge, "Purge dead tasks", body=Chosen, gives=Counts),
)  # fmt: skip
