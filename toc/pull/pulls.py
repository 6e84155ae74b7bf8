"""Pull consumers: the use case behind every door that hands tasks out.

    waiting ── pull ──▶ leased ── ack, also late ──▶ processed
       ▲                  │
       ├── nack ──────────┤  or dead, by the last try
       └── end of ttr ────┘  redelivered; dead, if it was the last try

Any number of processes may do this beside each other. A call never blocks the event loop: threads talk to the
servers, and all calls in flight share their round trips.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from toc.failpoint import failpoint
from toc.model.clock import from_ms
from toc.model.errors import NotPulled, TocError, UnreadableTask
from toc.model.pull import AckOutcome, LeaseOutcome, PullLease
from toc.model.task import TaskStatus
from toc.model.topic import Delivery, Slot, Topic
from toc.model.verdict import Nack, after_nack
from toc.observe.holdups import Holdups
from toc.observe.log import get_logger
from toc.observe.metrics import TRIES
from toc.pull.handed_out import NO_FENCE, Candidate, HandedOut, TtrOf
from toc.pull.handout import EndedLease, HandOuts, Mover
from toc.pull.taker import Taker
from toc.pull.waiting_pulls import LAST_SECONDS, WaitingPull, WaitingPulls
from toc.sdk.batcher import APART, Sender, Settle, ask_each, not_answered, one_each
from toc.sdk.client import TimeoutCenter
from toc.store.records.cluster import episode_writer

log = get_logger(__name__)

MAX_TASKS = 100
"""Most tasks of one pull."""
MAX_WAIT_SECONDS = 60.0
MAX_TOPICS = 100
DEFAULT_TTR_SECONDS = 60.0
HASTY_SECONDS = 1.5
"""How long a pull that does not wait may take to learn that nothing is due."""
STOP_SECONDS = 5.0

LEASE_BYTES = 100
"""Of a lease in a statement, about."""


class NackWish(NamedTuple):
    """How a consumer gives a task back. ``delay_ms`` None: the topic's backoff."""

    delay_ms: int | None
    dead: bool
    error: str


class LeaseCall(NamedTuple):
    """One lease, and what is asked about it beside the verb: of an extend the ttr (ms)."""

    lease: PullLease
    wish: NackWish | int | None = None


class Done(NamedTuple):
    """What came of leases, by job_id, and those of them that have ended."""

    outcomes: Mapping[int, Any] = {}
    failed: Mapping[int, TocError] = {}
    ends: Iterable[EndedLease] = ()


class LeaseBatches:
    """Writes in batches what consumers do with their leases, and what the gateway writes about them.

    Calls in flight share round trips, for each server of the task table and verb by itself. Belongs to one
    event loop.
    """

    def __init__(self, center: TimeoutCenter, outs: HandOuts, mover: Mover, sender: Sender) -> None:
        self._store, self._catalog = center.store, center.catalog
        self._outs, self._mover = outs, mover
        verbs = {"ack": self._ack, "nack": self._nack, "extend": self._extend, "release": self._release}
        self._batchers = {
            verb: one_each(center, f"pull-{verb}", partial(self._send, do), not_answered, sender)
            for verb, do in verbs.items()
        }

    async def ask(self, verb: str, calls: Sequence[LeaseCall]) -> list[Any]:
        """Return what came of each: its outcome or a TocError."""
        batchers = self._batchers[verb]
        return await ask_each(
            [(batchers[self._store.server_of(one.lease.job_id)], one, LEASE_BYTES) for one in calls]
        )

    async def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        for some in self._batchers.values():
            for batcher in some:
                await batcher.close()

    def _send(
        self, do: Callable[[Mapping[int, LeaseCall]], Done], calls: Sequence[LeaseCall], answer: Settle
    ) -> None:
        # A statement takes each task once. Who asks about one again is answered by itself.
        first = {one.lease.job_id: one for one in reversed(calls)}
        done = do(first)
        found = {**done.outcomes, **done.failed}
        answer([found.get(one.lease.job_id) if first[one.lease.job_id] is one else APART for one in calls])
        self._mover.ended(done.ends)

    def _ack(self, calls: Mapping[int, LeaseCall]) -> Done:
        outcomes = self._store.pulls.ack(call.lease for call in calls.values())
        failpoint("pull.acked")
        by_it = AckOutcome.ACKED, AckOutcome.LATE
        self._count((calls[job_id].lease, "processed") for job_id, what in outcomes.items() if what in by_it)
        ends = [EndedLease(calls[job_id].lease, None) for job_id, what in outcomes.items() if what.ok]
        return Done(outcomes, outcomes.unanswered, ends)

    def _nack(self, calls: Mapping[int, LeaseCall]) -> Done:
        found = self._store.pulls.read(calls)
        items: list[tuple[PullLease, Nack]] = []
        for job_id, row in found.items():
            wish, topic = calls[job_id].wish, self._catalog.known_type(row.biz_type)
            if isinstance(wish, NackWish) and topic is not None:
                nack = after_nack(row, topic, delay_ms=wish.delay_ms, dead=wish.dead, error=wish.error)
                items.append((calls[job_id].lease, nack))
        done = self._store.pulls.nack(items)
        outcomes = dict.fromkeys(calls, LeaseOutcome.GONE)
        ends: list[EndedLease] = []
        for job_id, changed in done.items():
            if changed is not None:
                dead = changed.status == TaskStatus.DEAD
                outcomes[job_id] = LeaseOutcome.DEAD if dead else LeaseOutcome.DONE
                ends.append(EndedLease(calls[job_id].lease, changed))
        words = {LeaseOutcome.DEAD: "dead", LeaseOutcome.DONE: "failed"}
        self._count((end.lease, words[outcomes[end.lease.job_id]]) for end in ends)
        return Done(outcomes, {**found.unanswered, **done.unanswered}, ends)

    def _count(self, ended: Iterable[tuple[PullLease, str]]) -> None:
        """Count what came of tries."""
        for (biz_type, outcome), tries in Counter((lease.biz_type, what) for lease, what in ended).items():
            if (topic := self._catalog.known_type(biz_type)) is not None:
                TRIES.of(topic.name, outcome).add(tries)

    def _extend(self, calls: Mapping[int, LeaseCall]) -> Done:
        items = []
        for lease, wish in calls.values():
            topic = self._catalog.known_type(lease.biz_type)
            if topic is not None and isinstance(wish, int):
                items.append((lease, wish, topic.max_runtime * 1000))
        # The entry stays where it is: when it comes due, its row says until when the lease lives.
        until = self._store.pulls.extend(items)
        return Done(until, until.unanswered)

    def _release(self, calls: Mapping[int, LeaseCall]) -> Done:
        self._outs.release(call.lease for call in calls.values())
        return Done()


