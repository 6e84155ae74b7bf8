"""What an object does in a child of ``os.fork``.

The child has only the thread that forked. Locks that other threads held stay locked there, and connections
are shared with the parent. So this is done before anything else runs in the child: a thread that noticed the
fork later, by the pid, would race with the child's other threads.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def call_in_children(method: Callable[[], None]) -> None:
    """Call this bound method in each forked child, for as long as its object lives. It must not raise."""
    reference = weakref.WeakMethod(method)

    def after_fork() -> None:
        call = reference()
        if call is not None:
            call()

    os.register_at_fork(after_in_child=after_fork)
