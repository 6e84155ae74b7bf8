"""The asyncio task in which a coroutine of a handler runs, which other handlers cannot end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

from toc.observe.log import get_logger
from toc.worker.stages.entry import Entry

log = get_logger(__name__)

_running: ContextVar[Entry | None] = ContextVar("toc_running", default=None)
"""For whom a coroutine runs; the callbacks and the tasks that it makes have it, too."""
_told: ContextVar[bool] = ContextVar("toc_told", default=False)


class HandlerTask(asyncio.Task[None]):
    """Runs the handler of one entry, or of a batch that begins with it.

    Who cancels it is the handler itself as a rule, by a time-out for example. To another handler, which goes
    through ``asyncio.all_tasks()`` most likely, it says that it has ended already. A cancel by nobody that is
    known, such as a thread that a handler has started, has its effect; but not before its first step, when
    nobody would report how it ended. ``disturbed``: there was one of either kind, so that a CancelledError is
    none of its own; the tasks that it waits for may have been cancelled.
    """

    def __init__(
        self, call: Coroutine[Any, Any, None], entry: Entry, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.entry = entry
        self.disturbed = False
        self.begun = False
        super().__init__(call, loop=loop)

    def begin(self) -> None:
        """Its first step, inside of it."""
        self.begun = True
        _running.set(self.entry)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel it, unless it is another handler that asks. Whether that was done."""
        asks = _running.get()
        if asks is self.entry:
            self.disturbed = False
            return super().cancel(msg)
        self.disturbed = self.disturbed or not self.cancelling()
        if asks is None and self.begun:
            return super().cancel(msg)
        if asks is not None and not _told.get():  # once: there may be thousands
            _told.set(True)
            log.warning("cancel_refused", job_id=asks.job_id, topic=asks.topic.name)
        return False

    def end(self) -> None:
        """Cancel it because max_runtime is over: its own failure, whatever else happens to it."""
        self.disturbed = False
        super().cancel("max_runtime is over")
