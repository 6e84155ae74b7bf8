"""The process in which tasks run alone (``isolated``), as the worker that started it sees it."""

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
from typing import Any

from toc.worker import stdio
from toc.worker.control import ControlPipe
from toc.worker.silence import BEAT_SECONDS, Silence

ALIVE_SECONDS = 3.0
"""Who has given a sign of life so recently does not count as silent."""


class IsolatedProcess:
    """Runs one task after the other. One thread talks to it; any thread may kill it."""

    def __init__(self, app: str) -> None:
        stdio.restore()  # it inherits them
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
                # A group of its own: what the handler has started ends with it.
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*command, "--parent", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
                self._pidfd = os.pidfd_open(self._process.pid)
            except OSError:
                ours.close()  # and with it ends the process, if there is one
                raise
        self._link = ControlPipe(ours)
        self._lock = threading.Lock()
        self._reaped = False
        self._heard: deque[dict[str, Any]] = deque()
        self._silence = Silence()
        self.fresh = True
        """Whether it has run nothing yet."""
        self.silent = False
        """Whether it has given no sign of life for too long: what it runs holds the interpreter."""

    def send(self, kind: str, **fields: Any) -> None:
        """Tell it something."""
        self._link.send(kind, **fields)

    def hear(self, seconds: float, patience: float | None = None) -> dict[str, Any] | None:
        """Its next message; None when it has ended, or the time is over.

        With ``patience`` it is to give signs of life: None, and it is ``silent``, when it has given none for
        so many seconds. If it gives none when the time is over, it gets until then.
        """
        until = time.monotonic() + seconds
        self._silence.broken()
        with selectors.PollSelector() as selector:  # needs no descriptor: there may be none left
            selector.register(self._link, selectors.EVENT_READ)
            # Its death too: what the handler has forked may hold the other end of the link.
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
        """Take what it says; whether it says anything."""
        try:
            messages = self._link.receive()
        except ValueError:  # its handler can reach every descriptor
            self.kill()
            return True
        self._heard += (message for message in messages if message["kind"] != "beat")
        return bool(messages)

    @property
    def dead(self) -> bool:
        """Whether the process has ended, or will never say anything again."""
        with selectors.PollSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            return self._link.closed or bool(selector.select(0))

    def kill(self) -> None:
        """End it and what it has started. Any thread may call it, at any time."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, seconds: float = 0.0) -> str:
        """Let it end by itself for so long, then by force. Returns how it ended."""
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
