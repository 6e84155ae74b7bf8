"""The state of the system: what is wrong now, and what each topic holds."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from toc.console.pages.numbers import due, lateness
from toc.console.pages.records import SLOTS
from toc.console.shown import Block, Content, Facts, Note, Table, columns, path
from toc.console.view import CLUSTER_SECONDS, Part, View, page
from toc.model.access import Action

HEALTH_SECONDS = 30.0
"""A younger examination is good enough: it asks every server several times."""
COUNTS = ("scheduled", "prepared", "dead")
NONE: dict[str, Any] = dict.fromkeys((*COUNTS, "overdue"))
"""What is known before any slot is read."""
HELD = columns(
    "topic, paused, scheduled: Counted as scheduled, prepared: Taken, dead, overdue, "
    "unowned: Slots without owner, unread: Slots not read",
    dead="/console/dead?topic={topic}",
)
HOSTS = columns(
    "topic: Host, slots, scheduled: Counted as scheduled, prepared: Taken, dead, overdue, "
    "unread: Slots not read",
    topic="",
)
FINDINGS = columns("level, part, of, what: Finding, do: What to do")


async def findings(view: View, *levels: str) -> tuple[list[Block], int | None]:
    """Return what the examination has found of these levels, and when."""
    part = await view.part("Health", "GET /v1/health", fresh=HEALTH_SECONDS)
    if part.value is None or part.at is None:
        return part.notes, None
    found = [one for one in part.value["findings"] if one["level"] in levels]
    about = f"Examined {view.ago(part.at)} ago; anew after {HEALTH_SECONDS:g} s."
    return [*part.notes, Table("What is wrong", about, FINDINGS, found, empty="Nothing.")], part.at


def least(slots: Part) -> list[Block]:
    """Say so if there may be more than is counted."""
    text = "Only the first tasks of each table are counted: there may be more."
    return [Note(text=text)] if slots.value is not None and slots.value["more"] else []


def by_topic(slots: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add up what the slots of each topic hold."""
    return summed((one["slot"].rpartition("_")[0], one) for one in slots)


def summed(slots: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Add up what slots hold by the topic, or host, that each is given with. The counts of those that could
    not be read are missing, and ``unread`` says so."""
    found: dict[str, dict[str, Any]] = {}
    for of, one in slots:
        held = found.setdefault(of, {"topic": of, **NONE, "slots": 0, "unowned": 0, "unread": 0})
        held["slots"] += 1
        held["unowned"] += one["owner"] is None
        if one["scheduled"] is None:
            held["unread"] += 1
            continue
        for name in COUNTS:
            held[name] = (held[name] or 0) + one[name]
        held["overdue"] = max(held["overdue"] or 0, one["overdue"] or 0)
    return list(found.values())


@page("", Action.READ_CLUSTER, menu="Overview", live=True)
async def overview(view: View) -> Content:
    """What is wrong, and what there is."""
    (wrong, _), coming, past, slots, policies = await asyncio.gather(
        findings(view, "wrong", "warn"),
        due(view),
        lateness(view),
        view.part("Slots", "GET /v1/slots", fresh=CLUSTER_SECONDS),
        view.part("Topics", "GET /v1/topics", fresh=CLUSTER_SECONDS),
    )
    blocks = [*wrong, *slots.notes, *least(slots), *policies.notes]
    if slots.value is not None:
        paused = {one["name"]: one["paused"] for one in (policies.value or {"topics": ()})["topics"]}
        held = [{**one, "paused": paused.get(one["topic"])} for one in by_topic(slots.value["slots"])]
        blocks.append(Table("Topics", columns=HELD, records=held, empty="No topics yet."))
    blocks += [*past, *coming]
    return Content("Overview", blocks, slots.at)


@page("health", Action.READ_CLUSTER, menu="Health", live=True)
async def health(view: View) -> Content:
    """All findings."""
    blocks, at = await findings(view, "wrong", "warn", "note", "ok")
    return Content("Health", blocks, at)


# --- topics

COLUMNS = columns(
    "name: Topic, delivery, topic_type: Type, paused, slot_amount: Slots, retries: Tries",
    name="/console/topics/{name}",
)
POLICIES = columns(
    "delivery, topic_type: Type, paused, slot_amount: Slots, retries: Tries, biz_type: biz_type, closed, "
    "backoff, backoff_base: First wait, backoff_cap: Longest wait, prepare_timeout, max_runtime, horizon, "
    "horizon_in_force: Horizon in force, horizon_why: Why, retention, expires_in, concurrency, target, "
    "resume_rate, paused_at: Last paused, paused_by, resumed_at: Last resumed",
    target="/console/targets/{target}",
)


@page("topics", Action.READ_TOPICS, menu="Topics")
async def topics(view: View) -> Content:
    """All topics that the reader may see."""
    return await view.listed("Topics", "GET /v1/topics", "topics", COLUMNS, empty="No topics yet.")


@page("topics/{topic}", Action.READ_TOPICS, live=True)
async def topic(view: View) -> Content:
    """One topic."""
    name = view.path["topic"]
    found = await view.ask("GET /v1/topics/{topic}", topic=name)
    blocks: list[Block] = []
    at = view.now_ms
    if view.may(Action.READ_CLUSTER):
        slots = await view.part("Slots", "GET /v1/slots", {"topic": name}, fresh=CLUSTER_SECONDS)
        blocks += [*slots.notes, *least(slots)]
        if slots.value is not None and slots.at is not None:
            at = slots.at
            each = slots.value["slots"]
            blocks.append(Facts("Backlog", columns=HELD[1:], record=by_topic(each)[0]))
            there = await view.part("Workers", "GET /v1/workers", fresh=CLUSTER_SECONDS)
            blocks += there.notes
            if there.value is not None:
                host = {one["worker"]: one["host"] for one in there.value["workers"]}
                by_host = summed((host.get(one["owner"], "none alive"), one) for one in each)
                blocks.append(Table("Slots by host", columns=HOSTS, records=by_host))
            blocks.append(Table("Slots", columns=SLOTS, records=each))
    blocks += [*await lateness(view, name), *await due(view, name)]
    for right, title, where in (
        (Action.FIND_TASKS, "Its pending tasks", "/console/tasks?topic={name}"),
        (Action.READ_DEAD, "Its dead tasks", "/console/dead?topic={name}"),
        (Action.FIND_TASKS, "Why its tasks were late", "/console/late?topic={name}"),
    ):
        if view.may(right, name):
            blocks.append(Note(text=title, href=path(where, found)))
    return Content(found["name"], [Facts("Policies", columns=POLICIES, record=found), *blocks], at)
