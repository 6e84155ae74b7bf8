"""The breaker of one target, as one process knows it.

closed     requests go; FAILURES failures in a row, in one process, open it
open       nothing goes until its time is over; each time in a row is twice as long
half-open  one request goes, the probe: its success closes the breaker, its failure opens it again

The processes share one state in Redis (``permits.lua``). Each change makes it a new *era*, and the latest era
holds for all; of two changes at once, the one that Redis hears of first. Redis also gives the probe to one
process at a time. While Redis is away each process has a breaker of its own.
"""

from __future__ import annotations

from typing import NamedTuple

FAILURES = 10
"""Failures in a row that open it."""
FIRST_SECONDS = 2.0
"""How long it is open the first time."""
MAX_SECONDS = 60.0
PROBE_WAIT_SECONDS = 1.0
"""How long others wait while the probe is under way."""


class BreakerState(NamedTuple):
    """What processes tell each other. ``opened``: how often in a row it was opened, 0: it is closed.

    ``left_ms``: how long nothing goes. ``probe``, of a process: 1 if it wants the probe or has it; of Redis:
    1 if the process has it, 2 if another one has.
    """

    era: int = 0
    opened: int = 0
    left_ms: int = 0
    probe: int = 0


class Breaker:
    """Counts failures that say something of the target: no answer, 408, 429 and 5xx. Times are monotonic."""

    __slots__ = ("_allowed", "_elsewhere", "_era", "_failures", "_opened", "_probing", "_until")

    def __init__(self) -> None:
        self._failures = 0
        self._era = 0
        self._opened = 0
        """How often in a row it was opened."""
        self._allowed = False
        """Whether this process may send the probe."""
        self._probing = False
        """Whether its probe is under way."""
        self._elsewhere = 0.0
        """Until when the probe of another process is waited for."""
        self._until = 0.0

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half-open``."""
        if not self._opened:
            return "closed"
        return "half-open" if self._probing else "open"

    @property
    def era(self) -> int:
        """A number that changes each time the breaker is opened or closed.

        A request belongs to the era in which it began.
        """
        return self._era

    def blocked(self, now: float) -> float:
        """Return for how many seconds no request may go; 0 if one may."""
        if not self._opened:
            return 0.0
        return PROBE_WAIT_SECONDS if self._probing else max(max(self._until, self._elsewhere) - now, 0.0)

    def wants(self, now: float) -> bool:
        """Whether the probe may go as soon as Redis gives it to this process."""
        return bool(self._opened) and not self._allowed and self.blocked(now) == 0

    def begin(self, now: float, *, alone: bool) -> bool:
        """Count a request that is to go, the probe if the breaker is not closed. False: it must not.

        ``alone``: Redis is away, so no other process is asked.
        """
        if not self._opened:
            return True
        if self.blocked(now) > 0 or not (alone or self._allowed):
            return False
        self._probing, self._allowed = True, False
        return True

    def succeeded(self) -> bool:
        """The target has answered well. Returns whether this has closed the breaker."""
        self._failures = 0
        if not self._opened:
            return False
        self._change(0, 0.0)
        return True

    def failed(self, now: float, era: int) -> bool:
        """A request of ``era`` failed. Returns whether this has opened the breaker."""
        if era != self._era:  # of those that were under way when it opened, none opens it for longer
            return False
        self._failures += 1
        if not self._opened and self._failures < FAILURES:
            return False
        self._change(self._opened + 1, now + min(FIRST_SECONDS * 2.0 ** min(self._opened, 10), MAX_SECONDS))
        return True

    def given_up(self, era: int) -> bool:
        """A request of ``era`` was broken off, which says nothing about the target.

        Returns whether it was the probe: if so, another request may be the probe.
        """
        was = self._probing and era == self._era
        if was:
            self._probing = False
        return was

    def give_back(self) -> bool:
        """Leave the probe to other processes if no request here took it. Returns whether that was so."""
        was, self._allowed = self._allowed, False
        return was

    # --- the other processes

    def state_to_share(self, now: float, *, waiting: bool) -> BreakerState:
        """What to tell the others. ``waiting``: there is a request that could be the probe."""
        probe = self._probing or (waiting and self.wants(now))
        left = max(self._until - now, 0.0) if self._opened else 0.0
        return BreakerState(self._era, self._opened, round(left * 1000), int(probe))

    def learn(self, now: float, shared: BreakerState) -> None:
        """Apply the state that all processes share, as Redis has answered it."""
        if shared.era < self._era:  # this process has changed the breaker after it asked
            return
        if shared.era > self._era or shared.opened != self._opened:  # or another one changed it at once
            self._failures = 0
            self._change(shared.opened, now + shared.left_ms / 1000, shared.era)
        if self._probing or not self._opened:
            return
        if shared.left_ms:  # by the clock of Redis it is not over yet
            self._until = max(self._until, now + shared.left_ms / 1000)
        self._allowed = shared.probe == 1
        self._elsewhere = now + PROBE_WAIT_SECONDS if shared.probe == 2 else 0.0

    def _change(self, opened: int, until: float, era: int | None = None) -> None:
        self._era = self._era + 1 if era is None else era
        self._opened, self._until = opened, until
        self._allowed = self._probing = False
        self._elsewhere = 0.0
