"""Parts of the interpreter that all handlers of a process share, and that one of them may change for all.

A handler that freezes time, as tests do, and does not undo it, stops the timers of the event loop and of the
drivers: coroutines never wake up, and a server that was away is not tried again. So replaced functions of
``time`` are put back.

A debugger or profiler may set a function for all new threads. If that function raises, each new
thread ends before it begins, and nobody would notice that a thread of ours is missing, such as one
that checks whether a server is back. So these functions are not set in our threads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from toc.observe.log import get_logger

log = get_logger(__name__)

_NAMES = ("monotonic", "monotonic_ns", "perf_counter", "sleep", "time", "time_ns")

_kept: dict[str, object] = {}
"""Functions of the module ``time``, by name."""
_switch_interval = 0.0
"""Seconds."""

_Hook = Callable[..., Any]
_set_trace, _set_profile = threading.settrace, threading.setprofile


def keep() -> None:
    """Record the functions and the switch interval. Call it when the application is loaded: its own
    changes are intended."""
    global _switch_interval
    _kept.update((name, getattr(time, name)) for name in _NAMES)
    _switch_interval = sys.getswitchinterval()
    threading.settrace = lambda func: _set_trace(_for_others(func, sys.settrace))
    threading.setprofile = lambda func: _set_profile(_for_others(func, sys.setprofile))


def _for_others(hook: _Hook | None, set_here: Callable[[_Hook | None], None]) -> Any:
    """Return a trace or profile function that sets ``hook`` only in threads that are not ours."""

    def first(*event: Any) -> Any:
        ours = threading.current_thread().name.startswith("toc-")
        set_here(None if ours else hook)
        return None if ours or hook is None else hook(*event)

    return None if hook is None else first


def restore() -> None:
    """Put back replaced functions of ``time``, and the switch interval if it was made much longer."""
    for name, function in _kept.items():
        if getattr(time, name) is not function:
            setattr(time, name, function)
            log.warning("time_restored", function=f"time.{name}")
    if _kept and sys.getswitchinterval() > 2 * _switch_interval:
        sys.setswitchinterval(_switch_interval)
        log.warning("switch_interval_restored", seconds=_switch_interval)
