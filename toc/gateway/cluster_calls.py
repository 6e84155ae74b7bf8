"""Calls about the cluster: slots, workers, and what operators ask of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from toc.coordination.intents import Intents
from toc.coordination.znodes import MAX_WEIGHT, check_node_name
from toc.gateway.calls import Answer, Asked, HttpCall, Model, Query
from toc.model.access import Action
from toc.operate import admin, running
from toc.operate.cluster import open_operator, slot_owners
from toc.operate.placement import Placement
from toc.operate.records import (
    intent_records,
    local_worker_records,
    move_record,
    ownership_record,
    queue_record,
    running_record,
    worker_record,
)

R = TypeVar("R")

HINT = "send absent: true if it will come later"


class SlotsQuery(Query):
    """Which slots."""

    topic: Annotated[str | None, Field(description="Only this topic.")] = None


class RunningQuery(Query):
    """Which of the tasks that run."""

    topic: Annotated[str | None, Field(description="Only this topic.")] = None
    limit: Annotated[int, Field(ge=1, le=running.PAGE)] = 100
    next: Annotated[str | None, Field(max_length=200, description="The next of the page before.")] = None


class RunningTasks(TypedDict):
    """Tasks that run, by slot and job_id."""

    tasks: list[dict[str, Any]]
    next: str | None


class Wish(Model):
    """What is asked of a host."""

    absent: bool = Field(False, description="Accept a host that has no worker now; takes effect when it has.")


class NewWeight(Wish):
    """A share of the slots."""

    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT, description="2 gets twice what 1 gets.")]


class NewPin(Wish):
    """Where a slot is to be."""

    target: Annotated[
        str,
        AfterValidator(partial(check_node_name, "target")),
        Field(max_length=255, description="A host, or a worker."),
    ]


class Rebalance(Model):
    """Whether to move."""

    dry_run: bool = False


class Asks(TypedDict):
    """Intents: what (drain, weight, pin), of which host or slot, to what, by whom, and when."""

    intents: list[dict[str, Any]]


class Slots(TypedDict):
    """Slots of topics."""

    slots: list[dict[str, Any]]


async def slots(asked: Asked) -> Answer:
    """Show every slot: its owner and why, how many tasks it holds, and how late it is."""
    center = asked.service.center

    def look() -> list[admin.SlotView]:
        return admin.slot_views(
            center.store, center.queues, slot_owners(center.settings), topic=asked.query.topic
        )

    return Answer({"slots": [_slot(view) for view in await asked.service.at_cluster(look)]})


async def running_tasks(asked: Asked) -> Answer:
    """Show the tasks that workers have taken now, with worker, host, and since when; a page at a time."""
    center, query = asked.service.center, asked.query

    def look() -> running.Page:
        wanted = query.topic
        topics = center.store.topics.list() if wanted is None else [admin.get_topic(center.store, wanted)]
        return running.page(center, topics, query.next, query.limit)

    page = await asked.service.at_cluster(look)
    return Answer({"tasks": [running_record(one) for one in page.tasks], "next": page.next})


def _slot(view: admin.SlotView) -> dict[str, Any]:
    row = view.ownership
    why = {"assigned": row and row.assigned, "why": row and row.reason}
    return ownership_record(view) | why | queue_record(view)


async def workers(asked: Asked) -> Answer:
    """Show the living workers of the cluster; without ZooKeeper those that use Redis."""
    center = asked.service.center
    if center.settings.zookeeper is None:
        owned = await asked.service.at_cluster(admin.local_workers, center.store, center.queues)
        return Answer({"workers": local_worker_records(owned)})

    def look() -> list[Any]:
        with open_operator(center.settings) as operator:
            return operator.workers()

    return Answer({"workers": [worker_record(row) for row in await asked.service.at_cluster(look)]})


async def intents(asked: Asked) -> Answer:
    """Show what operators have asked for: drains, weights and pins; by whom and when."""
    settings = asked.service.center.settings
    if settings.zookeeper is None:
        return Answer({"intents": []})

    def look() -> Intents:
        with open_operator(settings) as operator:
            return operator.intents()

    return Answer({"intents": intent_records(await asked.service.at_cluster(look))})


async def drain(asked: Asked) -> Answer:
    """Take all slots from a host, and give it none until it is undrained."""
    host = asked.path["host"]
    present = await _place(asked, lambda placement: placement.drain(host, absent=asked.body.absent))
    return Answer({"host": host, "drained": True, "present": present})


async def undrain(asked: Asked) -> Answer:
    """Let a drained host have slots again."""
    host = asked.path["host"]
    found = await _place(asked, lambda placement: placement.undrain(host))
    return Answer({"host": host, "drained": False, "changed": found})


async def weight(asked: Asked) -> Answer:
    """Give the workers of a host another share of the slots than its TOC_WEIGHT."""
    host, share = asked.path["host"], asked.body.weight
    await _place(asked, lambda placement: placement.weigh(host, share, absent=asked.body.absent))
    return Answer({"host": host, "weight": share})


async def unweight(asked: Asked) -> Answer:
    """Let TOC_WEIGHT of the host's daemon count again."""
    host = asked.path["host"]
    found = await _place(asked, lambda placement: placement.unweigh(host))
    return Answer({"host": host, "changed": found})


