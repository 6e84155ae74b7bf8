"""Poll: from due StoreQueue entries to checked entries in the dispatcher.

The poller learns from its agenda when a slot is due next and sleeps exactly until then. One call per node
then takes the due entries of its slots (prepare), one query per database server reads the rows, and the rows
decide what runs. It never asks Redis whether something is due: wake-up messages, or the slow peek of the
reclaimer, report entries that became due earlier.

It waits for a server that was quick 10 ms at most. Otherwise it sleeps until something is due or an answer
has come: while one server is slow, it serves the others.
"""

import heapq
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from toc.failpoint import failpoint
from toc.index.calls import IndexBroken, ReplyLost
from toc.index.messages import Prepared, PrepareRequest
from toc.index.nodes import RedisNode
from toc.index.takes import Takes
from toc.loop import Loop
from toc.model.errors import IndexUnavailable
from toc.model.lateness import Cause
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.observe.metrics import STEP
from toc.worker.check import Checker
from toc.worker.entry import Entry
from toc.worker.run.dispatch import Dispatcher
from toc.worker.run.handler_threads import MAX_WAITING
from toc.worker.settle.finish import MAX_UNWRITTEN, Finisher
from toc.worker.slots import NEVER, OwnedSlot
from toc.worker.take.adopt import Adopter
from toc.worker.take.resume_rate import PACE_MS, ResumeRate
from toc.worker.tools import Tools

log = get_logger(__name__)

IDLE_SECONDS = 60.0
LONG_SLEEP_SECONDS = 0.004
STIR_SECONDS = 0.0003
"""How long before the due time a long sleep ends and a short one begins. A core in deep sleep takes 0.1 to
0.2 ms to wake up, and its caches are cold."""
RETRY_MS = 500
"""Pause before a slot is tried again whose node failed."""


TAKE_LIMIT = 200
"""Most entries that one prepare takes from one slot. Bounds how long the script blocks the server."""
ROUND_LIMIT = 400
"""Most entries of one topic that one round takes. Other topics wait while their rows are read."""
ROUND_SLOTS = 256
"""Most slots that one round takes from: as many calls as neither side has trouble to buffer."""
ENOUGH_UNWRITTEN = 3000
"""While more ended tries than this are not written yet, nothing is taken of a topic whose last
prepare left due entries. So a burst waits for the finisher, and due tasks of other topics get
room."""
MAX_UNSTARTED = 2 * MAX_WAITING
"""While more entries of a topic than this were taken and have not started, no more of it are taken.
All of them count, not only those in its line: if rows or leases come slowly, most are in the row
check or were refused their start, while the line is empty and has room."""
BEHIND_LOOK_MS = 50
PAUSED_LOOK_MS = 1000
"""How often the poller checks whether a paused topic was resumed."""

_LONGEST = attrgetter("due")
"""Sorts slots: first the one that has waited longest."""


