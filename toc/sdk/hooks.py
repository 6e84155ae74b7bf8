"""What an application has done around tries, and beside them and its calls: middleware and the hooks.

Middleware runs where the handler runs, ``on_call`` where a center was called. ``on_dead`` and ``on_late`` are
told by a thread of their own, one call after the other, so that none holds up a task; what is told when too
much waits is dropped, and counted in the log.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from datetime import timedelta
from queue import Empty, Full, Queue
from typing import Any

from toc.model.clock import from_ms
from toc.model.errors import InvalidHandler
from toc.model.fork import call_in_children
from toc.model.raised import raised, where
from toc.model.task import Task
from toc.observe.log import get_logger

log = get_logger(__name__)

Middleware = Callable[[list[Task]], Iterator[None]] | Callable[[list[Task]], AsyncIterator[None]]
OnDead = Callable[[Task, str], object]
OnLate = Callable[[Task, timedelta], object]
OnCall = Callable[[str, float, BaseException | None], object]
_NOBODY = nullcontext()
MOST_WAITING = 1000
LOOK_SECONDS = 0.01
IDLE_SECONDS = 5.0
"""How long the thread waits for more before it ends."""


class Hooks:
    """The hooks of a center. ``look_up`` returns a task, ``now_ms`` the time; ``inline``: no thread."""

    def __init__(
        self,
        look_up: Callable[[int], Task | None],
        now_ms: Callable[[], int],
        inline: Callable[[], bool],
    ) -> None:
        self._look_up, self.now_ms, self._inline = look_up, now_ms, inline
        self._around: list[Callable[[list[Task]], Any]] = []
        """The middlewares in their order: each makes a context manager, perhaps an async one."""
        self.any = False
        """Whether something surrounds tries or is told of their begin."""
        self.on_dead: list[OnDead] = []
        self.on_late: list[tuple[float, OnLate]] = []
        self.on_call: list[OnCall] = []
        self._new_queue()
        call_in_children(self._new_queue)

    def _new_queue(self) -> None:
        self._waiting: Queue[Callable[[], object]] = Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    # --- what the application registers

    def add_middleware(self, middleware: Middleware) -> None:
        """Have it surround tries. Raises InvalidHandler unless it is a generator function."""
        self.any = True
        if inspect.isasyncgenfunction(middleware):
            self._around.append(asynccontextmanager(middleware))
        elif inspect.isgeneratorfunction(middleware):
            self._around.append(contextmanager(middleware))
        else:
            raise InvalidHandler(
                f"middleware {_name(middleware)} must be a generator function that takes a list of tasks and "
                "yields once, where the handler runs"
            )

    # --- around a call of the center

    def call(self, name: str) -> AbstractContextManager[None]:
        """Tell of what is done within as a call of this name."""
        return self._notifying(name) if self.on_call else _NOBODY

    @contextmanager
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
                    log.warning("hook_failed", hook=_name(hook), error=raised(exc).name, at=where(exc))

    # --- around a try

    def enter(self, stack: ExitStack, tasks: list[Task]) -> None:
        """Surround the call of a function."""
        for middleware in self._around:
            if isinstance(entered := middleware(tasks), AbstractContextManager):
                stack.enter_context(entered)

    async def enter_async(self, stack: AsyncExitStack, tasks: list[Task]) -> None:
        """Surround the call of a coroutine function."""
        for middleware in self._around:
            if isinstance(entered := middleware(tasks), AbstractContextManager):
                stack.enter_context(entered)
            else:
                await stack.enter_async_context(entered)

    # --- what is told beside it

    def began(self, tasks: Sequence[Task]) -> None:
        """Tell of those whose first try begins late."""
        for after, hook in self.on_late:
            for task in tasks:
                late = from_ms(self.now_ms()) - task.action_time
                if task.attempt == 1 and late.total_seconds() >= after:
                    self._notify(hook, task, late)

    def died(self, job_id: int, reason: str) -> None:
        """Tell of a death, now that the row says so."""
        for hook in self.on_dead:
            self._notify(hook, job_id, reason)

    def flush(self, seconds: float) -> None:
        """Let what waits be told, for at most so long."""
        until = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)

    def _notify(self, hook: Callable[..., object], of: Task | int, what: object) -> None:
        def notify() -> None:
            try:
                if (task := self._look_up(of) if isinstance(of, int) else of) is not None:
                    hook(task, what)
            except BaseException as exc:  # it is the application's, or a server is away: no task is harmed
                log.warning("hook_failed", hook=_name(hook), error=raised(exc).name, at=where(exc))

        if self._inline():
            notify()
            return
        try:
            self._waiting.put_nowait(notify)
        except Full:
            self._dropped += 1
            log.warning("hook_dropped", hook=_name(hook), dropped=self._dropped)
            return
        with (
            self._lock,
            suppress(RuntimeError),
        ):  # no thread can be started now
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="toc-hooks", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            try:
                notify = self._waiting.get(timeout=IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._thread = None
                        return
            else:
                notify()
                self._waiting.task_done()


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def checked(hook: Any, takes: str, arguments: int = 2) -> Any:
    """Return a hook that is a plain function of so many arguments. Raises InvalidHandler."""
    try:
        inspect.signature(hook).bind(*[None] * arguments)
    except (TypeError, ValueError) as exc:
        raise InvalidHandler(f"hook {_name(hook)} must take {takes}") from exc
    if inspect.iscoroutinefunction(hook):
        raise InvalidHandler(f"hook {_name(hook)} must be a plain function: a thread of toc calls it")
    return hook
