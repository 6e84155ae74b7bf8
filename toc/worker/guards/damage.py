"""What a handler can do to its process that harms the tasks of others. It is noticed, and never repaired.

A process that is damaged leaves in good order and is replaced; no task is charged for that. Each beat and the
end of each task that ran alone ask for it.

Closed descriptors are worse. The number of a closed descriptor goes to what is opened next, while its former
user keeps reading and writing there: it would read the answers of another connection as its own. So the end
of each handler, and each beat, check whether the channel to the daemon is still the same file. If not, the
process ends at once, as if the handler had ended it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat

from toc.sockets import is_open

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


def guard(descriptor: int) -> None:
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


def keep() -> None:
    """Record what ``found`` compares with. Call it when the application is loaded."""
    _streams.update((number, _connection(number)) for number in range(3) if is_open(number))


def found() -> str:
    """Return what is damaged, as the reason for a replacement; empty if nothing is."""
    if short():
        return "a handler has left it hardly any descriptors"
    for number, before in _streams.items():
        if not is_open(number):
            return f"a handler has closed its descriptor {number}"
        if _connection(number) not in (None, before):  # a file is intended: programs redirect their output
            return f"a handler has closed its descriptor {number}, and a connection has the number"
    return ""


def short() -> bool:
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