@dataclass(eq=False)
class Agenda:
    """When the poller looks at each slot next, and which of the due slots it serves now. Only its thread uses
    it.

    A slot is due when its first entry is, as far as the worker knows: each prepare reports the next due time
    of its slot, and wake-up messages or the slow peek of the reclaimer report entries that became due
    earlier. Of the due slots, those that wait longest come first, as far as their topic has room. The others
    wait until the dispatcher reports room. A slot with more due entries is served again while no other has
    waited longer. So the tasks that are taken, and end, within some milliseconds lie in few tables.
    """

    tools: Tools
    finisher: Finisher
    dispatcher: Dispatcher
    takes: Takes

    def __post_init__(self) -> None:
        self._due: list[tuple[int, Slot]] = []
        """Heap of (when to look, slot). Stale pairs are skipped when they reach the top."""
        self._no_room: dict[Slot, int] = {}
        """Due slots without room, with the due time of each. Those that wait longest are served first."""
        self._held_up: dict[RedisNode | None, dict[Slot, int]] = {}
        """Due slots whose node has yet to answer a prepare, with the due time of each."""
        self._resume = ResumeRate(self.tools.clock)

    def hear(self, news: Mapping[Slot, int]) -> None:
        """Begin a round: schedule looks at slots that may hold a due entry, at those that had no room in the
        last round, and at those whose node has answered since."""
        owned = self.tools.book.owned
        if not (news or self._no_room or self._held_up):
            return
        looks = [news, self._no_room]
        if self._held_up:
            free = [node for node in self._held_up if node not in self.takes.under_way]
            looks += [self._held_up.pop(node) for node in free]
        self._no_room = {}
        for look in looks:
            for slot, due in look.items():
                if slot in owned:
                    self.look(owned[slot], due)

    def had_nothing(self, slot: Slot, due: int, now: int) -> bool:
        """Whether nothing of a slot was due, as far as known, though a task in it came due at ``due`` (ms),
        since it is ours. Any thread may call it."""
        one, since = self.tools.book.owned.get(slot), self.tools.book.wanted.get(slot)
        if one is None or since is None or now - due >= (self.tools.clock.monotonic() - since) * 1000:
            return False
        waits = slot in self._no_room or any(slot in held for held in list(self._held_up.values()))
        asked = self.takes.node(slot) in self.takes.under_way
        return not (waits or asked or one.left) and (one.look == NEVER or one.due > now)

    def look(self, owned: OwnedSlot, due: int, at: int = 0) -> None:
        """Schedule a look at a slot, with an entry due at ``due``, for then, but not before ``at`` (both ms);
        unless an earlier one is scheduled."""
        at = due if due > at else at
        if at < owned.look:
            owned.due, owned.look = due, at
            heapq.heappush(self._due, (at, owned.slot))
            if len(self._due) > 2 * len(self.tools.book.owned) + 64:  # drop stale pairs that lie far ahead
                self._due = [(o.look, o.slot) for o in self.tools.book.owned.values() if o.look < NEVER]
                heapq.heapify(self._due)

    def next_due(self) -> int:
        """When to look at the next slot (ms), or NEVER if no due time is known."""
        while self._due:
            at, slot = self._due[0]
            owned = self.tools.book.owned.get(slot)
            if owned is not None and owned.look == at:
                return at
            heapq.heappop(self._due)
        return NEVER

    def choose(self, now: int) -> list[PrepareRequest]:
        """Choose due slots to take from, each with an entry limit: no more than can be started soon."""
        requests: list[PrepareRequest] = []
        if not self._due or self._due[0][0] > now:
            self.tools.backlogged = bool(self._held_up) and self.tools.backlogged
            return requests
        topics = self.tools.catalog.known()
        unwritten = self.finisher.backlog
        for name, members in self._remove_due(now).items():
            # Enough was taken: many ended tries wait to be written, or many entries to start.
            enough = ENOUGH_UNWRITTEN if any(one.left for one in members) else MAX_UNWRITTEN
            if unwritten > enough or self.tools.inflight.waiting(name) > MAX_UNSTARTED:
                self._put_off(members, now + BEHIND_LOOK_MS)
                continue
            topic, handler = topics.get(name), self.tools.handlers.get(name)
            if topic is None or handler is None or not handler.serves(topic):
                self._put_off(members, now + PAUSED_LOOK_MS)
                continue
            room = min(self.dispatcher.room(name), ROUND_LIMIT)
            limited = sum(member.due < topic.resumed_at for member in members) if topic.resume_rate else 0
            first = 0
            if limited:  # the first ones: one of them, which holds the oldest, is taken from at a time
                tokens = self._resume.tokens(topic, self.tools.book.owned)
                first = min(tokens, 1)
                self._put_off(members[first:limited], now + PACE_MS)
                members = members[:first] + members[limited:]
                room = min(room, tokens) if tokens else room
            chosen = share(members[: ROUND_SLOTS - len(requests)], room)
            if len(chosen) < len(members):
                self._no_room.update((member.slot, member.due) for member in members[len(chosen) :])
                self.dispatcher.want_room(name)
            if first and chosen:
                self._resume.took(topic, chosen[0][1])
            for member in members:
                member.look = NEVER  # until a due time is known
            requests += [
                PrepareRequest(member.slot, limit, topic.retries, member.claim) for member, limit in chosen
            ]
        if requests or not self._held_up:
            self.tools.backlogged = bool(self._no_room)
        return requests

    def _remove_due(self, now: int) -> dict[str, list[OwnedSlot]]:
        """Remove the slots that are due from the heap. Returns those of each topic, the longest due first."""
        owned = self.tools.book.owned
        due_slots: dict[str, dict[Slot, OwnedSlot]] = {}
        while self._due and self._due[0][0] <= now:
            at, slot = heapq.heappop(self._due)
            member = owned.get(slot)
            if member is None or member.look != at:
                continue
            if self.takes.under_way and (node := self.takes.node(slot)) in self.takes.under_way:
                self._held_up.setdefault(node, {})[slot] = member.due
                member.look = NEVER
            else:
                due_slots.setdefault(slot.topic, {})[slot] = member  # once: a stale pair may say the same
        return {topic: sorted(members.values(), key=_LONGEST) for topic, members in due_slots.items()}

    def _put_off(self, members: Iterable[OwnedSlot], until: int) -> None:
        """Look at slots that are due at ``until`` (ms) instead."""
        for member in members:
            member.look = NEVER
            self.look(member, member.due, until)

    def note_prepared(self, owned: OwnedSlot, result: Prepared, now: int) -> None:
        """Schedule the next look at a slot from which a prepare has taken ``result``."""
        owned.left = result.left
        if (due := result.next_due) is not None:
            not_yet = result.redis_now_ms < due <= now  # Redis's clock is behind ours
            self.look(owned, due, due + now - result.redis_now_ms if not_yet else due)


