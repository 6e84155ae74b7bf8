"""The asyncio task that runs a coroutine handler. Other handlers cannot cancel it.

The context tells where a cancel comes from. If another handler breaks off a try nevertheless, that
counts as a crash but uses up no try (``Disturbed``). After several of them the task runs alone,
where only the task itself can break off its try.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from typing import Any

from toc.observe.log import get_logger
from toc.worker.entry import Entry

log = get_logger(__name__)

_running: ContextVar[Entry | None] = ContextVar("toc_running", default=None)
"""The entry for which a coroutine runs. Callbacks and tasks that the coroutine creates inherit it."""
_refusal_logged: ContextVar[bool] = ContextVar("toc_refusal_logged", default=False)


class HandlerTask(asyncio.Task[None]):
    """Runs the handler of one entry, or of a batch that begins with it.

    Usually the handler itself cancels it, for example by a timeout. A cancel by another handler,
    most likely in a loop over ``asyncio.all_tasks()``, is refused as if the task had ended. A
    cancel from an unknown source, such as a thread that a handler started, takes effect, but only
    after the first step: before that, nothing would report the end of the task. ``disturbed``:
    there was a cancel of either kind, so a CancelledError is not the handler's own; tasks that it
    awaits may have been cancelled.
    """

    def __init__(
        self, call: Coroutine[Any, Any, None], entry: Entry, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.entry = entry
        self.disturbed = False
        self.begun = False
        super().__init__(call, loop=loop, context=Context())  # what other tries have set is not seen here

    def begin(self) -> None:
        """The first step, called inside the task."""
        self.begun = True
        _running.set(self.entry)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task unless another handler calls. Returns whether it was cancelled."""
        asks = _running.get()
        if asks is self.entry:
            self.disturbed = False
            return super().cancel(msg)
        self.disturbed = self.disturbed or not self.cancelling()
        if asks is None and self.begun:
            return super().cancel(msg)
        if asks is not None and not _refusal_logged.get():  # log once: there may be thousands
            _refusal_logged.set(True)
            log.warning("cancel_refused", job_id=asks.job_id, topic=asks.topic.name)
        return False

    def end(self) -> None:
        """Cancel the task because max_runtime is over: its own failure, even if it was disturbed."""
        self.disturbed = False
        super().cancel("max_runtime is over")
