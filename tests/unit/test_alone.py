"""The process in which tasks run alone, without its process."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

from toc import Task
from toc.handler import Handler
from toc.metrics import LOG_LINES_DROPPED
from toc.task import TryRow
from toc.worker.alone import serve
from toc.worker.link import Link


def test_log_lines_that_it_dropped_are_told_with_the_outcome() -> None:
    def talk(_: Task) -> None:
        LOG_LINES_DROPPED.of().add(3)

    LOG_LINES_DROPPED.of().take()
    ours, theirs = map(Link, socket.socketpair())
    with closing(theirs), closing(ours):
        child = threading.Thread(target=serve, args=[theirs, {"t": Handler.of("t", talk, None)}])
        child.start()
        assert [message["kind"] for message in ours.receive()] == ["ready"]
        for _ in range(2):
            ours.send("run", topic="t", row=TryRow(1, 1, 1, 0, 0, 0, 1, 0, 0, 0, None, "{}"))
            assert ours.receive() == [{"kind": "processed", "dropped": 3}]
        ours.close()
        child.join(10)
