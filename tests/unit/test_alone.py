"""The process in which tasks run alone, without its process and with it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness.patience import until

from toc import Task
from toc.model.handler import Handler
from toc.model.task import TryRow
from toc.observe.metrics import LOG_LINES_DROPPED
from toc.worker.control import ControlPipe
from toc.worker.quarantine.child import IsolatedProcess
from toc.worker.quarantine.isolated import serve

ROW = TryRow(1, 1, 1, 0, 0, 0, 1, 0, 0, 0, None, "{}")


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
    with closing(theirs), closing(ours), asyncio.Runner() as runner:
        child = threading.Thread(target=serve, args=[theirs, {"t": Handler.of("t", talk, None)}, runner])
        child.start()
        assert heard(ours)["kind"] == "ready"
        for _ in range(2):
            ours.send("run", topic="t", row=ROW, seconds=60)
            assert heard(ours) == {"kind": "processed", "dropped": 3}
        ours.close()
        child.join(60)
        for thread in threading.enumerate():
            if thread.name == "toc-beat":
                thread.join(60)


APP = """
import asyncio, os, sys, time
from toc import TimeoutCenter

center = TimeoutCenter()

@center.handler("write")
def write(task):
    os.write(int(sys.argv[sys.argv.index("--link") + 1]), task.attribute["line"].encode() + b"\\n")
    time.sleep(3600)

@center.handler("shut.down")
async def shut_down(task):
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, time.sleep, 3600)
    loop._default_executor.shutdown(wait=False)
"""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IsolatedProcess]:
    """The process, with the application above."""
    (tmp_path / "alone_app.py").write_text(APP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    process = IsolatedProcess("alone_app:center")
    told = process.hear(60)
    assert told is not None
    assert told.topics == {"write", "shut.down"}
    process.fresh = False
    yield process
    process.end()


def test_it_ends_at_once_when_a_handler_has_shut_down_what_the_next_one_may_need(
    alone: IsolatedProcess,
) -> None:
    alone.send("run", topic="shut.down", row=ROW, seconds=60)
    told = alone.hear(30)
    assert told is not None
    assert told.kind == "processed"
    assert until(lambda: alone.dead, 10), "it waits for the thread of a handler"


@pytest.mark.parametrize(
    "line", ["1", '{"kind":"processed"}', '{"kind":"failed","dropped":0}', '{"kind":"ready","topics":[]}']
)
def test_a_handler_that_writes_what_is_no_outcome_has_ended_it(alone: IsolatedProcess, line: str) -> None:
    alone.send("run", topic="write", row=ROW._replace(attribute=json.dumps({"line": line})), seconds=60)
    assert alone.hear(30) is None
    assert alone.dead
