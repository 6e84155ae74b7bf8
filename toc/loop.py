"""Loop: a thread that calls a function ``run_once`` repeatedly. Every internal loop is one.

Other functions here watch threads, and the callbacks and tasks of event loops, or end the process.

A process with a dead loop would look healthy and do nothing. So a loop that ends without being told to
ends its process.
"""

import asyncio
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from toc.observe.log import close_log, get_logger

log = get_logger(__name__)

EXIT_THREAD_DIED = 70
"""Exit code of a process after an internal thread raised, or returned without being told to."""
PREFIX = "toc-"
"""The names of toc's own threads begin with it."""
LAST_WORDS_SECONDS = 0.5
"""How long a process may take to log why its thread died, before it exits."""

_SELECTABLE = 1024
"""Descriptors below this can be waited for by select(2), which counts microseconds."""


class Wake:
    """Ends the sleep of a loop. Created before the loop, so that other objects can be given it."""

    def __init__(self) -> None:
        self._woken = False
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        """An Event would work too, for ten times the processor time in Python."""

    def __call__(self) -> None:
        """Run the loop again now. Cheap if it is awake already."""
        if not self._woken:
            self.surely()

    def surely(self) -> None:
        """Run the loop again now, even if an exception from a signal has broken off a call halfway."""
        self._woken = True
        self._wake_ups.put(None)

    def clear(self) -> None:
        """Forget all wake-ups so far."""
        while not self._wake_ups.empty():
            self._wake_ups.get_nowait()
        self._woken = False

    def sleep(self, seconds: float) -> None:
        """Sleep until woken, at most ``seconds``."""
        try:
            self._wake_ups.get(timeout=seconds)
        except Empty:
            return


class Reactor(Wake):
    """A Wake whose sleep also ends when one of the watched descriptors can be read.

    Any thread may wake it; one thread watches and sleeps, as precisely as the system's timers are.
    """

    def __init__(self) -> None:
        self._woken = self._asleep = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched: dict[int, Callable[[], None]] = {}
        self._ready: list[int] | None = None
        """The descriptors that can be read, of which the last sleep has heard."""

    def surely(self) -> None:
        """Run the loop again now, even if an exception from a signal has broken off a call halfway."""
        self._woken = True
        if self._asleep:  # a write releases the interpreter, which other threads may then keep for a while
            os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """Forget all wake-ups so far."""
        if self._ready and self._event in self._ready:
            os.eventfd_read(self._event)
            self._ready.remove(self._event)
        self._woken = False

    def watch(self, descriptor: int, then: Callable[[], None]) -> None:
        """Have ``hear`` call ``then`` once this can be read, until ``forget``."""
        self._watched[descriptor] = then

    def forget(self, descriptor: int) -> None:
        """Watch this no more, if it is watched."""
        self._watched.pop(descriptor, None)

    def sleep(self, seconds: float, also: Iterable[int] = ()) -> None:
        """Sleep until woken or until a watched descriptor, or one of ``also``, can be read; at most
        ``seconds``."""
        self._asleep = True  # before it looks whether it is woken: each wake-up is then seen, or written
        try:
            self._ready = self._readable(0.0 if self._woken else max(seconds, 0.0), also)
        finally:
            self._asleep = False

    def hear(self) -> None:
        """Make the calls for the descriptors that can be read."""
        ready, self._ready = self._ready, None
        if ready is None:
            ready = self._readable(0.0, ()) if self._watched else []
        for descriptor in ready:
            if descriptor in self._watched:
                self._watched[descriptor]()

    def _readable(self, seconds: float, also: Iterable[int]) -> list[int]:
        wanted = [self._event, *self._watched, *also]
        if max(wanted) < _SELECTABLE:
            return select.select(wanted, (), (), seconds)[0]
        poll = select.poll()  # counts whole milliseconds: up to one late
        for descriptor in wanted:
            poll.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(seconds * 1000)]

    def __del__(self) -> None:
        os.close(self._event)


class Bell:
    """Ends the sleep of a thread in a selector, which watches it. Any thread may ring; signals do through
    ``rope``, a descriptor."""

    def __init__(self) -> None:
        self._heard, self._rung = socket.socketpair()
        self._rung.setblocking(False)

    def __call__(self) -> None:
        """End the sleep now."""
        with suppress(OSError):  # full: awake anyway; closed: over
            self._rung.send(b"\0")

    @property
    def rope(self) -> int:
        """What ``signal.set_wakeup_fd`` gets."""
        return self._rung.fileno()

    def fileno(self) -> int:
        """What the selector watches."""
        return self._heard.fileno()

    def clear(self) -> None:
        """Forget that it rang. Call it once it can be read."""
        self._heard.recv(4096)

    def close(self) -> None:
        """Close it."""
        self._heard.close()
        self._rung.close()


class Loop:
    """Calls ``run_once`` repeatedly; it returns the seconds to sleep until the next call.

    ``wake`` ends that sleep early. ``stop`` lets the current call end and waits for the thread; it may be
    called twice, and before ``start``. With ``last`` one more call follows a stop. An error that ``run_once``
    does not handle ends the process.
    """

    def __init__(
        self, name: str, run_once: Callable[[], float], wake: Wake | None = None, *, last: bool = False
    ) -> None:
        self.name = name
        self.wake = wake or Wake()
        """Calling it ends the sleep: ``run_once`` is then called again at once."""
        self._run_once = run_once
        self._last = last
        self._turn_at = 0.0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless an earlier call has."""
        if self._thread is None:
            thread = watched_thread(self.name, self._run, lambda: self._stopped)
            thread.start()
            self._thread = thread

    def stop(self, timeout: float | None = None) -> None:
        """Ask the thread to end and wait for it, at most ``timeout`` seconds."""
        self._stopped = True
        self.wake.surely()
        if self._thread and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def turn(self) -> float:
        """Make a turn, here and now. Returns the seconds until the next."""
        self._turn_at = time.monotonic()
        try:
            return self._run_once()
        finally:
            self._turn_at = 0.0

    @property
    def at_work(self) -> bool:
        """Whether a turn is under way, from before its first step."""
        return self._turn_at != 0.0

    def busy_seconds(self, now: float) -> float:
        """How long the current turn has lasted at ``now`` (monotonic). 0 while it sleeps."""
        began = self._turn_at
        return max(now - began, 0.0) if began else 0.0

    def _run(self) -> None:
        while True:
            self.wake.clear()  # before the work: a wake during it ends the next sleep at once
            over = self._stopped  # after clear, which may have forgotten the wake of ``stop``
            seconds = self.turn() if self._last or not over else 0.0
            if over:
                return
            if seconds > 0:
                self.wake.sleep(seconds)


def end_process(thread: str, error: BaseException) -> NoReturn:
    """End the process: this thread met an error after which it cannot continue.

    Another thread logs it first, within ``LAST_WORDS_SECONDS``: neither a log that hangs, nor an error
    without a readable text, nor lack of memory may keep a process alive that does not do its work. If several
    threads die at once, as without memory, one of them is named.
    """

    def say() -> None:
        log.critical("thread_died", thread=thread, exc_info=error)
        close_log(LAST_WORDS_SECONDS)

    try:
        if not _ending.acquire(blocking=False):
            # Else this one might end the process before the other has spoken.
            time.sleep(2 * LAST_WORDS_SECONDS)
        else:
            last_words = threading.Thread(target=say, daemon=True)
            try:
                last_words.start()
            except RuntimeError:  # no thread is left, as without memory
                say()
            else:
                last_words.join(LAST_WORDS_SECONDS)
    finally:
        os._exit(EXIT_THREAD_DIED)


_ending = threading.Lock()
"""Held by the thread that ends the process."""


def leave_process(code: int) -> NoReturn:
    """End the process in good order, even if threads of handlers or of the application never end."""
    try:
        logging.shutdown()
        close_log()
    finally:
        os._exit(code)


def watch_threads() -> None:
    """End the process, with a message, if one of toc's threads ends with an unexpected error (``dies``).

    Packages that cannot use ``Loop`` start threads, too. Whatever waits for such a thread, or for its
    answers, would wait forever. Threads of the application are left alone.
    """
    before = threading.excepthook

    def died(error: threading.ExceptHookArgs) -> None:
        name = error.thread.name if error.thread is not None else ""
        if name.startswith(PREFIX) and error.exc_value is not None:
            dies(name.removeprefix(PREFIX), error.exc_value)
        before(error)

    threading.excepthook = died


class WatchedEventLoop(asyncio.SelectorEventLoop):
    """Ends the process, with a message, if a callback of toc's own raises.

    asyncio would only log the error, as it does for callbacks of handlers. But whatever waits for the
    callback's effect would wait forever.
    """

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Handle an error that no caller sees."""
        error = context.get("exception")
        if "handle" in context and isinstance(error, BaseException) and error.__traceback__ is not None:
            callback = error.__traceback__.tb_next  # the first frame is asyncio's
            name = "" if callback is None else str(callback.tb_frame.f_globals.get("__name__"))
            if name.startswith(("toc.worker.", "toc.webhooks.")):
                dies("async-handlers", error)
        super().call_exception_handler(context)


_on_death: Callable[[str, BaseException], None] | None = None


def embedded(on_death: Callable[[str, BaseException], None]) -> None:
    """Have the death of an internal thread told to this function, and go on: the process is not ours."""
    global _on_death
    if _on_death is None:
        watch_threads()
    _on_death = on_death


def dies(thread: str, error: BaseException) -> None:
    """End the process for an internal thread that met an error, unless the process is not ours."""
    if _on_death is None:
        end_process(thread, error)
    _on_death(thread, error)


def watched_thread(
    name: str, target: Callable[[], None], told_to_end: Callable[[], bool]
) -> threading.Thread:
    """A daemon thread that ends the process, with a message, if ``target`` raises or returns untold."""

    def run() -> None:
        try:
            target()
        except BaseException as exc:
            dies(name, exc)
            return
        if not told_to_end():
            dies(name, RuntimeError("it ended without being told to"))

    return threading.Thread(target=run, name=f"{PREFIX}{name}", daemon=True)


def watched_task(name: str, task: asyncio.Task[Any], told_to_end: Callable[[], bool]) -> None:
    """End the process, with a message, if the task raises, returns or is cancelled without being told to."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not told_to_end():
            error = None if task.cancelled() else task.exception()
            dies(name, error or RuntimeError("it ended without being told to"))

    task.add_done_callback(ended)
