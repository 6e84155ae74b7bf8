"""Standard streams of a process whose handlers may close them.

The number of a closed descriptor goes to what is opened next, for example a connection to MySQL. Text for
"stderr" would then go to that server. Python's own streams write elsewhere (``log.detach``). For all other
writers the three numbers are checked each second: closed ones are opened again, and if a connection has got
one of them by then, the process leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

from toc.observe.log import get_logger

log = get_logger(__name__)

_HIGH = 64
"""The lowest number of a copy: code that closes the first few descriptors does not reach the copies."""

_kept: dict[int, tuple[int, os.stat_result]] = {}
"""A copy of each of the descriptors 0, 1 and 2, and its stat."""


def keep() -> None:
    """Record what the three descriptors are. Call it before the application is loaded."""
    for number in range(3):
        with contextlib.suppress(OSError):  # a process may be started without it
            copy = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH)
            _kept[number] = copy, os.fstat(copy)


def restore() -> bool:
    """Open closed descriptors again. Returns whether a connection has got one of the numbers by now."""
    taken = False
    for number, (copy, before) in _kept.items():
        try:
            now = os.fstat(number)
        except OSError:
            try:
                # Not dup2, which would close what another thread opens there at this moment.
                again = fcntl.fcntl(copy, fcntl.F_DUPFD, number)
            except OSError:  # no descriptor is free, or the copy is closed
                continue
            if again != number:
                os.close(again)
            log.warning("descriptor_restored", descriptor=number)
        else:
            # Another kind of file may be intended: programs redirect their output.
            taken |= stat.S_ISSOCK(now.st_mode) and not os.path.samestat(now, before)
    return taken
