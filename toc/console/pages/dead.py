"""Dead tasks: why, in groups, and which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toc.console.pages.tasks import ON_PAGE, found
from toc.console.shown import Block, Content, Table, columns, following
from toc.console.view import View, page
from toc.model.access import Action

GROUPS_SECONDS = 15.0
GROUPS = columns("error, topic, tasks, first, last, job_id: One of them")


@page("dead", Action.READ_DEAD, menu="Dead")
async def dead(view: View) -> Content:
    """The groups, unless a group or some tasks were chosen; then these, the latest first."""
    if not view.query.keys() - {"topic"}:
        return await _groups(view)
    records = await view.ask("GET /v1/dead", {"limit": ON_PAGE, "newest": "true", **view.query})
    return Content("Dead tasks", found("", "GET /v1/dead", records, view, "status"), view.now_ms)


def _list(one: Mapping[str, Any]) -> str:
    return following("/console/dead", {}, topic=one["topic"], error=one["contains"], newest="true")


async def _groups(view: View) -> Content:
    part = await view.part("Dead tasks", "GET /v1/dead:groups", view.query, fresh=GROUPS_SECONDS)
    blocks: list[Block] = [*part.notes]
    if part.value is not None:
        groups = [{**one, "tasks": (one["tasks"], _list(one))} for one in part.value["groups"]]
        read = part.value["read"]
        about = f"Of the latest {read} deaths; there are earlier ones." if part.value["more"] else ""
        blocks.append(Table(about=about, columns=GROUPS, records=groups, empty="No dead tasks."))
    return Content("Dead tasks", blocks, part.at)
