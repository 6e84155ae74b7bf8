"""The cluster: slots and workers; hosts drained or weighed, slots pinned, everything spread evenly.

A change that names a host or worker that does not exist is refused, unless it is said to come later
(``absent``).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from toc.coordination.assignment import TABLES, Spread
from toc.coordination.znodes import MAX_WEIGHT, check_node_name, slot_of
from toc.index.messages import Peek
from toc.model.access import Action as Right
from toc.model.errors import ConfigError, InvalidInput, UnknownHost, shown
from toc.model.topic import Delivery, Slot
from toc.operate.operation import REQUIRED, Doing, Param, Place, Record, Value, operation
from toc.operate.records import intent_records, move_record, slot_record, worker_record
from toc.operate.topics import get_topic

if TYPE_CHECKING:
    from toc.config import Settings
    from toc.coordination.operator import Operator
    from toc.coordination.views import Onlooker, SlotRow, WorkerRow
    from toc.sdk.client import TimeoutCenter

NAMED = 20
"""How many hosts a message names at most."""
HOST = Param("host", Value.TEXT, "A host, as `toc workers` shows it.", REQUIRED, metavar="HOST")
SLOT = Param("slot", Value.TEXT, "A slot, as `toc slots` shows it: order.close_3.", REQUIRED, metavar="SLOT")
ABSENT = Param(
    "absent", Value.FLAG, "Accept a host that has no worker now; takes effect when it has.", default=False
)
TOPIC = Param("topic", Value.TEXT, "Only this topic.", metavar="NAME")
CLUSTER: Any = {"place": Place.CLUSTER}


# --- as an operator sees it


def open_operator(settings: Settings) -> Operator:
    """Return an Operator of the cluster, for a ``with`` block. Raises ConfigError without ZooKeeper."""
    if settings.zookeeper is None:
        raise ConfigError(
            "TOC_ZOOKEEPER is not set, and without it nothing can be drained, pinned, weighed or rebalanced: "
            "daemons share the work evenly"
        )
    from toc.coordination.operator import Operator

    return Operator(
        settings.zookeeper,
        cluster=settings.cluster,
        connect_timeout=settings.connect_timeout,
        spread=Spread(settings.databases, len(settings.database_urls)),
    )


def looking(center: TimeoutCenter) -> AbstractContextManager[Onlooker | Operator]:
    """Return who tells of workers and slots, for a ``with`` block: without ZooKeeper by the rows of members.

    Raises as ``living_workers``.
    """
    if center.settings.zookeeper is not None:
        return open_operator(center.settings)
    from toc.coordination.views import Onlooker

    topics = center.store.topics.list()
    slots = {slot for topic in topics for slot in topic.slots()}
    slots.update(Slot(TABLES, number) for number in center.store.tables)
    others = {one.name: one.delivery.value for one in topics if one.delivery is not Delivery.HANDLER}
    return nullcontext(Onlooker(center.store.members.list(), slots, others))


def living_workers(center: TimeoutCenter) -> list[WorkerRow]:
    """Return the living workers. Raises CoordinationUnavailable or, without ZooKeeper, StoreUnavailable."""
    with looking(center) as seen:
        return seen.workers()


def slot_owners(center: TimeoutCenter) -> list[SlotRow]:
    """Return who owns each slot, and why. Raises as ``living_workers``."""
    with looking(center) as seen:
        return seen.slots()


@operation("health.show", "GET /v1/health", Right.READ_CLUSTER, "Examine everything",
           place=Place.LONG)  # fmt: skip
def health(doing: Doing) -> Record:
    """Examine servers, clocks, workers, topics and schedules, as `toc doctor` does, and say what to do.

    A server that does not answer costs its timeout.
    """
    from toc.operate import doctor

    return {"findings": doctor.findings(doctor.examine(doing.center))}


@operation("slot.list", "GET /v1/slots", Right.READ_CLUSTER, "Show slots", TOPIC, **CLUSTER)
def slots(doing: Doing, topic: str | None = None) -> Record:
    """Show every slot: its owner and why, how many tasks it holds, and how late it is.

    `more`: without an index only the first tasks of each table are counted, and there may be more.
    """
    from toc.maintenance.depths import depths

    center, store = doing.center, doing.center.store
    topics = [get_topic(store, topic)] if topic is not None else store.topics.list()
    owners = {Slot(row.topic, row.number): row for row in slot_owners(center)}
    wanted = sorted(slot for each in topics for slot in each.slots())
    peeks = depths(store, center.queues, topics, wanted, center.clock.now_ms())
    found = [slot_record(slot, owners.get(slot), peek) for slot, peek in peeks.items()]
    return {"slots": found, "more": any(isinstance(peek, Peek) and peek.more for peek in peeks.values())}


@operation("worker.list", "GET /v1/workers", Right.READ_CLUSTER, "Show workers", **CLUSTER)
def workers(doing: Doing) -> Record:
    """Show the living workers, their slots, and the tables that they sweep.

    toc: Example: toc workers --json
    """
    return {"workers": [worker_record(row) for row in living_workers(doing.center)]}


@operation("intent.list", "GET /v1/intents", Right.READ_CLUSTER, "Show intents of operators", **CLUSTER)
def intents(doing: Doing) -> Record:
    """Show drains, weights and pins: by whom and when.

    toc: Example: toc intents --json
    """
    alone = doing.center.settings.zookeeper is None
    return {"intents": [] if alone else intent_records(doing.operator.intents())}


# --- changes


def _may_name(doing: Doing, host: str, *, absent: bool, **_: float) -> None:
    """Refuse a host that has no worker, unless it may be ``absent``, or an operator has named it before."""
    check_node_name("host", host)
    intents = doing.operator.intents()
    _find(doing, host, absent=absent or host in {**intents.drains, **intents.weights})


@operation("host.drain", "POST /v1/hosts/{host}:drain", Right.CHANGE_CLUSTER, "Drain a host",
           HOST, ABSENT, takes="Wish", check=_may_name, details=lambda _: {}, **CLUSTER)  # fmt: skip
def drain(doing: Doing, host: str, **_: bool) -> Record:
    """Take all slots from a host until it is undrained."""
    doing.operator.want("drain", host, by=doing.by)
    return {"host": host, "drained": True, "present": _find(doing, host, absent=True)}


@operation("host.undrain", "POST /v1/hosts/{host}:undrain", Right.CHANGE_CLUSTER, "Undrain a host",
           HOST, **CLUSTER)  # fmt: skip
def undrain(doing: Doing, host: str) -> Record:
    """Let a drained host have slots again."""
    found = doing.operator.unwant("drain", host)
    if not found:
        _find(doing, host, hint=f"drained hosts: {some(doing.operator.intents().drains)}")
    return {"host": host, "drained": False, "changed": found}


@operation(
    "host.weight", "POST /v1/hosts/{host}:weight", Right.CHANGE_CLUSTER, "Weigh a host",
    HOST,
    Param("weight", Value.NUMBER, "More than 0: 2 is twice what 1 gets.", REQUIRED, above=0, most=MAX_WEIGHT,
          metavar="WEIGHT"),
    ABSENT, takes="NewWeight", check=_may_name, details=lambda told: {"weight": told["weight"]}, **CLUSTER,
)  # fmt: skip
def weigh(doing: Doing, host: str, *, weight: float, **_: bool) -> Record:
    """Give the workers of a host another share of the slots than its TOC_WEIGHT, until it is unweighed."""
    doing.operator.want("weight", host, by=doing.by, weight=weight)
    return {"host": host, "weight": weight}


@operation("host.unweight", "POST /v1/hosts/{host}:unweight", Right.CHANGE_CLUSTER, "Unweigh a host",
           HOST, **CLUSTER)  # fmt: skip
def unweigh(doing: Doing, host: str) -> Record:
    """Let TOC_WEIGHT of the host's daemon count again."""
    found = doing.operator.unwant("weight", host)
    if not found:
        _find(doing, host, hint=f"hosts with a weight: {some(doing.operator.intents().weights)}")
    return {"host": host, "changed": found}


