"""The nodes in ZooKeeper and their data. All data are JSON objects; readers ignore unknown keys.

::

    /toc/{cluster}/                      after the chroot
        workers/{worker_id}   ephemeral   {host, pid, weight, topics: [...] or null, joined,
                                           metrics: "host:port" or null, machine,
                                           serves: [...], version, protocol, out_of_reach: [...]}
        assignment/{topic}                {workers: [worker_id, ...], slots: [index into workers, -1: none],
                                           by, at}; written by the leader, only when it changes
        slots/{topic}_{n}     ephemeral   {worker_id, since}: the owner's claim
        leader/{session}-{n}  ephemeral   {host}; the lowest n leads
        drain/{host}                      {by, at}: an operator wants no slots there
        pin/{topic}_{n}                   {target, by, at}: an operator wants the slot on that worker or host
        weight/{host}                     {weight, by, at}: an operator wants each worker there to weigh that
        rebalance/request                 {by, at}: spread each topic evenly, once; the leader removes it
        dead/{worker_id}                  {host, at}: this worker's process is known to have ended

A worker_id is ``{host}-{place}-{random}.{mark}``: its process holds this name (toc.coordination.presence).
Where it cannot, ``.{mark}`` is missing.

None of this is the source of truth. A daemon whose nodes are gone makes them again. A lost assignment stays
in the memory of every daemon, and a leader without one begins with the claims.

Instants are milliseconds since 1970 UTC. To change a format, add keys and never change the meaning of one: a
cluster runs two releases while it is upgraded. What members of a lower ``protocol`` would ignore is refused
until all have the higher one.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

from toc.coordination.assignment import Member
from toc.model.documents import parse_object
from toc.model.errors import InvalidDocument, InvalidInput, shown
from toc.model.topic import Slot
from toc.observe.log import get_logger

log = get_logger(__name__)

MAX_WEIGHT = 1000
"""The largest weight, as for TOC_WEIGHT."""
_NUMBER = re.compile("0|[1-9][0-9]{0,5}")
_YEAR_10000 = 253_402_300_800_000
"""The first instant (ms) that Python's datetime cannot hold."""


def root_of(chroot: str, cluster: str) -> str:
    """Return the path of cluster ``cluster``, under the chroot ('' or '/...')."""
    return f"{chroot}/toc/{check_node_name('cluster', cluster)}"


def check_node_name(what: str, name: str) -> str:
    """Return ``name`` if it is a valid node name. Raises InvalidInput."""
    if not name or name in (".", "..") or any(char == "/" or not char.isprintable() for char in name):
        raise InvalidInput(
            f"{what} {shown(name)} is not a name: it must not be empty or have '/' or control characters",
            what,
        )
    return name


def slot_of(name: str) -> Slot | None:
    """Return the slot that a node is named after, or None."""
    topic, _, number = name.rpartition("_")
    return Slot(topic, int(number)) if topic and _NUMBER.fullmatch(number) else None


def host_of(worker_id: str) -> str:
    """Return the host of a worker_id."""
    return worker_id.rsplit("-", 2)[0]


def place_of(worker_id: str) -> str:
    """Return the place of a worker_id on its host, which a process has from the one that it replaces."""
    return worker_id.rpartition("-")[0]


def first_candidate(names: Iterable[str]) -> str:
    """Return the candidate that leads, of the nodes ``leader/{session}-{n}``: "" if there is none."""
    return min(names, key=lambda name: name.rpartition("-")[2], default="")


def encode(**values: object) -> bytes:
    """Encode a node's data."""
    return json.dumps(values, separators=(",", ":"), sort_keys=True).encode()


def decode(name: str, data: bytes) -> dict[str, Any]:
    """Decode the data of the node of this name; {} if it is not a JSON object, which toc would not write."""
    try:
        return parse_object(data)
    except InvalidDocument as exc:
        not_understood(name, str(exc))
        return {}


@lru_cache(256)
def not_understood(name: str, error: str) -> None:
    """Log, once, that the data of a node are not what toc writes."""
    log.warning("node_not_understood", node=name, error=error)


def holder_of(name: str, data: bytes) -> str | None:
    """Return the worker_id in the data of a claim; None without one."""
    holder = decode(name, data).get("worker_id")
    return holder if isinstance(holder, str) else None


def weight_of(name: str, values: dict[str, Any]) -> float | None:
    """Return the weight in a node's data; None if workers cannot have it."""
    weight = values.get("weight")
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 < weight <= MAX_WEIGHT:
        return weight
    if values:
        not_understood(name, f"a weight is a number of more than 0 and at most {MAX_WEIGHT}")
    return None


def instant(values: dict[str, Any], key: str) -> int:
    """Return an instant (ms) in a node's data; 0 if there is none that can be shown."""
    value = values.get(key)
    return value if isinstance(value, int) and 0 <= value < _YEAR_10000 else 0


def member_values(member: Member) -> dict[str, Any]:
    """Return what workers/{worker_id} says: its fields."""
    values = {each.name: getattr(member, each.name) for each in fields(member) if each.name != "worker_id"}
    return {name: sorted(one) if isinstance(one, frozenset) else one for name, one in values.items()}


def member_data(member: Member) -> bytes:
    """Encode the data of workers/{worker_id}."""
    return encode(**member_values(member))


def member_of(worker_id: str, data: bytes) -> Member | None:
    """Return the member that workers/{worker_id} describes; None if the data are malformed."""
    return member_from(worker_id, decode(worker_id, data))


def member_from(worker_id: str, values: dict[str, Any]) -> Member | None:
    """Return the member that these values describe; None if they are malformed."""
    host, weight = values.get("host"), weight_of(worker_id, values)
    if not isinstance(host, str) or weight is None:
        return None
    given: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        if isinstance(values.get(name), kind):
            given[name] = frozenset(map(str, values[name])) if kind is list else values[name]
    return Member(worker_id, host, weight, joined=instant(values, "joined"), **given)


_KINDS: dict[str, type] = {
    **dict.fromkeys(("pid", "protocol", "lost_threads"), int),
    **dict.fromkeys(("metrics", "machine", "version"), str),
    **dict.fromkeys(("topics", "serves", "out_of_reach"), list),
}
"""The type of each further value in a member's data. One of another type counts as absent."""


class Assigned(NamedTuple):
    """assignment/{topic}: the owner per slot number, and the node's version, -1 if there is no node."""

    owners: list[str | None]
    version: int


def assignment_data(owners: Sequence[str | None], by: str, now_ms: int) -> bytes:
    """Encode assignment/{topic}: each worker_id once, so that 1024 slots take a few KB."""
    workers = sorted({owner for owner in owners if owner is not None})
    index = {worker_id: position for position, worker_id in enumerate(workers)}
    slots = [-1 if owner is None else index[owner] for owner in owners]
    return encode(workers=workers, slots=slots, by=by, at=now_ms)


def owners_of(topic: str, data: bytes) -> list[str | None]:
    """Return the owner per slot number in assignment/{topic}; [] if the data are malformed."""
    values = decode(topic, data)
    workers, slots = values.get("workers"), values.get("slots")
    if not isinstance(workers, list) or not isinstance(slots, list):
        not_understood(topic, "an assignment has lists of workers and slots")
        return []
    return [
        str(workers[index]) if isinstance(index, int) and 0 <= index < len(workers) else None
        for index in slots
    ]
