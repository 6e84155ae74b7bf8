"""Poll: from due StoreQueue entries to checked entries in the dispatcher.

The poller knows from its agenda when a slot is due next and sleeps exactly until then. Then one round trip
per node takes what is due in all slots (prepare), one round trip per server reads the rows, and the rows
decide what runs. It never asks Redis whether something is due: a wake-up message, or the slow peek of the
reclaimer, tells it of entries that became due earlier.

Of several Redis nodes one that is slow is not waited for: what it answers later comes in a later round.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, groupby
from typing import NamedTuple

from toc.failpoint import failpoint
from toc.index.calls import IndexBroken, ReplyLost
from toc.index.connections import IndexSlow
from toc.index.messages import ExpiredRequest, Prepared, PrepareRequest
from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import MAX_CLOCK_SKEW_MS, Clock
from toc.model.errors import IndexUnavailable
from toc.model.handler import Handler
from toc.model.scores import fence_of, split
from toc.model.task import TaskStatus, TryRow
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.observe.metrics import ORPHANS, STALE, StepTimer
from toc.store.batch import Owing
from toc.store.shards import Answers, Trouble
from toc.store.store import Store
from toc.worker.loop import Loop, end_process
from toc.worker.quarantine.quarantine import Quarantine
from toc.worker.slots import OwnedSlot, SlotBook
from toc.worker.stages.agenda import Agenda
from toc.worker.stages.dispatch import Dispatcher
from toc.worker.stages.entry import NO_FENCE, Entry, Held, Inflight
from toc.worker.stages.finish import Finisher
from toc.worker.stages.lease_keeper import LeaseKeeper

log = get_logger(__name__)

IDLE_SECONDS = 60.0
LONG_SLEEP_SECONDS = 0.004
STIR_SECONDS = 0.0003
"""How long before the due time a long sleep ends, to go on with a short one: a core that slept deeply takes
0.1 to 0.2 ms to come back, and its caches are cold."""
RETRY_MS = 500
"""Pause before a slot is tried again whose node did not answer, and before rows are read again."""
MOST_RETRY_MS = 10_000
"""The longest such pause, when a database server has been away for long."""
LUMP = 200
LUMP_MS = 500
"""What is put away for longer comes back in lumps, so many entries in so much time: however many are due that
belong to a server that is away, taking them and putting them away again costs little."""
OWING_MS = 30
"""The pause while it is not yet known whether a server is away or some table of it locked."""
MOST_OWED = 1000
"""How many entries may wait here for a server that is far away: those that come while it has yet to answer
are asked about together, once it has."""
SOON_MS = 10
"""When to ask it again if it has not answered when it should have."""
FORGET_UNREAD_SECONDS = 30.0
"""How long after rows could not be read last the next such trouble is another one."""
SLOW_MS = 20
"""The same where its node has not answered yet, but may at any moment."""
PATIENCE_SECONDS = 0.03
"""How long a round waits for one Redis node while tasks of others may be due."""
NO_TIMEOUT = 10**9
"""Seconds: no entry is so old, so only those under the claim are listed."""
MOVING_MS = 50
"""When to look for an entry that was not held because a move of the try before it was under way."""
RECONCILE_AFTER_MS = (0, 1000, 4000)
"""When to look for entries of a lost prepare reply: at once, and again in case Redis served it late."""


class Poller:
    """The loop that takes. Other threads tell it of slots and due times; it alone prepares."""

    def __init__(
        self,
        *,
        store: Store,
        queues: Queues,
        catalog: TopicCatalog,
        clock: Clock,
        handlers: Mapping[str, Handler],
        book: SlotBook,
        inflight: Inflight,
        finisher: Finisher,
    ) -> None:
        self._store = store
        self._queues = queues.within(PATIENCE_SECONDS)
        self._catalog = catalog
        self._clock = clock
        self._handlers = handlers
        self._book = book
        self._agenda = Agenda(catalog=catalog, clock=clock, handlers=handlers, book=book, finisher=finisher)
        self._inflight = inflight
        self._finisher = finisher
        self.dispatcher: Dispatcher
        self.quarantine: Quarantine
        self.leases: LeaseKeeper
        """Set by whoever composes the worker: they need each other."""
        self._lock = threading.Lock()
        self._news: dict[Slot | None, int] = {}
        """Due times told by other threads since the last round; None: look at every slot."""
        self._early: list[Entry] = []
        """Entries that this machine's clock does not call due yet, on their way to the heap."""
        self._waiting: list[tuple[int, int, Entry]] = []
        """Heap of entries that Redis's clock calls due and this machine's does not yet. Numbered: an id may
        wait twice, and entries have no order."""
        self._numbers = count()
        self._reconcile: list[tuple[int, Slot, int]] = []
        """Heap of (when, slot, claim): there entries of ours may stand that are not held."""
        self._unread: deque[tuple[int, list[Entry]]] = deque()
        """Entries that have a lease and whose rows could not be read, with the time to try again."""
        self._owed: list[Entry] = []
        """Entries for whose rows a server that is far away is to be asked once it has answered to others."""
        self._owed_at = 0
        """When that may be, in milliseconds."""
        self._let_go: set[tuple[Slot, int]] = set()
        """Where entries stand that were let go before they started, told by other threads."""
        self._settling = False
        """Whether what was let go is being looked for just now."""
        self._unread_since = self._unread_at = float("-inf")
        """Since when rows cannot be read, and when that was so last."""
        self._lump_at = self._lump_left = 0
        """When the last lump comes of what was put away, and how many entries may still come with it."""
        self._late: list[tuple[_Asked, dict[Slot, Prepared | IndexUnavailable]]] = []
        """Answers that came after their round."""
        self._awaited = 0
        """How many slots have yet to be answered."""
        self._taking = True
        self._between = threading.Lock()
        self._prepare_step = StepTimer("prepare")
        self._read_step = StepTimer("read")
        self.loop = Loop("poll", self.run_once)

    def crowded(self) -> bool:
        """Whether more is due than may be taken at once."""
        return self._agenda.crowded

    # --- told by other threads

    def look_at(self, slot: Slot | None, due_ms: int) -> None:
        """The slot (None: any slot) may hold something that is due at ``due_ms``."""
        with self._lock:
            known = self._news.get(slot)
            if known is None or due_ms < known:
                self._news[slot] = due_ms
        self.loop.wake()

    def has_room(self) -> None:
        """The dispatcher can take more."""
        self.loop.wake()

    def too_early(self, entries: Sequence[Entry]) -> None:
        """Keep entries until this machine's clock says due."""
        with self._lock:
            self._early.extend(entries)
        self.loop.wake()

    def look_for(self, entries: Iterable[Entry]) -> None:
        """These entries were let go; they may still stand under our claim."""
        with self._lock:
            self._let_go.update((e.slot, split(e.fence).claim) for e in entries if e.fence != NO_FENCE)
        self.loop.wake()

    @property
    def settled(self) -> bool:
        """Whether nothing that was let go has yet to be looked for, and no node owes an answer."""
        return not self._let_go and not self._settling and not self._awaited

    def pause_taking(self) -> None:
        """Take nothing more; returns when the round that is under way has ended."""
        self._taking = False
        with self._between:
            pass
        self.loop.wake()

    def withdraw(self, slots: set[Slot] | None = None) -> list[Entry]:
        """Entries that wait for the clock: of these slots, or all."""
        with self._lock:
            waiting = self._early + [entry for _, _, entry in self._waiting]
            taken = [entry for entry in waiting if slots is None or entry.slot in slots]
            kept = [entry for entry in waiting if not (slots is None or entry.slot in slots)]
            self._early = kept
            self._waiting = []
        return taken  # what is being checked right now is not among them; it runs here under our claim

    # --- one round

    def run_once(self) -> float:
        """Take what is due and can be started; returns the seconds until the next is due."""
        with self._between:
            now = self._clock.now_ms()
            self._hear()
            self._release_waiting(now)
            self._hear_late()
            self._settle_lost_replies(now)
            while self._unread and self._unread[0][0] <= now:
                self.check(self._unread.popleft()[1])
            if self._owed and self._owed_at <= now:
                self.check(self._no_more_owed())
            if not self._taking:
                return self._until_next(now)
            requests = self._agenda.choose(now, self.dispatcher)
            if requests and not self._take(requests) and self._agenda.crowded:
                return 0.0  # nothing that runs will make room for the others: go on with them
            return self._until_next(self._clock.now_ms())

    def _hear(self) -> None:
        with self._lock:
            news, self._news = self._news, {}
            early, self._early = self._early, []
            for entry in early:
                heapq.heappush(self._waiting, (entry.row.next_time, next(self._numbers), entry))
        self._agenda.hear(news)

    def _no_more_owed(self) -> list[Entry]:
        with self._lock:
            owed, self._owed = self._owed, []
        return owed

    def _until_next(self, now: int) -> float:
        if self._news or self._early or self._let_go or self._late:
            return 0.0
        times = []
        if self._taking and (due := self._agenda.next_due()) is not None:
            times.append(due)
        if self._reconcile:
            times.append(self._reconcile[0][0])
        if self._unread:
            times.append(self._unread[0][0])
        if self._owed:
            times.append(self._owed_at)
        with self._lock:
            if self._waiting:
                times.append(self._waiting[0][0])
        if not times:
            return IDLE_SECONDS
        # By the exact clock: now was rounded down, so this ends where the millisecond begins or just after.
        wait = min(times) / 1000 - self._clock.time() if min(times) > now else 0.0
        if wait > LONG_SLEEP_SECONDS:
            wait -= STIR_SECONDS
        return min(max(wait, 0.0), IDLE_SECONDS)

    # --- take

    def _take(self, requests: list[tuple[OwnedSlot, PrepareRequest]]) -> int:
        """Prepare, check, dispatch; returns how many entries were taken."""
        before = self._clock.monotonic()
        asked = _Asked(before, {owned.slot: owned for owned, _ in requests})
        results = self._queues.prepare(
            [request for _, request in requests], lambda answers: self._answered_late(asked, answers)
        )
        with self._lock:
            self._awaited += len(asked.slots) - len(results)  # a slot may have been asked for twice
        prepared = self._clock.monotonic() - before
        taken = self._accept(asked, results)
        if taken:
            failpoint("poll.taken")
            self.check(self._no_more_owed() + taken)  # else these would overtake them, again and again
        self._prepare_step.took(prepared, len(taken))  # after what is due has been handed over
        return len(taken)

    def _accept(self, asked: _Asked, results: Mapping[Slot, Prepared | IndexUnavailable]) -> list[Entry]:
        """Hold what was taken; returns what is to be checked."""
        taken: list[Entry] = []
        failures: list[IndexUnavailable] = []
        now = self._clock.now_ms()
        for slot, result in results.items():
            owned = asked.slots[slot]
            if isinstance(result, IndexUnavailable):
                if isinstance(result, IndexSlow):
                    self._agenda.look(owned, now + SLOW_MS)
                    continue
                if not isinstance(result, IndexBroken):  # the watch tells of that, once
                    failures.append(result)
                self._agenda.look(owned, now + RETRY_MS)
                if isinstance(result, ReplyLost):
                    for delay in RECONCILE_AFTER_MS:
                        heapq.heappush(self._reconcile, (now + delay, slot, owned.claim))
                continue
            taken += self._hold(slot, result.entries, result.redis_now_ms, asked.at)
            self._agenda.took(owned, result, now)
        if failures:
            log.warning("prepare_failed", slots=len(failures), error=str(failures[0]))
        return taken

    def _answered_late(self, asked: _Asked, answers: dict[Slot, Prepared | IndexUnavailable]) -> None:
        """A node has answered, or broken off, that was not waited for."""
        with self._lock:
            self._late.append((asked, answers))
        self.loop.wake()

    def _hear_late(self) -> None:
        """Take in what nodes have answered that were not waited for."""
        with self._lock:
            late, self._late = self._late, []
        for asked, answers in late:
            taken = self._accept(asked, answers)
            self._take_over(taken)
            with self._lock:
                self._awaited -= len(answers)  # only now: what was taken is held, or on its way back

    def _take_over(self, taken: Sequence[Entry]) -> None:
        """Check what stands under our claim; what is in slots that we no longer have goes back."""
        owned = self._book.owned if self._taking else {}
        self._finisher.give_back_unread(entry for entry in taken if entry.slot not in owned)
        if ours := [entry for entry in taken if entry.slot in owned]:
            self.check(ours)

    def _hold(self, slot: Slot, entries: Iterable[tuple[int, float]], taken: int, kept: float) -> list[Entry]:
        """Hold entries as (job_id, fence), known to stand since ``kept``; returns those to be checked."""
        topic = self._catalog.known().get(slot.topic)
        if topic is None:  # it was removed meanwhile: they time out, and stand there if it comes back
            return []
        handler = self._handlers[topic.name]
        held: list[Entry] = []
        for job_id, fence in entries:
            entry = Entry(job_id, slot, fence, topic, handler, taken, kept)
            what = self._inflight.hold(entry)
            if what is Held.NEW:
                held.append(entry)
            elif what is Held.MOVING:
                at = self._clock.now_ms() + MOVING_MS
                heapq.heappush(self._reconcile, (at, slot, split(fence).claim))
            # else ours already: timed out while this process was paused. It runs on under the new fence;
            # its late failure will find another (attempts, crashes) on the row.
        return held

    def check(self, entries: list[Entry]) -> None:
        """The row check: what the row says goes, whatever the index said. Any thread may ask for it.

        Each database server's rows are judged as they come. What a server has yet to tell is held until it
        does, which another thread sees to: nothing here waits for a server that hangs.
        """
        began = self._clock.monotonic()
        by_id = {entry.job_id: entry for entry in entries}
        taker = threading.get_ident()

        def take(job_ids: Sequence[int], rows: Answers[TryRow]) -> None:
            read = self._clock.monotonic() - began
            some = [by_id[job_id] for job_id in job_ids]
            if threading.get_ident() == taker:
                self._judge(some, rows)
                self._read_step.took(read, len(some))
                return
            try:
                if self._taking:
                    self._judge(some, rows)
                else:  # this worker leaves: whoever has the slot next decides
                    self._finisher.give_back_unread(some)
            except BaseException as exc:  # the thread is the store's, which would not tell
                end_process("poll", exc)

        self._store.check_tries(by_id, take)

    def _judge(self, entries: Sequence[Entry], rows: Answers[TryRow]) -> None:
        now = self._clock.now_ms()
        leased: list[Entry] = []
        ready: list[Entry] = []
        soon: list[Entry] = []
        behind: list[Entry] = []
        refused: list[tuple[Entry, TryRow | None]] = []
        for entry in entries:
            row = rows.get(entry.job_id)
            if row is None:
                if entry.job_id in rows.unanswered:
                    continue
                log.error("orphan_dropped", job_id=entry.job_id, slot=str(entry.slot))
                ORPHANS.of(entry.topic.name).add()
                refused.append((entry, None))
                continue
            if row.action_time > row.next_time:  # somebody has moved it in the table itself
                row = row._replace(next_time=row.action_time)
            entry.row = row
            entry.checked = True
            if row.status != TaskStatus.PENDING:
                STALE.of(entry.topic.name).add()
                refused.append((entry, row))
            elif row.lease and row.next_time - now <= MAX_CLOCK_SKEW_MS:
                leased.append(entry)
            elif row.next_time <= now:  # [rule: row-check]
                ready.append(entry)
            elif row.next_time - now <= MAX_CLOCK_SKEW_MS:
                soon.append(entry)
            elif row.next_time <= entry.taken:
                behind.append(entry)
            else:
                refused.append((entry, row))
        if rows.unanswered:
            self._put_away([entry for entry in entries if entry.job_id in rows.unanswered], rows.unanswered)
        if leased:
            ready += self.leases.judge(leased)
        if soon:
            self.too_early(soon)
        if behind:
            log.error("clock_behind_redis", tasks=len(behind), milliseconds=behind[0].taken - now)
            self._finisher.give_back_later(behind, now)
        if refused:
            self._finisher.settle_by_row(refused)
        if ready:
            if not self.leases.cover(ready):  # [rule: covered]
                self.loop.pause(RETRY_MS / 1000)
            self._start(ready)

    def _put_away(self, entries: Sequence[Entry], errors: Mapping[int, Trouble]) -> None:
        """Give back, for a while, what cannot be decided now: others that are due must not wait behind it.

        The longer a server is away, the longer: all of what is due there comes by again and again. When it is
        back the sweep brings it at once.
        """
        if not self._taking:
            self._finisher.give_back_unread(entries)
            return
        now, at = self._clock.monotonic(), self._clock.now_ms()
        if leased := [entry for entry in entries if entry.leased]:
            # These are few, and a lease that is left to run out would tell of a crash.
            with self._lock:
                self._unread.append((at + RETRY_MS, leased))
            self.loop.wake()
        free = [entry for entry in entries if not entry.leased]
        rest: list[Entry] = []
        for error, group in groupby(free, lambda entry: errors[entry.job_id]):
            some = list(group)
            if not isinstance(error, Owing):
                rest += some
            elif error.seconds is None or len(self._owed) > MOST_OWED:
                self._finisher.put_away((entry, at + OWING_MS) for entry in some)
            else:
                with self._lock:
                    self._owed += some
                    self._owed_at = at + max(SOON_MS, int(error.seconds * 1000))
                self.loop.wake()
        if not rest:
            return
        if now - self._unread_at > FORGET_UNREAD_SECONDS:
            self._unread_since = now
            log.warning("rows_not_read", tasks=len(rest), error=str(errors[rest[0].job_id]))
        self._unread_at = now
        wait = min(max(RETRY_MS, int(500 * (now - self._unread_since))), MOST_RETRY_MS)
        self._finisher.put_away([(entry, self._lumped(at + wait)) for entry in rest])

    def _lumped(self, at: int) -> int:
        """When an entry comes back that would at ``at``, or somewhat later, with others."""
        with self._lock:
            if at > self._lump_at:
                self._lump_at, self._lump_left = at + LUMP_MS, LUMP
            elif not self._lump_left:
                self._lump_at, self._lump_left = self._lump_at + LUMP_MS, LUMP
            self._lump_left -= 1
            return self._lump_at

    def _release_waiting(self, now: int) -> None:
        ready: list[Entry] = []
        with self._lock:
            while self._waiting and self._waiting[0][0] <= now:
                ready.append(heapq.heappop(self._waiting)[2])
        if ready:
            self._start(ready)

    def _start(self, ready: list[Entry]) -> None:
        """Hand over entries that are due and checked; those that may be killing workers run alone."""
        if any(map(self._finisher.behind, ready)):
            at = self._clock.now_ms() + RETRY_MS
            self._finisher.put_away((entry, at) for entry in ready if self._finisher.behind(entry))
            ready = [entry for entry in ready if not self._finisher.behind(entry)]
        alone = [entry for entry in ready if self.quarantine.takes(entry.row)]
        if alone:
            self.quarantine.admit(alone)
            ready = [entry for entry in ready if not self.quarantine.takes(entry.row)]
        self.dispatcher.put(ready)

    # --- lost replies

    def _settle_lost_replies(self, now: int) -> None:
        """Adopt what stands under our claim and is not held: a prepare took it whose reply never came.

        Only this thread can: it has no prepare out. Each is kept alive first, since it may be old. What
        stands in a slot that we no longer have goes back: nobody else would, but for its time-out, which
        costs a try.
        """
        with self._lock:
            let_go, self._let_go = self._let_go, set()
            self._settling = True
        for slot, claim in let_go:
            heapq.heappush(self._reconcile, (now, slot, claim))
        claims: dict[Slot, set[int]] = {}
        while self._reconcile and self._reconcile[0][0] <= now:
            _, slot, claim = heapq.heappop(self._reconcile)
            claims.setdefault(slot, set()).add(claim)
        if claims:
            self._adopt(claims, now)
        self._settling = False

    def _adopt(self, claims: Mapping[Slot, set[int]], now: int) -> None:
        """Hold, or give back, what stands under these claim numbers and is not held."""
        results = self._queues.expired(
            [ExpiredRequest(slot, NO_TIMEOUT, sorted(numbers)) for slot, numbers in claims.items()]
        )
        found: list[Entry] = []
        again: list[Slot] = []
        for slot, result in results.items():
            if isinstance(result, IndexUnavailable):
                again.append(slot)
                continue
            mine = [
                (job_id, fence_of(score)) for job_id, score in result if self._inflight.get(job_id) is None
            ]
            kept = self._clock.monotonic()
            # Held before it is seen to stand, not after it: a move that was under way may end in between.
            held = self._hold(slot, mine, now, kept)
            if not held:
                continue
            asked = [(entry.job_id, entry.fence) for entry in held]
            standing = self._queues.extend({slot: asked})[slot]  # [rule: adopted-alive]
            if isinstance(standing, IndexUnavailable):
                again.append(slot)
                standing = [False] * len(held)
            self._inflight.drop(entry for entry, stands in zip(held, standing, strict=True) if not stands)
            found += [entry for entry, stands in zip(held, standing, strict=True) if stands]
        for slot in again:
            for claim in claims[slot]:
                heapq.heappush(self._reconcile, (now + RETRY_MS, slot, claim))
        if not found:
            return
        log.info("entries_adopted", tasks=len(found))
        self._take_over(found)


class _Asked(NamedTuple):
    """A prepare that was sent: ``at`` is the monotonic time from before that, ``slots`` those it was for."""

    at: float
    slots: dict[Slot, OwnedSlot]
