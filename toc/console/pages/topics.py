"""Topics: what there is, what holds for each, and where its slots are."""

from __future__ import annotations

from toc.console.pages.cluster import SLOTS, by_host
from toc.console.pages.overview import HELD, by_topic, due
from toc.console.shown import (
    Block,
    Column,
    Content,
    Facts,
    Note,
    Table,
    flag,
    ident,
    number,
    path,
    seconds,
    status,
    time,
)
from toc.console.view import CLUSTER_SECONDS, View, page
from toc.model.access import Action

COLUMNS = (
    Column("name", "Topic", link="/console/topics/{name}"),
    Column("delivery", "Delivery", status),
    Column("topic_type", "Type"),
    Column("paused", "Paused", flag),
    Column("slot_amount", "Slots", number),
    Column("retries", "Tries", number),
)
POLICIES = (
    *COLUMNS[1:],
    Column("biz_type", "biz_type", ident),
    Column("closed", "Closed to submits", flag),
    Column("backoff", "Backoff"),
    Column("backoff_base", "First wait", seconds),
    Column("backoff_cap", "Longest wait", seconds),
    Column("prepare_timeout", "Prepare timeout", seconds),
    Column("max_runtime", "Longest run", seconds),
    Column("horizon", "Horizon", seconds),
    Column("retention", "Retention", seconds),
    Column("expires_in", "Expires after", seconds),
    Column("concurrency", "Concurrency", number),
    Column("target", "Target", link="/console/targets/{target}"),
    Column("resume_rate", "Resume rate", number),
    Column("resumed_at", "Resumed", time),
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
        blocks += slots.notes
        if slots.value is not None and slots.at is not None:
            at = slots.at
            each = slots.value["slots"]
            blocks.append(Facts("Backlog", columns=HELD[1:], record=by_topic(each)[0]))
            blocks.append(by_host(each))
            blocks.append(Table("Slots", columns=SLOTS, records=each))
    blocks += await due(view, name)
    for right, title, where in (
        (Action.FIND_TASKS, "Its pending tasks", "/console/tasks?topic={name}"),
        (Action.READ_DEAD, "Its dead tasks", "/console/dead?topic={name}"),
    ):
        if view.may(right, name):
            blocks.append(Note(text=title, href=path(where, found)))
    return Content(found["name"], [Facts("Policies", columns=POLICIES, record=found), *blocks], at)
