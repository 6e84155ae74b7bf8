"""What stops requests to a target that fails. It knows no clock, no Redis and no loop: times are given."""

FAILURES = 10
"""Failures in a row that open it."""
FIRST_SECONDS = 2.0
"""How long it is open the first time."""
MAX_SECONDS = 60.0
PROBE_WAIT_SECONDS = 1.0
"""How long others wait while the probe is under way."""


class Breaker:
    """The breaker of one target in one process.

    Counts failures that say something of the target: no answer, 408, 429 and 5xx. Times are monotonic.

    closed     requests go; FAILURES failures in a row open it
    open       nothing goes until its time is over; each time in a row is twice as long
    half-open  one request goes, the probe: its success closes the breaker, its failure opens it again
    """

    __slots__ = ("_failures", "_probing", "_times", "_until", "era")

    def __init__(self) -> None:
        self.era = 0
        """A number that changes each time the breaker is opened or closed. A request belongs to the era in
        which it began."""
        self._failures = 0
        self._times = 0
        """How often in a row it was opened."""
        self._until = 0.0
        self._probing = False
        """Whether the probe is under way."""

    def blocked(self, now: float) -> float:
        """Return for how many seconds no request may go; 0 if one may."""
        if not self._times:
            return 0.0
        return PROBE_WAIT_SECONDS if self._probing else max(self._until - now, 0.0)

    def begin(self, now: float) -> bool:
        """Count a request that is to go, the probe if the breaker is not closed. False: it must not."""
        if self.blocked(now) > 0:
            return False
        self._probing = bool(self._times)
        return True

    def judge(self, now: float, era: int, *, well: bool | None) -> bool:
        """Note whether the target was ``well`` at a request of ``era``; None: it was broken off, which says
        nothing. Returns whether this has opened the breaker."""
        if well is None:
            self.given_up(era)
        elif well:
            self._failures = 0
            if self._times:
                self._change(0, 0.0)
        elif era == self.era:  # of those that were under way when it opened, none opens it for longer
            self._failures += 1
            if self._times or self._failures >= FAILURES:
                seconds = min(FIRST_SECONDS * 2.0 ** min(self._times, 10), MAX_SECONDS)
                self._change(self._times + 1, now + seconds)
                return True
        return False

    def given_up(self, era: int) -> None:
        """If a request of ``era`` was the probe, let another one be it."""
        if era == self.era:
            self._probing = False

    def _change(self, times: int, until: float) -> None:
        self.era += 1
        self._times, self._until, self._probing = times, until, False
