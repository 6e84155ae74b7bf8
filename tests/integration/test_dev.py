"""``toc dev`` as a developer uses it: files that change and break, tracebacks, breakpoints in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PATIENCE = 60
PROGRAM = """\
from toc import Task, TimeoutCenter
center = TimeoutCenter()
@center.handler("order.close", retries=1)
def close(task: Task) -> None:
    {}
"""


class Terminal:
    """A terminal in which ``toc dev`` runs, and ``shop.py`` beside it."""

    def __init__(self, directory: Path, *more: str) -> None:
        self.directory, self.shown, self.all = directory, "", ""
        self._terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toc", "dev", "--app", "shop:center", *more],
            cwd=directory,
            env={name: value for name, value in os.environ.items() if not name.startswith("TOC_")},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def await_text(self, *texts: str) -> None:
        """Wait until these texts are shown, one after the other, after what was waited for before."""
        for text in texts:
            until = time.monotonic() + PATIENCE
            while text not in self.shown:
                assert time.monotonic() < until, f"{text!r} is not shown, but:\n{self.shown}"
                self._read()
            self.shown = self.shown.split(text, 1)[1]

    def _read(self) -> None:
        if select.select([self._terminal], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # nobody has the other end open
                found = os.read(self._terminal, 65536).decode(errors="replace")
                self.shown, self.all = self.shown + found, self.all + found

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def submit(self, biz_id: int) -> None:
        self.toc("submit", "order.close", "--biz-id", str(biz_id), "--delay", "100ms")

    def toc(self, *words: str) -> str:
        env = os.environ | {"TOC_CONFIG": str(self.directory / ".toc/toc.toml")}
        command = [sys.executable, "-m", "toc", *words]
        return subprocess.check_output(command, env=env, text=True, timeout=PATIENCE)

    def close(self) -> None:
        self.process.terminate()
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < until:  # a full terminal would hold it up
            self._read()
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*more: str) -> Terminal:
        started.append(Terminal(tmp_path, *more))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_changed_files_are_loaded_again_and_a_broken_one_is_waited_for(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    program = tmp_path / "shop.py"
    program.write_text(PROGRAM.format("pass"))
    shown = terminal()
    shown.await_text("ready: order.close", "toc submit order.close")
    shown.submit(1)
    shown.await_text("started    order.close 1:", "processed  order.close 1:")
    program.write_text(PROGRAM.format("raise RuntimeError("))
    shown.await_text("changed: shop.py", "was never closed (shop.py, line 5)", "waiting for a file to change")
    program.write_text(PROGRAM.format("raise RuntimeError('no shop')"))
    shown.await_text("changed: shop.py", "ready: order.close")
    shown.submit(2)
    shown.await_text("failed     order.close 2: try 1", "RuntimeError: no shop", 'shop.py", line 5, in close')
    shown.await_text("dead       order.close 2: RuntimeError: no shop")
    kept = shown.toc("find", "--biz-id", "2", "--json")
    history = json.loads(shown.toc("get", json.loads(kept)[0]["job_id"], "--json"))["history"]
    assert [each["stack"] for each in history] == [f"{program}:5 in close"]


@pytest.mark.parametrize("more", [[], ["--debug"]])
def test_of_an_app_that_cannot_be_loaded_the_error_is_told_alone(
    terminal: Callable[..., Terminal], more: list[str]
) -> None:
    shown = terminal(*more)
    shown.await_text("error: --app 'shop:center': there is no module 'shop'", "\n")
    shown.process.wait(PATIENCE)
    (line,) = shown.all.splitlines()
    assert line.startswith("error: ")


def test_a_breakpoint_stops_in_the_terminal_and_uses_up_no_try(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM.format("breakpoint()\n    print('closed', task.attempt)"))
    shown = terminal("--debug")
    shown.await_text("ready: order.close")
    shown.submit(1)
    shown.await_text("(Pdb)")
    shown.type("p task.biz_id + 41\n")
    shown.await_text("42", "(Pdb)")
    shown.type("q\n")
    shown.await_text("given back order.close 1:", "(Pdb)")
    shown.type("c\n")
    shown.await_text("closed 1", "processed  order.close 1:")
