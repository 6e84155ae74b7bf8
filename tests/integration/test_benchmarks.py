"""The benchmark itself runs: the floor, its servers, its host process and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import calls
from toc.dev.local.redis import MissingServer, find_redis


def test_a_quick_run_writes_a_report_in_which_nothing_was_lost_or_early(tmp_path: Path) -> None:
    try:
        find_redis()
    except MissingServer as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(exc))
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks", "bare loop", "--quick", "--output", str(output)]
    done = subprocess.run(
        [*command, "--workloads", "lateness", "burst"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    floor = json.loads(output.read_text())["peers"]["bare loop"]
    for result in [*floor["lateness"].values(), *floor["burst"].values()]:
        assert result["early"] == result["lost"] == result["doubled"] == 0
        assert result["tasks"] >= 200
    assert "Lateness in ms at 100 tasks a second" in done.stdout


def test_a_task_costs_no_more_calls_of_python_than_it_did() -> None:
    for _ in range(5):  # beside other work rounds are smaller, and a task costs more of them
        counted, tasks = calls.measure(seconds=2)
        by_thread = calls.per_task(counted, tasks)
        assert all(count > 10 for count in by_thread.values()), f"every thread counts: {by_thread}"
        if sum(by_thread.values()) <= calls.MOST:
            return
    pytest.fail(f"see python -m benchmarks.calls --functions 80: {by_thread}")