class Pulls:
    """What pull consumers can do, for one event loop, on which it is made. Stop it.

    Threads start with the first call; if one of them dies, the process ends. ``lease_secret`` is the task
    table's (``store.identity``): it seals the texts of leases. ``sender`` is that of ``Batcher``.
    """

    def __init__(self, center: TimeoutCenter, lease_secret: bytes, sender: Sender = str) -> None:
        self._catalog, self._clock = center.catalog, center.clock
        self._waiting = WaitingPulls(asyncio.get_running_loop())
        self._secret = lease_secret
        holdups = Holdups(center.clock, center.settings.host)
        self._taker = Taker(center, self._waiting, holdups, lease_secret)
        self._episodes = episode_writer(center.store.episodes, holdups)
        self._batches = LeaseBatches(center, self._taker.outs, self._taker.mover, sender)
        self._releases: set[asyncio.Task[Any]] = set()
        self._started = False

    async def pull(
        self,
        topics: Sequence[str],
        *,
        most: int = 1,
        wait: float = 0.0,
        ttr: float | TtrOf = DEFAULT_TTR_SECONDS,
    ) -> list[HandedOut]:
        """Hand out up to ``most`` due tasks of the first of these topics that has any.

        Waits up to ``wait`` seconds for the first to come due; returns [] if none did, or if this process
        leaves. For ``ttr`` seconds (at most the topic's max_runtime) nobody else gets these tasks; a function
        returns the ttr of each row in ms. Their tries are charged. The caller bounds all of these, and must
        ``release`` the tasks if its client is known to be gone before the answer is sent. A cancelled call
        releases what it was given.

        Raises UnknownTopic, NotPulled, or StoreUnavailable if a topic cannot be looked up.
        """
        names = list(dict.fromkeys(topics))
        for name in names:
            await self._pulled(name)
        self._start()
        pull = WaitingPull(names, most, ttr if callable(ttr) else round(ttr * 1000), hasty=wait == 0)
        if not self._waiting.enter(pull):
            return []
        self._taker.wake()
        timer = self._waiting.loop.call_later(wait or HASTY_SECONDS, self._time_up, pull)
        return await self._got(pull, timer)

    async def take(self, job_id: int, slot: Slot, *, ttr: float) -> list[HandedOut]:
        """Hand out this one task, in whatever order, if it is due and nobody has it; else return [].

        As with ``pull``, the caller releases it if its client is gone. Raises UnknownTopic, NotPulled or
        StoreUnavailable.
        """
        topic = await self._pulled(slot.topic)
        if topic.paused or self._waiting.shut:
            return []
        self._start()
        pull = WaitingPull([topic.name], 1, round(ttr * 1000), hasty=True)
        pull.closed, pull.in_transit = True, 1
        self._taker.hand_out(Candidate(job_id, slot, NO_FENCE, topic, self._clock.now_ms()), pull)
        timer = self._waiting.loop.call_later(LAST_SECONDS, pull.end)
        return await self._got(pull, timer)

    async def _got(self, pull: WaitingPull, timer: asyncio.TimerHandle) -> list[HandedOut]:
        """Wait until a pull has ended. Returns what it was given; releases that if the call is broken off."""
        try:
            await pull.done
        except BaseException:
            self.release(self._waiting.leave(pull))
            raise
        finally:
            timer.cancel()
        return sorted(self._waiting.leave(pull), key=lambda one: one.order)

    def _time_up(self, pull: WaitingPull) -> None:
        self._waiting.close(pull)
        pull.progress()
        self._waiting.loop.call_later(LAST_SECONDS, pull.end)

    async def ack(self, leases: Iterable[PullLease]) -> list[AckOutcome | TocError]:
        """Mark tasks as processed, also after their lease has ended. Returns what came of each, in order.

        Their topics must be known here, and be pulled. An error, such as StoreUnavailable or Busy, concerns
        its lease alone; repeating is safe.
        """
        return await self._ask(leases, "ack")

    async def nack(
        self, leases: Iterable[PullLease], *, delay: float | None = None, dead: bool = False, error: str = ""
    ) -> list[LeaseOutcome | TocError]:
        """Give tasks back as failed, due again after ``delay`` seconds (default: the topic's backoff).

        ``dead``: no further try. Needs living leases. Returns what came of each, in order.
        """
        delay_ms = None if delay is None else round(delay * 1000)
        wish = NackWish(delay_ms, dead, error or "its consumer gave it back")
        return await self._ask(leases, "nack", wish)

    async def extend(
        self, leases: Iterable[PullLease], *, ttr: float
    ) -> list[datetime | LeaseOutcome | TocError]:
        """Let living leases last ``ttr`` seconds from now, never less than they do, and in all at most the
        topic's max_runtime since the hand-out.

        Returns, in order, until when each lives (aware UTC), or GONE.
        """
        found = await self._ask(leases, "extend", round(ttr * 1000))
        return [
            one if isinstance(one, TocError) else from_ms(one) if isinstance(one, int) else LeaseOutcome.GONE
            for one in found
        ]

    def release(self, delivered: Iterable[HandedOut]) -> None:
        """Take back, uncharged and due at once, tasks of an answer of which no byte was sent. Does not wait.

        If a part was sent, the client may have read it: leave the tasks to the end of ttr.
        """
        if calls := [LeaseCall(one.key) for one in delivered]:
            release = self._waiting.loop.create_task(self._batches.ask("release", calls))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def bury(self, delivered: Iterable[HandedOut], why: str) -> None:
        """End tasks as dead that no consumer can be shown, each unless its lease has ended."""
        for one in delivered:
            error = str(UnreadableTask(one.key.job_id, why))
            if await self.nack([one.key], dead=True, error=error) == [LeaseOutcome.DEAD]:
                log.error("task_unreadable", job_id=one.key.job_id, error=error)

    def parse(self, text: object) -> PullLease:
        """Return the lease of a text. Raises InvalidLease."""
        return PullLease.parse(text, self._secret)

    def close(self) -> None:
        """Answer all waiting pulls, with nothing. Later pulls are answered at once."""
        self._waiting.close_all()

    async def stop(self) -> None:
        """Close, write what was asked, and end the threads. May be called twice, or never started."""
        self.close()
        if self._started:
            self._started = False
            await asyncio.to_thread(self._taker.stop, STOP_SECONDS)
            await asyncio.to_thread(self._episodes.stop, STOP_SECONDS)
        await asyncio.gather(*self._releases)
        await self._batches.close()
        # last: the others tell it how hand-outs and leases ended
        await asyncio.to_thread(self._taker.mover.stop, STOP_SECONDS)

    # --- inside

    def _start(self) -> None:
        if not self._started and not self._waiting.shut:
            self._episodes.start()  # first, as it may be started again if the other fails
            self._taker.start()
            self._started = True

    async def _pulled(self, name: str) -> Topic:
        topic = self._catalog.known().get(name)
        if topic is None:
            topic = await asyncio.to_thread(self._catalog.get, name)
        if topic.delivery is not Delivery.PULL:
            raise NotPulled(f"tasks of topic {name!r} are not pulled: its delivery is {topic.delivery}")
        return topic

    async def _ask(
        self, leases: Iterable[PullLease], verb: str, wish: NackWish | int | None = None
    ) -> list[Any]:
        self._start()
        return await self._batches.ask(verb, [LeaseCall(lease, wish) for lease in leases])
