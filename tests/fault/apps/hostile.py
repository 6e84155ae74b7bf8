"""The test application with handlers that do to their process what no handler should.

A task's attribute names the ``deed``, and for how many tries, ``deeds``, it is done (1 unless it says so).
One after which the process ends, or serves nobody until it is ended, is in the history as ``die``.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from harness import app

from toc import Task

center = app.center

EXIT_CODES = (0, 1, 2, 70, 75, 130, 255)


def _close_standard_streams() -> None:
    """As programs do that become daemons. What is opened next gets these numbers."""
    for number in range(3):
        os.close(number)


def _put_a_connection_in_place_of_stderr() -> None:
    """As when one is opened after that. What is written into it fails the try."""
    ours, theirs = socket.socketpair()
    os.dup2(ours.fileno(), 2)
    _connections.append((ours, theirs))
    print("a line that a handler prints", file=sys.stderr, flush=True)
    theirs.setblocking(False)
    try:
        raise AssertionError(f"written into a connection: {theirs.recv(4096)!r}")
    except BlockingIOError:
        pass


_connections: list[tuple[socket.socket, socket.socket]] = []

DEADLY: dict[str, Callable[[], object]] = {
    # PyDLL, unlike CDLL, keeps the interpreter.
    "hold the interpreter": lambda: ctypes.PyDLL(None).sleep(3600),
    "backtrack": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    **{f"exit {code}": partial(os._exit, code) for code in EXIT_CODES},
}
OTHERS: dict[str, Callable[[], object]] = {
    "raise SystemExit": lambda: sys.exit(2),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "close 0 to 2": _close_standard_streams,
    "connection at 2": _put_a_connection_in_place_of_stderr,
    "stop the event loop": lambda: asyncio.get_running_loop().stop(),
}


def _do(task: Task) -> None:
    deed = task.attribute.get("deed")
    if deed is None or task.attempt > task.attribute.get("deeds", 1):
        return
    if deed in DEADLY:
        app.history.ended(task, "die")
        DEADLY[deed]()
    else:
        OTHERS[deed]()


def on_thread(task: Task) -> None:
    with app.recorded(task):
        _do(task)
        app.after_sleep(task)


async def on_event_loop(task: Task) -> None:
    with app.recorded(task):
        _do(task)
        try:
            await asyncio.sleep(task.attribute.get("sleep", 0))
        finally:
            # Clean-up that takes its time: what interrupts it makes another outcome of the try.
            await asyncio.sleep(task.attribute.get("clean_up", 0))
        app.after_sleep(task)


for topic, call in (("test.sync", on_thread), ("test.async", on_event_loop)):
    center.handlers[topic] = replace(center.handlers[topic], call=call)
