"""Fault 34: a thread dies, and that it did cannot be said: the process is replaced at once all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from fault.kit.reader import Reader
from fault.test_25_threads import APP
from harness.patience import until
from harness.system import DaemonProcess

VICTIM = "poll"
AT_ONCE = 5.0
"""Seconds: LAST_WORDS_SECONDS and the way out."""


@pytest.mark.parametrize(
    "obstacle",
    [
        "the log is stalled",
        pytest.param("the log is gone", marks=pytest.mark.slow),
        pytest.param("the error's text hangs", marks=pytest.mark.slow),
    ],
)
def test_a_process_is_replaced_though_its_last_line_cannot_be_written(
    build: Build, tmp_path: Path, verdict: Verdict, reader: Reader, obstacle: str
) -> None:
    line = verdict(34, "a thread dies and that cannot be said", obstacle)
    death = tmp_path / VICTIM
    system = build()
    env = {**system.env, "TOC_TEST_DEATHS": str(tmp_path), "TOC_TEST_VICTIM": VICTIM}
    if obstacle == "the error's text hangs":
        env["TOC_TEST_NO_TEXT"] = "1"
    daemon = DaemonProcess(
        system.directory, "host-a", env, app=APP, processes=1, threads=4, output=reader.stream
    )
    system.daemons.append(daemon)
    system.wait(lambda: "worker_ready" in reader.told(), "it is ready", 60)
    (worker,) = daemon.workers()
    with Load(system.client, rate=50) as load:
        load.more(20)
        if obstacle == "the log is stalled":
            reader.stall(fill=True)
        elif obstacle == "the log is gone":
            reader.leave()
        with system.recorder.fault("kill", note="a thread dies") as fault:
            death.touch()
            assert until(lambda: not death.exists())
            began = time.monotonic()
            assert until(lambda: worker not in daemon.workers()), "it lives on"
            took = time.monotonic() - began
            fault.end(pids=[worker])
        line.prove(not death.exists(), f"an error raised in its thread {VICTIM}")
        line.within(took, AT_ONCE)
        system.wait(lambda: len(daemon.workers()) == 1, "another has taken its place", 30)
        load.more(150)
    assert "thread_died" not in reader.told()
    assert until(lambda: not system.pending(load.job_ids), 60), reader.told()[-5000:]
    assert daemon.process.poll() is None
    line.judge(system, within=20, at_most=100)
