"""Drives a run: submits and cancels at their times, against the real clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

from toc.dev.demo.orders import BIZ_TYPES, Plan
from toc.dev.demo.report import Observed
from toc.dev.demo.stage import Stage
from toc.model.clock import from_ms
from toc.model.errors import NotInFuture, TocError, Unavailable
from toc.model.task import CancelOutcome, TaskStatus
from toc.sdk.client import TimeoutCenter

THREADS = 16
LEAD_SECONDS = 0.5
"""Seconds between the start of the drive and the first submit."""
UNFINISHED_SECONDS = 20.0
"""Seconds after the last deadline after which unfinished tasks count as lost."""
READY_SECONDS = 60.0
LOOK_SECONDS = 0.25
"""How often the progress is shown."""

Progress = Callable[[float, str], None]
"""Gets the seconds since the start of the run, and what was done by then."""


def await_worker(stage: Stage) -> None:
    """Return once the worker handles tasks of both topics. Raises Unavailable if it ends or is too slow."""
    end = time.monotonic() + READY_SECONDS
    probes = {
        stage.center.submit(topic, biz_id=f"probe-{time.time_ns()}", delay=timedelta(milliseconds=50))
        for topic in BIZ_TYPES
    }
    while not all(stage.starts[job_id] for job_id in probes):
        stage.check()
        if time.monotonic() > end:
            raise Unavailable(f"the worker handled nothing within {READY_SECONDS:g} s; is the machine busy?")
        time.sleep(0.05)
        stage.starts.read()


def drive(stage: Stage, plan: Plan, progress: Progress) -> list[Observed]:
    """Run the plan and return what was seen. Calls ``progress`` a few times a second."""
    begin_ns = time.time_ns() + int(LEAD_SECONDS * 1e9)
    observed = [
        Observed(deadline, begin_ns // 1_000_000 + round(deadline.due_at * 1000))
        for deadline in plan.deadlines
    ]
    next_look = 0.0

    def look() -> None:
        nonlocal next_look
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_SECONDS
            stage.starts.read()
            progress(max(elapsed(), 0.0), _done(observed, stage))

    def elapsed() -> float:
        return (time.time_ns() - begin_ns) / 1e9

    def wait_until(seconds: float) -> None:
        while (left := seconds - elapsed()) > 0:
            look()
            time.sleep(min(left, 0.05))

    events = [(seen.deadline.submit_at, False, number) for number, seen in enumerate(observed)]
    for number, seen in enumerate(observed):
        if seen.deadline.cancel_at is not None:
            events.append((seen.deadline.cancel_at, True, number))
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="demo")
    try:
        # First in, first out: the submit that a cancel waits for left the queue before it.
        submits: dict[int, Future[None]] = {}
        for at, is_cancel, number in sorted(events):
            wait_until(at)
            if is_cancel:
                pool.submit(_cancel, stage.center, observed[number], submits[number])
            else:
                submits[number] = pool.submit(_submit, stage.center, observed[number])
        wait_until(plan.seconds)
    finally:
        pool.shutdown(cancel_futures=True)  # on an interrupt; else none is left
    end = time.monotonic() + UNFINISHED_SECONDS
    unfinished = [seen for seen in observed if seen.job_id is not None]
    while unfinished and time.monotonic() < end:
        for seen in unfinished:
            task = stage.center.get(seen.job_id or 0)
            seen.status = None if task is None else task.status
        unfinished = [seen for seen in unfinished if seen.status is TaskStatus.PENDING]
        look()
    stage.starts.read()
    return observed


def _done(observed: Sequence[Observed], stage: Stage) -> str:
    submitted = [seen for seen in observed if seen.job_id is not None]
    cancelled = sum(seen.cancel_outcome is CancelOutcome.CANCELLED for seen in submitted)
    fired = sum(seen.job_id in stage.starts for seen in submitted)
    return f"submitted {len(submitted)}/{len(observed)}  cancelled {cancelled}  fired {fired}"


def _submit(center: TimeoutCenter, seen: Observed) -> None:
    try:
        seen.job_id = center.submit(
            seen.deadline.topic, biz_id=seen.deadline.order_id, action_time=from_ms(seen.due_ms)
        )
    except NotInFuture:
        seen.error = "the driver came too late with the submit"
    except TocError as exc:
        seen.error = f"submit: {exc}"


def _cancel(center: TimeoutCenter, seen: Observed, submitted: Future[None]) -> None:
    submitted.result()
    if seen.job_id is None:
        return
    seen.cancel_issued_ns = time.time_ns()
    try:
        seen.cancel_outcome = center.cancel(seen.job_id)
        seen.cancel_answered_ns = time.time_ns()
    except TocError as exc:
        seen.error = f"cancel: {exc}"
