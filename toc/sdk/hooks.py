"""Hooks of a center: what surrounds tries and calls, and who is told of deaths and late starts.

Middleware runs where the handler runs, ``on_call`` where a center was called. ``on_dead`` and ``on_late`` are
told by a thread of their own, one call after the other, so that none holds up a task; what is told when too
much waits is dropped, and counted in the log.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import wait
from contextvars import Context
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from toc.model.clock import from_ms
from toc.model.errors import Busy, InvalidHandler
from toc.model.fork import in_each_process
from toc.model.raised import raised, where
from toc.model.task import Task
from toc.observe.log import get_logger
from toc.store.servers.threads import Threads

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter

log = get_logger(__name__)

Middleware = Callable[[list[Task]], Iterator[None]] | Callable[[list[Task]], AsyncIterator[None]]
OnDead = Callable[[Task, str], object]
OnLate = Callable[[Task, timedelta], object]
OnCall = Callable[[str, float, BaseException | None], object]
_NOBODY = contextlib.nullcontext()
MOST_WAITING = 1000


class Hooks:
    """The hooks of a center."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self.around: list[Callable[[list[Task]], Any]] = []
        """The middlewares in their order: each makes a context manager, perhaps an async one."""
        self.any = False
        """Whether something surrounds tries or is told of their begin."""
        self.on_dead: list[OnDead] = []
        self.on_late: list[tuple[float, OnLate]] = []
        self.on_call: list[OnCall] = []
        self._dropped = 0
        in_each_process(self.close)

    def close(self) -> None:
        """End the thread once it has told what waits."""
        self._threads = Threads(1, "toc-hooks")
        self._room = threading.BoundedSemaphore(MOST_WAITING)

    def now_ms(self) -> int:
        """The time by the center's clock."""
        return self._center.clock.now_ms()

    # --- around a call of the center

    def call(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Tell of what is done within as a call of this name."""
        return self._notifying(name) if self.on_call else _NOBODY

    @contextlib.contextmanager
    def _notifying(self, name: str) -> Iterator[None]:
        began, error = time.perf_counter(), None
        try:
            yield
        except BaseException as exc:
            error = exc
            raise
        finally:
            seconds = time.perf_counter() - began
            for hook in self.on_call:
                try:
                    hook(name, seconds, error)
                except Exception as exc:  # the call is as it is
                    log.warning("hook_failed", hook=hook_name(hook), error=raised(exc).name, at=where(exc))

    # --- around a try

    def enter(self, stack: contextlib.ExitStack, tasks: list[Task]) -> None:
        """Surround the call of a function."""
        for middleware in self.around:
            if isinstance(entered := middleware(tasks), contextlib.AbstractContextManager):
                stack.enter_context(entered)

    async def enter_async(self, stack: contextlib.AsyncExitStack, tasks: list[Task]) -> None:
        """Surround the call of a coroutine function."""
        for middleware in self.around:
            if isinstance(entered := middleware(tasks), contextlib.AbstractContextManager):
                stack.enter_context(entered)
            else:
                await stack.enter_async_context(entered)

    # --- what is told beside it

    def began(self, tasks: Sequence[Task]) -> None:
        """Tell of those whose first try begins late."""
        for after, hook in self.on_late:
            for task in tasks:
                late = from_ms(self.now_ms()) - task.action_time
                if task.attempt == 1 and not task.redrives and late.total_seconds() >= after:
                    self._notify(hook, task, late)

    def died(self, job_id: int, reason: str) -> None:
        """Tell of a death, now that the row says so."""
        for hook in self.on_dead:
            self._notify(hook, job_id, reason)

    def flush(self, seconds: float) -> None:
        """Let what waits be told, for at most so long."""
        with contextlib.suppress(Busy):
            wait([self._threads.soon(lambda: None)], seconds)

    def _notify(self, hook: Callable[..., object], of: Task | int, what: object) -> None:
        room = self._room

        def notify() -> None:
            try:
                if (task := self._center.get(of) if isinstance(of, int) else of) is not None:
                    Context().run(hook, task, what)
            except BaseException as exc:  # it is the application's, or a server is away: no task is harmed
                log.warning("hook_failed", hook=hook_name(hook), error=raised(exc).name, at=where(exc))

        def notify_beside() -> None:
            pid = os.getpid()
            notify()
            if os.getpid() != pid:  # a copy that the hook made: what waits is told in the original
                os._exit(0)
            room.release()

        if self._center.stands_in is not None:  # a test, which waits for it
            notify()
        elif room.acquire(blocking=False):
            try:
                self._threads.run_detached(notify_beside)
            except Busy:
                room.release()
        else:
            self._dropped += 1
            log.warning("hook_dropped", hook=hook_name(hook), dropped=self._dropped)


def hook_name(hook: object) -> str:
    """What messages call it."""
    return getattr(hook, "__qualname__", type(hook).__name__)


def checked_hook(hook: Any, takes: str, arguments: int = 2) -> Any:
    """Return a hook that is a plain function of so many arguments. Raises InvalidHandler."""
    try:
        inspect.signature(hook).bind(*[None] * arguments)
    except (TypeError, ValueError) as exc:
        raise InvalidHandler(f"hook {hook_name(hook)} must take {takes}") from exc
    if inspect.iscoroutinefunction(hook):
        raise InvalidHandler(f"hook {hook_name(hook)} must be a plain function: a thread of toc calls it")
    return hook
