"""Hand-out: from prepared entries to tasks that consumers have, a thread for each server of the task table.

One round trip hands out a batch on its rows and reads them. Consumers are answered at once; then the mover
moves each entry where its row says. Only the row decides: an entry that another gateway has taken meanwhile
is refused by the row, and a gateway that dies leaves entries that the slot's worker gives back.

The mover has a thread of its own, so that no consumer waits for Redis. What a hand-out means for its entry is
put there before its consumer is told, so what the answer means comes after it. All that comes while Redis is
asked goes with the next calls. An ack by another gateway, or a cancel, may overtake a move. Then the entry
stays until ttr would have ended; then its row, which has ended, drops it.
"""

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from toc.failpoint import failpoint
from toc.loop import Loop
from toc.model import verdict
from toc.model.errors import BodyGone, UnreadableTask
from toc.model.lateness import LATE_MS, Cause, LateStart, Span, clock_time, stored_late
from toc.model.pull import NONCE_BYTES, PullLease, PullRow
from toc.model.scores import unread_score
from toc.model.task import Body, Content, TaskStatus
from toc.model.topic import Slot
from toc.observe.holdups import Holdups
from toc.observe.log import get_logger
from toc.observe.metrics import HANDED_OUT
from toc.pull.handed_out import NO_FENCE, Candidate, HandedOut
from toc.pull.waiting_pulls import WaitingPull, WaitingPulls
from toc.sdk.client import TimeoutCenter
from toc.store.servers.shards import Answers
from toc.store.tasks.pulls import HandOut

log = get_logger(__name__)

AWAY_MS = 1000
"""Pause before tasks of a server that does not answer are taken again."""
AGAIN_MS = 20
"""Pause before an entry that its row calls due, but that was not handed out, is taken again."""
T = TypeVar("T")
IDLE_SECONDS = 60.0
STUCK_SECONDS = 0.25
"""A thread whose batch takes longer is not waited for: its server hangs."""
TOGETHER = 5000
"""Most moves that are made at once."""
TRANSITIONS = "rollback", "commit", "add", "restore_dead", "forget"
"""Of Queues, in the order in which a batch makes them: what was taken first, then what its answers mean."""


class BatchThread(Loop, Generic[T]):
    """A thread that handles what was put while it was busy, everything at once.

    There is one for each server of the task table and kind of work, so a server that hangs holds up nothing
    else.
    """

    def __init__(self, name: str, handle: Callable[[list[T]], None], most: int) -> None:
        super().__init__(name, self._handle_next)
        self._handle = handle
        self._most = most
        self._items: deque[T] = deque()

    def put(self, items: Iterable[T]) -> None:
        """Have these handled, unless the thread has been stopped."""
        self._items.extend(items)
        self.wake()

    @property
    def busy(self) -> bool:
        """Whether it handles something, or is about to."""
        return bool(self._items) or self.busy_seconds(time.monotonic()) > 0

    @property
    def stuck(self) -> bool:
        """Whether its server takes too long to answer."""
        return self.busy_seconds(time.monotonic()) > STUCK_SECONDS

    def stop(self, timeout: float | None = None) -> None:
        """Handle what was put before, and end. May be called twice, or never started."""
        super().stop(timeout)
        while self._items and not (self._thread and self._thread.is_alive()):
            self._handle_next()

    def _handle_next(self) -> float:
        batch = [self._items.popleft() for _ in range(min(len(self._items), self._most))]
        if batch:
            self._handle(batch)
        return 0.0 if self._items else IDLE_SECONDS


class EndedLease(NamedTuple):
    """A lease that has ended, and its row as it is then; None if its task is processed."""

    lease: PullLease
    row: PullRow | None


class Moves(list[tuple[str, Slot, Any]]):
    """Moves of entries: a transition, the slot, and what the transition takes of an entry."""

    def drop(self, entry: Candidate) -> None:
        """The task of a prepared entry has ended, or waits in its row alone."""
        if entry.fence != NO_FENCE:
            self.append(("commit", entry.slot, (entry.job_id, entry.fence)))

    def back(self, entry: Candidate, row: PullRow, due: int, now: int) -> None:
        """Its task is due at ``due`` (ms)."""
        if verdict.beyond_horizon(entry.topic, due, now):
            self.drop(entry)
        elif entry.fence != NO_FENCE:
            score = verdict.entry_score(entry.topic, due, row.attempts)
            self.append(("rollback", entry.slot, (entry.job_id, entry.fence, score)))


