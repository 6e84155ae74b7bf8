"""What handlers can do to their process that harms the tasks of others. It is noticed, and never repaired.

A process that is damaged leaves in good order and is replaced; no task is charged for that. Each beat and the
end of each task that ran alone ask for it.

Closed descriptors are worse. The number of a closed descriptor goes to what is opened next, while its former
user keeps reading and writing there: it would read the answers of another connection as its own. So the end
of each handler, and each beat, check whether the channel to the daemon is still the same file. If not, the
process ends at once, as if the handler had ended it.

A copy of the process is what a handler creates by ``os.fork``, directly or through a library. It has only the
handler's thread, but all data of its original: waiting tasks, connections, the channel to the daemon.
Handlers may use copies: a program replaces the copy, or a function runs in it and ends it, as in
``multiprocessing``. A copy may use the SDK, which connects again.

A copy must not do toc's work, or each waiting task would run twice. So it ends when the handler's
call returns to toc in it (``copy_ended``), after ``sys.exit()`` with that exit code. Resque has
done the same since jobs escaped there (https://github.com/resque/resque/pull/1470). If a coroutine
made the copy, the event loop in the copy runs nothing else, and the copy ends when that coroutine
awaits something. When a copy starts, the channel and the socket of its name are closed in it. It also
restores Python's own signal handlers, because libraries end copies by SIGTERM.
"""

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import stat
import sys
import threading
from typing import Any

from toc.observe.log import get_logger
from toc.sockets import is_open

log = get_logger(__name__)

LAST_WORDS_SECONDS = 0.5
"""How long a copy may take to log its end. Locks that other threads held at the fork stay locked."""

_original_pid: int | None = None
"""The pid of the original; None: no copy is ended, as when parts of toc are used alone."""
_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
"""The thread that runs the handlers' event loop, and the loop."""


def keep_apart() -> None:
    """Do as ``end_copies``, in a process that has no other purpose than to run handlers."""
    end_copies()
    os.register_at_fork(after_in_child=_begin)


def end_copies() -> None:
    """From now on, end each copy of this process when the handler returns in it."""
    global _original_pid
    _original_pid = os.getpid()


def runs_here(loop: asyncio.AbstractEventLoop) -> None:
    """Record that this thread runs the handlers' event loop."""
    global _loop
    _loop = (threading.get_ident(), loop)


def end_if_copy(error: BaseException | None) -> None:
    """End the process if it is a copy: a handler's call has returned, or raised ``error``."""
    if _original_pid is None or os.getpid() == _original_pid:
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
    log.warning("copy_ended", pid=os.getpid(), of=_original_pid, exit_code=code)


def _begin() -> None:
    """Prepare a copy before anything else runs in it."""
    with contextlib.suppress(ValueError):  # subinterpreters have no signals
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libraries end their copies with it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _loop is not None and _loop[0] == threading.get_ident():
        # When the coroutine that forked awaits something, the loop would continue with the others.
        loop: Any = _loop[1]
        getattr(loop, "_ready", []).clear()
        loop.call_soon(end_if_copy, None)


LEFT = 32
"""A process with fewer free descriptors than this, or than a quarter of its limit if that is less, leaves.
Until it is replaced, it works over its open connections."""
_PROBED = 4
"""How many numbers are probed: more than one, because a program may use a single high number on purpose."""
_MARK = signal.SIGIO
"""Marks the open file of the guarded descriptor, as the signal that the file would send if it ever sent one.
Another file under the same number has no mark. Reading the mark takes a third of the time of comparing
inodes."""

_guarded: int | None = None
"""A descriptor that no handler has reason to touch."""
_streams: dict[int, tuple[int, int] | None] = {}
"""What the standard streams were."""


def guard_descriptor(descriptor: int) -> None:
    """Set the descriptor by which ``check_descriptors`` detects that descriptors were closed."""
    global _guarded
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, _MARK)
    _guarded = descriptor


def check_descriptors() -> None:
    """Raise RuntimeError if a handler has closed descriptors that were not its own."""
    if _guarded is None:
        return
    try:
        if fcntl.fcntl(_guarded, fcntl.F_GETSIG) == _MARK:
            return
    except OSError:
        pass
    raise RuntimeError("a handler has closed descriptors of its process")


def keep_streams() -> None:
    """Record what ``damage`` compares with. Call it when the application is loaded."""
    _streams.update((number, _connection(number)) for number in range(3) if is_open(number))


def damage() -> str:
    """Return what is damaged, as the reason for a replacement; empty if nothing is."""
    if _is_short():
        return "a handler has left it hardly any descriptors"
    for number, before in _streams.items():
        if not is_open(number):
            return f"a handler has closed its descriptor {number}"
        if _connection(number) not in (None, before):  # a file is intended: programs redirect their output
            return f"a handler has closed its descriptor {number}, and a connection has the number"
    return ""


def _is_short() -> bool:
    """Whether hardly any descriptor is left.

    New descriptors get the lowest free number. So if those a little below the limit are taken, all are.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = limit - min(LEFT, limit // 4)
    return limit != resource.RLIM_INFINITY and all(map(is_open, range(first, first + _PROBED)))


def _connection(number: int) -> tuple[int, int] | None:
    """Return which connection this descriptor is; None if it is another kind of file."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None
