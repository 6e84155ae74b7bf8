"""The process in which tasks run alone (``isolated``), as seen by the worker that started it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from toc.model.raised import Raised
from toc.worker.app import started_in
from toc.worker.control import ControlPipe
from toc.worker.silence import BEAT_SECONDS, Silence

ALIVE_SECONDS = 3.0
"""A child that has sent a message within this time is not silent: its task only takes longer."""
FLUSH_SECONDS = 0.001
"""Pause between attempts to send the rest of a message."""
TAKE_SECONDS = 10.0
"""How long the child may take to read a message."""


class Told(NamedTuple):
    """A message of the child."""

    kind: str
    """``ready``, or how its task ended: ``processed``, ``failed``, ``retry``, ``dead``."""
    topics: frozenset[str] = frozenset()
    """The topics that it has handlers for, if it is ready."""
    dropped: int = 0
    """How many lines of the log it has dropped since its last message."""
    error: Raised | None = None
    """What the handler raised."""


class IsolatedProcess:
    """Runs one task after the other. One thread talks to it; any thread may kill it."""

    def __init__(self, app: str) -> None:
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "toc.worker.quarantine.isolated",
            "--app",
            app,
            "--link",
            str(theirs.fileno()),
        ]
        with theirs:
            try:
                # It has a process group of its own, so that what the handler has started ends with it.
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*command, "--parent", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    cwd=started_in(),
                    process_group=0,
                )
                self._pidfd = os.pidfd_open(self._process.pid)
            except OSError:
                ours.close()  # this also ends the process, if there is one
                raise
        self._link = ControlPipe(ours)
        self._lock = threading.Lock()
        self._reaped = False
        self._heard: deque[Told] = deque()
        self._silence = Silence()
        self.fresh = True
        """Whether it has run nothing yet."""
        self.silent = False
        """Whether it has sent nothing for too long: its task blocks the interpreter."""

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, which may hold a task's body. Kills a process that does not read it."""
        self._link.send(kind, **fields)
        until = time.monotonic() + TAKE_SECONDS
        while not self._link.flush() and not self.dead:
            if time.monotonic() > until:
                self.kill()
                return
            time.sleep(FLUSH_SECONDS)

    def hear(self, seconds: float, patience: float | None = None) -> Told | None:
        """Return its next message; None if it has ended, or after ``seconds``.

        With ``patience``, None is also returned after a silence of that many seconds (``silent``).
        If it has sent nothing for ALIVE_SECONDS when ``seconds`` are over, the wait lasts until it
        sends something or counts as silent.
        """
        until = time.monotonic() + seconds
        self._silence.broken()
        with selectors.PollSelector() as selector:  # it needs no descriptor, and none may be left
            selector.register(self._link, selectors.EVENT_READ)
            # Its death is watched too: a process that the handler forked may hold the other end of the link.
            selector.register(self._pidfd, selectors.EVENT_READ)
            while True:
                left, silent = until - time.monotonic(), self._silence.look()
                if left <= 0 and (patience is None or silent < ALIVE_SECONDS):
                    return None
                if patience is not None and silent > patience:
                    self.silent = True
                    return None
                ready = [key.fileobj for key, _ in selector.select(min(max(left, 0.1), BEAT_SECONDS))]
                if self._link in ready and self._receive():
                    self._silence.broken()
                    if self._heard:
                        return self._heard.popleft()
                elif self._pidfd in ready or self._link.closed:
                    return None

    def _receive(self) -> bool:
        """Read its messages. Returns whether there were any."""
        try:
            messages = self._link.receive()
            self._heard += [
                _told(message, ready=self.fresh) for message in messages if message["kind"] != "beat"
            ]
        except (ValueError, KeyError, TypeError):  # its handler can write to any descriptor, also to the link
            self.kill()
            return True
        return bool(messages)

    @property
    def dead(self) -> bool:
        """Whether the process has ended, or will never send anything again."""
        with selectors.PollSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            return self._link.closed or bool(selector.select(0))

    def kill(self) -> None:
        """Kill it and the programs that it has started. Any thread may call this, at any time."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, seconds: float = 0.0) -> str:
        """Wait up to ``seconds`` for it to end by itself, then kill it. Returns how it ended."""
        self._link.close()
        if seconds:
            with selectors.PollSelector() as selector:
                selector.register(self._pidfd, selectors.EVENT_READ)
                selector.select(seconds)
        self.kill()
        with self._lock:
            code = self._process.wait()
            self._reaped = True
        os.close(self._pidfd)
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _told(message: Mapping[str, Any], *, ready: bool) -> Told:
    kind = message["kind"]
    if (kind == "ready") != ready:
        raise ValueError("not what is expected of it now")
    if ready:
        return Told(kind, frozenset(message["topics"]))
    error = None if kind == "processed" else Raised(**message["raised"])
    return Told(kind, dropped=int(message["dropped"]), error=error)
