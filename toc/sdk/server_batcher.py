"""Sends what many callers on an event loop ask of one database server in batches that share round trips.

Calls that come while a batch is under way wait and go together in the next one, so a batch is as large as the
load makes it, and no caller waits for a timer. A batch is one round trip and one commit; each caller gets its
own outcome.

    ask ─▶ waiting ─▶ batch under way (one per kind) ─▶ committed ─▶ answers ─▶ index
              ▲              │
              │              └── what cannot go with others goes by itself, beside the next batch
              └── refused at once while the server is away

A batch that its server does not answer in time no longer holds back the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from toc.model.errors import Busy, StoreUnavailable, TocError
from toc.store.servers.threads import Threads

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter

MAX_TOGETHER = 500
"""Most items of a batch."""
MAX_BYTES = 500_000
"""Most bytes of a batch, roughly. Escaped, that is still less than what any server accepts at once."""
MAX_WAITING = 5_000
"""Most items that wait for one server; further ones are refused."""
MAX_WAITING_BYTES = 32 << 20
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
APART = object()
"""The outcome of an item that must go by itself."""


@dataclass(slots=True, eq=False)
class _Pending(Generic[Item]):
    item: Item
    size: int
    answer: asyncio.Future[Any]
    """Done once its caller has an answer, or has left."""
    sent: bool = False


class _Line(Generic[Item]):
    """The waiting items. Calls take turns, an item of each, so that a call with a thousand items does not
    hold up the calls after it."""

    def __init__(self) -> None:
        self._calls: deque[deque[_Pending[Item]]] = deque()
        """What is left of each call, at least one item."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, asked: Iterable[_Pending[Item]]) -> None:
        """Add items of a call."""
        if call := deque(asked):
            self._calls.append(call)
            self._count += len(call)

    def next(self) -> _Pending[Item]:
        """Take the item whose turn it is, of a line that is not empty."""
        self._count -= 1
        call = self._calls.popleft()
        asked = call.popleft()
        if call:
            self._calls.append(call)
        return asked


@dataclass(slots=True, eq=False)
class _Batch(Generic[Item]):
    asked: list[_Pending[Item]]
    alone: bool
    late: bool = False
    timer: asyncio.TimerHandle | None = None


