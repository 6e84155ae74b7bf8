"""Back-pressure: what one stage says of itself and others heed. One object, given to all of them."""

from __future__ import annotations


class Pressure:
    """Whether this process keeps up. Any thread may read it."""

    def __init__(self) -> None:
        self.crowded = False
        """Whether more is due than can be started at once. The poller says so; the finisher then gathers more
        before it writes, and the sweep rests longer."""

    def is_crowded(self) -> bool:
        """The same as a function, for those who get no more than that."""
        return self.crowded
