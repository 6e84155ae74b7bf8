"""Standard streams of a process whose handlers may close them.

A number that was closed is given to what is opened next: a connection to MySQL, say, and whatever is written
to "stderr" after that goes to the server. Python's own streams write elsewhere (``log.detach``); for what
else writes there the three numbers are looked at again and again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

from toc.observe.log import get_logger

log = get_logger(__name__)

_HIGH = 64
"""The copies get numbers from here on: who closes the first few descriptors does not mean them."""

_kept: dict[int, tuple[int, os.stat_result]] = {}
"""Of the descriptors 0, 1 and 2 a copy of each, and what it was."""


def keep() -> None:
    """Note what the three are. To be called before the application is loaded."""
    for number in range(3):
        with contextlib.suppress(OSError):  # there may be none
            copy = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH)
            _kept[number] = copy, os.fstat(copy)


def restore() -> bool:
    """Open again what was closed. True if a connection has one of the numbers by now."""
    taken = False
    for number, (copy, before) in _kept.items():
        try:
            now = os.fstat(number)
        except OSError:
            try:
                # Not dup2, which would close what another thread opens there at this moment.
                again = fcntl.fcntl(copy, fcntl.F_DUPFD, number)
            except OSError:  # another thread had the last one, or the copy is closed
                continue
            if again != number:
                os.close(again)
            log.warning("descriptor_restored", descriptor=number)
        else:
            # Another file may be meant: programs send their output elsewhere.
            taken |= stat.S_ISSOCK(now.st_mode) and not os.path.samestat(now, before)
    return taken
