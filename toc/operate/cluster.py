"""The cluster of some settings, as an operator sees and changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toc.coordination.assignment import TABLES, Spread
from toc.coordination.operator import Operator
from toc.coordination.rows import Onlooker
from toc.model.errors import ConfigError
from toc.model.topic import Delivery, Slot

if TYPE_CHECKING:
    from toc.config import Settings
    from toc.coordination.coordinator import SlotRow, WorkerRow
    from toc.sdk.client import TimeoutCenter


def open_operator(settings: Settings) -> Operator:
    """Return an Operator of the cluster, for a ``with`` block. Raises ConfigError without ZooKeeper."""
    if settings.zookeeper is None:
        raise ConfigError(
            "TOC_ZOOKEEPER is not set, and without it nothing can be drained, pinned, weighed or rebalanced: "
            "daemons share the work evenly"
        )
    return Operator(
        settings.zookeeper,
        cluster=settings.cluster,
        connect_timeout=settings.connect_timeout,
        spread=Spread(settings.databases, len(settings.database_urls)),
    )


def onlooker(center: TimeoutCenter) -> Onlooker:
    """Return what the rows of members say, for a cluster without ZooKeeper. Raises StoreUnavailable."""
    topics = center.store.topics.list()
    slots = {slot for topic in topics for slot in topic.slots()}
    slots.update(Slot(TABLES, number) for number in center.store.tables)
    others = {one.name: one.delivery.value for one in topics if one.delivery is not Delivery.HANDLER}
    return Onlooker(center.store.members.list(), slots, others)


def workers(center: TimeoutCenter) -> list[WorkerRow]:
    """Return the living workers. Raises CoordinationUnavailable or, without ZooKeeper, StoreUnavailable."""
    if center.settings.zookeeper is None:
        return onlooker(center).workers()
    with open_operator(center.settings) as operator:
        return operator.workers()


def slot_owners(center: TimeoutCenter) -> list[SlotRow]:
    """Return who owns each slot, and why. Raises CoordinationUnavailable or, without ZooKeeper,
    StoreUnavailable."""
    if center.settings.zookeeper is None:
        return onlooker(center).slots()
    with open_operator(center.settings) as operator:
        return operator.slots()


def living_hosts(center: TimeoutCenter) -> list[str]:
    """Return the hosts that have workers or gateways now. Raises CoordinationUnavailable or, without
    ZooKeeper, StoreUnavailable."""
    return sorted({row.member.host for row in workers(center)})
