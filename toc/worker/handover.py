"""How a process takes slots and tables from the daemon, and lets go of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toc.coordination.assignment import TABLES
from toc.model.topic import Slot

if TYPE_CHECKING:
    from toc.worker.worker import Worker

HAND_OVER_SECONDS = 0.5
"""How long a handover waits for running tries. Those that run longer end under our claim number."""
CLAIM_AGAIN_SECONDS = 0.5
"""Pause before slots whose Redis node did not answer are claimed again."""


@dataclass(eq=False)
class Handover:
    """Takes and drops slots and tables as the daemon says. Only the main thread calls it.

        taken     wanted ─▶ claimed (a number is drawn) ─▶ served
        dropped   nothing more is taken; entries that have not started are put back
                  ─▶ ``dropped`` is sent when running tries have finished, or after HAND_OVER_SECONDS;
                  at once where there is no claim: without an index, leases on the rows keep those tries

    The claim number stays ours: entries may be left under it. The slot's next owner deletes it once we are
    gone. Tables need no claim: it does no harm if two workers sweep one for a while.
    """

    worker: Worker

    def __post_init__(self) -> None:
        self.tools = self.worker.tools
        self._claimed_at = float("-inf")
        self._dropping: dict[Slot, float] = {}
        """Slots that are being handed over, with the end of the wait for running tries (monotonic)."""

    @property
    def under_way(self) -> bool:
        """Whether ``step`` has something to do soon."""
        return bool(self._dropping or self.tools.book.incomplete)

    def take(self, given: set[Slot], handed: set[Slot]) -> None:
        """Serve these slots and tables from now on. The next ``step`` claims the slots. ``handed`` are those
        that a former owner had to release first."""
        tables, slots = _apart(given)
        self.worker.services.add(tables)
        self.tools.book.want(slots, self.tools.clock.monotonic(), handed & slots)
        self._claimed_at = float("-inf")

    def drop(self, given: set[Slot]) -> None:
        """Take nothing more from these and put back what has not started. Later steps send ``dropped``."""
        tables, slots = _apart(given)
        self.worker.services.remove(tables)
        dropped = self.tools.book.give_up(slots)
        self.worker.listener.set_slots(self.tools.book.owned)
        self.worker.withdraw(given)
        self._dropping |= dict.fromkeys(dropped, self.tools.clock.monotonic() + HAND_OVER_SECONDS)
        if rest := given - dropped:
            self.tools.tell("dropped", slots=list(rest))

    def drop_all(self) -> None:
        """Take nothing more at all and put back what has not started: this process leaves. Sends no
        message."""
        self.tools.book.give_up(list(self.tools.book.wanted))
        self.worker.listener.set_slots(())
        self.worker.withdraw()

    def step(self, now: float) -> None:
        """Claim missing slots and continue handovers. ``now`` is monotonic."""
        if self.tools.book.incomplete and now - self._claimed_at >= CLAIM_AGAIN_SECONDS:
            self._claimed_at = now
            self._claim()
        if self._dropping:
            busy = {entry.slot for entry in self.tools.inflight.snapshot()} | self.worker.adopter.sought
            quiet = self.worker.finisher.idle
            released = [
                slot for slot, until in self._dropping.items() if now >= until or (quiet and slot not in busy)
            ]
            for slot in released:
                del self._dropping[slot]
            if released:
                self.tools.tell("dropped", slots=released)

    def _claim(self) -> None:
        fresh = self.tools.book.claim_missing()
        if fresh:
            self.worker.listener.set_slots(self.tools.book.owned)
            for owned in fresh:
                self.tools.inbox.look_at(owned.slot, 0)
            met = {worker_id for owned in fresh for worker_id in owned.others.values()}
            if met:
                self.tools.tell("met", workers=sorted(met))  # the daemon may know that some are dead
                self.worker.reclaimer.look_now()


def _apart(given: set[Slot]) -> tuple[set[int], set[Slot]]:
    """Split them into the numbers of tables and the slots."""
    tables = {slot for slot in given if slot.topic == TABLES}
    return {table.number for table in tables}, given - tables
