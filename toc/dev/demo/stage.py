"""Where a demo runs: on embedded servers in a temporary directory, with a worker of its own."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from toc.config import Settings
from toc.dev.demo.orders import BIZ_TYPES
from toc.dev.local.embedded import EmbeddedStack, write_config
from toc.dev.local.process import Process, tail
from toc.model.errors import Unavailable
from toc.model.topic import Topic
from toc.operate.admin import migrator
from toc.sdk.client import TimeoutCenter

_TOC = [sys.executable, "-c", "from toc.cli.main import run; run()"]
SLOTS = 8
PROCESSES = 2
STOP_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A TimeoutCenter, and the worker that runs its tasks, with its log."""

    center: TimeoutCenter
    starts: Starts
    worker: Process
    log: Path

    def check(self) -> None:
        """Raise Unavailable when the worker has ended."""
        if not self.worker.alive():
            raise Unavailable(f"the worker ended; its log ends with:\n{tail(self.log)}")


class Starts(defaultdict[int, list[int]]):
    """By job_id, the instants (ns) at which handlers started, as far as they were read from their record."""

    def __init__(self, record: Path) -> None:
        super().__init__(list)
        record.touch()
        self._file = record.open("rb")

    def read(self) -> None:
        """Read what is new."""
        for line in self._file:
            job_id, started_ns = line.split()
            self[int(job_id)].append(int(started_ns))

    def close(self) -> None:
        """Close the record."""
        self._file.close()


@contextmanager
def embedded() -> Iterator[Stage]:
    """Run a private Redis, SQLite and a worker in a temporary directory, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="toc-demo-") as name:
        directory = Path(name)
        with EmbeddedStack(directory / "data", redis=True) as stack:
            config = write_config(directory / "toc.toml", stack.settings)
            with only_config(config):
                migrator(Settings()).upgrade()
                with TimeoutCenter() as center:
                    for topic, biz_type in BIZ_TYPES.items():
                        center.store.topics.create(Topic(topic, biz_type, SLOTS))
                    with _working(center, directory) as stage:
                        yield stage


@contextmanager
def _working(center: TimeoutCenter, directory: Path) -> Iterator[Stage]:
    starts = Starts(directory / "starts")
    log = directory / "worker.log"
    worker = Process.spawn(
        [*_TOC, "worker", "--app", "toc.dev.demo.app:center", "--processes", str(PROCESSES)],
        log,
        env={**os.environ, "TOC_DEMO_HISTORY": str(directory / "starts")},
    )
    try:
        yield Stage(center, starts, worker, log)
    finally:
        worker.stop(STOP_SECONDS)
        starts.close()


@contextmanager
def only_config(path: Path) -> Iterator[None]:
    """Within the block, settings come from this file alone, not from TOC_* variables of the caller, but for
    those of the log."""
    before = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("TOC_") and not name.startswith("TOC_LOG_")
    }
    for name in before:
        del os.environ[name]
    os.environ["TOC_CONFIG"] = str(path)
    try:
        yield
    finally:
        del os.environ["TOC_CONFIG"]
        os.environ.update(before)
