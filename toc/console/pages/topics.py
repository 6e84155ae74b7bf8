"""Topics: what there is, and what holds for each."""

from __future__ import annotations

from toc.console.shown import Column, Content, Facts, Table, flag, number, seconds, status, time
from toc.console.view import View, page
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
    Column("biz_type", "biz_type", number),
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
    found = (await view.ask("GET /v1/topics"))["topics"]
    return Content("Topics", [Table(columns=COLUMNS, records=found, empty="No topics yet.")], view.now_ms)


@page("topics/{topic}", Action.READ_TOPICS)
async def topic(view: View) -> Content:
    """One topic."""
    found = await view.ask("GET /v1/topics/{topic}", topic=view.path["topic"])
    return Content(found["name"], [Facts("Policies", columns=POLICIES, record=found)], view.now_ms)
