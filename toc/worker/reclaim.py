"""Reclaim: give back the PrepareQueue entries of workers that died or fell silent.

It is also the slow safety poll. A peek at every slot finds due times whose wake-up message was lost, and
slots that hold prepared entries of others. Only these are searched for timed-out entries.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from toc.failpoint import failpoint
from toc.index.messages import ExpiredRequest
from toc.loop import Loop
from toc.model.errors import IndexUnavailable
from toc.model.scores import split
from toc.model.task import TaskStatus, TryRow
from toc.model.topic import Delivery, Slot, Topic
from toc.model.verdict import Failure, Place, after_crash, belongs, entry_score
from toc.observe.log import get_logger
from toc.observe.metrics import ORPHANS, TRIES
from toc.store.servers.shards import Answers, Trouble
from toc.store.tasks.batch import Guard
from toc.worker.settle.moves import mark_begun, tell_crashed
from toc.worker.slots import OwnedSlot, SlotTurns
from toc.worker.tools import Tools

log = get_logger(__name__)

TICK_SECONDS = 1.0
TURNED_SECONDS = 0.03
SPREAD_SECONDS = 0.2
"""Entries time out when a second of Redis's clock begins. A worker looks ``TURNED_SECONDS`` later, plus a
random part of ``SPREAD_SECONDS``: if all looked at once they would hold up live tasks."""
PEEK_SECONDS = 5.0
"""How often each slot is peeked at."""
EMPTY_SECONDS = 5.0
"""How long nothing must have been prepared in a slot until the claim numbers of others there are deleted. A
former owner may have sent a prepare that arrives later."""
PEEK_SLOTS = 500
"""Slots per look, unless the period requires more. Thousands at once hold up live tasks for 20 ms."""
RECLAIM_LIMIT = 200
PULLED_SECONDS = 2
"""Entries of pulled tasks stay prepared for some milliseconds: an older one was left by a gateway."""
BEFORE_MOVED = "its worker for a former time died or fell silent"
"""The last_error, if it has no other, of a task with a new deadline: a try for the former one may
have begun, but none is charged."""


class _Left(NamedTuple):
    """An entry that its worker has left: its whole score, its row, and what the end of its try changes."""

    slot: Slot
    topic: Topic
    job_id: int
    score: float
    row: TryRow | None
    crash: Failure | None


@dataclass(eq=False)
class Reclaimer:
    """The loop that rolls back timed-out entries, and at once those of workers known to be dead."""

    tools: Tools

    def __post_init__(self) -> None:
        self._turns = SlotTurns(TICK_SECONDS, PEEK_SLOTS)
        self._at_once = True
        """Whether to peek at all slots now."""
        self._to_reclaim: set[Slot] = set()
        """Slots in which entries may have timed out, or be those of a dead worker."""
        self._skip: Counter[Slot] = Counter()
        """How many of the oldest to leave out in the next look, which comes at once: they stay, because their
        rows cannot be read, and behind them may be entries of servers that answer."""
        self._offset = TURNED_SECONDS + random.uniform(0, SPREAD_SECONDS)  # noqa: S311 - spreads load, guards nothing
        self.loop = Loop("reclaim", self.run_once)

    def look_now(self) -> None:
        """Look without waiting for the next peek: slots were claimed, or a worker is known to have died."""
        self._at_once = True
        self.loop.wake()

    def run_once(self) -> float:
        """One look. Returns the seconds until the next."""
        now = self.tools.clock.monotonic()
        at_once, self._at_once = self._at_once, False
        owned = self.tools.book.owned  # not before: slots are claimed first, then look_now is called
        if slots := self._turns.part(owned, now, PEEK_SECONDS, at_once=at_once):
            self._peek(slots)
        if self._to_reclaim:
            self._reclaim()
        if self._skip:
            return 0.0
        return TICK_SECONDS - self.tools.clock.now_ms() % 1000 / 1000 + self._offset

    def _peek(self, slots: Sequence[Slot]) -> None:
        owned = self.tools.book.owned
        # Do not count entries that we have lost: each would hide one entry of another worker while
        # its try runs.
        held = Counter(entry.slot for entry in self.tools.inflight.snapshot() if entry.fenced)
        now = self.tools.clock.monotonic()
        idle: dict[Slot, list[int]] = {}
        for slot, peek in self.tools.queues.peek(slots).items():
            if isinstance(peek, IndexUnavailable) or slot not in owned:
                continue
            one = owned[slot]
            one.buried = peek.dead
            one.empty_since = None if peek.prepared else now if one.empty_since is None else one.empty_since
            if peek.next_due is not None:
                self.tools.inbox.look_at(slot, peek.next_due)
            # While others have claim numbers there, newer entries of ours may hide those that they
            # left.
            if peek.prepared > held[slot] or (peek.prepared and one.others):
                self._to_reclaim.add(slot)
                continue
            self._to_reclaim.discard(slot)
            if one.others and one.empty_since is not None and now - one.empty_since >= EMPTY_SECONDS:
                alive = self.tools.book.alive
                idle[slot] = [number for number, owner in one.others.items() if owner not in alive]
                one.others = {}
        if idle:
            self.tools.queues.unclaim(idle)

    def _reclaim(self) -> None:
        owned = self.tools.book.owned
        topics = self.tools.catalog.known()
        dead, held = self.tools.book.dead, self.tools.inflight.get
        self._to_reclaim = {slot for slot in self._to_reclaim if slot in owned and slot.topic in topics}
        requests = []
        for slot in self._to_reclaim:
            numbers, topic = _numbers_of(dead, owned[slot]), topics[slot.topic]
            pulled = topic.delivery is Delivery.PULL  # [rule: pull-given-back]
            timeout = PULLED_SECONDS if pulled else topic.prepare_timeout
            requests.append(ExpiredRequest(slot, timeout, numbers, RECLAIM_LIMIT, self._skip[slot]))
        found: dict[Slot, list[tuple[int, float]]] = {}
        oldest: dict[Slot, list[tuple[int, float]]] = {}
        for slot, result in self.tools.queues.expired(requests).items():
            if isinstance(result, IndexUnavailable):
                continue
            if len(result) >= RECLAIM_LIMIT:
                oldest[slot] = result[:RECLAIM_LIMIT]
            if left := [pair for pair in result if held(pair[0]) is None]:
                found[slot] = left
        unknown = self._roll_back(found, topics) if found else {}
        skipped, self._skip = self._skip, Counter()
        for slot, pairs in oldest.items():
            stay = sum(job_id in unknown or held(job_id) is not None for job_id, _ in pairs)
            if stay:
                self._skip[slot] = skipped[slot] + stay

    def _roll_back(
        self, found: Mapping[Slot, list[tuple[int, float]]], topics: Mapping[str, Topic]
    ) -> Mapping[int, Trouble]:
        """Write rows, then move the listed entries if unchanged: a crash in between repeats it uncharged.

        Returns why rows could not be read or written; their entries stay.
        """
        rows = self.tools.store.read_tries([job_id for pairs in found.values() for job_id, _ in pairs])
        now = self.tools.clock.now_ms()
        owned = self.tools.book.owned
        left: list[_Left] = []
        for slot, pairs in found.items():
            topic = topics[slot.topic]
            dead = _numbers_of(self.tools.book.dead, owned[slot]) if slot in owned else []
            for job_id, score in pairs:
                row = rows.get(job_id)
                _, remaining, claim = split(score)
                crash = after_crash(row, topic, remaining, now, self.tools.max_crashes, dead=claim in dead)
                left.append(_Left(slot, topic, job_id, score, row, crash))
        crashes = [one.crash for one in left if one.crash is not None]
        guards = self.tools.store.crash(crashes) if crashes else Answers[Guard]()
        tell_crashed(guards)
        # A try of these tasks may have begun before their deadline changed, and nothing else records that. (A
        # hand-out of a pulled task is on its row.)
        uncharged = [one.row for one in left if one.crash is None and one.topic.delivery is not Delivery.PULL]
        moved = [row.job_id for row in uncharged if row and row.status == TaskStatus.PENDING and row.version]
        unmarked = mark_begun(self.tools.store, rows.values(), moved, BEFORE_MOVED)
        # Rows that cannot be read or written now: a later look finds their entries again.
        unknown = rows.unanswered | guards.unanswered | unmarked
        if unknown:
            log.warning("not_reclaimed", tasks=len(unknown), error=str(next(iter(unknown.values()))))
        failpoint("reclaim.rows-written")
        tasks = self._move([one for one in left if one.job_id not in unknown], guards, now)
        log.warning("reclaimed", slots=len(found), tasks=tasks)
        return unknown

    def _move(self, left: Collection[_Left], guards: Mapping[int, Guard], now: int) -> int:
        """Move entries to where their rows say. Returns how many were put back.

        The whole score is the fencing token: it holds unless a heartbeat came since the entry was listed. A
        worker that has woken up meanwhile continues, but its failure is fenced off.
        """
        # [rule: whole-score]
        commits: defaultdict[Slot, list[tuple[int, float]]] = defaultdict(list)
        backs: defaultdict[Slot, list[tuple[int, float, float]]] = defaultdict(list)
        buries: defaultdict[Slot, list[tuple[int, float, int]]] = defaultdict(list)
        for slot, topic, job_id, score, row, crash in left:
            place = belongs(row)
            if row is None or place is Place.NOWHERE:
                commits[slot].append((job_id, score))
            elif place is Place.DEAD_QUEUE:
                buries[slot].append((job_id, score, now))
            elif crash is None:
                due = max(row.next_time, now + row.lease if row.lease > 0 else 0)
                backs[slot].append((job_id, score, entry_score(topic, due, row.attempts)))
            elif guards.get(job_id) is Guard.APPLIED:  # else the row has changed: it is read again
                TRIES.of(topic.name, "crashed").add()
                target = entry_score(topic, crash.next_time, crash.new_attempts)
                backs[slot].append((job_id, score, target))
        self._drop(commits, {one.job_id for one in left if one.row is None})
        self.tools.queues.rollback(backs)
        self.tools.queues.bury(buries)
        return sum(map(len, backs.values()))

    def _drop(self, entries: Mapping[Slot, list[tuple[int, float]]], orphans: Collection[int]) -> None:
        """Remove entries of tasks that have ended or have no row. A task without a row is logged as
        an error."""
        for slot, removed in self.tools.queues.commit(entries).items():
            if isinstance(removed, IndexUnavailable):
                continue
            for (job_id, _), was_there in zip(entries[slot], removed, strict=True):
                if was_there and job_id in orphans:
                    log.error("orphan_dropped", job_id=job_id, slot=str(slot))
                    ORPHANS.of(slot.topic).add()


def _numbers_of(dead: frozenset[str], owned: OwnedSlot) -> list[int]:
    return [number for number, worker in owned.others.items() if worker in dead]  # [rule: known-death]
