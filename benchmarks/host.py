"""The process that holds one peer, in the peer's own environment; it takes requests as JSON lines.

``python -m benchmarks.host MODULE DIRECTORY``; a request is ``{"do": ..., ...}``, an answer ``{"ok": ...}``
or ``{"error": ...}``. It submits tasks and supervises workers; it neither measures starts nor handles tasks.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peer import Peer, Workers


class Host:
    """One peer, its workers, and the requests that it understands."""

    def __init__(self, module: str, directory: Path) -> None:
        peer = importlib.import_module(f"benchmarks.peers.{module}").PEER()
        assert isinstance(peer, Peer)
        self._peer = peer
        self._log = directory / "workers.log"
        self._workers: Workers | None = None

    def version(self) -> str:
        """Return name and version."""
        return self._peer.version()

    def start(self, processes: int) -> None:
        """Start workers."""
        self._workers = Workers(self._peer.commands(processes), self._log)

    def pids(self) -> list[int]:
        """Return the workers' process ids."""
        return self._workers.pids() if self._workers else []

    def stop(self) -> None:
        """Stop the workers."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None

    def submit(self, numbers: tuple[int, int], dues: list[int], batch: bool) -> float:
        """Submit the range of numbers with these due times; return the seconds that it took."""
        span = range(*numbers)
        started = time.perf_counter()
        if batch:
            self._peer.submit_many(span, dues)
        else:
            for number, due in zip(span, dues, strict=True):
                self._peer.submit(number, due)
        return time.perf_counter() - started

    def pending(self) -> int:
        """Return how many tasks the servers hold."""
        return self._peer.pending()

    def close(self) -> None:
        """Stop the workers and the peer."""
        self.stop()
        self._peer.close()


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    host: Host | None = None
    try:
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            try:
                if host is None:
                    host = Host(sys.argv[1], Path(sys.argv[2]))
                result = getattr(host, request.pop("do"))(**request)
                answers.write(json.dumps({"ok": result}) + "\n")
            except Exception as exc:
                answers.write(json.dumps({"error": f"{type(exc).__name__}: {exc}"}) + "\n")
    finally:
        if host is not None:
            host.stop()


if __name__ == "__main__":
    main()
