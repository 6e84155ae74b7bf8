"""`toc demo` and `toc dev` as a user runs them: programs of their own, on real servers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import forks
from harness.patience import until


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
