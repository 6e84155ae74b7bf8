"""What is registered: schedules with their next times, targets, tokens; and the audit."""

from __future__ import annotations

from typing import Any

from toc.console.pages.tasks import carried
from toc.console.shown import (
    Cell,
    Column,
    Content,
    Facts,
    Form,
    Table,
    document,
    flag,
    harmless,
    names,
    number,
    seconds,
    status,
    time,
)  # fmt: skip
from toc.console.view import View, fields_of, page
from toc.model.access import Action

SCHEDULES = (
    Column("name", "Schedule", link="/console/schedules/{name}"),
    Column("topic", "Topic", link="/console/topics/{topic}"),
    Column("cron", "Cron"),
    Column("zone", "Zone"),
    Column("every", "Every", seconds),
    Column("paused", "Paused", flag),
    Column("next_time", "Next", time),
    Column("fired", "Fired", number),
    Column("skipped", "Skipped", number),
    Column("missed", "Missed", number),
)
SCHEDULE = (
    *SCHEDULES[1:],
    Column("anchor", "Begins", time),
    Column("dst", "When the clock changes"),
    Column("missed_policy", "After a stop"),
    Column("window", "Longest stop that is made up for", seconds),
    Column("overlap", "If the one before runs"),
    Column("jitter", "Jitter", seconds),
    Column("missed_at", "Last missed", time),
    Column("buffered", "Waits for the one before", time),
    Column("last_job_id", "Last task", link="/console/tasks/{last_job_id}"),
    Column("stuck", "Stuck"),
    Column("created", "Created", time),
    Column("modified", "Changed", time),
)


def nominal(value: Any) -> Cell:
    """Show a time with the offset of its zone."""
    at = harmless(value)
    return Cell(f"{at[:19].replace('T', ' ')} {at[23:] or 'Z'}", "time", iso=at)


FIRES = (Column("nominal", "By its clock", nominal), Column("due", "In UTC", time))
TARGETS = (
    Column("name", "Target", link="/console/targets/{name}"),
    Column("url", "URL"),
    Column("paused", "Paused", flag),
    Column("concurrency", "Concurrency", number),
    Column("rate", "Rate", number),
    Column("timeout", "Timeout", seconds),
)
TARGET = (
    *TARGETS[1:],
    Column("topics", "Topics", names),
    Column("headers", "Headers", names),
    Column("dead_on", "Dead on", names),
    Column("paused_by", "Paused by"),
    Column("paused_why", "Paused because"),
    Column("previous_until", "Also signs with its former secret until", time),
    Column("created", "Created", time),
    Column("modified", "Changed", time),
)
TOKENS = (
    Column("name", "Token"),
    Column("roles", "Roles", names),
    Column("topics", "Topics", names),
    Column("rate", "Rate", number),
    Column("expires_at", "Expires", time),
    Column("revoked_at", "Revoked", time),
    Column("created_by", "Made by"),
    Column("created", "Made", time),
)
ACTIONS = (
    Column("at", "When", time),
    Column("by", "Who"),
    Column("action", "Action"),
    Column("target", "On"),
    Column("outcome", "Outcome", status),
    Column("details", "Details", document),
    Column("result", "Result", document),
)


@page("schedules", Action.READ_SCHEDULES, menu="Schedules")
async def schedules(view: View) -> Content:
    """Schedules by name."""
    call, columns = "GET /v1/schedules", SCHEDULES
    return await view.listed("Schedules", call, "schedules", columns, view.query, cursor="after")


@page("schedules/{name}", Action.READ_SCHEDULES)
async def schedule(view: View) -> Content:
    """One schedule and its next times."""
    name = view.path["name"]
    one = await view.ask("GET /v1/schedules/{name}", name=name)
    fires = (await view.ask("GET /v1/schedules/{name}:preview", name=name))["fires"]
    about = "Also over the days when the clock of its zone changes: its offset is shown."
    blocks = [
        Facts(columns=SCHEDULE, record=one),
        *carried(one, view),
        Table("Its next times", about, columns=FIRES, records=fires),
    ]
    return Content(f"Schedule {one['name']}", blocks, view.now_ms)


@page("targets", Action.READ_TARGETS, menu="Targets")
async def targets(view: View) -> Content:
    """Receivers of webhooks."""
    return await view.listed("Targets", "GET /v1/targets", "targets", TARGETS)


@page("targets/{name}", Action.READ_TARGETS)
async def target(view: View) -> Content:
    """One receiver."""
    one = await view.ask("GET /v1/targets/{name}", name=view.path["name"])
    return Content(f"Target {one['name']}", [Facts(columns=TARGET, record=one)], view.now_ms)


@page("tokens", Action.READ_TOKENS, menu="Tokens")
async def tokens(view: View) -> Content:
    """The access tokens that the reader's own covers."""
    return await view.listed("Access tokens", "GET /v1/tokens", "tokens", TOKENS)


@page("audit", Action.READ_AUDIT, menu="Audit")
async def audit(view: View) -> Content:
    """What operators did, the latest first."""
    call = "GET /v1/audit"
    form = Form(fields=fields_of(call, view.query, leave_out=("limit", "next")))
    return await view.listed("Audit", call, "actions", ACTIONS, {"limit": "50", **view.query}, form)
