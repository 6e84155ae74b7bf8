"""The log that the processes of a daemon share, which may be full, gone or stalled."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from harness.threads import at_once

from toc.observe.log import LogWriter, Stack, configure, get_logger, stack

# The log that the processes of a daemon share.

MANY = """
from toc.observe.log import configure, get_logger
configure("info", "json")
log = get_logger("toc.test")
for number in range(2000):
    log.info("counted", number=number)
"""


def test_processes_that_share_a_log_leave_each_others_lines_whole(tmp_path: Path) -> None:
    """Unbuffered, as in most images: there a line and its end are two writes if they are printed apart."""
    path = tmp_path / "log"
    with path.open("ab") as file:
        processes = [subprocess.Popen([sys.executable, "-u", "-c", MANY], stderr=file) for _ in range(4)]
        assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8000


CARD = {"card": "canary-4111"}


def test_a_stack_tells_where_and_what_kind_and_not_what_was_said() -> None:
    def pay(attribute: dict[str, str]) -> None:
        raise ValueError(f"no such card: {attribute['card']}")

    def handle(attribute: dict[str, str]) -> None:
        try:
            pay(attribute)
        except ValueError as exc:
            raise RuntimeError(f"cannot pay with {attribute}") from exc

    with pytest.raises(RuntimeError) as caught:
        handle(CARD)
    text = stack(caught.value)
    assert "canary" not in text
    assert text.index("RuntimeError") < text.index("ValueError")
    assert text.count("in handle") == 2
    assert "in pay" in text


def test_the_stack_of_a_handlers_error_is_made_only_if_its_line_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[BaseException] = []

    def make(error: BaseException) -> str:
        made.append(error)
        return stack(error)

    monkeypatch.setattr("toc.observe.log.stack", make)
    error = ValueError("canary")
    for level, written in (("info", False), ("debug", True)):
        configure(level, "json")
        get_logger("toc.test").debug("handler_raised", stack=Stack(error))
        said = capsys.readouterr().err
        assert ("ValueError" in said, "canary" in said, bool(made)) == (written, False, written)


# Lines on their way to a log that may be full, gone or stalled.


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
        at_once(partial(_count, log.writer, name) for name in range(4))
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


def test_everything_that_python_prints_arrives_of_a_process_that_is_detached(tmp_path: Path) -> None:
    """Where it cannot be written: fault 33."""
    path = tmp_path / "log"
    with path.open("wb") as output:
        ended = subprocess.run([sys.executable, "-c", EVERY_WAY], stdout=output, stderr=output, check=False)
    text = path.read_text()
    forms = ('"event": "said"', "^WARNING:", "^said")
    assert [len(re.findall(form, text, re.MULTILINE)) for form in forms] == [3000, 3000, 3000]
    assert "ZeroDivisionError" in text
    assert "ValueError: the end" in text
    assert "the last line" in text
    assert ended.returncode == 1


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
