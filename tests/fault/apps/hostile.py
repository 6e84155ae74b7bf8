"""The test application with handlers that do to their process what no handler should.

A task's attribute names the ``deed``, and for how many tries, ``deeds``, it is done (1 unless it says so).
One after which the process ends, or serves nobody until it is ended, is in the history as ``die``; so is a
try that another task's deed has broken off.
"""

import asyncio
import ctypes
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

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
_leaked: list[int] = []
DESCRIPTORS = 256
"""So many a process may have, once a handler leaks them: as many as systems give by default take a while."""


def _leak_descriptors() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, most))
    while True:
        _leaked.append(os.open(os.devnull, os.O_RDONLY))  # raises in the end


def _use_copies() -> None:
    """What programs rightly do with copies of their process. Each fails the try if it does not work."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    assert process.exitcode == 3, process.exitcode
    with context.Pool(2) as pool:  # which it ends by SIGTERM
        assert pool.map(abs, [-1, -2]) == [1, 2]
    subprocess.run(["true"], check=True, preexec_fn=os.getpid)
    pid = os.fork()
    if not pid:
        sys.exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4


_loops: list[asyncio.AbstractEventLoop] = []
"""The event loop, once a handler runs there."""


def _cancel_all() -> None:
    for task in asyncio.all_tasks(_loops[0]):
        task.cancel()


def _run_on() -> None:
    """Until the test lets it go."""
    released = Path(os.environ["TOC_TEST_HISTORY"]).with_name("released")
    while not released.exists():
        time.sleep(0.05)


def _block_the_event_loop() -> None:
    _run_on()


WRITTEN_SECONDS = 30.0
"""How long a handler goes on that has written to the link, unless its process is killed for it."""
NO_MESSAGES = {
    "a number": b"1",
    "no fields": b'{"kind":"beat"}',
    "deep nesting": b"[" * 100_000,
    "no reason": b'{"kind":"unfit"}',
    "no names": b'{"kind":"met","workers":1}',
}


def _write_to_the_link(line: bytes) -> None:
    """As a handler does that takes the descriptor for its own."""
    descriptor = int(sys.argv[sys.argv.index("--link") + 1])
    os.write(descriptor, line + b"\n")
    time.sleep(WRITTEN_SECONDS)


DEADLY: dict[str, Callable[[], object]] = {
    # PyDLL, unlike CDLL, keeps the interpreter.
    "hold the interpreter": lambda: ctypes.PyDLL(None).sleep(3600),
    "crash": lambda: ctypes.string_at(0),
    "backtrack": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    **{f"exit {code}": partial(os._exit, code) for code in EXIT_CODES},
    # As programs do that become daemons, but in a copy.
    "close from 3": lambda: os.closerange(3, 65535),
    **{f"write {what} to the link": partial(_write_to_the_link, line) for what, line in NO_MESSAGES.items()},
}
OTHERS: dict[str, Callable[[], object]] = {
    "raise SystemExit": lambda: sys.exit(2), "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "kill 0": lambda: os.kill(0, signal.SIGTERM), "leak descriptors": _leak_descriptors,
    "use copies": _use_copies, "close 0 to 2": _close_standard_streams,
    "connection at 2": _put_a_connection_in_place_of_stderr,
    "stop the event loop": lambda: asyncio.get_running_loop().stop(),
    "cancel all": lambda: _cancel_all(),
    "cancel all from a thread": lambda: _loops[0].call_soon_threadsafe(_cancel_all),
    "block the event loop": lambda: _block_the_event_loop(), "run on": _run_on,
}  # fmt: skip


def _doing(task: Task) -> bool:
    """Whether this try does a deed."""
    return "deed" in task.attribute and task.attempt <= task.attribute.get("deeds", 1)


def _do(task: Task) -> None:
    if not _doing(task):
        return
    deed = task.attribute["deed"]
    if deed in DEADLY:
        app.history.ended(task, "die")
        DEADLY[deed]()
    else:
        OTHERS[deed]()


FORKS = {"fork", "fork and go on"}
"""Both the process and its copy return, or go on, as if alone; the try ends well if the copy does."""


def _forks(task: Task) -> bool:
    return task.attribute.get("deed") in FORKS and task.attempt <= task.attribute.get("deeds", 1)


def on_thread(task: Task) -> None:
    with app.recorded(task):
        if not _forks(task):
            _do(task)
        time.sleep(task.attribute.get("sleep", 0))
        app.after_sleep(task)
    if _forks(task) and (copy := os.fork()):
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0


_background: list[asyncio.Task[None]] = []


async def _go_on_calling() -> None:
    while True:
        await asyncio.to_thread(time.sleep, 0.5)


async def on_event_loop(task: Task) -> None:
    _loops[:] = [asyncio.get_running_loop()]
    with app.recorded(task, partial(broken_off, task)):
        if not _forks(task):
            _do(task)
        if "background" in task.attribute:  # as a client's library does, once
            _background.append(asyncio.create_task(_go_on_calling()))
        try:
            sleep = app.slept(task)
            # A child has no protection from others.
            await (asyncio.ensure_future(sleep) if "child" in task.attribute else sleep)
            if "call" in task.attribute:
                await asyncio.to_thread(time.sleep, task.attribute["call"])
        finally:
            # Clean-up that takes its time: what interrupts it makes another outcome of the try.
            await asyncio.sleep(task.attribute.get("clean_up", 0))
        app.after_sleep(task)
    if _forks(task):
        if copy := os.fork():
            await asyncio.to_thread(os.waitpid, copy, 0)
        elif task.attribute["deed"] == "fork and go on":
            await asyncio.sleep(0.1)


def broken_off(task: Task, error: BaseException) -> bool:
    """Whether that is what comes of another task's deed."""
    cancelled = isinstance(error, asyncio.CancelledError) and "max_runtime" not in str(error)
    return cancelled and not _doing(task)


for topic, call in (("test.sync", on_thread), ("test.async", on_event_loop)):
    center.handlers[topic] = replace(center.handlers[topic], call=call)