def _can_pin(doing: Doing, slot: str, *, target: str, absent: bool) -> None:
    check_node_name("target", target)
    wanted = _slot(slot)
    topic = get_topic(doing.center.store, wanted.topic)
    if wanted.number >= topic.slot_amount:
        raise InvalidInput(
            f"{topic.name} has slots 0 to {topic.slot_amount - 1}, not {wanted.number}", "slot"
        )
    _find(doing, target, absent=absent, workers=True)


@operation("slot.pin", "POST /v1/slots/{slot}:pin", Right.CHANGE_CLUSTER, "Pin a slot",
           SLOT, Param("target", Value.TEXT, "A host, or a worker.", REQUIRED, most=255, metavar="TARGET"),
           ABSENT, takes="NewPin", check=_can_pin, details=lambda told: {"to": told["target"]},
           **CLUSTER)  # fmt: skip
def pin(doing: Doing, slot: str, *, target: str, **_: bool) -> Record:
    """Assign a slot to a host or worker. While that is absent, the slot goes where balance puts it."""
    doing.operator.want("pin", _slot(slot), by=doing.by, target=target)
    return {"slot": slot, "target": target}


@operation("slot.unpin", "POST /v1/slots/{slot}:unpin", Right.CHANGE_CLUSTER, "Unpin a slot",
           SLOT, check=lambda _, slot: _slot(slot), **CLUSTER)  # fmt: skip
