"""How a worker process gains and loses slots and tables.

    taken     wanted ─▶ claimed (a number is drawn) ─▶ served
    dropped   nothing more is taken; entries that have not started are put back
              ─▶ ``dropped`` is sent when running tries have finished, or after HAND_OVER_SECONDS

The claim number stays ours: entries may be left under it. The slot's next owner deletes it once we are gone.

Tables need no claim: it does no harm if two workers sweep one for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from toc.coordination.assignment import TABLES
from toc.index.wake import WakeListener
from toc.model.topic import Slot
from toc.worker.control import ControlPipe, pack
from toc.worker.pipeline import Pipeline
from toc.worker.reclaim import Reclaimer
from toc.worker.slots import OwnedSlot
from toc.worker.table_services import TableServices
from toc.worker.tools import Tools

HAND_OVER_SECONDS = 0.5
"""How long a handover waits for running tries. Those that run longer end under our claim number."""
CLAIM_AGAIN_SECONDS = 0.5
"""Pause before slots whose Redis node did not answer are claimed again."""


@dataclass(kw_only=True, eq=False)
class Handover:
    """Takes and drops slots as the daemon says. Only the main thread calls it."""

    tools: Tools
    link: ControlPipe
    listener: WakeListener
    pipeline: Pipeline
    reclaimer: Reclaimer
    services: TableServices

    def __post_init__(self) -> None:
        self._claimed_at = float("-inf")
        self._dropping: list[tuple[float, list[OwnedSlot]]] = []
        """Slots that are being handed over, with the end of the wait for running tries (monotonic)."""

    @property
    def under_way(self) -> bool:
        """Whether ``step`` has something to do soon."""
        return bool(self._dropping or self.tools.book.incomplete)

    def take(self, given: set[Slot]) -> None:
        """Serve these slots and tables from now on. The next ``step`` claims the slots."""
        tables, slots = _apart(given)
        self.services.add(tables)
        self.tools.book.want(slots, self.tools.clock.monotonic())
        self._claimed_at = float("-inf")

    def drop(self, given: set[Slot]) -> None:
        """Take nothing more from these and put back what has not started. Later steps send ``dropped``."""
        tables, slots = _apart(given)
        self.services.remove(tables)
        dropped = self.tools.book.give_up(slots)
        self.listener.set_slots(self.tools.book.owned)
        self.pipeline.withdraw(given)
        self._dropping.append((self.tools.clock.monotonic() + HAND_OVER_SECONDS, dropped))
        rest = given - {owned.slot for owned in dropped}
        if rest:
            self.link.send("dropped", slots=pack(rest))

    def drop_all(self) -> None:
        """Take nothing more at all and put back what has not started: this process leaves. Sends no
        message."""
        self.tools.book.give_up(list(self.tools.book.wanted))
        self.listener.set_slots(())
        self.pipeline.withdraw()

    def step(self, now: float) -> None:
        """Claim missing slots and continue handovers. ``now`` is monotonic."""
        self._claim(now)
        self._hand_over(now)

    def _claim(self, now: float) -> None:
        if not self.tools.book.incomplete or now - self._claimed_at < CLAIM_AGAIN_SECONDS:
            return
        self._claimed_at = now
        fresh = self.tools.book.claim_missing()
        if fresh:
            self.listener.set_slots(self.tools.book.owned)
            for owned in fresh:
                self.pipeline.inbox.look_at(owned.slot, 0)
            met = {worker_id for owned in fresh for worker_id in owned.others.values()}
            if met:
                self.link.send("met", workers=sorted(met))  # the daemon may know that some are dead
                self.reclaimer.look_now()

    def _hand_over(self, now: float) -> None:
        if not self._dropping:
            return
        busy = {entry.slot for entry in self.pipeline.inflight.snapshot()} | self.pipeline.adopter.sought
        quiet = self.pipeline.finisher.idle
        released: list[OwnedSlot] = []
        waiting: list[tuple[float, list[OwnedSlot]]] = []
        for until, owned in self._dropping:
            left = [o for o in owned if now < until and not (quiet and o.slot not in busy)]
            released += [o for o in owned if now >= until or (quiet and o.slot not in busy)]
            if left:
                waiting.append((until, left))
        self._dropping = waiting
        if released:
            self.link.send("dropped", slots=pack(owned.slot for owned in released))


def _apart(given: set[Slot]) -> tuple[set[int], set[Slot]]:
    """Split them into the numbers of tables and the slots."""
    tables = {slot for slot in given if slot.topic == TABLES}
    return {table.number for table in tables}, given - tables