def share(members: list[OwnedSlot], room: int) -> list[tuple[OwnedSlot, int]]:
    """The slots to take from now, the first of those that are due, and the entry limit of each.

    The limit of a slot is the number of due entries that its last prepare left, so that few slots give many
    entries each: a batch of one slot lies in few tables, and taking, reading and finishing cost per slot and
    per table. A slot whose backlog is unknown gets an equal share.
    """
    part = min(max(1, room // max(1, len(members))), TAKE_LIMIT)
    chosen: list[tuple[OwnedSlot, int]] = []
    for member in members:
        if room < 1:
            break
        limit = min(member.left or part, TAKE_LIMIT, room)
        chosen.append((member, limit))
        room -= limit
    return chosen


@dataclass(eq=False)
class Poller:
    """The loop that takes tasks. It alone prepares. Other threads report slots and due times to its inbox."""

    tools: Tools
    takes: Takes
    agenda: Agenda
    checker: Checker
    adopter: Adopter

    def __post_init__(self) -> None:
        self._between = threading.Lock()
        self._seconds = STEP.of("prepare")
        self.loop = Loop("poll", self.run_once, self.tools.wake)

    @property
    def settled(self) -> bool:
        """Whether no prepare is under way: what was taken is held."""
        return not self._between.locked() and not self.takes.under_way

    def await_round(self) -> None:
        """Return when the current round has ended."""
        with self._between:
            pass
        self.loop.wake()

    # --- one round

    def run_once(self) -> float:
        """Hear what has been answered, and take the due entries that can start. Returns the seconds until the
        next are due."""
        with self._between:
            self.tools.wake.hear()
            self._accept()
            now = self.tools.clock.now_ms()
            if early := self.tools.early.release(now):
                self.checker.start(early)
            self.agenda.hear(self.tools.inbox.take_due())
            if not self.tools.book.leaving and (requests := self.agenda.choose(now)):
                self.takes.begin(requests)
                self._accept()
            answer_at = min(self.checker.run_once(), self.takes.give_up())
            return min(self._until_next(), max(answer_at - time.monotonic(), 0.0))

    def _until_next(self) -> float:
        if self.takes.answered or not self.tools.inbox.empty:
            return 0.0
        due = NEVER if self.tools.book.leaving else self.agenda.next_due()
        due = min(due, self.tools.early.next_due())
        # Computed from the exact clock: the sleep ends when the due millisecond begins, or just after.
        wait = due / 1000 - self.tools.clock.time()
        if wait > LONG_SLEEP_SECONDS:
            wait -= STIR_SECONDS
        return min(max(wait, 0.0), IDLE_SECONDS)

    # --- take

    def _accept(self) -> None:
        """Hold the entries that were taken, and have their rows read."""
        taken: list[Entry] = []
        failures: list[IndexUnavailable] = []
        answers = self.takes.answers()
        if not answers:
            return
        now, at = self.tools.clock.now_ms(), self.tools.clock.monotonic()
        seconds = 0.0
        for request, result, began in answers:
            owned = self.tools.book.owned.get(request.slot)
            if not isinstance(result, IndexUnavailable):
                seconds = time.monotonic() - began
                self.tools.late.slow(Cause.REDIS, request.slot, seconds, "taking it")
                taken += self.adopter.hold(request.slot, result.entries, result.redis_now_ms, at - seconds)
                if owned is not None:
                    self.agenda.note_prepared(owned, result, now)
                continue
            if isinstance(result, ReplyLost):
                self.adopter.reply_lost(request.slot, request.claim)
            if not isinstance(result, IndexBroken):  # the watch reports these, once
                failures.append(result)
                since = now - round((time.monotonic() - began) * 1000)
                self.tools.late.note(Cause.REDIS, request.slot, since, now + RETRY_MS, str(result))
            if owned is not None:
                self.agenda.look(owned, now + RETRY_MS)
        if failures:
            log.warning("prepare_failed", slots=len(failures), error=str(failures[0]))
        if taken:
            failpoint("poll.taken")
            self.checker.put(self.adopter.ours(taken))
        if seconds:
            self._seconds.observe([seconds])
