"""The taker: sleeps until a task is due that a waiting pull wants, and prepares it.

No gateway owns the slots of a pulled topic. Each gateway looks at all slots of the topics that its own pulls
wait for, and takes no more than they want. A gateway without such pulls takes nothing. If two gateways ask
for one slot, the script decides; if two hold one task, the row decides.

So claim numbers mean nothing here, and each process draws one at random. An entry normally stays prepared for
some milliseconds. One that stays longer was left by a gateway that died or is paused: the worker that owns
the slot gives it back (``worker/reclaim``), and the row judges that gateway's hand-out.

Where Redis does not answer, or there is no index, due rows are read instead.
"""

import random
from collections.abc import Mapping, Sequence

from toc.failpoint import failpoint
from toc.index.inbox import Inbox
from toc.index.messages import Prepared, PrepareRequest
from toc.loop import Loop, watched_thread
from toc.model.errors import IndexUnavailable
from toc.model.lateness import Cause
from toc.model.scores import CLAIMS
from toc.model.topic import Delivery, Slot, Topic
from toc.observe.holdups import Holdups
from toc.observe.log import get_logger
from toc.pull.due_rows import DueRows
from toc.pull.due_times import NEVER, UNKNOWN, DueTimes
from toc.pull.handed_out import Candidate
from toc.pull.handout import Assigned, BatchThread, HandOuts, Mover
from toc.pull.waiting_pulls import TAKE_LIMIT, WaitingPull, WaitingPulls
from toc.sdk.client import TimeoutCenter

log = get_logger(__name__)

IDLE_SECONDS = 60.0
RETRY_MS = 250
"""Pause before a slot is asked again whose node failed."""
PAUSED_MS = 1000
"""Pause before a slot of a topic that is paused, or is not pulled any more, is looked at again."""
PEEK_AGAIN_SECONDS = 1.0
"""How often slots are peeked at while pulls wait, for lost wake-ups."""
PEEK_SLOTS = 500
"""Most slots of one peek; the next follows after PEEK_SECONDS."""
PEEK_SECONDS = 0.05
LINGER_SECONDS = 30.0
"""How long the slots of a topic are watched after its last pull."""
ROWS_LINGER_SECONDS = 2.5
"""For how long after the last failure of a Redis node due rows are read as well."""
SURPLUS = 100
"""Least entries to take while a server of the task table does not answer: otherwise its tasks could be the
only ones taken, although those of other servers can be handed out."""


