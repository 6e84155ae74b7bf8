"""File descriptors of a process: its handlers may use them all up, or close descriptors of others.

The number of a closed descriptor goes to what is opened next, while its former user keeps reading and writing
there: it would read the answers of another connection as its own. So a process whose descriptors were closed
ends at once, as if the handler had ended it. The end of each handler and each beat check whether the channel
to the daemon is still the same file. The other tasks in the process are charged a crash, as at any death of
their process: only the process knew which of them had not started.

With fewer than ``LEFT`` descriptors free (checked each second and whenever a handler has raised) the process
leaves in good order, and no task is charged. Until it is replaced, it works over its open connections. It
does not mark a server as away because it cannot open another connection.
"""

from __future__ import annotations

import fcntl
import resource
import signal

from toc.sockets import is_open

LEFT = 32
"""A process with fewer free descriptors than this, or than a quarter of its limit if that is less, leaves."""
_LOOKED_AT = 4
"""How many numbers are probed: more than one, because a program may use a single high number on purpose."""

_guarded: int | None = None
"""A descriptor that no handler has reason to touch."""
_MARK = signal.SIGIO
"""Marks the open file of that descriptor, as the signal that the file would send if it ever sent one. Another
file under the same number has no mark. Reading the mark takes a third of the time of comparing inodes."""


def short() -> bool:
    """Whether hardly any descriptor is left.

    New descriptors get the lowest free number. So if those a little below the limit are taken, all are.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = limit - min(LEFT, limit // 4)
    return limit != resource.RLIM_INFINITY and all(map(is_open, range(first, first + _LOOKED_AT)))


def guard(descriptor: int) -> None:
    """Set the descriptor by which ``check`` detects that descriptors were closed."""
    global _guarded
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, _MARK)
    _guarded = descriptor


def check() -> None:
    """Raise RuntimeError if a handler has closed descriptors that were not its own."""
    if _guarded is None:
        return
    try:
        if fcntl.fcntl(_guarded, fcntl.F_GETSIG) == _MARK:
            return
    except OSError:
        pass
    raise RuntimeError("a handler has closed descriptors of its process")
