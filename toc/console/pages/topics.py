"""Topics: what there is, what holds for each, and where its slots are."""

from __future__ import annotations

from toc.console.pages.cluster import SLOTS, by_host
from toc.console.pages.numbers import due, lateness
from toc.console.pages.overview import HELD, by_topic
from toc.console.shown import Block, Content, Facts, Note, Table, columns, path
from toc.console.view import CLUSTER_SECONDS, View, page
from toc.model.access import Action

COLUMNS = columns(
    "name: Topic, delivery, topic_type: Type, paused, slot_amount: Slots, retries: Tries",
    name="/console/topics/{name}",
)
POLICIES = columns(
    "delivery, topic_type: Type, paused, slot_amount: Slots, retries: Tries, biz_type: biz_type, closed, "
    "backoff, backoff_base: First wait, backoff_cap: Longest wait, prepare_timeout, max_runtime, horizon, "
    "horizon_in_force: Horizon in force, horizon_why: Why, retention, expires_in, concurrency, target, "
    "resume_rate, resumed_at: Resumed, paused_at: Paused since",
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
        blocks += slots.notes
        if slots.value is not None and slots.at is not None:
            at = slots.at
            each = slots.value["slots"]
            blocks.append(Facts("Backlog", columns=HELD[1:], record=by_topic(each)[0]))
            blocks.append(by_host(each))
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
