"""The process of the quarantine: it runs one task at a time and nothing else.

The row and the outcome go over a socket pair, so only handlers connect to servers here. The process ends with
its worker, however that ends.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Awaitable, Mapping
from contextvars import Context
from typing import Any

from toc.loop import leave_process
from toc.model.body import Body, Content
from toc.model.errors import TocError
from toc.model.handler import Handler
from toc.model.raised import raised
from toc.model.task import TryRow
from toc.observe.log import configure, detach
from toc.observe.metrics import LOG_LINES_DROPPED
from toc.worker import copies, damage
from toc.worker.app import load_app, skip_breakpoints
from toc.worker.control import ControlPipe
from toc.worker.copies import end_if_copy
from toc.worker.silence import BEAT_SECONDS
from toc.worker.stages.handler_calls import check_done, per_task
from toc.worker.stages.loopwatch import executor_gone
from toc.worker.stages.traced import traced

PR_SET_PDEATHSIG = 1


def run(
    handler: Handler, row: TryRow, body: Body | None, runner: asyncio.Runner, seconds: float
) -> dict[str, Any]:
    """Run one task to its end. Returns the message with the outcome. A batch handler gets the task alone.

    A coroutine is cancelled after ``seconds``. For other handlers the waiting worker enforces the limit.
    """
    error: BaseException | None = None
    try:
        task = row.to_task(handler.topic, body)
        context = Context()  # what other tries have set is not seen here
        outcome = context.run(handler.call, task if handler.batch is None else [task])
        if handler.is_async:
            outcome = _await(outcome, runner.get_loop(), seconds, context)
        check_done(outcome)
        if handler.batch is not None:
            error = per_task(outcome, [task]).get(task.job_id)
    except BaseException as exc:
        error = exc
    end_if_copy(error)
    return {"kind": "processed"} if error is None else _failure(error)


def _await(outcome: Awaitable[Any], loop: asyncio.AbstractEventLoop, seconds: float, context: Context) -> Any:
    async def awaited() -> Any:
        return await outcome

    task = loop.create_task(awaited(), context=context)
    timer = loop.call_later(seconds, task.cancel, "max_runtime is over")
    task.add_done_callback(lambda _: loop.stop())
    while not task.done():
        loop.run_forever()  # again, as a handler may stop the loop
    timer.cancel()
    return task.result()


def _failure(error: BaseException) -> dict[str, Any]:
    what = raised(error)
    kind = "dead" if what.dead else "failed" if what.after_ms is None else "retry"
    return {"kind": kind, "raised": what._asdict()}


def serve(link: ControlPipe, handlers: Mapping[str, Handler], runner: asyncio.Runner) -> bool:
    """Run tasks until the worker closes its end.

    Returns False at once if a handler has damaged the process, or ended the executor of its event loop.
    """
    dropped = LOG_LINES_DROPPED.of()
    link.send("ready", topics=list(handlers))
    threading.Thread(target=_beat, args=[link], name="toc-beat", daemon=True).start()
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        copies.runs_here(runner.get_loop())
        while not link.closed:
            if damage.found():
                return False
            selector.select()
            for message in link.receive():
                row = TryRow._make(message["row"])
                # All tasks have one runner: objects that handlers keep may be bound to its event loop.
                body = _body(message.get("body"))
                outcome = run(handlers[message["topic"]], row, body, runner, message["seconds"])
                link.send(outcome.pop("kind"), dropped=dropped.take(), **outcome)
                if executor_gone(runner.get_loop()):
                    return False
    return True


def _body(packed: tuple[str, str] | None) -> Body | None:
    if packed is None:
        return None
    content = Content(packed[0], b64decode(packed[1]))
    return Body(len(content.data), content)


def _beat(link: ControlPipe) -> None:
    # It stops when a handler blocks the interpreter: that is its purpose.
    while not link.closed:
        link.send("beat")
        time.sleep(BEAT_SECONDS)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even if a handler hangs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(0)


def main() -> None:
    """The entry point of ``python -m toc.worker.quarantine.isolated``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--app", required=True)
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    detach()
    end_with(arguments.parent)
    # Supervisors signal every process of a service, but the worker decides when this one ends. The signals
    # are not set to "ignore": programs that handlers start would inherit that.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    sock = socket.socket(fileno=arguments.link)
    sock.set_inheritable(False)
    skip_breakpoints()
    try:
        center = load_app(arguments.app)
    except TocError as exc:
        print(f"error: {exc}", file=sys.stderr)
        leave_process(exc.exit_code)
    configure(center.settings.log_level, center.settings.log_format)
    handlers = center.handlers
    if center.tracing is not None:
        handlers = {topic: traced(handler, center.tracing) for topic, handler in handlers.items()}
    damage.keep()
    link = ControlPipe(sock)
    copies.keep_apart(link.close)
    serve(link, handlers, asyncio.Runner())
    # Closing the runner would wait for its executor's threads, and Python for those of the application.
    leave_process(0)


if __name__ == "__main__":
    main()
