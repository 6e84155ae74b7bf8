"""Checks whether a Redis is fit for the index, when a daemon starts and for ``toc doctor``."""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from toc.index.calls import IndexBroken
from toc.index.nodes import RedisNode
from toc.index.queues import OWNER_LAPSE_SECONDS, Queues
from toc.index.url import Topology
from toc.index.wire import Command, Refusal
from toc.model.errors import IndexUnavailable, UnfitServer
from toc.model.finding import Finding, Level, clock_finding
from toc.model.topic import Slot

_MIN_MAJOR = 7
_OLDEST = f"Redis or Valkey {_MIN_MAJOR}"
_ANOTHER = "set another TOC_NAMESPACE, or use another Redis, for one of the two"
_BRING_BACK = "bring it back, or promote a replica"
_NO_SLOT = Slot("toc.operate.doctor", 0)
"""A slot that no topic uses."""
NEARLY_FULL = 0.8
_MEMORY = ("used_memory", "maxmemory")
_COVERAGE: Command = ("CONFIG", "GET", "cluster-require-full-coverage")
"""Many accounts may not ask this; the answer is then unknown."""


def require_fit(queues: Queues) -> list[Finding]:
    """Return what is merely worth a warning of each master.

    A master out of reach is a warning, because due tasks then run from the rows. Raises IndexUnavailable,
    which names every master, if all are out of reach; UnfitServer.
    """
    found = examine(queues)
    refused = [f"{one.server}: {one.what}; {one.do}" for one in found if one.level is Level.REFUSE]
    if refused:
        raise UnfitServer("\n".join(refused))
    return [one for one in found if one.level is Level.WARN]


def broken(queues: Queues, slots: Sequence[Slot]) -> list[Finding]:
    """Return the slots with keys that toc did not write. Their tasks run from the rows meanwhile."""
    return [
        Finding(Level.REFUSE, str(slot), str(answer), "its tasks are taken from the task table until then")
        for slot, answer in queues.generations(slots).items()
        if isinstance(answer, IndexBroken)
    ]


def owner(queues: Queues, identity: str) -> list[Finding]:
    """Check whether the queues of this namespace belong to the task table with that identity."""
    server = queues.namespace or "-"
    try:
        found = queues.owner()
    except IndexUnavailable:
        return []  # reported elsewhere
    if found is None:
        return []
    if found.identity != identity and found.seconds <= OWNER_LAPSE_SECONDS:
        what = f"this Redis and namespace belong to another cluster: {found.name}"
        return [Finding(Level.REFUSE, server, f"{what}; ours takes its tasks from the task table", _ANOTHER)]
    if found.identity != identity:
        what = f"this Redis and namespace last belonged to another task table: {found.name}"
        do = "is TOC_DATABASE_URLS the right server? If so, the first worker that starts takes them over"
        return [Finding(Level.WARN, server, what, do)]
    return []


def unheard(queues: Queues, identity: str, workers: Collection[str]) -> set[str]:
    """Return those of the living workers that have never asked this Redis, in this namespace, whose index it
    is. Nobody is suspected where it cannot be asked, or is another task table's."""
    try:
        found = queues.owner()
    except IndexUnavailable:
        return set()  # reported elsewhere
    if found is not None and found.identity != identity:
        return set()  # so is that
    return set(workers).difference(found.members if found else ())


def examine(queues: Queues) -> list[Finding]:
    """Return findings about every master, also good ones. Raises IndexUnavailable if all are out of reach."""
    found: list[Finding] = []
    away: list[IndexUnavailable] = []
    masters = queues.nodes.masters()
    for node in masters:
        try:
            found += _examine(node, queues)
        except IndexUnavailable as exc:
            away.append(exc)
            found.append(Finding(Level.WARN, str(node.address), str(exc), _BRING_BACK))
    if len(away) == len(masters):
        raise IndexUnavailable("\n".join(map(str, away))) from away[0]
    return found


def _examine(node: RedisNode, queues: Queues) -> list[Finding]:
    """Examine a master, in one round trip."""
    server, kind = str(node.address), queues.nodes.location.kind
    began = time.time()
    info, save, coverage, published = node.ask(
        ("INFO",), ("CONFIG", "GET", "save"), _COVERAGE, ("PUBLISH", queues.keys(_NO_SLOT).channel, "")
    )
    took_ms = (time.time() - began) * 1000
    if isinstance(info, Refusal):
        return [Finding(Level.REFUSE, server, "it refuses INFO", "grant the user +info")]
    facts = facts_of(info)
    wrong = unfit(facts, save, coverage, published, kind)
    found = [Finding(level, server, what, do) for level, what, do in wrong]
    whole = facts.get("maxmemory_human", "0B")
    most = "what the machine has" if whole == "0B" else whole
    about = f"{_name(facts)}, {facts.get('used_memory_human', '?')} of {most} used"
    found.append(Finding(Level.OK, server, about, ""))
    if facts.get("server_time_usec", "").isdecimal():
        ahead = int(facts["server_time_usec"]) / 1000 - began * 1000 - took_ms / 2
        found.append(clock_finding(server, ahead, took_ms / 2))
    return found


def facts_of(info: bytes) -> dict[str, str]:
    """Return the fields of an INFO."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def _name(facts: dict[str, str]) -> str:
    # Valkey reports the Redis version that it is compatible with, and its own as valkey_version.
    name = "Valkey" if "valkey_version" in facts else "Redis"
    return f"{name} {facts.get('valkey_version') or facts.get('redis_version') or 'of an unknown version'}"


def unfit(
    facts: dict[str, str], save: Any, coverage: Any, published: Any, kind: Topology
) -> Iterator[tuple[Level, str, str]]:
    """Yield what is wrong with a server, and what to do, by its answers. ``facts`` are those of INFO."""
    name, _, version = _name(facts).partition(" ")
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < _MIN_MAJOR:
        do = f"use {_OLDEST} or later: older ones cannot remove entries when memory is full"
        yield Level.REFUSE, f"it is {name} {version}", do
    role, policy = facts.get("role", "unknown"), facts.get("maxmemory_policy", "unknown")
    if role != "master":
        do = "point TOC_REDIS_URL at the master, or let sentinels find it with redis+sentinel://"
        yield Level.REFUSE, f"its role is {role}, not master", do
    if policy != "noeviction":
        what = f"its maxmemory_policy is {policy}: it would drop whole queues when memory is full"
        yield Level.REFUSE, what, "set maxmemory-policy noeviction"
    used, most = (int(facts[name]) if facts.get(name, "").isdecimal() else 0 for name in _MEMORY)
    if most and used >= NEARLY_FULL * most:
        what = f"{100 * used / most:.0f} % of its maxmemory is used; when it is full, nothing is indexed"
        yield Level.WARN, what, "give it more memory, add nodes, or lower the horizon of topics"
    snapshots = bool(save[1]) if isinstance(save, list) and len(save) == 2 else False
    saved = facts.get("rdb_saves", "0") != "0" or facts.get("rdb_last_bgsave_time_sec", "-1") != "-1"
    if facts.get("aof_enabled") != "1" and not snapshots and not saved:
        what = "it writes neither an append-only file nor, as far as toc can see, snapshots"
        do = "set appendonly yes: without it, the index is rebuilt from the task table after every restart"
        yield Level.WARN, what, do
    if facts.get("cluster_enabled") == "1" and kind is not Topology.CLUSTER:
        yield Level.WARN, "it is a node of a cluster", "begin TOC_REDIS_URL with redis+cluster://"
    if kind is Topology.CLUSTER and isinstance(coverage, list) and coverage[1:] == [b"yes"]:
        what = "cluster-require-full-coverage is yes: when one node is down, all of them stop"
        yield Level.WARN, what, "set cluster-require-full-coverage no"
    if isinstance(published, Refusal) and published.code == "NOPERM":
        what = "its ACL refuses PUBLISH, which a script does not report: no worker hears of an earlier task"
        yield Level.WARN, what, "grant the commands, keys and channels in deploy/redis-acl.conf"
