"""Members that are cut off: they do not reach a server that another member reaches.

The leader gives their slots to members that are not cut off, if there are any. If the server itself is away,
nobody is cut off, because all members soon cease to report that it answers. "A host that is cut off" in
docs/design.md says more.

A worker reports with its beat which servers it reaches and which not (``Reach``), its daemon writes that into
the worker's node, and the leader compares (``CutOff``). Both wait before they conclude anything: moving slots
costs more than a short interruption.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from toc.coordination.assignment import Member

OUT_SECONDS = 2.0
"""A worker reports a server that has been out of reach for this long."""
APART_SECONDS = 5.0
"""A member that for this long has not reached a server that others reach counts as cut off. Members
notice that a server has gone, or is back, seconds after each other."""
BACK_SECONDS = 10.0
"""A cut-off member no longer counts as cut off once it has reached all servers again for half as
long as it lacked one, but at most for this long. Its slots then move back, so a connection that
comes and goes must not move them each time."""
GAP_SECONDS = 1.0
"""An interval this short, in which a member reaches everything, does not restart the wait of
APART_SECONDS."""


class Reach:
    """The servers that one process does not reach, without short interruptions."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: dict[str, float] = {}
        """Each server that is out of reach, and since when."""

    def look(self, out: Collection[str]) -> list[str]:
        """Record which servers are out of reach now, by name. Returns those to report, sorted."""
        now = self._monotonic()
        self._since = {name: self._since.get(name, now) for name in out}
        return sorted(name for name, since in self._since.items() if now - since >= OUT_SECONDS)


def apart(members: Iterable[Member]) -> dict[str, list[str]]:
    """Return the workers that do not reach a server that another one reaches, each with those servers."""
    members = list(members)
    reached = {name for member in members for name in member.reached}
    lacking = {member.worker_id: sorted(reached.intersection(member.out_of_reach)) for member in members}
    return {worker_id: names for worker_id, names in lacking.items() if names}


@dataclass(slots=True)
class _Apart:
    """Since when (monotonic) a worker lacks servers, and since when (``back``) it reaches all again."""

    since: float
    servers: list[str]
    cut_off: bool
    back: float | None = None

    @property
    def over(self) -> float:
        """When it is forgotten, if it reaches everything until then."""
        if self.back is None:
            return float("inf")
        return self.back + (min((self.back - self.since) / 2, BACK_SECONDS) if self.cut_off else GAP_SECONDS)


class CutOff:
    """The leader's judgement of which workers are cut off: those that have been apart for long enough."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._apart: dict[str, _Apart] = {}
        """The workers that are apart, or were a moment ago, by worker_id."""
        self.due: float | None = None
        """When the judgement changes next if no report does (monotonic); None: never."""

    def look(self, members: Iterable[Member], owners: Collection[str | None]) -> dict[str, list[str]]:
        """Return the workers that are cut off now, each with the servers that it lacks.

        ``owners`` are the workers that have slots. A worker without slots counts as soon as it is apart: that
        moves no slot, and a new leader does not give slots to a worker from which the last leader took them.
        """
        now = self._monotonic()
        told = list(members)
        lacking = apart(told)
        before = self._apart
        self._apart = {}
        for member in told:
            worker_id = member.worker_id
            one = before.get(worker_id)
            if one is not None and one.over <= now:
                one = None
            if worker_id in lacking:
                since = one.since if one else now if worker_id in owners else now - APART_SECONDS
                self._apart[worker_id] = _Apart(since, lacking[worker_id], now - since >= APART_SECONDS)
            elif one is not None:
                one.back = now if one.back is None else one.back
                self._apart[worker_id] = one
        changes = [
            one.over if one.cut_off else one.since + APART_SECONDS
            for one in self._apart.values()
            if one.cut_off or one.back is None
        ]
        self.due = min((at for at in changes if now < at < float("inf")), default=None)
        return {worker_id: one.servers for worker_id, one in self._apart.items() if one.cut_off}
