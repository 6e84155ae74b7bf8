"""In each process an error is raised inside another of its threads, until all of them have had theirs.

Not a wrong build: any thread may meet an error that nobody has thought of. TOC_TEST_DEATHS is a directory in
which a process makes the file named after its victim; ``none-left`` says that there is nobody left to die.
With TOC_TEST_DAEMON_DIES it is the daemon, and that thread of it; with TOC_TEST_VICTIM that thread of one
worker process, once the file of its name is there. With TOC_TEST_NO_TEXT the error has no text: who wants it
waits for ever.
"""

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.app import center

from toc.loop import Loop
from toc.store.servers.health import Health
from toc.store.tasks.leases import Leases
from toc.worker.entry import Inflight
from toc.worker.settle.finish import Finisher

__all__ = ["center"]

LOOP_STEPS = ("a start on the event loop", "a report on the event loop")
"""asyncio takes an error of a callback for its own affair: these must end the process all the same."""
STORE_STEP = "a row check on a thread of the store"
"""Nobody waits for it, or sees its error."""


class Unthought(Exception):
    """What nobody has thought of."""

    def __str__(self) -> str:
        if "TOC_TEST_NO_TEXT" in os.environ:
            never = threading.Lock()
            with never, never:
                pass
        return super().__str__()


_loops: list[Loop] = []
_victim = ""
_patience = vars(Health)["patience"].fget


def _noted(start: Callable[[Loop], None]) -> Callable[[Loop], None]:
    def noted(loop: Loop) -> None:
        _loops.append(loop)
        start(loop)

    return noted


def _mortal(step: str, method: Callable[..., Any], thread: str = "toc-async-handlers") -> Callable[..., Any]:
    def mortal(*args: Any, **more: Any) -> Any:
        if _victim == step and threading.current_thread().name == thread:
            raise Unthought(step)
        return method(*args, **more)

    return mortal


def _no_patience(health: Health) -> float:
    """The poller gets no answer of MySQL in time: it leaves the row check to a thread of the store."""
    hurry = _victim == STORE_STEP and threading.current_thread().name == "toc-poll"
    return 0.0 if hurry else _patience(health)


def _threads() -> dict[str, list[int]]:
    """The threads that are toc's own, with their idents by kind; not those of the store, whose callers get
    the error, nor the one that writes the log, which stops nothing."""
    found = {"main": [threading.main_thread().ident or 0]}
    for thread in threading.enumerate():
        name = thread.name
        if not thread.daemon or not name.startswith("toc-") or name.startswith(("toc-log", "toc-store")):
            continue
        kind = re.sub(r"handler-\d+", "handler", name.removeprefix("toc-"))
        found.setdefault(kind, []).append(thread.ident or 0)
    return found


def _choose() -> str:
    if in_daemon:
        return in_daemon
    for name in (*sorted(_threads()), *LOOP_STEPS, STORE_STEP):
        try:
            (Path(os.environ["TOC_TEST_DEATHS"]) / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        return name
    (Path(os.environ["TOC_TEST_DEATHS"]) / "none-left").touch()
    return ""


def _removed(path: Path) -> bool:
    """Whether there was such a file, and it is this process that has taken it away."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _murder(first: str) -> None:
    global _victim
    while first not in _threads():
        time.sleep(0.05)
    if only := os.environ.get("TOC_TEST_VICTIM"):
        while not _removed(Path(os.environ["TOC_TEST_DEATHS"]) / only):
            time.sleep(0.05)
        _victim = only
    else:
        time.sleep(0.5)
        _victim = _choose()
    while _victim:  # a thread may be inside of a handler, whose errors are no news
        if any(thread.name.endswith("(say)") for thread in threading.enumerate()):
            return  # it is dying (toc.loop.end_process), and must not be disturbed as it says so
        if _victim not in (*LOOP_STEPS, STORE_STEP):
            for ident in _threads()[_victim]:  # of the handlers' threads, one may wait for work for minutes
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Unthought))
            for loop in _loops:
                loop.wake()  # it is raised when the thread goes on
        time.sleep(0.2)


if "TOC_TEST_DEATHS" in os.environ:  # else a test imports it
    main = getattr(sys.modules["__main__"], "__spec__", None)
    in_worker = main is not None and main.name == "toc.worker.process"
    in_daemon = os.environ.get("TOC_TEST_DAEMON_DIES", "")
    if in_worker != bool(in_daemon):
        Loop.start = _noted(Loop.start)  # type: ignore[assignment, method-assign]
        Inflight.start = _mortal(LOOP_STEPS[0], Inflight.start)  # type: ignore[method-assign]
        Finisher.ended = _mortal(LOOP_STEPS[1], Finisher.ended)  # type: ignore[method-assign]
        Leases.judged = _mortal(STORE_STEP, Leases.judged, "toc-store")  # type: ignore[method-assign]
        Health.patience = property(_no_patience)  # type: ignore[assignment, method-assign]
        threading.Thread(target=_murder, args=["wake" if in_worker else "catalog"], daemon=True).start()
