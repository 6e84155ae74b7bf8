"""Resource limits of a process: a handler that lowers one, perhaps to bound its own work, bounds all others.

Nothing else would tell. With 0 as the largest size of a file the process works on, and each task whose
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
"""Those that are kept. Not that of descriptors: a process that has none left is replaced."""

_kept: dict[str, tuple[int, int]] = {}
"""The limits before any handler ran: the soft and the hard one of each."""


def keep() -> None:
    """Record the limits. Call when the application is loaded: what it sets, it sets for its handlers."""
    _kept.update((name, resource.getrlimit(number)) for name, number in _NUMBERS.items())


def restore() -> bool:
    """Raise limits that were lowered. True if one cannot be raised, for lack of privileges."""
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
