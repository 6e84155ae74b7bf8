"""What an object does in a child of ``os.fork``.

The child has only the thread that forked. Locks that other threads held stay locked there, and connections
are shared with the parent. So this is done before anything else runs in the child: a thread that noticed the
fork later, by the pid, would race with the child's other threads.
"""

import os
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

_numbers = count()
_methods: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]] = {}
"""What is called, in this order. A method leaves it with its object: what ``os.register_at_fork`` is given
stays for good, so it is given one function alone."""


def call_in_children(method: Callable[[], None]) -> None:
    """Call this bound method in each forked child, for as long as its object lives. It must not raise."""
    number = next(_numbers)
    # No WeakMethod, whose callback fails at the end of the interpreter; what this one needs it holds itself.
    owner = weakref.ref(method.__self__, partial(_methods.pop, number))  # type: ignore[attr-defined]
    _methods[number] = owner, method.__func__  # type: ignore[attr-defined]


def in_each_process(method: Callable[[], None]) -> None:
    """Call this bound method now, and in each forked child."""
    method()
    call_in_children(method)


def _call_all() -> None:
    for reference, function in list(_methods.values()):
        if (owner := reference()) is not None:
            function(owner)


os.register_at_fork(after_in_child=_call_all)
