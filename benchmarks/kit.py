"""How long an application's tests take with the kit: each lets the seven days of a deadline pass."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environment import CannotRun

TESTS = 1000
_SUITE = """
import pytest
from toc import TimeoutCenter

center = TimeoutCenter()
confirmed = []

@center.handler("parcel.confirm")
def confirm(task):
    confirmed.append(task.biz_id)

@pytest.mark.parametrize("parcel", range({tests}))
def test_a_parcel_is_confirmed_after_seven_days(toc, parcel):
    center.submit("parcel.confirm", biz_id=parcel, delay="7d", attribute={{"by": "mail"}})
    toc.assert_submitted("parcel.confirm", biz_id=parcel, due_in="7d")
    toc.advance("6d")
    assert parcel not in confirmed
    toc.advance("1d")
    assert parcel in confirmed
"""


def measure(tests: int = TESTS) -> dict[str, float]:
    """Run them by pytest, with its start, and without the plugins of toc's own tests. Raises CannotRun."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "test_parcels.py").write_text(_SUITE.format(tests=tests))
        began, used = time.monotonic(), _processor()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "toc.pytest_plugin"]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True, check=False)
        seconds, used = time.monotonic() - began, _processor() - used
    if f"{tests} passed" not in done.stdout:
        raise CannotRun(f"the kit's tests: {done.stdout[-500:]}{done.stderr[-500:]}")
    return {"tests": tests, "seconds": seconds, "processor_seconds": used}


def _processor() -> float:
    """Seconds that ended children of this process have used."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
