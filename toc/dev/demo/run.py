"""Drives a run: submits and cancels at their real instants, then reads the outcomes.

Nothing is simulated: real cancels race a real clock. Every outcome is observed, in the handlers' record and
in the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from toc.dev.demo.history import History
from toc.dev.demo.orders import BIZ_TYPES, PREPARE_TIMEOUT, Plan
from toc.dev.demo.report import Observed
from toc.model.clock import from_ms
from toc.model.errors import NotInFuture, TocError, TopicExists, Unavailable
from toc.model.task import CancelOutcome, TaskStatus
from toc.model.topic import Topic
from toc.sdk.client import TimeoutCenter

SLOTS = 8
THREADS = 16
LEAD_SECONDS = 0.5
"""Seconds between the start of the drive and the first submit."""
UNFINISHED_SECONDS = 20.0
"""Seconds after the last deadline after which unfinished tasks count as lost."""
READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. Times are seconds."""

    elapsed: float
    seconds: float
    tasks: int
    submitted: int
    cancelled: int
    fired: int


def create_topics(center: TimeoutCenter) -> None:
    """Create the demo's two topics unless they exist. Raises TopicExists if another has the biz_type."""
    for name, biz_type in BIZ_TYPES.items():
        if center.store.topics.get(name) is None:
            try:
                center.store.topics.create(Topic(name, biz_type, SLOTS, prepare_timeout=PREPARE_TIMEOUT))
            except TopicExists:
                if center.store.topics.get(name) is None:
                    raise  # another topic has the biz_type


def await_workers(center: TimeoutCenter, history: History, alive: Callable[[], None]) -> None:
    """Return once a worker handles tasks of both topics. ``alive`` raises when waiting is of no use.

    Raises Unavailable when none does within READY_SECONDS.
    """
    end = time.monotonic() + READY_SECONDS
    probes = {
        center.submit(topic, biz_id=f"probe-{time.time_ns()}", delay=timedelta(milliseconds=50))
        for topic in BIZ_TYPES
    }
    while not all(history.starts.get(job_id) for job_id in probes):
        alive()
        if time.monotonic() > end:
            raise Unavailable(
                f"no worker handled a task of the demo within {READY_SECONDS:g} s; is one running with "
                f"`toc worker --app toc.dev.demo.app:center`?"
            )
        time.sleep(0.05)
        history.read()


def drive(
    center: TimeoutCenter, plan: Plan, history: History, progress: Callable[[Progress], None]
) -> list[Observed]:
    """Run the plan and return what was seen. Calls ``progress`` a few times a second."""
    begin_ns = time.time_ns() + int(LEAD_SECONDS * 1e9)
    observed = [
        Observed(deadline, begin_ns // 1_000_000 + round(deadline.due_at * 1000))
        for deadline in plan.deadlines
    ]
    watch = _Watch(begin_ns, plan, observed, history, progress)
    events = [(deadline.submit_at, number, False) for number, deadline in enumerate(plan.deadlines)]
    events += [
        (deadline.cancel_at, number, True)
        for number, deadline in enumerate(plan.deadlines)
        if deadline.cancel_at is not None
    ]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="demo") as pool, _dropping_rest(pool):
        # First in, first out: the submit that a cancel waits for left the queue before it.
        submits: dict[int, Future[None]] = {}
        for at, number, is_cancel in sorted(events, key=lambda event: (event[0], event[2])):
            watch.until(at)
            if is_cancel:
                pool.submit(_cancel, center, observed[number], submits[number])
            else:
                submits[number] = pool.submit(_submit, center, observed[number])
        watch.until(plan.seconds)
    _await_ends(center, observed, history, watch)
    return observed


@contextmanager
def _dropping_rest(pool: ThreadPoolExecutor) -> Iterator[None]:
    """On an interrupt, drop what has not started."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


@dataclass
class _Watch:
    """Waits for instants of the run, and shows the progress in the meantime."""

    begin_ns: int
    plan: Plan
    observed: Sequence[Observed]
    history: History
    progress: Callable[[Progress], None]
    next_look: float = 0.0

    def until(self, seconds: float) -> None:
        """Return ``seconds`` after the start of the run."""
        while (left := seconds - self.elapsed()) > 0:
            self.look()
            time.sleep(min(left, 0.05))

    def elapsed(self) -> float:
        return (time.time_ns() - self.begin_ns) / 1e9

    def look(self) -> None:
        """Read the handlers' record and report the progress, at most four times a second."""
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + 0.25
        self.history.read()
        submitted = cancelled = fired = 0
        for seen in self.observed:
            if seen.job_id is not None:
                submitted += 1
                cancelled += seen.cancel_outcome is CancelOutcome.CANCELLED
                fired += seen.job_id in self.history.starts
        self.progress(
            Progress(
                max(self.elapsed(), 0.0), self.plan.seconds, len(self.observed), submitted, cancelled, fired
            )
        )


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


def _await_ends(center: TimeoutCenter, observed: Sequence[Observed], history: History, watch: _Watch) -> None:
    """Read every row; wait up to UNFINISHED_SECONDS for those that are still pending."""
    end = time.monotonic() + UNFINISHED_SECONDS
    unfinished = [seen for seen in observed if seen.job_id is not None]
    with ThreadPoolExecutor(4, thread_name_prefix="demo") as pool:
        while unfinished:
            for seen, status in zip(unfinished, pool.map(partial(_status, center), unfinished), strict=True):
                seen.status = status
            unfinished = [seen for seen in unfinished if seen.status is TaskStatus.PENDING]
            if time.monotonic() > end:
                break
            watch.look()
            time.sleep(0.2)
    history.read()


def _status(center: TimeoutCenter, seen: Observed) -> TaskStatus | None:
    task = center.get(seen.job_id) if seen.job_id is not None else None
    return None if task is None else task.status
