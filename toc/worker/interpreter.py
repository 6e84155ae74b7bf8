"""What the handlers of a process share of their interpreter, and one of them may change for all.

A program that freezes time, as for a test, and does not undo it, stops the timers of the event loop and those
of the drivers: coroutines sleep for ever, and a server that was away is not asked again.

A debugger or profiler that sets a function for all new threads, and raises in it, ends each thread before it
begins. A thread of ours that looks whether a server is back would be missed by nobody, and for good. So such
functions do not reach our threads.
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
"""The functions of the module ``time``."""
_switch_interval = 0.0

_Hook = Callable[..., Any]
_set_trace, _set_profile = threading.settrace, threading.setprofile


def keep() -> None:
    """Record what is in force. Call when the application is loaded: what it changes, it means."""
    global _switch_interval
    _kept.update((name, getattr(time, name)) for name in _NAMES)
    _switch_interval = sys.getswitchinterval()
    threading.settrace = lambda func: _set_trace(_for_others(func, sys.settrace))
    threading.setprofile = lambda func: _set_profile(_for_others(func, sys.setprofile))


def _for_others(hook: _Hook | None, set_here: Callable[[_Hook | None], None]) -> Any:
    """A trace or profile function that puts ``hook`` in its place in threads that are not ours."""

    def first(*event: Any) -> Any:
        ours = threading.current_thread().name.startswith("toc-")
        set_here(None if ours else hook)
        return None if ours or hook is None else hook(*event)

    return None if hook is None else first


def restore() -> None:
    """Put back functions of ``time`` that were replaced, and how often threads may switch."""
    for name, function in _kept.items():
        if getattr(time, name) is not function:
            setattr(time, name, function)
            log.warning("time_restored", function=f"time.{name}")
    if _kept and sys.getswitchinterval() > 2 * _switch_interval:
        sys.setswitchinterval(_switch_interval)
        log.warning("switch_interval_restored", seconds=_switch_interval)
