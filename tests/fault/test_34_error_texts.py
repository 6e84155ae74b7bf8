"""Fault 34: errors whose text takes its time, or cannot be had, or is larger than memory likes."""

from __future__ import annotations

import time

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load

from benchmarks.local import RedisServer

APP = "fault.apps.hostile:center"
SPEAK_SECONDS = 5.0
"""What the text of the unspeakable takes."""


@pytest.mark.parametrize(
    ("deed", "kept"),
    [
        pytest.param(
            "raise the unspeakable", "Unspeakable: (its text cannot be made)", marks=pytest.mark.slow
        ),
        ("raise what is wordy", "Wordy: xxx"),
    ],
)
def test_an_error_whose_text_takes_its_time_takes_that_of_its_own_thread(
    build: Build, clean_redis: RedisServer, verdict: Verdict, deed: str, kept: str
) -> None:
    line = verdict(34, "an error's text takes its time", deed)
    system = build(clean_redis.url)
    daemon = system.start(processes=1, app=APP)
    before = daemon.workers()
    slow: dict[int, float] = {}
    with Load(system.client, rate=50, fail=0) as load:
        raising = system.client.submit("test.sync", biz_id=0, delay=0.5, attribute={"deed": deed})
        system.wait(lambda: bool(system.starts(raising)), "it runs", 20)
        # Beside it: tasks that are written while the text is being made.
        while system.row(raising).attempts == 0:
            began = time.monotonic()
            one = system.client.submit("test.sync", biz_id=1, delay=0.02)
            system.wait(lambda: not system.pending([one]), "it has ended", 20)  # noqa: B023
            slow[one] = time.monotonic() - began
        system.wait(lambda: not system.pending([raising]), "it runs again", 20)
    error = system.row(raising).last_error or ""
    line.prove(error.startswith(kept), f"it failed with {error[:60]!r}")
    assert len(error) <= 1000
    assert max(slow.values()) < SPEAK_SECONDS / 2 + line.slack, "what others did was written meanwhile"
    assert daemon.workers() == before
    line.judge(system, within=5)
    assert system.late(load.job_ids)[-1] < 1000 * (SPEAK_SECONDS / 2 + line.slack)
