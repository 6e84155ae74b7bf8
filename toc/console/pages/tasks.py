"""Tasks: find them, the life of one, those that run now, dead ones."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from toc.console import shown
from toc.console.shown import Block, Content, Facts, Field, Form, Lines, Note, Table, columns
from toc.console.view import CLUSTER_SECONDS, Redirect, View, fields_of, page
from toc.gateway.exchange import Answer
from toc.gateway.problems import INVALID, Problem
from toc.model.access import Action
from toc.model.documents import MAX_EXACT

ON_PAGE = "50"
COLUMNS = columns(
    "job_id: Task, topic, biz_id, status, action_time: Due, next_time: Next try, ended, failed_tries, "
    "last_error, unreadable: Damage"
)
TASK = columns(
    "topic, biz_id, status, action_time: Due, next_time: Next try, ended, failed_tries, "
    "tries: Tries of its own, crashes, version, dedup_key, expires_at: Expires, expired, "
    "body_length: Bytes of its body, created: Stored, modified: Changed",
    biz_id="/console/tasks?biz_id={biz_id}&text={text}",
)
LIFE = columns("at: When, what, status: HTTP status, seconds: Took, error: Error or answer")
SHARES = columns("cause, seconds: For, since, evidence")
RUNNING = columns("job_id: Task, slot, host, owner: Worker, since")
STAGES = ("prepared", "row read", "started")
SOME = "Others may run: not all due tasks were looked at, or not all tables answered."
JOB_ID = re.compile(r"[1-9][0-9]{0,18}")


def found(title: str, call: str, records: Mapping[str, Any], view: View, *hidden: str) -> list[Block]:
    """Return the form of a search for tasks, and what it has found."""
    fields = fields_of(call, view.query, leave_out=("limit", "next", *hidden))
    more = shown.following(view.url, view.query, next=records["next"]) if records["next"] else ""
    tasks = records["tasks"]
    some = [one for one in COLUMNS if any(one.key in task and task[one.key] is not None for task in tasks)]
    empty = "None on this page; there may be more." if more else "None."
    return [Form(fields=fields), Table(title, columns=some or COLUMNS, records=tasks, more=more, empty=empty)]


@page("tasks", Action.FIND_TASKS, menu="Tasks", search="GET /v1/tasks")
async def tasks(view: View) -> Content | Redirect:
    """Tasks that match; a job_id leads to its task."""
    job_id = view.query.get("job_id", "").strip()
    if JOB_ID.fullmatch(job_id):
        return Redirect(f"/console/tasks/{job_id}")
    if job_id:
        raise Problem(INVALID, "a job_id has only digits, at most 19")
    query = {name: value for name, value in view.query.items() if name != "job_id"}
    records = await view.ask("GET /v1/tasks", {"limit": ON_PAGE, **query})
    form, table = found("", "GET /v1/tasks", records, view)
    by_id = Form(fields=[Field("job_id", "job_id", value=job_id, required=True)], submit="Open")
    blocks = [form, by_id, table]
    biz_id = query.get("biz_id", "")
    if not records["tasks"] and biz_id.isdecimal() and query.get("text") != "true":
        said = f"{shown.harmless(biz_id)} was looked for as a number. Look for it as a text."
        blocks.append(Note(text=said, href=shown.following(view.url, query, text="true", next=None)))
    return Content("Tasks", blocks, view.now_ms)


@page("running", Action.READ_CLUSTER, menu="Running", live=True)
async def running(view: View) -> Content:
    """What runs now."""
    part = await view.part("Running tasks", "GET /v1/running", {"limit": "1000"}, fresh=CLUSTER_SECONDS)
    blocks = list(part.notes)
    if part.value is not None:
        about = "Those without a time have been taken by their worker, and have not started yet."
        tasks = sorted(part.value["tasks"], key=lambda one: one["since"] is None)
        blocks += [Note(text=SOME, level="warn")] if part.value["more"] else []
        blocks.append(Table("", about, RUNNING, tasks, empty="No task was found that runs in a worker."))
    return Content("Running now", blocks, part.at)


@page("tasks/{job_id}", Action.GET_TASK)
async def task(view: View) -> Content:
    """One task and its life."""
    job_id = view.path["job_id"]
    one = await view.ask("GET /v1/tasks/{job_id}", job_id=job_id)
    tries = (await view.ask("GET /v1/tasks/{job_id}/history", job_id=job_id))["tries"]
    blocks: list[Block] = []
    if late := one.get("late"):
        blocks.append(Note(text=late["sentence"], level="warn"))
        blocks.append(Table("Why it was late", late["remedy"], SHARES, late["shares"]))
    biz_id = one["biz_id"]
    text = isinstance(biz_id, str) and biz_id.isdecimal() and int(biz_id) <= MAX_EXACT
    blocks.append(Facts(columns=TASK, record={**one, "text": str(text).lower()}))
    blocks.append(Table("Its life", columns=LIFE, records=life(one, tries)))
    blocks += carried(one, view)
    if one["last_error"]:
        blocks.append(Lines("Last error", text=one["last_error"]))
    for each in tries[::-1]:
        if each.get("stack"):
            blocks.append(Lines(f"Where try {each['attempt']} failed", text=each["stack"]))
    return Content(f"Task {job_id}", blocks, view.now_ms)


@page("tasks/{job_id}/body", Action.GET_BODY)
async def body(view: View) -> Answer:
    """The body of a task, as a file: a browser neither shows nor runs it."""
    return await view.call("GET /v1/tasks/{job_id}/body", job_id=view.path["job_id"])


def carried(one: Mapping[str, Any], view: View) -> list[Block]:
    """Return what a task or schedule carries, as far as the reader may see it."""
    found: list[Block] = []
    if one["attribute"]:
        found.append(Lines("Attribute", text=json.dumps(one["attribute"], indent=2, ensure_ascii=False)))
    elif not view.may(Action.READ_VALUES, one["topic"]):
        found.append(Note(text="Its attribute is hidden: seeing it needs a token with the role values."))
    if one.get("body_length") is not None and view.may(Action.GET_BODY, one["topic"]):
        found.append(Note(text="Download its body", href=shown.path("/console/tasks/{job_id}/body", one)))
    return found


def life(one: Mapping[str, Any], tries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what has happened to a task and what will, in the order of time."""
    awaited = [{"at": one["action_time"], "what": "due"}, {"at": one["expires_at"], "what": "expires"}]
    if one["next_time"] != one["action_time"]:
        awaited.append({"at": one["next_time"], "what": "next try"})
    ended = one["ended"]
    steps = [
        {"at": one["created"], "what": "stored"},
        *(each for each in awaited if not (ended and each["at"] and each["at"] > ended)),
        *({**each, "what": _outcome(each)} for each in tries),
    ]
    if late := one.get("late"):
        steps += [{"at": late[one.replace(" ", "_")], "what": one} for one in STAGES]
    steps.append({"at": ended, "what": one["status"]})
    return sorted((each for each in steps if each["at"]), key=lambda each: each["at"])


