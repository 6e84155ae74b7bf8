"""A cluster of this machine as its operator has it: a command line, and hosts that obey systemctl."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.patience import until
from harness.system import TOPICS, DaemonProcess, System

from benchmarks.cluster import LocalCluster
from toc import Topic


class OperatedCluster:
    """Servers of this machine, and hosts that are daemons of it."""

    def __init__(self, directory: Path) -> None:
        self.local = LocalCluster(directory / "servers", daemons=0)
        self.settings = self.local.start(lambda _settings: None) | {"tables": 64}
        self.directory = directory / "system"
        self.directory.mkdir()
        config = directory / "toc.toml"
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in self.settings.items()))
        outside = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {**outside, "PATH": path, "TOC_CONFIG": str(config)}
        self.hosts: dict[str, DaemonProcess] = {}
        self._system: System | None = None

    @property
    def system(self) -> System:
        """The same as the tests see it; to be used when the schema and the topic are there."""
        if self._system is None:
            self._system = System(self.directory, **self.settings)
            topics = self._system.center.store.topics
            there = {topic.name for topic in topics.list()}
            for biz_type, name in enumerate(TOPICS, start=1):
                if name not in there:
                    topics.create(Topic(name, biz_type, 8))
                topics.alter(name, prepare_timeout=3, backoff_base=0.2, retries=4)
        return self._system

    def run(
        self, line: str, words: Mapping[str, str] = MappingProxyType({}), *, codes: tuple[int, ...] = (0,)
    ) -> str:
        """What an operator types, with some words replaced; what it printed. ``ssh HOST systemctl VERB UNIT``
        is played."""
        for word, mine in words.items():
            line = line.replace(word, mine)
        if line.startswith("ssh "):
            _, host, _, verb, _ = line.split()
            self._systemctl(verb, host)
            return ""
        done = subprocess.run(
            ["bash", "-c", line], env=self.env, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode in codes, f"{line}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _systemctl(self, verb: str, host: str) -> None:
        """What systemd would do on that host."""
        assert verb in ("start", "stop", "restart")
        if verb != "start":
            daemon = self.hosts.pop(host)
            with self.system.recorder.fault("stop"):
                daemon.terminate()
                assert daemon.process.wait(60) == 0, daemon.log.read_text()
            daemon.log.rename(daemon.log.with_suffix(f".{time.time_ns()}.log"))
        if verb != "stop":
            self.hosts[host] = self.system.start(host, processes=1)

    def json(self, line: str) -> Any:
        """The same as a program reads it."""
        return json.loads(self.run(f"{line} --json"))

    def even(self) -> bool:
        """What the page calls done: ``owned`` equals ``assigned`` in every line of ``toc workers``."""
        workers = self.json("toc workers")
        return {row["host"] for row in workers} == set(self.hosts) and all(
            row["owned"] == row["assigned"] and row["tables"] == row["tables_assigned"] for row in workers
        )

    def owned(self, host: str) -> int:
        """Slots and tables."""
        workers = self.json("toc workers")
        return sum(int(row["owned"]) + int(row["tables"]) for row in workers if row["host"] == host)

    def most_overdue(self) -> float:
        """Of all slots, in milliseconds."""
        return max(1000 * (row["overdue"] or 0) for row in self.json("toc slots"))

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        logs = self._system.logs() if self._system else ""
        assert until(condition, seconds), f"not within {seconds} s: {what}\n{logs}"

    def stop(self) -> None:
        if self._system is not None:
            self._system.stop()
        self.local.stop()