class Mover:
    """Makes the moves in order. Thread-safe."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._queues, self._catalog, self._clock = center.queues, center.catalog, center.clock
        self._thread = BatchThread[tuple[str, Slot, Any]]("pull-index", self._run, TOGETHER)
        self.start = self._thread.start
        self.stop = self._thread.stop
        """Make what was asked for, and end. Who finds an entry that was not moved moves it by its row."""
        self.move = self._thread.put
        """Have moves made. If one fails, the next that finds the entry gives it back and reads its row."""

    def ended(self, ends: Iterable[EndedLease]) -> None:
        """Tell the index how leases ended."""
        moves, now = Moves(), self._clock.now_ms()
        for lease, row in ends:
            topic = self._catalog.known_type(lease.biz_type)
            if topic is None:
                continue
            slot = Slot(topic.name, lease.slot)
            if row is None:  # what stays is dropped when it comes due: its row has ended
                moves.append(("forget", slot, lease.job_id))
            elif row.status == TaskStatus.DEAD:
                moves.append(("restore_dead", slot, (row.job_id, row.next_time)))
            elif not verdict.beyond_horizon(topic, row.next_time, now):
                score = verdict.entry_score(topic, row.next_time, row.attempts)
                moves.append(("add", slot, (row.job_id, score)))
        self.move(moves)

    def _run(self, moves: list[tuple[str, Slot, Any]]) -> None:
        found: dict[str, dict[Slot, list[Any]]] = {}
        for transition, slot, entry in moves:
            found.setdefault(transition, {}).setdefault(slot, []).append(entry)
        for transition in TRANSITIONS:
            if transition in found:
                getattr(self._queues, transition)(found[transition])


class Assigned(NamedTuple):
    """An entry on its way to a consumer."""

    entry: Candidate
    pull: WaitingPull


class HandOuts:
    """Hands out batches. Each server's thread calls ``run`` with that server's entries."""

    def __init__(
        self,
        center: TimeoutCenter,
        waiting: WaitingPulls,
        mover: Mover,
        holdups: Holdups,
        lease_secret: bytes,
        woken: Callable[[], None],
    ) -> None:
        self._store, self._queues = center.store, center.queues
        self._catalog, self._clock = center.catalog, center.clock
        self._waiting = waiting
        self._mover = mover
        self._holdups = holdups
        self._secret = lease_secret
        self._woken = woken
        """Called when pulls that were given entries in vain wait again."""

    def run(self, batch: Sequence[Assigned]) -> None:
        """Hand out tasks of one server."""
        settled = Counter(pull for _, pull in batch)
        handed: dict[WaitingPull, list[HandedOut]] = {pull: [] for pull in settled}
        wanted: dict[int, Assigned] = {}
        back: list[Candidate] = []
        for one in batch:
            paused = one.entry.topic.name in self._catalog.paused
            if not one.pull.over and not paused and one.entry.job_id not in wanted:
                wanted[one.entry.job_id] = one
            else:  # its client has left, or it was paused meanwhile: nothing is charged
                back.append(one.entry)
        items = _items(wanted, self._ttrs(wanted))
        now = self._clock.now_ms()
        rows = self._store.pulls.hand_out(items, now) if items else Answers[PullRow]()
        failpoint("pull.handed-out")
        moves, unreadable = self._deliver(items, wanted, rows, handed)
        # before a consumer is told: what its answer means for the index comes after it
        self._mover.move(moves)
        lost = self._waiting.hand_over(settled, handed)
        failpoint("pull.answered")
        if not all(handed.values()):
            self._woken()
        self._bury(unreadable)
        self._mover.move(self._refusals(items, wanted, rows))
        self.give_back(back)
        self.release(one.key for one in lost)
        self._note_late(one for delivered in handed.values() for one in delivered)

    def _deliver(
        self,
        items: Sequence[HandOut],
        wanted: Mapping[int, Assigned],
        rows: Mapping[int, PullRow],
        handed: dict[WaitingPull, list[HandedOut]],
    ) -> tuple[Moves, list[tuple[PullLease, verdict.Nack]]]:
        """Add what was handed out to what its pulls get, and count it. Returns the moves of its entries to
        the ends of their ttr, and what cannot be read."""
        moves = Moves()
        unreadable: list[tuple[PullLease, verdict.Nack]] = []
        counts: Counter[str] = Counter()
        now = self._clock.now_ms()
        for item in items:
            entry, pull = wanted[item.job_id]
            row = rows.get(item.job_id)
            if row is not None and row.nonce == item.nonce:
                moves.back(entry, row, row.next_time, now)
                key = PullLease(row.job_id, row.version, row.biz_type, entry.slot.number, item.nonce)
                try:
                    handed[pull].append(self._delivered(row, entry, key))
                    counts[entry.topic.name] += 1
                except UnreadableTask as exc:
                    unreadable.append((key, verdict.Nack(row, True, 0, str(exc))))
        for topic, tasks in counts.items():
            HANDED_OUT.of(topic).add(tasks)
        return moves, unreadable

    def _note_late(self, delivered: Iterable[HandedOut]) -> None:
        """Write why tasks were handed out late."""
        now, wall = self._clock.now_ms(), self._clock.now_ms() - round(time.monotonic() * 1000)
        lines: dict[int, tuple[int, str]] = {}
        for one in delivered:
            row, name = one.row, one.task.topic
            if now - row.action_time <= LATE_MS:
                continue
            late = LateStart(row.version, now, now, ())
            if row.attempts == 1:  # of a later try, when it was due is not known any more
                late = late._replace(due=row.action_time)
                if self._holdups.may_write():
                    late = late._replace(spans=self._spans(row, one.key.slot, name, now, wall))
                self._holdups.count(name, [(row.job_id, late)])
            if late.spans or row.attempts > 1:
                lines[row.job_id] = row.version, late.line()
        if lines:
            self._store.pulls.note_late(lines)

    def _spans(self, row: PullRow, slot: int, name: str, now: int, wall: int) -> list[Span]:
        """Return what fills the time until a task is handed out for the first time (ms)."""
        due = row.action_time
        asked = round(self._waiting.asked_since(name) * 1000) + wall
        spans = [Span(Cause.NO_CONSUMER, due, asked, f"until {clock_time(asked)} UTC")] if asked > due else []
        topic = self._catalog.known().get(name)
        if topic is not None:
            spans += self._holdups.of_topic(topic, due, now)
        spans += stored_late(row.job_id, row.version, due)
        places = self._store.server_of(row.job_id), Slot(name, slot)
        return self._holdups.fill(due, now, places, spans, Span(Cause.BACKLOG, 0, 0, "consumers were busy"))

    def _bury(self, unreadable: Sequence[tuple[PullLease, verdict.Nack]]) -> None:
        """End tasks that were handed out and that no consumer can be shown."""
        if unreadable:
            for lease, nack in unreadable:
                log.error("task_unreadable", job_id=lease.job_id, error=nack.error)
            buried = self._store.pulls.nack(unreadable)
            self._mover.ended(
                EndedLease(lease, row) for lease, _ in unreadable if (row := buried.get(lease.job_id))
            )

    def _delivered(self, row: PullRow, entry: Candidate, key: PullLease) -> HandedOut:
        bodies = self._store.bodies

        def read() -> Content:
            content = bodies.one(row.job_id, row.version)
            if content is None:
                raise BodyGone(f"the body of task {row.job_id} is gone: the task was purged or replaced")
            return content

        body = None if row.body_length < 0 else Body(row.body_length, read=read)
        task = row.to_task(entry.topic.name, body)
        last = verdict.no_try_left(row, entry.topic, row.attempts)
        return HandedOut(task, row, key, last, self._secret)

    def _ttrs(self, wanted: dict[int, Assigned]) -> dict[int, int]:
        """Return the ttr (ms) of each task to hand out. Takes out and gives back those whose rows tell it but
        cannot be read now."""
        asked = [job_id for job_id, (_, pull) in wanted.items() if callable(pull.ttr)]
        rows: Answers[PullRow] = self._store.pulls.read(asked) if asked else Answers()
        self.put_away([wanted.pop(job_id).entry for job_id in rows.unanswered])
        ttrs: dict[int, int] = {}
        for job_id, (_, pull) in wanted.items():
            if isinstance(pull.ttr, int):
                ttrs[job_id] = pull.ttr
            else:  # without a row there is nothing to hand out
                ttrs[job_id] = pull.ttr(rows[job_id]) if job_id in rows else 0
        return ttrs

    def _refusals(
        self, items: Sequence[HandOut], wanted: Mapping[int, Assigned], rows: Answers[PullRow]
    ) -> Moves:
        """Return the moves of each entry that was not handed out to where its row says.

        The entry of a dead task, or of one without a row, stays prepared: who reclaims what gateways have
        left buries or removes it.
        """
        unanswered = rows.unanswered
        now = self._clock.now_ms()
        for job_id, error in unanswered.items():
            server = self._store.server_of(job_id)
            self._holdups.note(Cause.DATABASE, server, now, now + AWAY_MS, str(error))
        if unanswered:
            log.warning("not_handed_out", tasks=len(unanswered), error=str(next(iter(unanswered.values()))))
            self.put_away(wanted[job_id].entry for job_id in unanswered)
        moves = Moves()
        for item in items:
            row, entry = rows.get(item.job_id), wanted[item.job_id].entry
            if row is not None and row.nonce != item.nonce:  # [rule: pulled-by-row]
                what = verdict.unpulled(row, entry.topic)
                if what is verdict.Unpulled.NOT_DUE:
                    ahead = row.next_time - row.now  # by the row's clock; Redis's may be ahead of it
                    moves.back(entry, row, max(row.next_time, entry.taken + ahead), now)
                elif what is verdict.Unpulled.AGAIN:
                    moves.back(entry, row, max(entry.taken, now) + AGAIN_MS, now)
                elif row.status != TaskStatus.DEAD:  # what is over is the sweep's
                    moves.drop(entry)
        return moves

    def put_away(self, entries: Iterable[Candidate]) -> None:
        """Give back entries whose servers do not answer, for a while."""
        self.give_back(entries, self._clock.now_ms() + AWAY_MS)

    def give_back(self, entries: Iterable[Candidate], at: int | None = None) -> None:
        """Give back entries that were not handed out, due at once or ``at`` (ms). Nothing is charged."""
        backs: dict[Slot, list[tuple[int, float, float]]] = {}
        for entry in entries:
            if entry.fence != NO_FENCE:
                due = entry.taken if at is None else at
                score = unread_score(entry.fence, due, entry.topic.retries)
                backs.setdefault(entry.slot, []).append((entry.job_id, entry.fence, score))
        if backs:
            self._queues.rollback(backs)  # if one fails, the next gateway that finds it gives it back

    def release(self, leases: Iterable[PullLease]) -> None:
        """Take back tasks that no consumer has seen. If that fails, they come again after their ttr."""
        by_id = {lease.job_id: lease for lease in leases}
        if by_id:
            rows = self._store.pulls.release(by_id.values())
            self._mover.ended(
                EndedLease(by_id[row.job_id], row)
                for row in rows.values()
                if row is not None and row.status == TaskStatus.PENDING and not row.living
            )


def _items(wanted: Mapping[int, Assigned], ttrs: Mapping[int, int]) -> list[HandOut]:
    """The tasks that the store is asked to hand out, each with a nonce."""
    drawn = secrets.token_bytes(NONCE_BYTES * len(wanted))  # at once: each draw is a call of the kernel
    return [
        HandOut(
            job_id,
            entry.topic.biz_type,
            entry.topic.retries,
            min(ttrs[job_id], entry.topic.max_runtime * 1000),
            drawn[NONCE_BYTES * index : NONCE_BYTES * (index + 1)],
        )
        for index, (job_id, (entry, _)) in enumerate(wanted.items())
    ]
