"""What the handlers of the demo write down, and how it is read while they do.

One line per start, ``job_id started_ns``, in a file per process of the history directory.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from pathlib import Path

from toc.config import config_file


def history_directory() -> Path:
    """Where starts are written down: TOC_DEMO_HISTORY, else ``demo-history`` beside the settings file."""
    named = os.environ.get("TOC_DEMO_HISTORY")
    if named:
        return Path(named)
    path = config_file()
    return (path.parent if path else Path()) / "demo-history"


class HistoryWriter:
    """The file of this process. O_APPEND and one write per line: lines of threads never mix."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._descriptor = -1

    def append(self, job_id: int, started_ns: int) -> None:
        """Note a start. Usable after a fork."""
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
    """Reads on where it stopped. ``starts`` are by job_id, in nanoseconds since 1970 UTC."""

    def __init__(self, directory: Path) -> None:
        self.starts: dict[int, list[int]] = defaultdict(list)
        self._by_process: dict[int, list[int]] = defaultdict(list)
        self._directory = directory
        self._read: dict[Path, int] = {}

    def read(self) -> None:
        """Take in what is new. A line that is written only in part is left for the next time."""
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
        """How many starts of each job_id were in processes that are no more: such a try may run again."""
        gone = [pid for pid in self._by_process if not Path(f"/proc/{pid}").exists()]
        return Counter(job_id for pid in gone for job_id in self._by_process[pid])
