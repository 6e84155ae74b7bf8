"""``toc demo`` and ``toc dev`` as their users run them: files that change and break,
a debugger in a terminal."""

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import forks
from harness.patience import until

# `toc demo` and `toc dev` as a user runs them: programs of their own, on real servers.


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary directory of the programs, whose remains can be seen; short, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


@pytest.fixture
def environment(temporary: Path) -> dict[str, str]:
    """Nothing of the caller's settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
    return clean | {"TMPDIR": str(temporary), "PYTHONWARNINGS": "error"}


def toc(environment: dict[str, str], directory: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return forks.run([str(word) for word in words], env=environment, directory=directory, timeout=240)


def test_the_demo_runs_on_nothing_comes_out_right_and_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, temporary: Path
) -> None:
    ended = toc(environment, tmp_path, "demo", "--count", 60, "--seconds", 3, "--json")
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["right"], report
    assert report["submitted"] == 60
    assert report["cancelled"] > 10
    assert report["fired"] > 0
    assert list(temporary.iterdir()) == []


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """An application of a user."""
    path = tmp_path / "shop #1? 50%20"  # a name that URLs and shells must not take apart
    path.mkdir()
    (path / "deadlines.py").write_text(
        "from pathlib import Path\n"
        "from toc import Task, TimeoutCenter\n"
        "center = TimeoutCenter()\n"
        "@center.handler('order.close')\n"
        "def close(task: Task) -> None:\n"
        "    Path(f'closed-{task.biz_id}').touch()\n"
        "    raise KeyError\n"
    )
    return path


def test_dev_creates_everything_an_app_needs_and_runs_it(environment: dict[str, str], shop: Path) -> None:
    _run_dev(environment, shop, 5)
    _run_dev(environment, shop, 6, "--redis")  # a step up the ladder
    assert "redis_url" in (shop / ".toc/toc.toml").read_text()


def _run_dev(environment: dict[str, str], shop: Path, biz_id: int, *more: str) -> None:
    said, log = shop / f"said-{biz_id}", shop / f"log-{biz_id}"
    said.touch()
    dev = forks.start(
        ["dev", "--app", "deadlines:center", *more],
        env=environment | {"TOC_LOG_LEVEL": "debug"},
        directory=shop,
        streams={"stdout": str(said), "stderr": str(log)},
    )
    try:
        assert until(lambda: "\n" in said.read_text(), 60)
        (_, setting) = shlex.split(said.read_text().splitlines()[0])
        name, _, value = setting.partition("=")
        theirs = environment | {name: value}

        words = ("submit", "order.close", "--biz-id", biz_id, "--delay", "100ms")
        assert until(lambda: toc(theirs, shop, *words).returncode == 0, 60)
        assert until((shop / f"closed-{biz_id}").exists, 60)
        assert until(lambda: '"event": "handler_raised"' in log.read_text(), 60), "the level is obeyed"
    finally:
        dev.send_signal(signal.SIGINT)
        assert dev.wait(60) == 0


# ``toc dev`` as a developer uses it: files that change and break, tracebacks, breakpoints in a terminal.

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

    def submit(self, biz_id: int, topic: str = "order.close") -> None:
        self.toc("submit", topic, "--biz-id", str(biz_id), "--delay", "100ms")

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
    program.write_text(PROGRAM.format("__import__('time').sleep(60)"))
    shown.await_text("ready: order.close")
    shown.submit(3)
    shown.await_text("started    order.close 3:")
    program.write_text(PROGRAM.format("pass"))
    shown.await_text("changed: shop.py", "handlers_abandoned")
    shown.await_text("processed  order.close 3:")


def test_topics_that_no_handler_of_the_app_is_for_are_named(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    program = tmp_path / "shop.py"
    program.write_text(PROGRAM.format("pass") + "center.topic('order.pulled', delivery='pull')\n")
    shown = terminal()
    shown.await_text("ready: order.close")
    assert "no handler" not in shown.all
    program.write_text(PROGRAM.format("pass").replace("order.close", "order.paid"))
    shown.await_text("no handler is for order.close: their tasks wait", "ready: order.paid")


NO_HANDLER = "from toc import TimeoutCenter\ncenter = TimeoutCenter()\n"


@pytest.mark.parametrize(("program", "told", "more"), [
    ("", "--app 'shop:center': module 'shop' has no 'center'", ["--debug"]),
    (NO_HANDLER, "the app registers no handler", []),
    (f"{NO_HANDLER}center.topic('a', retries=99)", "not 99 (at shop.py:3)", ["--debug"]),
])  # fmt: skip
def test_of_an_app_that_cannot_be_loaded_the_error_is_told_last(
    tmp_path: Path, terminal: Callable[..., Terminal], program: str, told: str, more: list[str]
) -> None:
    (tmp_path / "shop.py").write_text(program)
    shown = terminal(*more)
    shown.process.wait(PATIENCE)
    shown.await_text("error: ", "\n")
    assert told in shown.all.replace(f"{tmp_path}/", "").splitlines()[-1]


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
    shown.submit(2)
    shown.await_text("(Pdb)")
    (found,) = json.loads(shown.toc("find", "--biz-id", "2", "--json"))
    shown.process.terminate()
    shown.await_text("handlers_abandoned", found["job_id"])


def test_a_try_that_a_developer_looks_at_takes_as_long_as_it_does(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    program = PROGRAM.format("breakpoint()\n    print('closed', task.attempt)")
    program = program.replace("retries=1", "retries=1, max_runtime='1s'")
    coroutine = program[program.index("@") :].replace("order.close", "order.later")
    coroutine = coroutine.replace("def close", "async def later")
    (tmp_path / "shop.py").write_text(program + coroutine)
    shown = terminal("--debug")
    shown.await_text("ready: order.close")
    for topic in ("order.close", "order.later"):
        shown.submit(1, topic)
        shown.await_text("(Pdb)")
        shown.type("import time; time.sleep(5); print('sl' + 'ept')\n")
        shown.await_text("slept", "(Pdb)")
        shown.type("c\n")
        shown.await_text("closed 1", f"processed  {topic} 1:")
    found = json.loads(shown.toc("find", "--biz-id", "1", "--json"))
    assert [(one["status"], one["failed_tries"]) for one in found] == 2 * [("processed", 0)]
    assert "event_loop_blocked" not in shown.all
