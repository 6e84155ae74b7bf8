"""Clocks in the hands of a test."""

from toc.model.clock import Clock


class StandingClock(Clock):
    """Stands still, whatever it is asked for, until a test sets ``now``, in milliseconds."""

    def __init__(self, now: int) -> None:
        self.now = now

    def now_ms(self) -> int:
        return self.now

    def time(self) -> float:
        return self.now / 1000

    def monotonic(self) -> float:
        return self.now / 1000


class PushedClock(Clock):
    """The machine's clocks, put forward as a test says: that of the wall and the monotonic one."""

    def __init__(self, ahead_ms: int = 0) -> None:
        self.ahead_ms = ahead_ms
        self.pushed = 0.0
        """Seconds."""

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def monotonic(self) -> float:
        return super().monotonic() + self.pushed
