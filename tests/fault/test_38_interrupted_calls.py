"""Fault 38: calls into the SDK that an exception from outside breaks off, at any instant."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from fault.conftest import Build, Verdict
from fault.kit.interrupted import AT_ONCE_SECONDS


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "stride"), [(200, 97), pytest.param(10_000, 7, marks=pytest.mark.slow)])
def test_calls_that_are_broken_off_lose_no_connection_and_mix_up_no_answers(
    build: Build, verdict: Verdict, count: int, stride: int
) -> None:
    line = verdict(38, "a call into the SDK broken off by SIGALRM", f"{count:,} times")
    system = build()
    command = [sys.executable, "-m", "fault.kit.interrupted", str(count), str(stride), "38"]
    done = subprocess.run(command, env=system.env, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert sum(found["nested"].values()) > 100
    assert done.stderr.count("the interpreter is ending") == 2, done.stderr[-4000:]
    line.prove(
        sum(found["broken"].values()) >= count and len(found["broken"]) == 7,
        f"{sum(found['broken'].values())} calls of 7 kinds broken off; {found['stored']} tasks acknowledged",
    )
    line.within(found["slowest"], AT_ONCE_SECONDS)