class Taker:
    """Two threads: ``take`` prepares what is due, ``watch`` finds what ``take`` may miss."""

    def __init__(
        self, center: TimeoutCenter, waiting: WaitingPulls, holdups: Holdups, lease_secret: bytes
    ) -> None:
        self._store, self._queues = center.store, center.queues
        self._catalog, self._clock = center.catalog, center.clock
        self._waiting, self._rows = waiting, DueRows(center)
        self._indexed = center.queues.present
        self._claim = random.randrange(CLAIMS)  # noqa: S311 - it fences nothing
        self._due_times: dict[str, DueTimes] = {}
        """Changed by ``take`` alone."""
        self._failing: dict[str, float] = {}
        """Topics of which a Redis node did not answer, with the time until which to read rows as well."""
        self._peeked_at = float("-inf")
        self._to_peek: list[Slot] = []
        by_server = self._store.tables_of_server()
        self._listener = self._queues.listener()
        # It returns when it was told to, and only then.
        self._listens = watched_thread("pull-wake", lambda: self._listener.run(self._woken), lambda: True)
        self.mover = Mover(center)
        """Stopped by its owner, after everything that may use it."""
        self._holdups = holdups
        self.outs = HandOuts(center, waiting, self.mover, holdups, lease_secret, self.wake)
        self._threads: list[BatchThread[Assigned]] = [
            BatchThread(f"pull-out-{number}", self.outs.run, TAKE_LIMIT * 2)
            for number in range(len(by_server))
        ]
        self._take_loop = Loop("pull-take", self.take)
        self._inbox = Inbox(self._take_loop.wake)
        self._watch_loop = Loop("pull-watch", self.watch)

    def start(self) -> None:
        """Start the threads; called again after an error, those that it did not start then."""
        self.mover.start()
        for thread in (*self._threads, self._take_loop, self._watch_loop):
            thread.start()
        if self._indexed:
            self._listens.start()

    def stop(self, seconds: float) -> None:
        """Take nothing more, hand out what was taken, and end."""
        self._listener.stop()
        for thread in (self._watch_loop, self._take_loop, *self._threads):
            thread.stop(seconds)
        if self._indexed:
            self._listens.join(seconds)

    def wake(self) -> None:
        """Pulls have come, or wait again."""
        (self._take_loop if self._indexed else self._watch_loop).wake()

    def _woken(self, slot: Slot | None, due: int | None) -> None:
        if slot is None or due is None:  # messages may have been missed
            self._peeked_at = float("-inf")
            self._watch_loop.wake()
        else:
            self._inbox.look_at(slot, due)

    # --- take

    def take(self) -> float:
        """One round. Returns the seconds until the next."""
        if not self._indexed:
            return IDLE_SECONDS
        now = self._clock.now_ms()
        for slot, at in self._inbox.take_due().items():
            if slot.topic in self._due_times:
                self._due_times[slot.topic].note(slot, at)
        names = self._waiting.topics()
        self._watch_topics(names)
        due: set[str] = set()
        requests: list[PrepareRequest] = []
        for name in names:
            topic, due_times = self._catalog.known().get(name), self._due_times.get(name)
            if topic is None or due_times is None or due_times.next_due() > now:
                continue
            if not _served(topic):
                for _, slot in due_times.take_due(now, len(due_times.due)):
                    due_times.note(slot, now + PAUSED_MS)
                continue
            due.add(name)
            if demand := self._waiting.demand(name):
                requests += self._requests(topic, due_times, demand, now)
        if requests:
            self._accept(self._queues.prepare(requests), due, now)
        self._waiting.close_hasty(self._empty_topics())
        return self._until_next()

    def _watch_topics(self, names: Sequence[str]) -> None:
        now, known = self._clock.monotonic(), self._catalog.known()
        changed = False
        for name in names:
            if name in known:
                if (due_times := self._due_times.get(name)) is None:
                    due_times = DueTimes()
                    self._due_times = {**self._due_times, name: due_times}
                    self._watch_loop.wake()
                due_times.wanted_at = now
                if len(due_times.due) != known[name].slot_amount:
                    due_times.set_slots(known[name].slots())
                    changed = True
        old = [name for name, one in self._due_times.items() if now - one.wanted_at > LINGER_SECONDS]
        if old:
            self._due_times = {name: one for name, one in self._due_times.items() if name not in old}
        if changed or old:
            self._listener.set_slots(slot for one in self._due_times.values() for slot in one.due)

    def _requests(self, topic: Topic, due_times: DueTimes, demand: int, now: int) -> list[PrepareRequest]:
        if unknown := due_times.take_due(UNKNOWN, PEEK_SLOTS):  # learn first what is due when
            return [PrepareRequest(slot, 0, topic.retries, self._claim) for _, slot in unknown]
        wanted = max(demand, SURPLUS) if any(map(self._hangs, range(len(self._threads)))) else demand
        requests = []
        slots = due_times.take_due(now, wanted)
        # Another process may have taken what was due first in a slot. So if one task is wanted, none is taken
        # that came due after what the next slot may have.
        latest = due_times.next_due() if wanted == 1 else NEVER
        part = max(1, wanted // max(len(slots), 1))
        for due, slot in slots:
            if wanted < 1:
                due_times.note(slot, due)
                continue
            limit = min(part, wanted, TAKE_LIMIT)
            wanted -= limit
            requests.append(PrepareRequest(slot, limit, topic.retries, self._claim, latest))
        return requests

    def _accept(self, answers: Mapping[Slot, Prepared | IndexUnavailable], due: set[str], asked: int) -> None:
        """Give what was taken to those who wait. ``asked``: when (ms) it was asked for."""
        now, known = self._clock.now_ms(), self._catalog.known()
        taken: dict[str, list[Candidate]] = {}
        for slot, result in answers.items():
            due_times = self._due_times.get(slot.topic)
            if isinstance(result, IndexUnavailable):
                self._fails(slot, result, asked)
                if due_times is not None:
                    due_times.note(slot, now + RETRY_MS)
                continue
            topic = known.get(slot.topic)
            if topic is None:  # deleted meanwhile: the next that finds them gives them back
                continue
            taken.setdefault(topic.name, []).extend(
                Candidate(job_id, slot, fence, topic, result.redis_now_ms) for job_id, fence in result.entries
            )
            if due_times is not None and (at := result.next_due) is not None:
                # What is due by our clock, but not yet by Redis's, is not asked for all the time.
                early = at <= now and at > result.redis_now_ms
                due_times.note(slot, now + at - result.redis_now_ms if early else at)
        if taken:
            failpoint("pull.taken")
        for name, entries in taken.items():
            left = self._dispatch(name, entries, due)
            if left:
                self.outs.give_back(left)
                for slot in {entry.slot for entry in left}:
                    self._inbox.look_at(slot, now)

    def _dispatch(self, topic: str, entries: Sequence[Candidate], due: set[str]) -> list[Candidate]:
        """Have entries handed out. Returns those that no pull wants."""
        free: list[Candidate] = []
        hung: list[Candidate] = []
        for entry in entries:
            (hung if self._hangs(self._store.server_of(entry.job_id)) else free).append(entry)
        if hung:
            self.outs.put_away(hung)
        pairs, left = self._waiting.assign(topic, free, due)
        by_thread: dict[BatchThread[Assigned], list[Assigned]] = {}
        for entry, pull in pairs:
            by_thread.setdefault(self._thread_of(entry), []).append(Assigned(entry, pull))
        for thread, some in by_thread.items():
            thread.put(some)
        return left

    def hand_out(self, entry: Candidate, pull: WaitingPull) -> None:
        """Have one task handed out to a pull that is in no queue."""
        self._thread_of(entry).put([Assigned(entry, pull)])

    def _hangs(self, server: int) -> bool:
        """Whether a database server, by number, takes too long to answer, or is known to be away."""
        return self._threads[server].stuck or self._store.away(server) is not None

    def _thread_of(self, entry: Candidate) -> BatchThread[Assigned]:
        return self._threads[self._store.server_of(entry.job_id)]

    def _empty_topics(self) -> set[str]:
        """The topics of which nothing is due, as far as Redis says."""
        now, at = self._clock.now_ms(), self._clock.monotonic()
        return {
            name
            for name, due_times in self._due_times.items()
            if due_times.next_due() > now and self._failing.get(name, 0.0) < at
        }

    def _until_next(self) -> float:
        if not self._inbox.empty:
            return 0.0
        watched = (self._due_times.get(name) for name in self._waiting.topics())
        first = min((one.next_due() for one in watched if one is not None), default=NEVER)
        return min(max(first / 1000 - self._clock.time(), 0.0), IDLE_SECONDS)

    # --- watch

    def watch(self) -> float:
        """Find what was missed; read the rows where Redis does not answer."""
        if not self._indexed:
            return self._read_rows(self._waiting.topics())
        names, now = set(self._waiting.topics()), self._clock.monotonic()
        # A pull that does not wait has mostly left before it is seen here.
        names |= {name for name, one in self._due_times.items() if now - one.wanted_at < PEEK_AGAIN_SECONDS}
        if not names:
            return PEEK_AGAIN_SECONDS
        if now - self._peeked_at >= PEEK_AGAIN_SECONDS or self._to_peek:
            self._take_loop.wake()  # topics may have other slots now
            self._peek()
        failing = [name for name, until in list(self._failing.items()) if until > now and name in names]
        if failing:
            return self._read_rows(failing)
        return PEEK_SECONDS if self._to_peek else PEEK_AGAIN_SECONDS

    def _fails(self, slot: Slot, error: IndexUnavailable, asked: int) -> None:
        """Redis did not answer about a slot, and is asked again soon. ``asked``: when (ms) it was asked."""
        now = self._clock.monotonic()
        self._holdups.note(Cause.REDIS, slot, asked, self._clock.now_ms() + RETRY_MS, str(error))
        if self._failing.get(slot.topic, 0.0) < now:
            log.warning("pulls_without_redis", topic=slot.topic, error=str(error))
            self._watch_loop.wake()
        self._failing[slot.topic] = now + ROWS_LINGER_SECONDS

    def _peek(self) -> None:
        """Peek at the next slots."""
        if not self._to_peek:
            self._peeked_at = self._clock.monotonic()
            self._to_peek = [slot for one in list(self._due_times.values()) for slot in list(one.due)]
        slots, self._to_peek = self._to_peek[:PEEK_SLOTS], self._to_peek[PEEK_SLOTS:]
        asked = self._clock.now_ms()
        for slot, peek in self._queues.peek(slots).items():
            if isinstance(peek, IndexUnavailable):
                self._fails(slot, peek, asked)
            elif peek.next_due is not None:
                self._inbox.look_at(slot, peek.next_due)

    def _read_rows(self, names: Sequence[str]) -> float:
        """Hand out due rows of these topics. Returns the seconds until the next read."""
        if not names:
            return IDLE_SECONDS
        hasty, known = self._waiting.hasty(), self._catalog.known()
        found = self._rows.read(known[name] for name in names if _served(known.get(name)))
        # What a thread is busy with may be among them: judged before any is given to a thread.
        busy = {thread for thread in self._threads if thread.busy}
        for name, entries in found.due.items():
            free = [entry for entry in entries if self._thread_of(entry) not in busy]
            self._dispatch(name, free, {name for name, some in found.due.items() if some})
        if found.whole and not self._indexed:
            self._waiting.close_hasty(set(names) - found.due.keys(), hasty)
        return found.seconds


def _served(topic: Topic | None) -> bool:
    return topic is not None and not topic.paused and topic.delivery is Delivery.PULL
