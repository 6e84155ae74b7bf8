"""What there is: workers and their slots, schedules with their next times, targets, tokens; and the audit."""

import asyncio

from toc.console.pages.tasks import carried
from toc.console.shown import Block, Content, Facts, Form, Table, columns
from toc.console.view import CLUSTER_SECONDS, View, fields_of, marked, page
from toc.gateway.app import CONSOLE, problem_for
from toc.gateway.problems import Problem
from toc.model.access import Action
from toc.model.errors import TocError

WORKERS = columns(
    "worker, host, drained, owned: Slots, assigned, tables, weight, leader: Leads, "
    "out_of_reach: Does not reach, version: Release, joined"
)
SLOTS = columns(
    "slot, state, owner, assigned: Assigned to, why, since, scheduled: Counted as scheduled, "
    "prepared: Taken, dead, overdue"
)
INTENTS = columns("what, of, to, by, at: When")
SCHEDULES = columns(
    "name: Schedule, topic, cron, zone, every, paused, next_time: Next, fired, skipped, missed",
    name="/console/schedules/{name}",
)
SCHEDULE = columns(
    "topic, cron, zone, every, anchor: Begins, paused, paused_by, next_time: Next, dst: A time that the "
    "clock skips, missed_policy: After a stop, window: Longest stop that is made up for, overlap: If the "
    "one before runs, jitter, fired, skipped, missed, missed_at: Last missed, buffered: Waits for the one "
    "before, last_job_id: Last task, stuck, created, modified: Changed"
)
SKIPPED = {"cron": "runs right after", "skip": "does not run"}
FIRES = columns("nominal: By its clock, due: In UTC")
TARGETS = columns(
    "name: Target, url: URL, paused, concurrency, rate, timeout", name="/console/targets/{name}"
)
TARGET = columns(
    "url: URL, paused, concurrency, rate, timeout, topics, headers, dead_on, paused_by, "
    "paused_why: Paused because, previous_until: Also signs with its former secret until, created, "
    "modified: Changed"
)
TOKENS = columns(
    "name: Token, roles, topics, rate, expires_at: Expires, revoked_at: Revoked, created_by: Made by, "
    "created: Made"
)
ACTIONS = columns("at: When, by: Who, action, target: On, outcome, details, result")


@page("workers", Action.READ_CLUSTER, menu="Workers", live=True)
async def workers(view: View) -> Content:
    """Workers, slots that move, intents."""
    there, slots, asked = await asyncio.gather(
        view.part("Workers", "GET /v1/workers", fresh=CLUSTER_SECONDS),
        view.part("Slots", "GET /v1/slots", fresh=CLUSTER_SECONDS),
        view.part("Drains, weights and pins", "GET /v1/intents", fresh=CLUSTER_SECONDS),
    )
    blocks: list[Block] = [*there.notes, *slots.notes, *asked.notes]
    if there.value is not None:
        about = "A drained worker finishes what it runs: see Running."
        blocks.append(Table("Workers", about, WORKERS, there.value["workers"], empty="No worker is alive."))
    if slots.value is not None:
        each = slots.value["slots"]
        moving = [one for one in each if one["owner"] is None or one["owner"] != one["assigned"]]
        blocks.append(Table("Slots that have no owner or move", columns=SLOTS[:6], records=moving))
    if asked.value is not None:
        blocks.append(Table("Drains, weights and pins", columns=INTENTS, records=asked.value["intents"]))
    return Content("Workers and slots", blocks, slots.at or there.at)


@page("schedules", Action.READ_SCHEDULES, menu="Schedules")
async def schedules(view: View) -> Content:
    """Schedules by name."""
    call = "GET /v1/schedules"
    return await view.listed("Schedules", call, "schedules", SCHEDULES, view.query, cursor="after")


@page("schedules/{name}", Action.READ_SCHEDULES)
async def schedule(view: View) -> Content:
    """One schedule and its next times."""
    name = view.path["name"]
    one = await view.ask("GET /v1/schedules/{name}", name=name)
    call = "GET /v1/schedules/{name}:preview"
    fields, status = fields_of(call, view.query), 200
    try:
        fires = (await view.ask(call, view.query, name=name))["fires"]
        found: list[Block] = [Table(columns=FIRES, records=fires)]
    except (Problem, TocError) as exc:  # what was typed says nothing against the rest of the page
        problem = problem_for(exc, CONSOLE)
        (fields, found), status = marked(fields, problem), problem.kind.status
    about = "Also over the days when the clock of its zone changes: its offset is shown."
    about = f"Paused: none of these runs. {about}" if one["paused"] else about
    blocks = [
        Facts(columns=SCHEDULE, record={**one, "dst": SKIPPED[one["dst"]]}),
        *carried(one, view),
        Form("Its next times", about, fields, submit="Show"),
        *found,
    ]
    return Content(f"Schedule {one['name']}", blocks, view.now_ms, status)


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


@page("audit", Action.READ_AUDIT, menu="Audit", search="GET /v1/audit")
async def audit(view: View) -> Content:
    """What operators did, the latest first."""
    call = "GET /v1/audit"
    form = Form(fields=fields_of(call, view.query, leave_out=("limit", "next")))
    return await view.listed("Audit", call, "actions", ACTIONS, {"limit": "50", **view.query}, form)