def unpin(doing: Doing, slot: str) -> Record:
    """Let a pinned slot go where balance puts it, also one that is gone."""
    return {"slot": slot, "changed": doing.operator.unwant("pin", _slot(slot))}


@operation("cluster.rebalance", "POST /v1/cluster:rebalance", Right.CHANGE_CLUSTER, "Rebalance slots",
           Param("dry_run", Value.FLAG, "Only show what would move.", default=False), takes="Rebalance",
           target=lambda doing: doing.center.settings.cluster, details=lambda _: {}, **CLUSTER)  # fmt: skip
def rebalance(doing: Doing, *, dry_run: bool) -> Record:
    """Spread every topic's slots evenly over the workers, and show the moves.

    toc: Example: toc rebalance --dry-run
    """
    topics = doing.center.store.topics.list()
    others = {one.name: one.delivery.value for one in topics if one.delivery is not Delivery.HANDLER}
    moves = doing.operator.rebalance(by=doing.by, dry_run=dry_run, deliveries=others)
    doing.result["moves"] = len(moves)
    return {"moves": [move_record(move) for move in moves]}


def _find(doing: Doing, target: str, *, absent: bool = False, workers: bool = False, hint: str = "") -> bool:
    """Whether a host has a worker now. With ``workers`` the target may be a worker, too. Raises UnknownHost
    unless it may be ``absent``."""
    host_of = {row.member.worker_id: row.member.host for row in doing.operator.workers()}
    hosts = set(host_of.values())
    if target in hosts or (workers and target in host_of):
        return True
    if target in host_of:
        raise UnknownHost(f"{shown(target)} is a worker, not a host: give its host, {host_of[target]}")
    if not absent:
        how = "add --absent" if doing.token is None else "send absent: true"
        hint = hint or f"{how} if it will come later"
        raise UnknownHost(f"{shown(target)} has no worker now; hosts with workers: {some(hosts)}; {hint}")
    return False


def _slot(name: str) -> Slot:
    slot = slot_of(name)
    if slot is None:
        raise InvalidInput(
            f"{shown(name)} is not a slot; write it as `toc slots` does: order.close_3", "slot"
        )
    return slot


def some(names: Iterable[str]) -> str:
    """Return names for a message, at most NAMED of them."""
    first, rest = sorted(names)[:NAMED], sorted(names)[NAMED:]
    return (", ".join(first) or "none") + (f" and {len(rest)} more" if rest else "")
