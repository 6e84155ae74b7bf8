"""Where a demo runs: on embedded servers, or on those of the settings."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from toc.config import Settings, config_file
from toc.dev.demo.history import History, history_directory
from toc.dev.demo.run import create_topics
from toc.dev.local.embedded import EmbeddedStack, write_config
from toc.dev.local.process import Process, tail
from toc.model.errors import Unavailable
from toc.operate.admin import migrator
from toc.sdk.client import TimeoutCenter

_TOC = [sys.executable, "-c", "from toc.cli.main import run; run()"]
APP = "toc.dev.demo.app:center"
STOP_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A TimeoutCenter, and a worker that runs its tasks.

    ``alive`` raises Unavailable when that worker has ended; ``log`` is its log.
    """

    center: TimeoutCenter
    history: History
    alive: Callable[[], None]
    log: Path


@contextmanager
def embedded(processes: int) -> Iterator[Stage]:
    """Run a private Redis, SQLite and a worker in a temporary directory, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="toc-demo-") as name:
        directory = Path(name)
        with EmbeddedStack(directory / "data") as stack:
            config = write_config(directory / "toc.toml", stack.settings)
            with only_config(config):
                migrator(Settings()).upgrade()
                with configured(directory, processes) as stage:
                    yield stage


@contextmanager
def configured(directory: Path, processes: int) -> Iterator[Stage]:
    """Use the servers of the settings, with a new worker that keeps its files in ``directory``.

    Other workers of the same settings file may run its tasks too.
    """
    history = history_directory() if config_file() else directory / "demo-history"
    with TimeoutCenter() as center:
        create_topics(center)
        log = directory / "worker.log"
        worker = Process.spawn(
            [*_TOC, "worker", "--app", APP, "--processes", str(processes)],
            log,
            env={**os.environ, "TOC_DEMO_HISTORY": str(history)},
        )

        def alive() -> None:
            if not worker.alive():
                raise Unavailable(f"the worker ended; its log ends with:\n{tail(log)}")

        try:
            yield Stage(center, History(history), alive, log)
        finally:
            worker.stop(STOP_SECONDS)


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
