"""The kit for tests, as the contract's tests see a system: a thread lets its time pass like the machine's."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from contract.system import TOPICS
from harness.patience import until
from harness.rows import known
from typer.testing import CliRunner

from toc.cli.main import app
from toc.store.schema import task_table_name
from toc.store.servers.server import Statement
from toc.testing import Toc

T = TypeVar("T")
TURN_SECONDS = 0.005
_with_topics: list[Any] = []
"""The kit's database with all topics: the commands that make them take longer than a test."""


class KitContract:
    """What tests use of ``Contract``, in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "history").mkdir()
        self.kit = Toc()
        self.center = self.kit.center
        self.settings = self.center.settings
        self.kit.use(self.center)  # not those of other tests
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pass_time)

    def create_topics(self) -> None:
        if _with_topics:
            self.kit._database.add_topics(_with_topics[0])
            return
        for name in TOPICS:
            done = self.toc("topic", "create", name, *TOPICS[name])
            assert done.returncode == 0, done.stderr
        _with_topics.append(self.kit._database.topic_rows())

    def start(self) -> None:
        with mock.patch.dict(os.environ, TOC_TEST_HISTORY=str(self.directory / "history")):
            path = Path(__file__).with_name("contract_app.py")
            spec = known(importlib.util.spec_from_file_location("contract_app_of_the_kit", path))
            assert spec.loader is not None
            self._app = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = self._app  # dataclasses look there
            spec.loader.exec_module(self._app)
        self.kit.use(self._app.center)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.kit.close()

    def _pass_time(self) -> None:
        while not self._ended.wait(TURN_SECONDS):
            with suppress(Exception):
                self.now()

    def now(self) -> datetime:
        behind = time.time() - self.kit.now.timestamp()
        allowed = self.kit._clock.lag_ms / 1000  # what it runs although it is due later
        self.kit.advance(max(0.0, behind - 0.002 - allowed))
        return self.kit.now

    def toc(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = CliRunner().invoke(app, words)
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)

    def json(self, *words: str) -> Any:
        done = self.toc(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def row(self, job_id: int) -> dict[str, Any]:
        row = known(self.center.store.get(job_id))
        times = {name: _instant(getattr(row, name)) for name in ("action_time", "next_time")}
        return {**row._asdict(), **times}

    def status(self, job_id: int) -> int:
        return int(self.row(job_id)["status"])

    def end(self, job_id: int) -> None:
        end = f"UPDATE {task_table_name(0)} SET status=2 WHERE job_id={job_id}"
        self.kit._database.run([Statement(end)])

    def rows(self) -> int:
        return len(self.kit.tasks())

    has_index = False

    def slot(self, topic: str, number: int) -> str:
        return f"{topic}_{number}"

    def keys(self) -> dict[str, int]:
        return {}

    def scores(self, _job_id: int) -> dict[str, float]:
        return {}

    def history(self, job_id: int) -> list[dict[str, Any]]:
        lines = [
            json.loads(line)
            for path in (self.directory / "history").iterdir()
            for line in path.read_text().split("\n")[:-1]
        ]
        return sorted((line for line in lines if line["job_id"] == job_id), key=lambda line: line["at"])

    def open_gate(self, name: str) -> None:
        (self.directory / name).touch()

    def wait(self, condition: Callable[[], T], what: str, seconds: float = 60) -> T:
        found: list[T] = []

        def so() -> bool:
            found.append(condition())
            return bool(found[-1])

        assert until(so, seconds), what
        return found[-1]

    def wait_status(self, job_id: int, status: int) -> None:
        self.wait(lambda: self.status(job_id) == status, f"{job_id} has status {status}")


def _instant(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).replace(tzinfo=None)
