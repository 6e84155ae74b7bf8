"""The process in which tasks run alone, without its process."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import closing
from typing import Any

from harness.patience import until

from toc import Task
from toc.model.handler import Handler
from toc.model.task import TryRow
from toc.observe.metrics import LOG_LINES_DROPPED
from toc.worker.control import ControlPipe
from toc.worker.quarantine.isolated import serve


def heard(link: ControlPipe) -> dict[str, Any]:
    """The next message that is no sign of life."""
    said: list[dict[str, Any]] = []

    def something() -> bool:
        said.extend(message for message in link.receive() if message["kind"] != "beat")
        return bool(said)

    assert until(something, 30)
    (message,) = said
    return message


def test_log_lines_that_it_dropped_are_told_with_the_outcome() -> None:
    def talk(_: Task) -> None:
        LOG_LINES_DROPPED.of().add(3)

    LOG_LINES_DROPPED.of().take()
    ours, theirs = map(ControlPipe, socket.socketpair())
    with closing(theirs), closing(ours):
        child = threading.Thread(target=serve, args=[theirs, {"t": Handler.of("t", talk, None)}])
        child.start()
        assert heard(ours)["kind"] == "ready"
        for _ in range(2):
            ours.send("run", topic="t", row=TryRow(1, 1, 1, 0, 0, 0, 1, 0, 0, 0, None, "{}"), seconds=60)
            assert heard(ours) == {"kind": "processed", "dropped": 3}
        ours.close()
        child.join(10)
        for thread in threading.enumerate():
            if thread.name == "toc-beat":
                thread.join(10)


def test_it_ends_when_a_handler_has_shut_down_what_the_next_one_may_need() -> None:
    async def shut_down(_: Task) -> None:
        await asyncio.get_running_loop().shutdown_default_executor()

    ours, theirs = map(ControlPipe, socket.socketpair())
    with closing(theirs), closing(ours):
        child = threading.Thread(target=serve, args=[theirs, {"t": Handler.of("t", shut_down, None)}])
        child.start()
        assert heard(ours)["kind"] == "ready"
        ours.send("run", topic="t", row=TryRow(1, 1, 1, 0, 0, 0, 1, 0, 0, 0, None, "{}"), seconds=60)
        assert heard(ours)["kind"] == "processed"
        child.join(10)
        assert not child.is_alive()
        ours.close()
        theirs.receive()  # so that it knows
        for thread in threading.enumerate():
            if thread.name == "toc-beat":
                thread.join(10)
