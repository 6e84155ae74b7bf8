"""The record that the demo's handlers write, and its reader, which reads while they write.

One line per start, ``job_id started_ns``, in one file per process of the history directory.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from pathlib import Path

from toc.config import config_file


def history_directory() -> Path:
    """Return the record's directory: TOC_DEMO_HISTORY, else ``demo-history`` beside the settings file."""
    named = os.environ.get("TOC_DEMO_HISTORY")
    if named:
        return Path(named)
    path = config_file()
    return (path.parent if path else Path()) / "demo-history"


class HistoryWriter:
    """Writes the file of this process. O_APPEND and one write per line keep the lines of threads apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._descriptor = -1

    def append(self, job_id: int, started_ns: int) -> None:
        """Record a start. Usable after a fork."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    directory = history_directory()
                    directory.mkdir(parents=True, exist_ok=True)
                    path = directory / f"{os.getpid()}.txt"
                    self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                    self._pid = os.getpid()
        os.write(self._descriptor, b"%d %d\n" % (job_id, started_ns))


class History:
    """Reads the record from where it last stopped. ``starts``: by job_id, in nanoseconds since 1970 UTC."""

    def __init__(self, directory: Path) -> None:
        self.starts: dict[int, list[int]] = defaultdict(list)
        self._by_process: dict[int, list[int]] = defaultdict(list)
        self._directory = directory
        self._read: dict[Path, int] = {}

    def read(self) -> None:
        """Read what is new. An incomplete line is left for the next call."""
        for path in sorted(self._directory.glob("*.txt")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                job_id, started_ns = line.split()
                self.starts[int(job_id)].append(int(started_ns))
                self._by_process[int(path.stem)].append(int(job_id))

    def cut_off(self) -> Counter[int]:
        """Return by job_id how many starts were in processes that have ended: such a try may run again."""
        gone = [pid for pid in self._by_process if not Path(f"/proc/{pid}").exists()]
        return Counter(job_id for pid in gone for job_id in self._by_process[pid])
