"""Lines on their way to a log that may be full, gone or stalled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toc.observe.logwriter import LogWriter


class Log:
    """A writer, and what it has counted."""

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        self.writer = LogWriter(descriptor, dropped=self._count)

    def _count(self, lines: int) -> None:
        self.dropped += lines


def _count(writer: LogWriter, name: int) -> None:
    for number in range(2000):
        writer.write(f"{name} {number}\n".encode())


def test_threads_leave_each_others_lines_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab") as file:
        log = Log(file.fileno())
        threads = [threading.Thread(target=_count, args=[log.writer, name]) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.writer.close(60.0)
    lines = path.read_text().splitlines()
    for name in range(4):
        mine = [int(line.split()[1]) for line in lines if line.startswith(f"{name} ")]
        assert mine == list(range(2000))
    assert len(lines) == 8000


EVERY_WAY = """
import atexit, logging, sys, threading, warnings
from toc.observe.log import detach, get_logger
detach()
logging.basicConfig()
atexit.register(print, "the last line")
for number in range(3000):
    get_logger("toc.test").error("said", number=number)
    logging.warning("said")
    warnings.warn("said", stacklevel=1)
    print("said" * 100)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("the end")
"""


@pytest.mark.parametrize("log", ["stalled", "gone", "full", "well"])
def test_nothing_that_python_prints_holds_up_a_process_that_is_detached(log: str) -> None:
    receiver, sender = os.pipe()
    output = os.open("/dev/full", os.O_WRONLY) if log == "full" else sender
    process = subprocess.Popen([sys.executable, "-c", EVERY_WAY], stdout=output, stderr=output)
    os.close(sender)
    if log == "gone":
        os.close(receiver)
    elif log == "well":
        with os.fdopen(receiver) as file:
            text = file.read()
        counts = [
            len(re.findall(form, text, re.MULTILINE)) for form in ('"event": "said"', "^WARNING:", "^said")
        ]
        assert counts == [3000, 3000, 3000]
        assert "ZeroDivisionError" in text
        assert "ValueError: the end" in text
        assert "the last line" in text
    assert process.wait(60) == 1
    if log in ("stalled", "full"):
        os.close(receiver)
    if log == "full":
        os.close(output)


FORKED = """
import os, sys
from toc.observe.log import detach
detach()
print("ours", file=sys.stderr)
pid = os.fork()
if pid == 0:
    print("a child's last words", file=sys.stderr)
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_what_a_handler_forks_writes_as_it_always_did(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], stderr=file, timeout=240, check=True)
    assert sorted(path.read_text().splitlines()) == ["a child's last words", "ours"]
