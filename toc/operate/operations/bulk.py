"""Bulk jobs: in the background, all tasks of a topic that match are cancelled, rescheduled, redriven, purged.

First a dry run tells how many match. Then the same call with that number and the name of the topic, typed
once more, makes the job.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from toc.model.access import Action as Right
from toc.model.bulk import PART, STORED, BulkJob, BulkKind, BulkOutcome, BulkState
from toc.model.clock import to_ms
from toc.model.documents import instant
from toc.model.errors import InvalidInput, NotGranted, UnknownBulk, shown
from toc.model.topic import EVERYTHING
from toc.operate.operation import REQUIRED, Doing, Operation, Param, Place, Record, Value, operation
from toc.operate.operations.tasks import BIZ_ID, DRY_RUN, ERROR, TEXT, selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from toc.store.tasks.select import Selection

DEFAULT_RATE = 500
MAX_RATE = 10_000
PARTS_ON_PAGE = 20
"""How many parts of a job's tasks one page of them reads."""
WHICH = (
    Param("topic", Value.TOPIC, "The tasks' topic.", REQUIRED),
    BIZ_ID, TEXT,
    Param("due_after", Value.PAST, "Due, or dead, from this time on."),
    Param("due_before", Value.PAST, "Due, or dead, before this time."),
)  # fmt: skip
HOW = (
    Param("rate", Value.NUMBER, f"At most N tasks per second. Default {DEFAULT_RATE}.", DEFAULT_RATE, least=1,
          most=MAX_RATE),
    replace(DRY_RUN, about="Make no job; tell how many tasks match."),
    Param("tasks", Value.WHOLE, "How many match, as the dry run told.", least=1),
    Param("confirm", Value.TEXT, "The name of the topic once more.", most=128),
)  # fmt: skip
WHEN = (
    Param("delay", Value.SECONDS, "The new deadline, from the moment when a task is moved."),
    Param("action_time", Value.INSTANT, "The new deadline."),
    Param("expires_at", Value.INSTANT, "No try starts after it. Default: unchanged."),
)
JOB = Param("name", Value.TEXT, "Which job.", REQUIRED, metavar="JOB")
NOTHING: Record = {}
_LOOK, _CHANGE = Right.FIND_TASKS, Right.CANCEL
"""To look at jobs; to stop and resume them, for which one needs the right of the job's kind, too."""


def _makes(kind: BulkKind, title: str, *more: Param) -> Callable[[Callable[..., Any]], Operation]:
    """Declare an operation that makes a job."""

    def check(doing: Doing, *, dry_run: bool, topic: str, **values: Any) -> None:
        if kind is BulkKind.RESCHEDULE:
            _check_deadline(doing, topic, values)
        if dry_run:
            return
        if values.get("confirm") != topic:
            raise InvalidInput("type the name of the topic here to confirm", "confirm")
        if values.get("tasks") is None:
            raise InvalidInput("give the number of tasks that the dry run told", "tasks")

    return operation(
        f"bulk.{kind}", f"POST /v1/bulk:{kind}", kind.right, title, *WHICH, *more, *HOW,
        takes=f"Bulk{kind.name.title()}", place=Place.LONG, audited=False, check=check,
    )  # fmt: skip


@_makes(BulkKind.CANCEL, "Cancel all tasks that match")
def cancel(doing: Doing, **values: Any) -> Record:
    """Cancel all pending tasks of a topic that match. A handler that runs is not stopped."""
    return _make(doing, BulkKind.CANCEL, **values)


@_makes(BulkKind.RESCHEDULE, "Reschedule all tasks that match", *WHEN)
def reschedule(doing: Doing, **values: Any) -> Record:
    """Give all pending tasks of a topic that match another deadline, and all tries."""
    return _make(doing, BulkKind.RESCHEDULE, **values)


@_makes(BulkKind.REDRIVE, "Redrive all dead tasks that match", ERROR)
def redrive(doing: Doing, **values: Any) -> Record:
    """Make all dead tasks of a topic that match pending again, due now. First repair the cause."""
    return _make(doing, BulkKind.REDRIVE, **values)


@_makes(BulkKind.PURGE, "Purge all dead tasks that match", ERROR)
def purge(doing: Doing, **values: Any) -> Record:
    """Delete all dead tasks of a topic that match, for good."""
    return _make(doing, BulkKind.PURGE, **values)


def _make(
    doing: Doing,
    kind: BulkKind,
    *,
    topic: str,
    rate: float,
    dry_run: bool,
    tasks: int | None = None,
    confirm: str | None = None,  # noqa: ARG001 - checked before
    **values: Any,
) -> Record:
    when = {one.name: values.pop(one.name, None) for one in WHEN}
    wanted = selection(doing, kind.status, topic, **values)
    if dry_run:
        return {"would_change": doing.center.store.selections.count(wanted)}
    name = _job_of(doing, kind, topic, wanted, values, when, rate, seen=tasks or 0)
    return _shown(doing, doing.center.store.bulk.get(name))


def _job_of(
    doing: Doing, kind: BulkKind, topic: str, wanted: Selection, which: Record, when: Record, rate: float, *,
    seen: int,
) -> str:  # fmt: skip
    """Make a job of what is wanted, and return its name."""
    from toc.operate import bulk_jobs

    details = {"selected": _texts(which)} | {k: v for k, v in _texts(when).items() if v is not None}
    job = BulkJob(bulk_jobs.new_name(), kind, topic, details, doing.by, rate, 0)
    return bulk_jobs.make_job(doing.center, job, wanted, seen=seen).name


