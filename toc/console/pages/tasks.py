"""Tasks: find them, and the life of one."""

from __future__ import annotations

from toc.console.shown import (
    Column,
    Content,
    Facts,
    Form,
    Table,
    following,
    number,
    status,
    time,
)
from toc.console.view import View, fields_of, page
from toc.model.access import Action

ON_PAGE = "50"
COLUMNS = (
    Column("job_id", "Task", link="/console/tasks/{job_id}"),
    Column("topic", "Topic", link="/console/topics/{topic}"),
    Column("biz_id", "biz_id"),
    Column("status", "Status", status),
    Column("action_time", "Due", time),
    Column("next_time", "Next try", time),
    Column("ended", "Ended", time),
    Column("failed_tries", "Failed tries", number),
    Column("last_error", "Last error"),
)
TASK = (
    Column("topic", "Topic", link="/console/topics/{topic}"),
    Column("biz_id", "biz_id", link="/console/tasks?biz_id={biz_id}"),
    *COLUMNS[3:8],
    Column("version", "Version", number),
    Column("created", "Stored", time),
    Column("modified", "Changed", time),
)


@page("tasks", Action.FIND_TASKS, menu="Tasks")
async def tasks(view: View) -> Content:
    """Tasks that match."""
    found = await view.ask("GET /v1/tasks", {"limit": ON_PAGE, **view.query})
    form = Form(fields=fields_of("GET /v1/tasks", view.query, leave_out=("limit", "next")))
    more = following(view.url, view.query, next=found["next"]) if found["next"] else ""
    return Content("Tasks", [form, Table(columns=COLUMNS, records=found["tasks"], more=more)], view.now_ms)


@page("tasks/{job_id}", Action.GET_TASK)
async def task(view: View) -> Content:
    """One task."""
    found = await view.ask("GET /v1/tasks/{job_id}", job_id=view.path["job_id"])
    return Content(f"Task {found['job_id']}", [Facts(columns=TASK, record=found)], view.now_ms)
