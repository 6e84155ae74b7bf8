"""Group commit for asyncio: what many callers on an event loop ask of one database server shares round trips.

Calls that come while a batch is under way wait and go together in the next one, so a batch is as large as the
load makes it, and no caller waits for a timer. A batch is one round trip and one commit; each caller gets its
own outcome.

    ask ─▶ waiting ─▶ batch under way (one per kind) ─▶ committed ─▶ answers ─▶ index
              ▲              │
              │              └── what cannot go with others goes by itself, beside the next batch
              └── refused at once while the server is away

A batch that its server does not answer in time no longer holds back the next one.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import chain, count
from typing import Any, Generic, TypeVar

from toc.failpoint import failpoint
from toc.model import errors
from toc.model.catalog import REFRESH_SECONDS
from toc.model.errors import Busy, InvalidInput, StoreUnavailable, TocError
from toc.model.task import NewTask, Put, Request, Submission, TaskRow
from toc.model.topic import Topic, check_topic_name
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.sdk.submission import check_job_id
from toc.store.servers.threads import Threads
from toc.store.tasks.plan import Stored

log = get_logger(__name__)

MAX_TOGETHER = 500
"""Most items of a batch."""
MAX_BYTES = 500_000
"""Most bytes of a batch, roughly. Escaped, that is still less than what any server accepts at once."""
MAX_WAITING = 10_000
"""Most items that wait for one server or are under way, if they are small."""
MAX_WAITING_BYTES = 64 << 20
"""Most bytes of them; a smaller item counts for as much as one of so many. A sender may have as many as he
leaves free, and has a first call in any case: he can keep out nobody else."""
LARGE_BYTES = 100_000
"""A larger item goes by itself: the others of its batch would wait for it."""
PATIENCE_SECONDS = 0.05
"""A batch that takes longer no longer holds back the next one."""
GIVE_UP_SECONDS = 10.0
"""After this time a caller gets an error. Its item may still be stored."""
UNDER_WAY = 4
"""Most batches under way, if the server is slow; also most items that go by themselves."""
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Settle = Callable[[Sequence[Any]], None]
"""Takes the outcome of each item of a batch: a result, a TocError, or APART."""
Send = Callable[[Sequence[Item], Settle], None]
GivenUp = Callable[[Item], TocError]
Away = Callable[[], StoreUnavailable | None]
"""Returns why the server is out of reach, None if it is not."""
Sender = Callable[[], str]
"""Returns in whose name the present call is made."""
APART = object()
"""The outcome of an item that must go by itself."""


@dataclass(slots=True, eq=False)
class _Pending(Generic[Item]):
    item: Item
    size: int
    answer: asyncio.Future[Any]
    """Done once its caller has an answer, or has left."""
    until: float
    """When its caller gets an error instead, by the clock of the event loop."""
    sender: str

    @property
    def counts(self) -> int:
        """The bytes that it counts for."""
        return max(self.size, MAX_WAITING_BYTES // MAX_WAITING)


_Line = list[tuple[int, int, _Pending[Item]]]
"""The waiting items, a heap by turn and then by the order in which they came. Calls take turns, an item of
each, so that a call with a thousand items does not hold up the calls after it."""


@dataclass(slots=True, eq=False)
class _Batch(Generic[Item]):
    asked: list[_Pending[Item]]
    alone: bool
    late: bool = False


class ServerBatcher(Generic[Item, Outcome]):
    """What many callers ask one server, in batches. For one event loop."""

    def __init__(
        self, away: Away, name: str, send: Send[Item], given_up: GivenUp[Item], sender: Sender
    ) -> None:
        """``send`` runs on a thread. It calls the Settle once, and may then do more, of which an error is
        logged. ``given_up`` returns the error of a caller who has waited too long."""
        self._send = send
        self._away, self._given_up, self._sender = away, given_up, sender
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(4 * UNDER_WAY, f"toc-{name}")
        self._waiting: _Line[Item] = []
        self._apart: _Line[Item] = []
        self._came = count()
        self._asked: set[_Pending[Item]] = set()
        """Who waits for an answer; perhaps some who have left."""
        self._counted = Counter[str]()
        """The bytes of what waits or is under way, by sender."""
        self._open: set[_Batch[Item]] = set()
        """Batches under way, not answered yet."""
        self._busy = 0
        """Threads at work: for batches under way, and for what follows the answers."""
        self._pumps = False
        """Whether ``_pump`` is called once those who can run now have asked."""
        self._watched = False
        """Whether ``_give_up`` is called at the time of whoever has waited longest."""

    async def ask(self, item: Item, size: int) -> Outcome:
        """Return the outcome for the item. Raises it if it is an error; Busy if too much waits already."""
        (answer,) = self.line_up([(item, size)])
        outcome = await answer
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def line_up(self, items: Iterable[tuple[Item, int]]) -> list[asyncio.Future[Outcome | TocError]]:
        """Let items wait, each given with its size. Returns their outcomes to come: for all StoreUnavailable
        or Busy, and at once, if these are refused."""
        until, sender = self._loop.time() + GIVE_UP_SECONDS, self._sender()
        asked = [_Pending(item, size, self._loop.create_future(), until, sender) for item, size in items]
        more, his = sum([one.counts for one in asked]), self._counted[sender]
        refused: TocError | None = None
        if (away := self._away()) is not None:
            refused = StoreUnavailable(str(away))
        elif his and more > MAX_WAITING_BYTES - self._counted.total() - his:
            refused = Busy("too many requests wait for a database server; try again in a moment")
        if refused is not None:
            for one in asked:
                one.answer.set_result(refused)
            return [one.answer for one in asked]
        self._counted[sender] += more
        self._asked.update(asked)
        self._add(self._waiting, (one for one in asked if one.size <= LARGE_BYTES))
        self._add(self._apart, (one for one in asked if one.size > LARGE_BYTES))
        self._pump_soon()
        if not self._watched:
            self._watched = True
            self._loop.call_at(until, self._give_up)
        return [one.answer for one in asked]

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not (self._waiting or self._apart or self._busy)

    async def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        while not self.idle:
            await asyncio.sleep(0.01)
        self._threads.close()

    # --- on the event loop

    def _pump_soon(self) -> None:
        """Start what can be started, after those who can run now, such as callers of the last batch, have
        asked: what they ask goes together."""
        if not self._pumps:
            self._pumps = True
            self._loop.call_soon(self._pump)

    def _add(self, line: _Line[Item], asked: Iterable[_Pending[Item]]) -> None:
        """Add items of a call, one to the next turn and to each that follows: no turn goes on for ever."""
        following = line[0][0] + 1 if line else 0
        for turn, one in enumerate(asked, following):
            heappush(line, (turn, next(self._came), one))

    def _next(self, line: _Line[Item]) -> _Pending[Item] | None:
        """Take the next item whose caller waits for it, if there is one."""
        while line:
            asked = heappop(line)[-1]
            if not asked.answer.done():
                return asked
            self._settle(asked, None)
        return None

    def _pump(self) -> None:
        """Start what can be started now."""
        self._pumps = False
        while sum(batch.alone for batch in self._open) < UNDER_WAY and (one := self._next(self._apart)):
            self._start([one], alone=True)
        while self._waiting and self._may_start():
            together: list[_Pending[Item]] = []
            size = 0
            while len(together) < MAX_TOGETHER and size < MAX_BYTES and (one := self._next(self._waiting)):
                together.append(one)
                size += one.size
            if together:
                self._start(together, alone=False)

    def _may_start(self) -> bool:
        late = [batch.late for batch in self._open if not batch.alone]
        return len(late) < UNDER_WAY and all(late)

    def _start(self, asked: list[_Pending[Item]], *, alone: bool) -> None:
        batch = _Batch(asked, alone)
        try:
            self._threads.run_detached(partial(self._run, batch))
        except Busy as exc:
            for one in asked:
                self._settle(one, exc)
            return
        self._busy += 1
        self._open.add(batch)
        self._loop.call_later(PATIENCE_SECONDS, self._be_late, batch)

    def _be_late(self, batch: _Batch[Item]) -> None:
        batch.late = True
        self._pump()

    def _take(self, batch: _Batch[Item], outcomes: Sequence[Any]) -> None:
        """Give the callers of a batch their outcomes, unless they have them."""
        if batch not in self._open:  # what followed its answer has failed
            log.warning(
                "batch_not_indexed", tasks=len(outcomes), error=str(outcomes[0]), exc_info=outcomes[0]
            )
            return
        self._open.discard(batch)
        for asked, outcome in zip(batch.asked, outcomes, strict=True):
            if outcome is APART and not batch.alone:
                self._add(self._apart, [asked])
            else:
                self._settle(asked, outcome)
        self._pump_soon()

    def _settle(self, asked: _Pending[Item], outcome: Any) -> None:
        self._counted[asked.sender] -= asked.counts
        if not self._counted[asked.sender]:
            del self._counted[asked.sender]
        self._asked.discard(asked)
        if not asked.answer.done():
            asked.answer.set_result(outcome)

    def _give_up(self) -> None:
        """Answer who has waited too long. What was not sent yet is not sent any more."""
        late = Busy("what came before holds up the database; try again in a moment")
        waiting, now = {one for *_, one in chain(self._waiting, self._apart)}, self._loop.time()
        for one in self._asked:
            if one.until <= now and not one.answer.done():
                one.answer.set_result(late if one in waiting else self._given_up(one.item))
        self._asked = {one for one in self._asked if not one.answer.done()}
        self._watched = bool(self._asked)
        if self._watched:
            self._loop.call_at(min(one.until for one in self._asked), self._give_up)

    def _ended(self) -> None:
        self._busy -= 1

    # --- on a thread

    def _run(self, batch: _Batch[Item]) -> None:
        answer = partial(self._on_loop, self._take, batch)
        try:
            self._send([asked.item for asked in batch.asked], answer)
        except BaseException as exc:
            answer([exc] * len(batch.asked))
        finally:
            self._on_loop(self._ended)

    def _on_loop(self, do: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it all callers
            self._loop.call_soon_threadsafe(do, *args)


def one_each(
    center: TimeoutCenter, name: str, send: Send[Item], given_up: GivenUp[Item], sender: Sender
) -> list[ServerBatcher[Item, Any]]:
    """Return a batcher for each server, by number."""
    away, servers = center.store.away, range(len(center.store.tables_of_server()))
    return [ServerBatcher(partial(away, one), f"{name}-{one}", send, given_up, sender) for one in servers]


async def ask_each(
    asked: Sequence[tuple[ServerBatcher[Item, Outcome], Item, int]],
) -> list[Outcome | TocError]:
    """Return the outcome of each item, given with its batcher and size."""
    by_batcher: dict[ServerBatcher[Item, Outcome], dict[int, tuple[Item, int]]] = {}
    for number, (batcher, item, size) in enumerate(asked):
        by_batcher.setdefault(batcher, {})[number] = item, size
    answers: dict[int, asyncio.Future[Outcome | TocError]] = {}
    for batcher, items in by_batcher.items():
        answers |= zip(items, batcher.line_up(items.values()), strict=True)
    return [await answers[number] for number in range(len(asked))]


def not_answered(_item: object) -> TocError:
    """Return the error of a caller who has waited too long for what may be asked again."""
    return StoreUnavailable("the database server does not answer")


class Batcher:
    """Submits and reads tasks for many coroutines of one event loop, on which it is made. Close it.

    Every call raises what TimeoutCenter's does, and Busy. ``sender``: by default all calls are one's.
    """

    def __init__(self, center: TimeoutCenter, sender: Sender = str) -> None:
        self.center = center
        self._loop = asyncio.get_running_loop()
        # What they hold does not hold this: dropped, it ends their threads at once.
        store, read = partial(_store, center), partial(_read, center)
        self._submits = one_each(
            center, "submit", store, lambda one: errors.SubmitUnknown(one.row.job_id), sender
        )
        self._reads = one_each(center, "read", read, not_answered, sender)
        self._batchers: list[ServerBatcher[Any, Any]] = [*self._submits, *self._reads]
        self._topics_thread = Threads(1, "toc-topics")
        self._reading_topics: Future[Any] | None = None
        self._keeping: asyncio.Task[None] | None = None

    def keep_topics(self) -> asyncio.Task[None]:
        """Keep the topics fresh, so that no call has to wait for them. Only ``close`` may end what is
        returned.

        The owner of the Batcher must watch it: nothing else notices if it ends earlier.
        """
        self._keeping = self._loop.create_task(self._keep_topics())
        return self._keeping

    # --- submit

    async def put(self, task: NewTask) -> Put:
        """Do as ``TimeoutCenter.put``. Its outcome is what the rows tell; the index is not waited for."""
        one = await self.checked(task)
        return one if isinstance(one, Put) else await self.store(one)

    async def store(self, one: Submission) -> Put:
        """Store what ``checked`` returned."""
        if self.center.tracing is None:
            return await self._batcher_of(one).ask(one, one.row.size)
        (outcome,) = await self.store_each([one])
        if not isinstance(outcome, Put):
            raise outcome
        return outcome

    async def store_each(self, tasks: Sequence[Submission]) -> list[Put | TocError]:
        """Store what ``checked`` returned, each for itself. Returns their outcomes."""
        began = time.time_ns()
        asked = [(self._batcher_of(one), one, one.row.size) for one in tasks]
        outcomes: list[Put | TocError] = await ask_each(asked)
        if (tracing := self.center.tracing) is not None:
            tracing.submitted(began, tasks, [one.job_id if isinstance(one, Put) else one for one in outcomes])
        return outcomes

    async def checked(
        self, task: NewTask, *, request: Request | None = None, topic: Topic | None = None
    ) -> Submission | Put:
        """Return what a task's submit writes, or the answer that its request got before.

        ``topic`` takes the place of the task's topic, for one that is yet to be created. Raises InvalidInput.
        """
        try:
            topic = topic or await self.topic(task.topic)
            check = partial(self.center._checked, task, request, topic)
            if isinstance(task.target, str) and not self.center.targets.serves(task.target, task.topic):
                return await asyncio.wrap_future(self._topics_thread.soon(check))
            return check()
        except InvalidInput as exc:
            if request is None and task.dedup_key is None:
                raise
            before = partial(self.center._before, task, request, exc, topic)
            return await asyncio.wrap_future(self.center.store.soon(before))

    async def claim(self, request: Request) -> None:
        """Claim the name of a request for many tasks, whose parts are stored next. Raises RequestReused."""
        store = self.center.store
        await asyncio.wrap_future(store.soon(partial(store.requests.claim, request)))

    # --- look up

    async def get(self, job_id: int) -> TaskRow | None:
        """Return the row of a task, or None."""
        batcher = self._reads[self.center.store.server_of(check_job_id(job_id))]
        row: TaskRow | None = await batcher.ask(job_id, 0)
        return row

    async def topic(self, name: str) -> Topic:
        """Return a topic. Raises InvalidTopic, UnknownTopic."""
        topic = self.center.catalog.known().get(name)
        if topic is None:
            check_topic_name(name)
            await self.read_topics()
            topic = self.center.catalog.known().get(name)
        if topic is None:
            raise errors.UnknownTopic(f"there is no topic {name!r}", name)
        return topic

    async def read_topics(self) -> None:
        """Read the topic table. Calls at the same time share the next read. Raises StoreUnavailable."""
        reading = self._reading_topics
        if reading is None or reading.running() or reading.done():  # it may have missed a new topic
            reading = self._reading_topics = self._topics_thread.soon(self.center.catalog.read_through)
        await asyncio.shield(asyncio.wrap_future(reading))

    # --- the end

    async def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        for batcher in self._batchers:
            await batcher.close()
        self._topics_thread.close()

    # --- inside

    async def _keep_topics(self) -> None:
        """Keep the view of the topics fresh, so that no call has to wait for it."""
        while True:
            with contextlib.suppress(StoreUnavailable, errors.SchemaBehind):
                await self.read_topics()
            await asyncio.sleep(REFRESH_SECONDS / 2)

    def _batcher_of(self, one: Submission) -> ServerBatcher[Submission, Put]:
        return self._submits[self.center.store.server_of(one.row.job_id)]


def _store(center: TimeoutCenter, tasks: Sequence[Submission], answer: Settle) -> None:
    outcomes = center.store.put_each(tasks)  # [rule: row-first]
    failpoint("batch.rows-stored")
    answer([APART if one is None else one.put if isinstance(one, Stored) else one for one in outcomes])
    center._changes.apply([one for one in outcomes if isinstance(one, Stored)])


def _read(center: TimeoutCenter, job_ids: Sequence[int], answer: Settle) -> None:
    found = center.store.read_each(job_ids)
    answer([found.unanswered.get(job_id) or found.get(job_id) for job_id in job_ids])
