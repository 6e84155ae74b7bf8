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
from harness.system import System

from toc import CancelOutcome, NewTask, RescheduleOutcome
from toc.model.clock import from_ms

COUNT = 10_000
THREADS = 8
WINDOW = 0.05
"""Calls come at the due time, so many seconds before or after."""


@pytest.mark.slow
def test_who_cancels_or_moves_a_task_as_it_comes_due_is_answered_honestly(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(19, "cancel or reschedule at the due instant", f"{COUNT:,} at due ± 50 ms")
    system = build()
    system.start()
    said: list[tuple[int, CancelOutcome | RescheduleOutcome]] = []
    submitted, rate = 0, 400.0
    while (left := COUNT - len(said)) > 0:  # a busy machine lets some of the instants pass by
        assert submitted <= 5 * COUNT, f"{submitted:,} tasks, but only {len(said):,} calls in time"
        biz_ids = range(submitted, submitted + max(left, COUNT // 10))
        met = _meet(system, biz_ids, rate)
        rate = max(rate * len(met) / len(biz_ids), 100.0)
        submitted += len(biz_ids)
        said += met
    answers = Counter(f"{_op(outcome)} {outcome.value}" for _, outcome in said)
    cancelled = {job_id: outcome for job_id, outcome in said if isinstance(outcome, CancelOutcome)}
    seen = [
        answers[f"cancel {CancelOutcome.CANCELLED.value}"],
        answers[f"cancel {CancelOutcome.TOO_LATE.value}"],
        answers[f"reschedule {RescheduleOutcome.RESCHEDULED.value}"],
        answers[f"reschedule {RescheduleOutcome.TOO_LATE.value}"],
    ]
    line.prove(
        min(seen) >= 3,
        f"{len(said):,} calls; "
        + ", ".join(f"{answer} {number:,}" for answer, number in sorted(answers.items())),
    )
    line.judge(system, within=10)
    ran = {event.job_id for event in system.history() if event.event == "start"}
    for job_id, outcome in cancelled.items():
        assert (job_id in ran) or outcome is not CancelOutcome.TOO_LATE


def _meet(system: System, biz_ids: range, rate: float) -> list[tuple[int, CancelOutcome | RescheduleOutcome]]:
    """Submit a task for each, ``rate`` of them due in a second, and cancel or move each as it comes due; but
    leave it alone if we are too late for that ourselves. Returns the answers by job_id.
    """
    count = len(biz_ids)
    begin = datetime.now(UTC) + timedelta(seconds=2 + count / 3000)
    tasks = [
        NewTask("test.async", biz_id, action_time=begin + timedelta(seconds=(biz_id - biz_ids[0]) / rate))
        for biz_id in biz_ids
    ]
    job_ids = system.client.submit_many(tasks)
    rows = system.center.store.read(job_ids)
    dice = random.Random(count)
    plan = sorted(
        (rows[job_id].action_time / 1000 + dice.uniform(-WINDOW, WINDOW), job_id) for job_id in job_ids
    )
    said: list[tuple[int, CancelOutcome | RescheduleOutcome]] = []

    def work(part: list[tuple[float, int]]) -> None:
        for at, job_id in part:
            time.sleep(max(0.0, at - time.time()))
            if time.time() <= rows[job_id].action_time / 1000 + WINDOW:
                said.append(
                    (job_id, system.client.cancel(job_id) if job_id % 3 else _move(system.client, job_id))
                )

    threads = [threading.Thread(target=work, args=[plan[n::THREADS]]) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def _op(outcome: CancelOutcome | RescheduleOutcome) -> str:
    return "cancel" if isinstance(outcome, CancelOutcome) else "reschedule"


def _move(client: Client, job_id: int) -> RescheduleOutcome:
    later = from_ms(client.center.clock.now_ms() + 500)
    return client.reschedule(job_id, action_time=later)
