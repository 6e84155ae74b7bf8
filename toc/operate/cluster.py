"""The cluster of some settings, as an operator sees and changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toc.coordination.operator import Operator
from toc.coordination.znodes import host_of
from toc.model.errors import ConfigError

if TYPE_CHECKING:
    from toc.config import Settings
    from toc.coordination.coordinator import SlotRow
    from toc.sdk.client import TimeoutCenter


def open_operator(settings: Settings) -> Operator:
    """Return an Operator of the cluster, for a ``with`` block. Raises ConfigError without ZooKeeper."""
    if settings.zookeeper is None:
        raise ConfigError(
            "TOC_ZOOKEEPER is not set, so one daemon runs alone and owns every slot: "
            "set TOC_ZOOKEEPER to run several hosts as a cluster"
        )
    return Operator(settings.zookeeper, cluster=settings.cluster, connect_timeout=settings.connect_timeout)


def slot_owners(settings: Settings) -> list[SlotRow]:
    """Return who owns each slot, and why; nothing without ZooKeeper. Raises CoordinationUnavailable."""
    if settings.zookeeper is None:
        return []
    with open_operator(settings) as operator:
        return operator.slots()


def living_hosts(center: TimeoutCenter) -> list[str]:
    """Return the hosts that have workers or gateways now. Raises CoordinationUnavailable, StoreUnavailable or
    IndexUnavailable."""
    if center.settings.zookeeper is not None:
        with open_operator(center.settings) as operator:
            return sorted({row.member.host for row in operator.workers()})
    if center.settings.redis_url is None or (owner := center.queues.owner()) is None:
        return []
    return sorted(set(map(host_of, owner.alive)))
