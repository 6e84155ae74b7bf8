"""Watch: whether each Redis node can be reached, and whether it still holds its data.

``gen_{order.close_3}`` holds the run_id of the server on which the slot was last rebuilt. If it is missing,
or differs from the run_id of the server that answers, the index has lost data: a restart, a failover, a
restore, a FLUSHALL. Then everything is restored from the rows at once, soonest due first:

    every worker    asks one slot per node twice a second, so it sees the loss while the key is missing, and
                    refills the index from the tables that it sweeps
    the owner       of a slot draws a new claim number, because that is lost too; it records the new
                    generation once its own tables are through, but not before the others must have seen the
                    loss

If a server is emptied once more before that and keeps its run_id, nobody sees it. Each task then comes back
just before it is due, or with a slow pass of the sweep.

A worker that takes over tables finds what is due soon there, so one that ends half-way does no harm. If keys
of single slots vanish, only the owner notices. It looks at all of its slots each second (less often if it
owns many) and refills from its own tables. Tasks in tables of other workers come back when due, or with a
slow pass.

The same look finds slots with a key that toc did not write. Only these slots count as out of reach. Once the
key is gone, the slot has lost its data.

A node that is at its maxmemory takes no new entries; what it has still moves. So its slots count as out of
reach as well: the poller takes what is indexed; the rest is taken by rows.

The watch also asks whose index this is. If workers of another task table were there first, by mistake on the
same Redis and namespace, each side would drop the other's entries as orphans. So this worker sends nothing
there any more, and runs everything from the rows until those workers are gone.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from toc.index.calls import BySlot, IndexBroken, IndexFull
from toc.index.messages import Generation
from toc.index.queues import OWNER_REFRESH_SECONDS, Queues
from toc.loop import Loop
from toc.model.errors import IndexUnavailable
from toc.model.lateness import Cause
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.observe.metrics import INDEX_LOSSES
from toc.worker.slots import SlotTurns
from toc.worker.table_services import TableServices
from toc.worker.tools import Tools

log = get_logger(__name__)

PROBE_SECONDS = 0.5
PROBE_AGAIN_SECONDS = 0.25
"""Pause while a node does not answer."""
OUT_SECONDS = 1.0
"""How long a node must be silent before its slots are served without it."""
LOOK_SECONDS = 1.0
MAX_LOOK_SECONDS = 5.0
LOOK_SLOTS = 100
"""Each owned slot is looked at every ``LOOK_SECONDS``. With more than ``LOOK_SLOTS`` the period grows in
proportion, up to ``MAX_LOOK_SECONDS``: an idle worker must cost next to nothing. Each look takes a part of
them: thousands at once hold up live tasks for 50 ms."""
SPREAD_SECONDS = 5.0
SPREAD_SLOTS = 500
"""How often the slots of all topics are assigned to nodes again: each ``SPREAD_SECONDS``, or one second for
each ``SPREAD_SLOTS`` of them if that is longer."""
HOLD_SECONDS = 3.0
"""How long after a loss no new generation is recorded. By then every worker has looked."""


@dataclass(eq=False)
class IndexWatch:
    """The loop that checks the nodes. ``queues`` should have short timeouts, as it detects servers that hang.

    ``services`` refill the index from this worker's tables. ``identity`` is that of the task table, ``name``
    says whose it is. ``on_change`` is called when a node or a slot goes out of reach, and when it comes back.
    """

    tools: Tools
    queues: Queues
    services: TableServices
    identity: str
    name: str
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self._own_at = float("-inf")
        """When to ask next whose index this is (monotonic)."""
        self.foreign = False
        """Whether the index is another task table's."""
        self._seen: dict[Slot, Generation] = {}
        """The generation last seen of each slot."""
        self._missing: dict[Slot, tuple[str, float]] = {}
        """Slots that are not whole: the run_id that answered, and since when that is known (monotonic)."""
        self._topics: frozenset[str] = frozenset()
        """The topics as of the last look."""
        self._turns = SlotTurns(PROBE_SECONDS)
        self._at_once = True
        """Whether to look at all slots now."""
        self._spread_at = float("-inf")
        """When the slots are assigned to nodes next (monotonic)."""
        self._by_node: list[list[Slot]] = []
        """The slots to sample, by node."""
        self._turn = 0
        self._answered: dict[object, float] = {}
        """When each node answered last (monotonic)."""
        self._unanswered = False
        """Whether some node did not answer the last time."""
        self.silent: dict[object, IndexUnavailable] = {}
        """The nodes that are out of reach or full, as ``Queues.node_of`` returns them, and why. Replaced,
        never changed in place."""
        self.broken: frozenset[Slot] = frozenset()
        """Slots with a key that toc did not write."""
        self.loop = Loop("watch", self.run_once)

    def look_now(self) -> None:
        """Look at every slot: the connection is new."""
        self._at_once = True
        self.loop.wake()

    def out_of_reach(self, slots: Iterable[Slot]) -> list[Slot]:
        """Those of the slots that are broken, or whose node is full or has not answered for ``OUT_SECONDS``.

        Any thread may call it.
        """
        if self.foreign:
            return list(slots)
        out, broken = self.silent, self.broken
        if not out and not broken:
            return []
        return [slot for slot in slots if slot in broken or self.queues.node_of(slot) in out]

    def run_once(self) -> float:
        """One look. Returns the seconds until the next."""
        now = self.tools.clock.monotonic()
        if now >= self._own_at:
            self.ask_owner()
        if self.foreign:
            return PROBE_SECONDS
        topics = frozenset(self.tools.catalog.known())
        if topics != self._topics:  # the missing keys of one that was deleted are no loss of data
            self._topics, self._spread_at = topics, float("-inf")
        owned, wanted = self.tools.book.owned, self.tools.book.wanted
        unseen = any(slot not in self._seen and slot not in self.broken for slot in owned)
        anew = self._at_once or (unseen and not self._unanswered)
        self._at_once = False
        period = min(max(LOOK_SECONDS, len(wanted) / LOOK_SLOTS), MAX_LOOK_SECONDS)
        part = self._turns.part(wanted, now, period, at_once=anew)
        if anew or now >= self._spread_at:
            every = set(chain.from_iterable(topic.slots() for topic in self.tools.catalog.known().values()))
            every.update(wanted)
            self._seen = {slot: seen for slot, seen in self._seen.items() if slot in every}
            self._missing = {slot: seen for slot, seen in self._missing.items() if slot in owned}
            self._by_node = self._spread(every)
            self._spread_at = now + max(SPREAD_SECONDS, len(every) / SPREAD_SLOTS)
        self._turn += 1
        samples = [slots[self._turn % len(slots)] for slots in self._by_node]
        before = self.silent.keys(), self.broken
        found = self._ask(samples, part)
        mended = self._note_broken(found)
        if before != (self.silent.keys(), self.broken):
            self.on_change()
        loss = self._judge(found, now, mended)
        if loss:  # one node has lost data: which of our slots?
            self._judge(self.queues.generations(owned), now)
            # Claims may be lost with the rest.
            self.tools.book.renew([slot for slot in owned if slot in self._missing])
            self.services.refill()
        self._record(now)
        self._note_out(now)
        return PROBE_AGAIN_SECONDS if self._unanswered else PROBE_SECONDS

    def ask_owner(self) -> None:
        """Ask whose index this is. Called before anything is taken, and then repeatedly."""
        self._own_at = self.tools.clock.monotonic() + OWNER_REFRESH_SECONDS
        try:
            owner = self.queues.own(self.identity, self.name, self.tools.book.worker_id)
        except IndexUnavailable:
            return  # keep the last answer
        self.tools.book.alive = owner.alive
        foreign = owner.identity != self.identity
        if foreign == self.foreign:
            return
        self.foreign, why = foreign, None
        if foreign:
            why = (
                f"this Redis and namespace belong to another cluster, {owner.name}, whose workers used them "
                f"{owner.seconds} s ago; set another TOC_NAMESPACE, or use another Redis, for one of the two"
            )
            log.error("index_not_ours", error=why)
        else:
            log.info("index_ours")
        self.tools.queues.refuse(why)
        self.on_change()

    def leave(self) -> None:
        """Say that this worker ends in good order."""
        with suppress(IndexUnavailable):
            self.queues.own(self.identity, self.name, self.tools.book.worker_id, leaves=True)

    def _ask(self, samples: Sequence[Slot], more: Sequence[Slot]) -> BySlot[Generation]:
        """The generations of one slot per node, and of ``more``. Records the nodes that do not answer."""
        found = self.queues.generations({**dict.fromkeys(samples), **dict.fromkeys(more)})
        now = self.tools.clock.monotonic()
        self._unanswered = False
        out: dict[object, IndexUnavailable] = {}
        for slot in samples:
            node, answer = self.queues.node_of(slot), found[slot]
            if not isinstance(answer, IndexUnavailable) or isinstance(answer, IndexBroken):
                self._answered[node] = now
                continue
            self._unanswered = True
            if isinstance(answer, IndexFull) or now - self._answered.setdefault(node, now) >= OUT_SECONDS:
                out[node] = answer
        before, self.silent = self.silent, out
        for node in out.keys() - before:
            log.warning("index_unreachable", error=str(out[node]))
        if back := before.keys() - out:
            log.info("index_reachable", nodes=len(back))
            self._at_once |= not all(isinstance(before[node], IndexFull) for node in back)
        return found

    def _spread(self, slots: Iterable[Slot]) -> list[list[Slot]]:
        """The slots of each node: only those that were seen whole, if there are any."""
        by_node: dict[object, list[Slot]] = {}
        for slot in slots:
            by_node.setdefault(self.queues.node_of(slot), []).append(slot)
        whole = {slot for slot, seen in self._seen.items() if seen.recorded == seen.serving}
        return [[slot for slot in some if slot in whole] or some for some in by_node.values()]

    def _note_out(self, now: float) -> None:
        """Note what cannot be taken from the index now."""
        at = self.tools.clock.now_ms()
        for slot in self.out_of_reach(self.tools.book.wanted):
            silent = now - self._answered.get(self.queues.node_of(slot), now)
            about = "its node is out of reach, full, or has a key of others"
            self.tools.late.note(Cause.REDIS, slot, at - round(silent * 1000), at, about)

    def _note_broken(self, found: BySlot[Generation]) -> set[Slot]:
        """Record slots with a key that toc did not write. Returns those that have none any more."""
        wanted, before = self.tools.book.wanted, self.broken
        errors = {slot: str(each) for slot, each in found.items() if isinstance(each, IndexBroken)}
        errors = {slot: error for slot, error in errors.items() if slot in wanted}
        mended = {slot for slot in before if isinstance(found.get(slot), Generation)}
        self.broken = frozenset(slot for slot in {*before, *errors} - mended if slot in wanted)
        if fresh := [slot for slot in errors if slot not in before]:
            log.error("slots_broken", slots=len(fresh), slot=str(fresh[0]), error=errors[fresh[0]])
        if mended:
            log.info("slots_mended", slots=len(mended), slot=str(min(mended)))
        return mended

    def _judge(self, found: BySlot[Generation], now: float, mended: Collection[Slot] = ()) -> bool:
        """Record the generations found. Returns whether data was lost that was not known to be lost.

        Data of mended slots is lost, whatever their generation says.
        """
        owned = self.tools.book.owned
        lost: list[Slot] = []
        known = False
        for slot, generation in found.items():
            if isinstance(generation, IndexUnavailable) or slot.topic not in self._topics:
                continue  # the topic was deleted, and we are about to lose the slot
            before, self._seen[slot] = self._seen.get(slot), generation
            recorded, serving = generation
            whole = recorded == serving
            changed = slot in mended or (
                before is not None
                and (before.serving != serving or (before.recorded == serving and not whole))
            )
            if whole and not changed:
                self._missing.pop(slot, None)
            elif changed or (slot in owned and self._missing.get(slot, ("",))[0] != serving):
                if slot in owned:
                    self._missing[slot] = (serving, now)
                lost.append(slot)
                known = known or changed
        if lost:
            # Forget what was seen of other slots on these nodes: their loss must not be reported
            # once more.
            nodes = {self.queues.node_of(slot) for slot in lost}
            self._seen = {
                slot: seen
                for slot, seen in self._seen.items()
                if slot in owned or slot in found or self.queues.node_of(slot) not in nodes
            }
            if known:
                INDEX_LOSSES.of().add()
                at = self.tools.clock.now_ms()
                for slot in lost:
                    until = at + round(HOLD_SECONDS * 1000)
                    self.tools.late.note(Cause.REDIS, slot, at, until, "it had lost its data")
                log.warning("index_lost_data", slots=len(lost), slot=str(lost[0]))
            else:  # a new topic, or a loss that no worker saw
                log.info("index_unfilled", slots=len(lost), slot=str(lost[0]))
        return bool(lost)

    def _record(self, now: float) -> None:
        """Record the generation of slots that are whole again."""
        owned = self.tools.book.owned
        refilled = self.services.refilled()
        whole = {
            slot: run_id
            for slot, (run_id, since) in self._missing.items()
            if slot in owned and slot not in self.broken and now - since >= HOLD_SECONDS and refilled >= since
        }
        if not whole:
            return
        # If data was lost again while the key was missing anyway, our claims are lost as well.
        self.tools.book.renew(whole)
        for slot, result in self.queues.set_generations(whole).items():
            if not isinstance(result, IndexUnavailable):
                del self._missing[slot]
                self._seen[slot] = Generation(whole[slot], whole[slot])
