"""A member's row: what one daemon without ZooKeeper tells all others."""

from typing import NamedTuple


class MemberRow(NamedTuple):
    """The row of one daemon.

    ``beat`` counts its writes; the last one was ``age`` ms ago by the server's clock. After ``timeout`` ms
    without one others may call it ``dead``: then it owns nothing, and its row is kept for people.
    ``data`` is a JSON object (toc.coordination.ledger).
    """

    name: str
    host: str
    beat: int
    age: int
    timeout: int
    dead: bool
    data: str

    @property
    def alive(self) -> bool:
        """Whether it has written in time, by the server's clock. Good enough to show, not to take over."""
        return not self.dead and self.age <= self.timeout
