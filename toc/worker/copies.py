"""Copies of a worker process: what a handler makes by ``os.fork``, by itself or through a library.

A copy has the handler's thread and no other, and everything else as its original had it: the tasks that wait,
the connections, the line to the daemon. What handlers make copies for is theirs to do: a program takes its
place, or a function runs in it and ends it, as ``multiprocessing`` does. It may use the SDK, which connects
anew. It does nothing of toc's own, or each task that waits would run twice: where the handler's call comes
back to toc, the copy ends, as Python ends a program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from toc.observe.log import get_logger

log = get_logger(__name__)

R = TypeVar("R")

LAST_WORDS_SECONDS = 0.5
"""How long a copy may take to say that it ends: locks that other threads had when it was made stay locked."""

_original: int | None = None
"""The process of which there may be copies; None: none is ended, as where toc's parts are used one by one."""
_own: list[Callable[[], None]] = []
"""Closes what stands for the original alone: the line to its daemon, the name that proves it alive."""
_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
"""The thread that runs the handlers' event loop, and that."""


def keep_apart(*close: Callable[[], None]) -> None:
    """From now on copies of this process end as they should; in each these are called first of all."""
    global _original
    _original = os.getpid()
    _own.extend(close)
    os.register_at_fork(after_in_child=_begin)


def runs_here(loop: asyncio.AbstractEventLoop) -> None:
    """This thread runs the handlers' event loop."""
    global _loop
    _loop = (threading.get_ident(), loop)


def end_if_copy(error: BaseException | None) -> None:
    """A handler's call has come back, or raised this: in a copy that is the end."""
    if _original is None or os.getpid() == _original:
        return
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):  # what a program says that means to end
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
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
    """In a copy, before anything else runs there."""
    with contextlib.suppress(ValueError):  # in a subinterpreter there are no signals
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libraries end their copies with it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for close in _own:
        close()
    if _loop is not None and _loop[0] == threading.get_ident():
        # Where the coroutine that made the copy awaits something, the loop would go on with the others.
        loop: Any = _loop[1]
        getattr(loop, "_ready", []).clear()
        loop.call_soon(end_if_copy, None)


class Executor(ThreadPoolExecutor):
    """Threads for ``asyncio.to_thread``, whose queue copies have, too."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run it on a thread; a copy that it makes ends with it."""
        return super().submit(_ending_copies, fn, *args, **kwargs)


def _ending_copies(fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    try:
        value = fn(*args, **kwargs)
    except BaseException as exc:
        end_if_copy(exc)
        raise
    end_if_copy(None)
    return value
