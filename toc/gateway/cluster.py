"""Calls about the cluster: slots, workers, rebalance."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from toc.coordination.coordinator import SlotRow
from toc.coordination.operator import Operator
from toc.gateway import show
from toc.gateway.calls import Answer, Asked, HttpCall, Model, Query
from toc.model.access import Call
from toc.model.errors import ConfigError
from toc.operate import admin


class SlotsQuery(Query):
    """Which slots."""

    topic: Annotated[str | None, Field(description="Only this topic.")] = None


class Rebalance(Model):
    """Whether to move."""

    dry_run: bool = False


class Slots(TypedDict):
    """Slots of topics."""

    slots: list[dict[str, Any]]


async def slots(asked: Asked) -> Answer:
    """Show every slot: its owner and why, how many tasks it holds, and how late it is."""
    center = asked.service.center

    def look() -> list[admin.SlotView]:
        seats: list[SlotRow] = []
        if center.settings.zookeeper is not None:
            with operator(asked) as visit:
                seats = visit.slots()
        return admin.slot_views(center.store, center.queues, seats, topic=asked.query.topic)

    return Answer({"slots": [show.slot(view) for view in await asked.service.at_cluster(look)]})


async def workers(asked: Asked) -> Answer:
    """Show the living workers of the cluster; without ZooKeeper those that hold slots in Redis."""
    center = asked.service.center
    if center.settings.zookeeper is None:
        owned = await asked.service.at_cluster(admin.local_workers, center.store, center.queues)
        return Answer({"workers": [{"worker": one, "owned": count} for one, count in sorted(owned.items())]})

    def look() -> list[Any]:
        with operator(asked) as visit:
            return visit.workers()

    return Answer({"workers": [show.worker(row) for row in await asked.service.at_cluster(look)]})


async def rebalance(asked: Asked) -> Answer:
    """Spread every topic's slots evenly over the workers, and show the moves."""

    def move() -> list[Any]:
        with operator(asked) as visit:
            return visit.rebalance(by=asked.token.name, dry_run=asked.body.dry_run)

    if asked.body.dry_run:
        moves = await asked.service.at_cluster(move)
    else:
        async with asked.audit("rebalance", "cluster", {}):
            moves = await asked.service.at_cluster(move)
    return Answer({"moves": [show.move(one) for one in moves]})


def operator(asked: Asked) -> Operator:
    """Return a visit to ZooKeeper. Raises ConfigError without one."""
    settings = asked.service.center.settings
    if settings.zookeeper is None:
        raise ConfigError("one daemon runs alone and owns every slot; TOC_ZOOKEEPER makes several a cluster")
    return Operator(settings.zookeeper, cluster=settings.cluster, connect_timeout=settings.connect_timeout)


CALLS = (
    HttpCall("GET", "/v1/slots", Call.READ_CLUSTER, slots, "Show slots", query=SlotsQuery, gives=Slots),
    HttpCall("GET", "/v1/workers", Call.READ_CLUSTER, workers, "Show workers"),
    HttpCall(
        "POST", "/v1/cluster:rebalance", Call.CHANGE_CLUSTER, rebalance, "Rebalance slots", body=Rebalance
    ),
)  # fmt: skip
