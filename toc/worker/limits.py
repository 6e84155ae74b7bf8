"""Resource limits of a process: a handler that lowers one to bound its own work bounds all other handlers.

Nothing else would show that: with a largest file size of 0, the process continues, and each task whose
handler writes a file fails.
"""

from __future__ import annotations

import math
import resource

from toc.observe.log import get_logger

log = get_logger(__name__)

_NUMBERS = {
    name: getattr(resource, name)
    for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_STACK")
}
"""The limits that are watched. That of descriptors is not: a process without free ones is replaced."""

_kept: dict[str, tuple[int, int]] = {}
"""The soft and the hard value of each limit before any handler ran."""


def keep() -> None:
    """Record the limits. Call it when the application is loaded: limits that it sets are meant for
    handlers."""
    _kept.update((name, resource.getrlimit(number)) for name, number in _NUMBERS.items())


def restore() -> bool:
    """Raise limits that were lowered. Returns whether one could not be raised, for lack of privileges."""
    stuck = False
    for name, kept in _kept.items():
        now = resource.getrlimit(_NUMBERS[name])
        wanted = max(now[0], kept[0], key=_size), max(now[1], kept[1], key=_size)
        if now == wanted:
            continue
        try:
            resource.setrlimit(_NUMBERS[name], wanted)
        except (ValueError, OSError):
            stuck = True
        else:
            log.warning("limit_restored", limit=name, was=now[0])
    return stuck


def _size(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit
