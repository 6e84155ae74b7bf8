"""The benchmark's own arithmetic, and that every peer it names is there."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import guard, record, report, stats
from benchmarks.catalog import ENTRIES

MS = 1_000_000


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0.5, 0.99, 0.999, 1.0]))
def test_a_percentile_is_the_least_value_that_the_share_does_not_exceed(
    values: list[float], share: float
) -> None:
    ordered = sorted(values)
    found = stats.percentile(ordered, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_lateness_counts_early_lost_and_doubled_tasks_and_takes_the_first_start() -> None:
    due = {1: 100 * MS, 2: 100 * MS, 3: 100 * MS, 4: 100 * MS}
    starts = {1: [99 * MS], 2: [103 * MS], 3: [190 * MS, 104 * MS], 5: [0]}
    found = stats.lateness(due, starts)
    assert (found["early"], found["lost"], found["doubled"]) == (1, 1, 1)
    assert (found["p50"], found["max"]) == (3.0, 4.0)


def test_medians_keep_the_shape_and_skip_runs_that_lack_a_part() -> None:
    runs = [{"a": {"x": 1.0}, "b": "old"}, {"a": {"x": 9.0}}, {"a": {"x": 3.0}, "b": "new", "c": None}]
    assert stats.medians(runs) == {"a": {"x": 3.0}, "b": "new", "c": None}


def test_medians_do_not_hide_the_one_run_in_which_tasks_were_lost() -> None:
    assert stats.medians([{"lost": 0}, {"lost": 7}, {"lost": 0}]) == {"lost": 7}


def test_medians_of_a_workload_that_was_left_out_last_say_so() -> None:
    assert stats.medians([{"rate": 3.0}, {"left_out": "too slow"}]) == {"left_out": "too slow"}


def test_starts_written_by_forked_processes_are_all_read(tmp_path: Path) -> None:
    program = (
        "import os; from benchmarks.record import started; started(7)\n"
        "if os.fork() == 0: started(8); os._exit(0)\n"
        "os.wait()"
    )
    environment = {**os.environ, record.STARTS_DIRECTORY: str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert sorted(number for number, _ in record.read(tmp_path)) == [7, 8]
    assert record.count(tmp_path) == len(list(tmp_path.iterdir())) == 2


def test_half_a_record_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(record.START.pack(7, 8) + b"\0\0")
    assert list(record.read(tmp_path)) == [(7, 8)]


def test_a_handler_that_shall_die_dies_once(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.mkdir()
    program = f"from benchmarks.record import started; started({record.DIES | 5})"
    environment = {**os.environ, record.STARTS_DIRECTORY: str(starts)}
    codes = [
        subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode
        for _ in range(2)
    ]
    assert codes == [-9, 0]
    assert record.count(starts) == 2


def test_every_peer_of_the_catalog_has_its_file() -> None:
    peers = Path(record.__file__).parent / "peers"
    for entry in ENTRIES:
        assert "PEER = " in (peers / f"{entry.module}.py").read_text(), entry.name
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("name", list(guard.BOUNDS))
def test_the_guard_names_what_is_out_of_bounds_and_nothing_else(name: str) -> None:
    measured = dict(guard.BOUNDS)
    assert guard.exceeded(measured) == []
    measured[name] *= 1.01
    (problem,) = guard.exceeded(measured)
    assert problem.startswith(name)


def test_a_report_shows_what_was_left_out_and_who_could_not_run() -> None:
    lateness = stats.lateness({1: 0}, {1: [5 * MS]})
    peers: dict[str, dict[str, Any]] = {
        "one": {"version": "one 1", "settings": "best", "lateness": {"100": lateness}},
        "two": {"version": "two 2", "settings": "best", "lateness": {"100": {"left_out": "too slow for it"}}},
        "three": {"settings": "best", "cannot": "no [server] here"},
    }
    machine = {
        "processor": "P",
        "cores": 2,
        "memory_gib": 4,
        "kernel": "6",
        "python": "3",
        "fsync_ms": math.pi,
    }
    text = io.StringIO()
    result = {"peers": peers, "machine": machine, "load": "0", "repeat": 1}
    report.tables(json.loads(json.dumps(result)), Console(file=text, width=200))
    assert "5.00" in text.getvalue()
    assert "too slow for it" in text.getvalue()
    assert "three was not measured: no [server] here" in text.getvalue()
