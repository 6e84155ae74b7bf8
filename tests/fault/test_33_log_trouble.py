"""Fault 33: the log's disk is full, its reader gone or stalled: work goes on, lines are dropped, counted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from fault.kit.reader import Reader
from fault.kit.servers import fill
from harness.forks import FULL
from harness.patience import until
from harness.system import DaemonProcess, System

from benchmarks.private import free_port
from toc import TaskStatus
from toc.observe.logwriter import LogWriter


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param("disk full", marks=pytest.mark.slow),
        "reader gone",
        pytest.param("reader stalled", marks=pytest.mark.slow),
    ],
)
def test_trouble_with_the_log_stops_nothing(
    build: Build, tmp_path: Path, verdict: Verdict, reader: Reader, trouble: str
) -> None:
    line = verdict(33, "the log cannot be written", trouble)
    talk = tmp_path / "talk"
    system = build(metrics_address=f"127.0.0.1:{free_port()}", max_crashes=1)
    daemon = DaemonProcess(
        system.directory,
        "host-a",
        {**system.env, "TOC_HOST": "host-a", "TOC_TEST_TALK": str(talk)},
        app="fault.apps.talkative:center",
        processes=2,
        threads=4,
        output=FULL if trouble == "disk full" else reader.stream,
    )
    system.daemons.append(daemon)
    system.wait(lambda: _ask(system, "readyz") == "ok\n", "it is ready", 60)
    with Load(system.client, rate=50) as load:
        load.more(50)
        {"reader gone": reader.leave, "reader stalled": reader.stall}.get(trouble, lambda: None)()
        talk.touch()
        began = time.time()
        system.wait(lambda: _dropped(system) > 1000, "lines are dropped", 30)
        with system.recorder.fault("kill", note="a task ends its process") as fault:
            dead = daemon.workers()
            poison = system.client.submit("test.sync", biz_id=1, delay=0.2, attribute={"die": 1})
            system.wait(
                lambda: system.row(poison).status == TaskStatus.PROCESSED, "it has run, alone at last", 60
            )
            fault.end(pids=dead)
        load.more(100)
        over = time.time()
        if trouble == "reader stalled":
            talk.unlink()
            reader.go_on()
            told = len(reader.told())
            system.wait(lambda: len(reader.told()) > told, "what waited is told", 30)
            reader.stall()
            talk.touch()
    assert until(lambda: not system.pending(load.job_ids), 30), system.logs()
    line.prove(_dropped(system) > 1000, f"{_dropped(system):,.0f} lines dropped by daemon and processes")
    line.on_time(system.late(since=began, before=over), p50=50)
    daemon.terminate()
    asked = time.monotonic()
    assert daemon.process.wait(60) == 0
    line.within(time.monotonic() - asked, 10)
    line.judge(system, within=10, at_most=100)


def test_a_log_whose_disk_has_room_again_goes_on_with_whole_lines(small_disk: Callable[[int], Path]) -> None:
    directory = small_disk(1)
    path = directory / "log"
    lost: list[int] = []
    with path.open("ab") as file:
        writer = LogWriter(file.fileno(), dropped=lost.append)
        writer.write(b"begun\n")
        assert until(lambda: path.read_bytes() == b"begun\n", 10)
        ballast = fill(directory)  # the file has the rest of its page
        for number in range(200):
            writer.write(f"{number:099d}\n".encode())
        assert until(lambda: bool(lost), 10)
        ballast.unlink()
        writer.write(b"whole\n")
        writer.close(60.0)
    begun, *lines, torn, whole = path.read_text().splitlines()
    assert (begun, whole) == ("begun", "whole")
    assert lines == [f"{number:099d}" for number in range(200 - sum(lost))]
    assert f"{len(lines):099d}".startswith(torn)
    assert len(torn) < 99


def _ask(system: System, path: str) -> str:
    with (
        suppress(URLError, OSError),
        urlopen(f"http://{system.settings.metrics_address}/{path}", timeout=30) as answer,
    ):
        return str(answer.read().decode())
    return ""


def _dropped(system: System) -> float:
    (found,) = re.findall(r"^toc_dropped_log_lines_total (\S+)$", _ask(system, "metrics"), re.MULTILINE)
    return float(found)
