"""What an object does in a child of ``os.fork``.

The child has only the thread that forked. Locks that other threads held stay locked there, and connections
are shared with the parent. So this is done before anything else runs in the child: a thread that noticed the
fork later, by the pid, would race with the child's other threads.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from itertools import count

_numbers = count()
_methods: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}
"""What is called, in this order. A method leaves it with its object: what ``os.register_at_fork`` is given
stays for good, so it is given one function alone."""


def call_in_children(method: Callable[[], None]) -> None:
    """Call this bound method in each forked child, for as long as its object lives. It must not raise."""
    number = next(_numbers)
    _methods[number] = weakref.WeakMethod(method, lambda _: _methods.pop(number, None))


def _call_all() -> None:
    for reference in list(_methods.values()):
        if (call := reference()) is not None:
            call()


os.register_at_fork(after_in_child=_call_all)
