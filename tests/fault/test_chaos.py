"""The soak of random faults, and the page that it and the fault tests end on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_half_a_minute_of_chaos_ends_with_a_clean_verdict() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fault.chaos", "--seed", "26193", "--minutes", "0.5"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert lines[0].startswith("seed 26193, 30 s: ")
    for fault in ("kill gateway", "kill consumer", "ack twice", "kill host", "pause MySQL"):
        assert fault in done.stdout, "another seed has it"
    assert re.search(r" pulled [1-9]", done.stdout), done.stdout
    assert lines[-1].startswith('CLEAN: {"seed": 26193, "seconds": 30, '), done.stdout
