"""Is this Redis fit to hold the index? Asked once at start, and by ``toc doctor``."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from toc.errors import IndexUnavailable
from toc.queue.nodes import Node
from toc.queue.queues import Queues
from toc.queue.url import Kind

_MIN_MAJOR = 7


class Level(Enum):
    """How bad a finding is."""

    REFUSE = "refuse"
    """Tasks would be late or lost from the index: do not start."""
    WARN = "warn"
    """Start, and tell the operator."""


class Finding(NamedTuple):
    """What is wrong with one server, and what to do about it."""

    level: Level
    server: str
    what: str
    do: str


def check(queues: Queues) -> list[Finding]:
    """Everything that is wrong, of every master; empty when all is well. One round trip per master.

    Raises IndexUnavailable, which names every master that is out of reach: nothing is known of its fitness.
    """
    kind = queues.nodes.location.kind
    found: list[Finding] = []
    away: list[IndexUnavailable] = []
    for node in queues.nodes.masters():
        try:
            found += _check_node(node, kind)
        except IndexUnavailable as exc:
            away.append(exc)
    if away:
        raise IndexUnavailable("\n".join(map(str, away))) from away[0]
    return found


def _check_node(node: Node, kind: Kind) -> list[Finding]:
    server = str(node.address)
    wire = node.take()
    try:
        wire.send([("INFO",), ("CONFIG", "GET", "save"), ("CLUSTER", "INFO")])
        info, save, cluster = wire.read(), wire.read(), wire.read()
    except RedisError as exc:
        wire.close()
        raise IndexUnavailable(
            f"Redis at {server}: the connection broke ({type(exc).__name__}); check its log and try again"
        ) from exc
    node.give(wire)
    if isinstance(info, RedisError):
        return [Finding(Level.REFUSE, server, "it refuses INFO", "grant the user +info")]
    facts = _facts(info)
    wrong = [
        _version(facts),
        _role(facts),
        _memory(facts),
        _persistence(facts, save),
        _last_save(facts),
        _cluster(facts, {} if isinstance(cluster, RedisError) else _facts(cluster), kind),
    ]
    return [Finding(found[0], server, found[1], found[2]) for found in wrong if found]


_Wrong = tuple[Level, str, str] | None


def _facts(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def _version(facts: dict[str, str]) -> _Wrong:
    # Valkey goes on telling the version of Redis that it is compatible with; its own one is beside it.
    name = "Valkey" if "valkey_version" in facts else "Redis"
    version = facts.get("valkey_version") or facts.get("redis_version", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) >= _MIN_MAJOR:
        return None
    return (
        Level.REFUSE,
        f"it is {name} {version or 'of an unknown version'}",
        f"use Redis or Valkey {_MIN_MAJOR} or later: older ones cannot drain when memory is full",
    )


def _role(facts: dict[str, str]) -> _Wrong:
    role = facts.get("role", "unknown")
    if role == "master":
        return None
    return (
        Level.REFUSE,
        f"its role is {role}, not master",
        "point TOC_REDIS_URL at the master, or let sentinels find it with redis+sentinel://",
    )


def _memory(facts: dict[str, str]) -> _Wrong:
    policy = facts.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return None
    return (
        Level.REFUSE,
        f"its maxmemory_policy is {policy}: it would drop whole queues when memory is full",
        "set maxmemory-policy noeviction",
    )


def _persistence(facts: dict[str, str], save: Any) -> _Wrong:
    if facts.get("aof_enabled") == "1":
        return None
    snapshots = bool(save[1]) if isinstance(save, list) and len(save) == 2 else False
    if snapshots or facts.get("rdb_saves", "0") != "0" or facts.get("rdb_last_bgsave_time_sec", "-1") != "-1":
        return None
    return (
        Level.WARN,
        "it writes neither an append-only file nor, as far as can be seen, snapshots",
        "set appendonly yes: without it every restart means a rebuild from the task table",
    )


def _last_save(facts: dict[str, str]) -> _Wrong:
    for name in ("rdb_last_bgsave_status", "aof_last_write_status"):
        if facts.get(name, "ok") != "ok":
            return (
                Level.WARN,
                f"its {name} is {facts[name]}: it may refuse writes",
                "check its disk and log",
            )
    return None


def _cluster(facts: dict[str, str], cluster: dict[str, str], kind: Kind) -> _Wrong:
    if facts.get("cluster_enabled") != "1":
        return None
    if kind is not Kind.CLUSTER:
        return (Level.WARN, "it is a node of a cluster", "begin TOC_REDIS_URL with redis+cluster://")
    if cluster.get("cluster_slots_assigned", "16384") != "16384":
        return (
            Level.REFUSE,
            f"its cluster serves {cluster['cluster_slots_assigned']} of 16384 hash slots",
            "assign the others: redis-cli --cluster fix",
        )
    if cluster.get("cluster_state", "ok") != "ok":
        return (Level.WARN, f"its cluster_state is {cluster['cluster_state']}", "check CLUSTER NODES")
    return None