def count_or_do(
    doing: Doing,
    kind: BulkKind,
    done: str,
    *,
    dry_run: bool,
    rate: float | None,
    which: Record,
    when: Record = NOTHING,
    ask: bool = True,
) -> Record:
    """Do it to all tasks that match, at the command line: as a job, on which it works itself until it ends.

    Returns how many tasks had which outcome, ``done`` above all; with ``dry_run`` how many match.
    """
    from toc.operate.bulk_jobs import work_off

    wanted = selection(doing, kind.status, **which)
    tasks = doing.center.store.selections.count(wanted)
    if dry_run:
        return {f"would_{kind}": tasks}
    if not tasks:
        return {done: 0}
    topic = which.get("topic", EVERYTHING)
    if ask:
        doing.confirm(f"{kind} {tasks} {kind.status} tasks" + (f" of {topic}" if "topic" in which else ""))
    name = _job_of(doing, kind, topic, wanted, which, when, rate or MAX_RATE, seen=tasks)
    return {done: 0, **work_off(doing.center, name, doing.progress)}


def _check_deadline(doing: Doing, topic: str, values: Record) -> None:
    """Refuse a deadline that no task of the topic could have."""
    from toc.sdk.submission import RowMaker

    center = doing.center
    maker = RowMaker(center.clock, center.settings.max_delay, center.settings.max_body)
    due = maker.deadline(center.catalog.get(topic), values.get("delay"), values.get("action_time"))
    maker.expiry(values.get("expires_at"), due)


def _texts(values: Record) -> Record:
    """Return values as JSON has them."""
    return {k: instant(to_ms(v)) if isinstance(v, datetime) else v for k, v in values.items()}


@operation("bulk.list", "GET /v1/bulk", _LOOK, "List bulk jobs",
    Param("limit", Value.WHOLE, "At most N jobs.", 100, least=1, most=1000), takes="BulkQuery",
)  # fmt: skip
def list_jobs(doing: Doing, limit: int) -> Record:
    """Show bulk jobs and how far they came, the newest first."""
    from toc.operate.bulk_jobs import MOST_SEEN

    jobs = [job for job in doing.center.store.bulk.list(MOST_SEEN) if doing.sees(job.topic)]
    return {"jobs": [_shown(doing, job) for job in jobs[:limit]]}


@operation("bulk.show", "GET /v1/bulk/{name}", _LOOK, "Show a bulk job", JOB)
def show(doing: Doing, name: str) -> Record:
    """Show a bulk job: how far it came, and how many tasks had which outcome.

    Its `state` is waiting (for a gateway), running, stopping, stopped or done; `error` is why it waits, or
    the last error about a task. The outcome `may_have_started` means that a try may be running or have run.
    """
    return _shown(doing, _job(doing, name))


@operation("bulk.tasks", "GET /v1/bulk/{name}/tasks", _LOOK, "Show the outcome of each task of a bulk job",
    JOB,
    Param("outcome", BulkOutcome, "Only tasks with this outcome."),
    Param("next", Value.WHOLE, "The next of the page before.", 0, least=0, most=2**31),
    takes="BulkTasksQuery",
)  # fmt: skip
def outcomes(doing: Doing, name: str, next: int, outcome: BulkOutcome | None = None) -> Record:  # noqa: A002
    """Show what came of each task of a bulk job, a page at a time.

    A page may be empty although more follow: while `next` is not null, ask on with it.
    """
    job = _job(doing, name)
    wanted = range(len(STORED)) if outcome is None else [STORED.index(outcome)]
    end = min(next + PARTS_ON_PAGE, -(-job.done // PART))
    parts = [doing.center.store.bulk.part(name, number) for number in range(next, end)]
    found = [
        {"job_id": str(job_id), "outcome": STORED[byte].value}
        for part in parts
        for job_id, byte in zip(part.job_ids, part.outcomes, strict=False)
        if byte in wanted
    ]
    return {"tasks": found, "next": end if end * PART < job.done else None}


def _may_change(doing: Doing, name: str) -> None:
    job = _job(doing, name)
    if not doing.may(job.kind.right, job.topic):
        raise NotGranted(f"{doing.by} may not {job.kind} tasks of {job.topic}, nor stop or resume such a job")


@operation("bulk.stop", "POST /v1/bulk/{name}:stop", _CHANGE, "Stop a bulk job", JOB,
           check=_may_change)  # fmt: skip
def stop(doing: Doing, name: str) -> Record:
    """Stop a bulk job after its present step. What is done stays done."""
    return _move(doing, name, BulkState.RUNNING, BulkState.STOPPED)


@operation("bulk.resume", "POST /v1/bulk/{name}:resume", _CHANGE, "Resume a bulk job", JOB,
           check=_may_change)  # fmt: skip
def resume(doing: Doing, name: str) -> Record:
    """Let a stopped bulk job go on where it stopped."""
    from toc.operate.bulk_jobs import check_room

    check_room(doing.center, _job(doing, name).by)
    return _move(doing, name, BulkState.STOPPED, BulkState.RUNNING)


def _move(doing: Doing, name: str, before: BulkState, after: BulkState) -> Record:
    doing.center.store.bulk.move(name, before, after)
    job = doing.center.store.bulk.get(name)
    doing.result["done"] = job.done
    return _shown(doing, job)


def _job(doing: Doing, name: str) -> BulkJob:
    job = doing.center.store.bulk.get(name)
    if not doing.sees(job.topic):
        raise UnknownBulk(f"there is no such bulk job: {shown(name)}")
    return job


def _shown(doing: Doing, job: BulkJob) -> Record:
    from toc.operate.bulk_jobs import job_record

    return job_record(job, doing.center.clock.now_ms())