def _outcome(each: Mapping[str, Any]) -> str:
    if each["status"] is not None and 200 <= each["status"] < 300:
        return f"try {each['attempt']} succeeded"
    return f"crash {each['crashes']}" if each["crashes"] else f"try {each['attempt']} failed"


# --- dead ones: why, in groups, and which

GROUPS_SECONDS = 15.0
OF_GROUP = "/console/dead?topic={topic}&error={contains}&newest=true"
GROUPS = columns(
    "error, topic, tasks, others: Other errors its search also finds, first, last, job_id: One of them",
    error=OF_GROUP, tasks=OF_GROUP,
)  # fmt: skip


@page("dead", Action.READ_DEAD, menu="Dead", search="GET /v1/dead")
async def dead(view: View) -> Content:
    """The groups, unless a group or some tasks were chosen; then these, the latest first."""
    if view.query.keys() - {"topic"}:
        records = await view.ask("GET /v1/dead", {"limit": ON_PAGE, "newest": "true", **view.query})
        return Content("Dead tasks", found("", "GET /v1/dead", records, view, "status"), view.now_ms)
    part = await view.part("Dead tasks", "GET /v1/dead:groups", view.query, fresh=GROUPS_SECONDS)
    blocks: list[Block] = [*part.notes]
    if part.value is not None:
        read = part.value["read"]
        about = f"Of the latest {read} deaths; there are earlier ones." if part.value["more"] else ""
        blocks.append(Table(about=about, columns=GROUPS, records=part.value["groups"]))
    return Content("Dead tasks", blocks, part.at)
