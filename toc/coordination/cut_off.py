"""Members that are cut off: they do not reach a server that another member reaches.

The server is well then, and the way to it is not. What a cut-off worker owns would wait until it reaches the
server again, so the leader gives its slots to members that are not cut off, as long as there are any. If the
server itself is away, nobody is cut off and no slot moves: within moments of each other all members cease to
report that it answers them. Those that have not asked it yet prove nothing.

A worker reports what it reaches and what it does not with its heartbeat (``Reach``), its daemon writes that
into the worker's node, and the leader compares (``CutOff``). Each of the three waits a little: moving slots
costs more than a short interruption.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

OUT_SECONDS = 2.0
"""How long a server must be out of reach until a worker reports it."""
BACK_SECONDS = 10.0
"""How long at most it must be within reach again until the worker takes that back; after a short outage, half
as long as that lasted. Slots then move back, so a connection that comes and goes must not move them each
time. But a server that was away for a moment must not cut off those few that had noticed in time to report
it."""
APART_SECONDS = 5.0
"""How long a member must lack what others reach until it counts as cut off. Members notice that a server has
gone, or is back, seconds after each other."""


class Reach:
    """What one process does not reach, without short changes."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._out: dict[str, tuple[float, float]] = {}
        """Each server, since when it has been out of reach, and when it last was."""

    def look(self, out: Collection[str]) -> list[str]:
        """Record which servers are out of reach now, by name. Returns those to report, sorted."""
        now = self._monotonic()
        for name in out:
            since, _ = self._out.get(name, (now, now))
            self._out[name] = (since, now)
        self._out = {
            name: (since, last)
            for name, (since, last) in self._out.items()
            if name in out
            or (last - since >= OUT_SECONDS and now - last < min((last - since) / 2, BACK_SECONDS))
        }
        return sorted(name for name, (since, last) in self._out.items() if last - since >= OUT_SECONDS)


class Report(Protocol):
    """What a worker has told of the servers, each by a name that is the same on all hosts."""

    @property
    def worker_id(self) -> str:
        """Whose report it is."""

    @property
    def out_of_reach(self) -> Collection[str]:
        """The servers that it does not reach."""

    @property
    def reached(self) -> Collection[str]:
        """Those of the others that have answered it lately. A worker of an earlier version does not tell."""


def apart(reports: Iterable[Report]) -> dict[str, list[str]]:
    """Return the workers that do not reach a server that another one reaches, each with those servers."""
    told = list(reports)
    reached = {name for report in told for name in report.reached}
    lacking = {report.worker_id: sorted(reached.intersection(report.out_of_reach)) for report in told}
    return {worker_id: names for worker_id, names in lacking.items() if names}


class CutOff:
    """The leader's judgement of who is cut off: those that have been apart for long enough."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._since: dict[str, float] = {}
        """worker_id -> since when it has been apart."""
        self.due: float | None = None
        """When the next of them counts as cut off (monotonic); None if no one will."""

    def look(self, reports: Iterable[Report], owners: Collection[str | None]) -> dict[str, list[str]]:
        """Return the workers that are cut off now, each with the servers that it lacks.

        ``owners`` are those that have slots. Who has none, and is apart, counts at once: nothing moves for
        that. Otherwise a new leader would give slots to whom the last one had just taken them from.
        """
        now = self._monotonic()
        lacking = apart(reports)
        long_ago = now - APART_SECONDS
        self._since = {
            worker_id: self._since.get(worker_id, now if worker_id in owners else long_ago)
            for worker_id in lacking
        }
        at = {worker_id: since + APART_SECONDS for worker_id, since in self._since.items()}
        self.due = min((due for due in at.values() if due > now), default=None)
        return {worker_id: lacking[worker_id] for worker_id, due in at.items() if due <= now}
