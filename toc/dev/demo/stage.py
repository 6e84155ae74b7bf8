"""Where a demo runs: on embedded servers in a temporary directory, with a worker in this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from toc.config import Settings
from toc.dev.demo.orders import BIZ_TYPES
from toc.dev.local.embedded import EmbeddedStack, write_config
from toc.model.errors import Unavailable
from toc.model.topic import Topic
from toc.operate.admin import migrator

SLOTS = 8
READY_SECONDS = 60.0


@contextmanager
def embedded() -> Iterator[ModuleType]:
    """Run a private Redis, SQLite and the application, whose module is given.

    All files are in a temporary directory, which is removed at the end. Raises Unavailable if the worker is
    not ready in time.
    """
    with (
        tempfile.TemporaryDirectory(prefix="toc-demo-") as name,
        EmbeddedStack(Path(name), redis=True) as stack,
        only_config(write_config(Path(name) / "toc.toml", stack.settings)),
    ):
        migrator(Settings()).upgrade()
        from toc.dev.demo import app  # now, as its center reads the settings

        with app.center as center:
            for topic, biz_type in BIZ_TYPES.items():
                center.store.topics.create(Topic(topic, biz_type, SLOTS))
            with center.worker() as worker:
                if not worker.ready.wait(READY_SECONDS):
                    raise Unavailable(
                        f"the worker was not ready within {READY_SECONDS:g} s; is the machine busy?"
                    )
                yield app


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
