"""The file descriptors of a process: its handlers may take all that there are, or close those of others.

Where there are none left nothing new can be opened; what is open serves on, until the process is replaced.

A number that was closed is given to what is opened next, while who had it before goes on reading and writing
there: answers of one connection would be taken for another's. So a process whose descriptors were closed ends
at once, as if the handler had ended it.
"""

from __future__ import annotations

import os
import resource

LEFT = 32
"""Fewer than so many make a process leave; or a quarter of all, if that is less."""
_LOOKED_AT = 4
"""How many numbers are looked at: a program may have given a descriptor a high one on purpose."""

_guarded: tuple[int, int] | None = None
"""A descriptor that nobody has any business with, and the inode behind it."""


def short() -> bool:
    """Whether hardly any descriptor is left.

    New ones get the lowest number that is free. So where those a little below the limit are taken, all are.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = limit - min(LEFT, limit // 4)
    return limit != resource.RLIM_INFINITY and all(map(_is_open, range(first, first + _LOOKED_AT)))


def guard(descriptor: int) -> None:
    """``check`` is to find out by this one whether descriptors were closed."""
    global _guarded
    _guarded = descriptor, os.fstat(descriptor).st_ino


def check() -> None:
    """Raise RuntimeError if a handler has closed descriptors that were not its own."""
    if _guarded is None:
        return
    try:
        if os.fstat(_guarded[0]).st_ino == _guarded[1]:
            return
    except OSError:
        pass
    raise RuntimeError("a handler has closed descriptors of its process")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
