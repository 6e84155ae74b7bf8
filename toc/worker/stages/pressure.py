"""Back-pressure: one object through which the poller slows other stages down."""

from __future__ import annotations


class Pressure:
    """Whether this process keeps up. Any thread may read it."""

    def __init__(self) -> None:
        self.crowded = False
        """Whether more is due than can start at once. The poller sets it. The finisher then gathers more
        before it writes, and the sweep rests longer."""

    def is_crowded(self) -> bool:
        """``crowded`` as a function, for callers that need only this."""
        return self.crowded
