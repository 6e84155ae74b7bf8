"""Fault 19: cancel and reschedule at the due instant: an honest answer, whatever it is."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from fault.conftest import Build, Verdict
from harness.history import Client

from toc import CancelOutcome, NewTask, RescheduleOutcome
from toc.clock import from_ms
from toc.local.servers import RedisServer

THREADS = 8
WINDOW = 0.05
"""Calls come at the due time, so many seconds before or after."""


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_who_cancels_or_moves_a_task_as_it_comes_due_is_answered_honestly(
    build: Build, clean_redis: RedisServer, verdict: Verdict, count: int
) -> None:
    line = verdict(19, "cancel or reschedule at the due instant", f"{count:,} at due ± 50 ms")
    system = build(clean_redis.url)
    system.start()
    seconds = count / 400
    begin = datetime.now(UTC) + timedelta(seconds=2 + count / 3000)
    tasks = [
        NewTask("test.async", n, action_time=begin + timedelta(seconds=seconds * n / count))
        for n in range(count)
    ]
    job_ids = system.client.submit_many(tasks)
    rows = system.center.store.read(job_ids)
    dice = random.Random(count)
    plan = sorted(
        (rows[job_id].action_time / 1000 + dice.uniform(-WINDOW, WINDOW), job_id) for job_id in job_ids
    )
    answers: Counter[str] = Counter()
    cancelled: dict[int, CancelOutcome] = {}

    def work(part: list[tuple[float, int]]) -> None:
        for at, job_id in part:
            time.sleep(max(0.0, at - time.time()))
            if time.time() > rows[job_id].action_time / 1000 + WINDOW:
                answers["left alone, as we were too late"] += 1
            elif job_id % 3:
                outcome = cancelled[job_id] = system.client.cancel(job_id)
                answers[f"cancel {outcome.value}"] += 1
            else:
                moved = _move(system.client, job_id)
                answers[f"reschedule {moved.value}"] += 1

    threads = [threading.Thread(target=work, args=[plan[n::THREADS]]) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    met = [
        answers[f"cancel {CancelOutcome.CANCELLED.value}"],
        answers[f"cancel {CancelOutcome.TOO_LATE.value}"],
        answers[f"reschedule {RescheduleOutcome.RESCHEDULED.value}"],
        answers[f"reschedule {RescheduleOutcome.TOO_LATE.value}"],
    ]
    line.prove(
        min(met) >= 3,
        "answers: " + ", ".join(f"{answer} {number:,}" for answer, number in sorted(answers.items())),
    )
    line.judge(system, within=10)
    ran = {event.job_id for event in system.history() if event.event == "start"}
    for job_id, outcome in cancelled.items():
        assert (job_id in ran) or outcome is not CancelOutcome.TOO_LATE
        if count <= 1_000:
            assert system.client.cancel(job_id) is outcome, "asked again, it answers the same"


def _move(client: Client, job_id: int) -> RescheduleOutcome:
    later = from_ms(client.center.clock.now_ms() + 500)
    return client.reschedule(job_id, action_time=later)
