"""Drives a run: submits and cancels at their times, against the real clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from toc.dev.demo.orders import Deadline
from toc.model.clock import from_ms
from toc.model.errors import TocError
from toc.model.task import CancelOutcome, TaskStatus
from toc.sdk.client import TimeoutCenter

THREADS = 16
LEAD_SECONDS = 0.5
"""Seconds between the start of the drive and the first submit."""
UNFINISHED_SECONDS = 20.0
"""Seconds after the last deadline after which unfinished tasks count as lost."""
LOOK_SECONDS = 0.25
"""How often the progress is shown."""

Progress = Callable[[float, str], None]
"""Gets the seconds since the start of the run, and what was done by then."""


def drive(
    center: TimeoutCenter,
    starts: Container[int | None],
    deadlines: Sequence[Deadline],
    seconds: float,
    progress: Progress,
) -> None:
    """Play the deadlines, and note at each what was seen. Calls ``progress`` a few times a second.

    ``starts`` has the job_ids of what handlers have started.
    """
    begin = time.time() + LEAD_SECONDS
    next_look = 0.0

    def look() -> None:
        nonlocal next_look
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_SECONDS
            progress(max(time.time() - begin, 0.0), _done(deadlines, starts))

    def wait_until(at: float) -> None:
        while (left := begin + at - time.time()) > 0:
            look()
            time.sleep(min(left, 0.05))

    events = [(one.submit_at, False, number) for number, one in enumerate(deadlines)]
    for number, one in enumerate(deadlines):
        one.due_ms = round((begin + one.due_at) * 1000)
        if one.cancel_at is not None:
            events.append((one.cancel_at, True, number))
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="demo")
    try:
        # First in, first out: the submit that a cancel waits for left the queue before it.
        submits: dict[int, Future[None]] = {}
        for at, is_cancel, number in sorted(events):
            wait_until(at)
            if is_cancel:
                pool.submit(_cancel, center, deadlines[number], submits[number])
            else:
                submits[number] = pool.submit(_submit, center, deadlines[number])
        wait_until(seconds)
    finally:
        pool.shutdown(cancel_futures=True)  # on an interrupt; else none is left
    end = time.monotonic() + UNFINISHED_SECONDS
    unfinished = [one for one in deadlines if one.job_id is not None]
    while unfinished and time.monotonic() < end:
        for one in unfinished:
            task = center.get(one.job_id or 0)
            one.status = None if task is None else task.status
        unfinished = [one for one in unfinished if one.status is TaskStatus.PENDING]
        look()


def _done(deadlines: Sequence[Deadline], starts: Container[int | None]) -> str:
    submitted = [one for one in deadlines if one.job_id is not None]
    cancelled = sum(one.cancelled is CancelOutcome.CANCELLED for one in submitted)
    fired = sum(one.job_id in starts for one in submitted)
    return f"submitted {len(submitted)}/{len(deadlines)}  cancelled {cancelled}  fired {fired}"


def _submit(center: TimeoutCenter, one: Deadline) -> None:
    try:
        one.job_id = center.submit(one.topic, biz_id=one.order, action_time=from_ms(one.due_ms))
    except TocError as exc:
        one.error = f"submit: {exc}"


def _cancel(center: TimeoutCenter, one: Deadline, submitted: Future[None]) -> None:
    submitted.result()
    if one.job_id is not None:
        try:
            one.cancelled = center.cancel(one.job_id)
        except TocError as exc:
            one.error = f"cancel: {exc}"
        one.answered_ms = time.time() * 1000