class ServerBatcher(Generic[Item, Outcome]):
    """What many callers ask one server, in batches. For one event loop."""

    def __init__(
        self, center: TimeoutCenter, server: int, name: str, send: Send[Item], given_up: GivenUp[Item]
    ) -> None:
        """``send`` runs on a thread. It calls the Settle once, and may then do more. ``given_up`` returns the
        error of a caller who has waited too long."""
        self._send = send
        self._given_up = given_up
        self._center, self._server = center, server
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(4 * UNDER_WAY, f"toc-{name}-{server}")
        self._waiting = _Line[Item]()
        self._apart = _Line[Item]()
        self._bytes = 0
        """Those that wait or are under way."""
        self._open: set[_Batch[Item]] = set()
        """Batches under way, not answered yet."""
        self._busy = 0
        """Threads at work: for batches under way, and for what follows the answers."""

    async def ask(self, item: Item, size: int) -> Outcome:
        """Return the outcome for the item. Raises it if it is an error; Busy if too much waits already."""
        (outcome,) = await self.ask_many([(item, size)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def ask_many(self, items: Sequence[tuple[Item, int]]) -> list[Outcome | TocError]:
        """Return the outcome of each item, given with its size. Raises StoreUnavailable or Busy for all."""
        self._check_room(len(items), sum(size for _, size in items))
        asked = [_Pending(item, size, self._loop.create_future()) for item, size in items]
        self._add(asked)
        timer = self._loop.call_later(GIVE_UP_SECONDS, self._give_up, asked)
        try:
            return [await one.answer for one in asked]
        finally:
            timer.cancel()

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not (self._waiting or self._apart or self._busy)

    def close(self) -> None:
        """End the threads after the work begun."""
        self._threads.close()

    # --- on the event loop

    def _check_room(self, items: int, size: int) -> None:
        if (error := self._center.store.away(self._server)) is not None:
            raise StoreUnavailable(str(error))
        waiting = len(self._waiting) + len(self._apart)
        if waiting and (waiting + items > MAX_WAITING or self._bytes + size > MAX_WAITING_BYTES):
            raise Busy("too many requests wait for a database server; try again in a moment")

    def _add(self, asked: Sequence[_Pending[Item]]) -> None:
        self._bytes += sum(one.size for one in asked)
        self._waiting.add(one for one in asked if one.size <= LARGE_BYTES)
        self._apart.add(one for one in asked if one.size > LARGE_BYTES)
        self._pump()

    def _next(self, line: _Line[Item]) -> _Pending[Item] | None:
        """Take the next item whose caller waits for it, if there is one."""
        while line:
            asked = line.next()
            if not asked.answer.done():
                return asked
            self._bytes -= asked.size
        return None

    def _pump(self) -> None:
        """Start what can be started now."""
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
        except RuntimeError:  # can't start new thread
            for one in asked:
                self._settle(one, Busy("this process can start no further thread; try again in a moment"))
            return
        for one in asked:
            one.sent = True
        self._busy += 1
        self._open.add(batch)
        batch.timer = self._loop.call_later(PATIENCE_SECONDS, self._be_late, batch)

    def _be_late(self, batch: _Batch[Item]) -> None:
        batch.late = True
        self._pump()

    def _take(self, batch: _Batch[Item], outcomes: Sequence[Any]) -> None:
        """Give the callers of a batch their outcomes."""
        self._open.discard(batch)
        if batch.timer is not None:
            batch.timer.cancel()
        for asked, outcome in zip(batch.asked, outcomes, strict=True):
            if outcome is APART and not batch.alone:
                asked.sent = False
                self._apart.add([asked])
            else:
                self._settle(asked, outcome)
        self._pump()

    def _settle(self, asked: _Pending[Item], outcome: Any) -> None:
        self._bytes -= asked.size
        if not asked.answer.done():
            asked.answer.set_result(outcome)

    def _give_up(self, asked: Sequence[_Pending[Item]]) -> None:
        """Answer who has waited too long. What was not sent yet is not sent any more."""
        late = Busy("what came before holds up the database; try again in a moment")
        for one in asked:
            if not one.answer.done():
                one.answer.set_result(self._given_up(one.item) if one.sent else late)

    def _ended(self) -> None:
        self._busy -= 1

    # --- on a thread

    def _run(self, batch: _Batch[Item]) -> None:
        answered = False

        def answer(outcomes: Sequence[Any]) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._on_loop(self._take, batch, outcomes)

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
    center: TimeoutCenter, name: str, send: Send[Item], given_up: GivenUp[Item]
) -> list[ServerBatcher[Item, Any]]:
    """Return a batcher for each server, by number."""
    servers = range(len(center.store.tables_of_server()))
    return [ServerBatcher(center, server, name, send, given_up) for server in servers]


async def ask_each(
    asked: Sequence[tuple[ServerBatcher[Item, Outcome], Item, int]],
) -> list[Outcome | TocError]:
    """Return the outcome of each item, given with its batcher and size."""
    outcomes: list[Any] = [None] * len(asked)
    by_batcher: dict[ServerBatcher[Item, Outcome], list[int]] = {}
    for index, (batcher, _, _) in enumerate(asked):
        by_batcher.setdefault(batcher, []).append(index)

    async def ask(batcher: ServerBatcher[Item, Outcome], part: list[int]) -> None:
        found: list[Outcome | TocError]
        try:
            found = await batcher.ask_many([asked[index][1:] for index in part])
        except TocError as exc:
            found = [exc] * len(part)
        for index, outcome in zip(part, found, strict=True):
            outcomes[index] = outcome

    await asyncio.gather(*(ask(batcher, part) for batcher, part in by_batcher.items()))
    return outcomes
