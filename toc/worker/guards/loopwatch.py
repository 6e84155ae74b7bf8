"""Detects that a handler blocks the event loop that all share."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback

from toc.observe.log import get_logger
from toc.worker.run.coroutine import HandlerTask

log = get_logger(__name__)


class LoopWatch:
    """Reports a long step on an event loop: no other coroutine of the process runs meanwhile.

    It asks the loop, whose thread is ``thread``, to answer and checks once a second. A single missed answer
    proves nothing: the whole process may have been stopped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._answered = True
        self._silent = 0
        """Looks in a row at which the loop had not answered."""

    def look(self, *, busy: bool) -> None:
        """Check whether the loop has answered, and ask again if coroutines run there (``busy``)."""
        if not self._answered:
            self._silent += 1
            if self._silent == 2:
                log.warning("event_loop_blocked", **self._culprit())
            return
        self._silent = 0
        if busy:
            self._answered = False
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._answered = True

    def _culprit(self) -> dict[str, object]:
        """Return what blocks the loop: the stack, and the task if its own coroutine runs (not a
        child task or callback)."""
        about: dict[str, object] = {}
        task = asyncio.current_task(self._loop)
        if isinstance(task, HandlerTask):
            about = {"job_id": task.entry.job_id, "topic": task.entry.topic.name}
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is not None:
            about["stack"] = "".join(traceback.format_stack(frame))
        return about