async def pin(asked: Asked) -> Answer:
    """Assign a slot to a host or worker. While that is absent, the slot goes where balance puts it."""
    slot, target = asked.path["slot"], asked.body.target
    await _place(asked, lambda placement: placement.pin(slot, target, absent=asked.body.absent))
    return Answer({"slot": slot, "target": target})


async def unpin(asked: Asked) -> Answer:
    """Let a pinned slot go where balance puts it."""
    slot = asked.path["slot"]
    found = await _place(asked, lambda placement: placement.unpin(slot))
    return Answer({"slot": slot, "changed": found})


async def rebalance(asked: Asked) -> Answer:
    """Spread every topic's slots evenly over the workers, and show the moves."""
    moves = await _place(asked, lambda placement: placement.rebalance(dry_run=asked.body.dry_run))
    return Answer({"moves": [move_record(one) for one in moves]})


async def _place(asked: Asked, do: Callable[[Placement], R]) -> R:
    """Change where slots go, in the name of the token."""
    center = asked.service.center

    def make() -> R:
        with open_operator(center.settings) as operator:
            by, name = asked.token.name, center.settings.cluster
            return do(Placement(operator, center.store, by=by, cluster=name, hint=HINT))

    return await asked.service.at_cluster(make)


CALLS = (
    HttpCall("GET", "/v1/slots", Action.READ_CLUSTER, slots, "Show slots", query=SlotsQuery, gives=Slots),
    HttpCall(
        "GET", "/v1/running", Action.READ_CLUSTER, running_tasks, "Show running tasks",
        query=RunningQuery, gives=RunningTasks,
    ),
    HttpCall("GET", "/v1/workers", Action.READ_CLUSTER, workers, "Show workers"),
    HttpCall("GET", "/v1/intents", Action.READ_CLUSTER, intents, "Show intents of operators", gives=Asks),
    HttpCall("POST", "/v1/hosts/{host}:drain", Action.CHANGE_CLUSTER, drain, "Drain a host", body=Wish),
    HttpCall("POST", "/v1/hosts/{host}:undrain", Action.CHANGE_CLUSTER, undrain, "Undrain a host"),
    HttpCall(
        "POST", "/v1/hosts/{host}:weight", Action.CHANGE_CLUSTER, weight, "Weigh a host", body=NewWeight
    ),
    HttpCall("POST", "/v1/hosts/{host}:unweight", Action.CHANGE_CLUSTER, unweight, "Unweigh a host"),
    HttpCall("POST", "/v1/slots/{slot}:pin", Action.CHANGE_CLUSTER, pin, "Pin a slot", body=NewPin),
    HttpCall("POST", "/v1/slots/{slot}:unpin", Action.CHANGE_CLUSTER, unpin, "Unpin a slot"),
    HttpCall(
        "POST", "/v1/cluster:rebalance", Action.CHANGE_CLUSTER, rebalance, "Rebalance slots", body=Rebalance
    ),
)  # fmt: skip
