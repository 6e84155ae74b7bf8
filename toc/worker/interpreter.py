"""What the handlers of a process share of their interpreter, and one of them may change for all.

A program that freezes time, as for a test, and does not undo it, stops the timers of the event loop and those
of the drivers: coroutines sleep for ever, and a server that was away is not asked again.
"""

from __future__ import annotations

import sys
import time

from toc.observe.log import get_logger

log = get_logger(__name__)

_NAMES = ("monotonic", "monotonic_ns", "perf_counter", "sleep", "time", "time_ns")

_kept: dict[str, object] = {}
"""The functions of the module ``time``."""
_switch_interval = 0.0


def keep() -> None:
    """Record what is in force. Call when the application is loaded: what it changes, it means."""
    global _switch_interval
    _kept.update((name, getattr(time, name)) for name in _NAMES)
    _switch_interval = sys.getswitchinterval()


def restore() -> None:
    """Put back functions of ``time`` that were replaced, and how often threads may switch."""
    for name, function in _kept.items():
        if getattr(time, name) is not function:
            setattr(time, name, function)
            log.warning("time_restored", function=f"time.{name}")
    if _kept and sys.getswitchinterval() > 2 * _switch_interval:
        sys.setswitchinterval(_switch_interval)
        log.warning("switch_interval_restored", seconds=_switch_interval)
