"""Copies of a worker process: what a handler creates by ``os.fork``, directly or through a library.

A copy has only the handler's thread, but all data of its original: waiting tasks, connections, the channel to
the daemon. Handlers may use copies: a program replaces the copy, or a function runs in it and ends it, as in
``multiprocessing``. A copy may use the SDK, which connects again.

A copy must not do toc's work, or each waiting task would run twice. So it ends when the handler's
call returns to toc in it (``copy_ended``), after ``sys.exit()`` with that exit code. Resque has
done the same since jobs escaped there (https://github.com/resque/resque/pull/1470). If a coroutine
made the copy, the event loop in the copy runs nothing else, and the copy ends when that coroutine
awaits something. When a copy starts, it closes the channel and the socket of its name. It also
restores Python's own signal handlers, because libraries end copies by SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from toc.observe.log import get_logger

log = get_logger(__name__)

LAST_WORDS_SECONDS = 0.5
"""How long a copy may take to log its end. Locks that other threads held at the fork stay locked."""

_original: int | None = None
"""The pid of the original; None: no copy is ended, as when parts of toc are used alone."""
_own: list[Callable[[], None]] = []
"""Functions with which a copy closes what only the original may hold: the channel to its daemon,
and the name that proves it alive."""
_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
"""The thread that runs the handlers' event loop, and the loop."""


def keep_apart(*close: Callable[[], None]) -> None:
    """Do as ``end_them``. Each copy calls ``close`` before."""
    end_them()
    _own.extend(close)
    os.register_at_fork(after_in_child=_begin)


def end_them() -> None:
    """From now on, end each copy of this process when the handler returns in it."""
    global _original
    _original = os.getpid()


def runs_here(loop: asyncio.AbstractEventLoop) -> None:
    """Record that this thread runs the handlers' event loop."""
    global _loop
    _loop = (threading.get_ident(), loop)


def end_if_copy(error: BaseException | None) -> None:
    """End the process if it is a copy: a handler's call has returned, or raised ``error``."""
    if _original is None or os.getpid() == _original:
        return
    code = 0 if error is None else 1
    if issubclass(type(error), SystemExit):  # the exit code of a program that ends itself
        given = vars(SystemExit)["code"].__get__(error)
        code = given if type(given) is int else int(given is not None)
    try:
        last_words = threading.Thread(target=_say, args=[code], daemon=True)
        last_words.start()
        last_words.join(LAST_WORDS_SECONDS)
    finally:
        os._exit(code & 0xFF)


def _say(code: int) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    log.warning("copy_ended", pid=os.getpid(), of=_original, exit_code=code)


def _begin() -> None:
    """Prepare a copy before anything else runs in it."""
    with contextlib.suppress(ValueError):  # subinterpreters have no signals
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libraries end their copies with it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for close in _own:
        close()
    if _loop is not None and _loop[0] == threading.get_ident():
        # When the coroutine that forked awaits something, the loop would continue with the others.
        loop: Any = _loop[1]
        getattr(loop, "_ready", []).clear()
        loop.call_soon(end_if_copy, None)
