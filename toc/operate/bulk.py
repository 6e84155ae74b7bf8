"""Change many tasks: cancel, reschedule, redrive, purge those that are named, or all that match.

All that match are the tasks of a bulk job, which works in the background. First a dry run tells how many
match. Then the same call with that number and the name of the topic, typed once more, makes the job. A
command does both, and works on its job itself until it ends.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import replace
from datetime import datetime
from functools import wraps
from typing import Any

from toc.model.access import Action as Right
from toc.model.bulk import PART, STORED, BulkJob, BulkKind, BulkOutcome, BulkState
from toc.model.clock import from_ms, to_ms
from toc.model.documents import instant
from toc.model.errors import InvalidInput, NotGranted, PartialCancel, UnknownBulk, shown
from toc.model.task import RescheduleOutcome
from toc.model.topic import EVERYTHING
from toc.operate.audit import audited
from toc.operate.operation import REQUIRED, Doing, Operation, Param, Place, Record, Value, operation
from toc.operate.records import bulk_record
from toc.operate.tasks import BIZ_ID, DRY_RUN, ERROR, TEXT, TOPIC, selection

DEFAULT_RATE = 500
MAX_RATE = 10_000
PARTS_ON_PAGE = 20
"""How many parts of a job's tasks one page of them reads."""
RATE = Param("rate", Value.NUMBER, "At most N tasks per second.", MAX_RATE, least=0.001, most=MAX_RATE)
"""That of a command, which works on no other job."""
HOW = (
    replace(RATE, about=f"{RATE.about} Default {DEFAULT_RATE}.", default=DEFAULT_RATE, least=1),
    replace(DRY_RUN, about="Make no job; tell how many tasks match."),
    Param("tasks", Value.WHOLE, "How many match, as the dry run told.", least=1),
    Param("confirm", Value.TEXT, "The name of the topic once more; of all topics, the biz_id.", most=255),
)  # fmt: skip
WHEN = (
    Param("delay", Value.SECONDS, "The new deadline, from the moment when a task is moved."),
    Param("action_time", Value.INSTANT, "The new deadline."),
    Param("expires_at", Value.INSTANT, "No try starts after it. Default: unchanged."),
)
JOB = Param("name", Value.TEXT, "Which job.", REQUIRED, metavar="JOB")
_LOOK, _CHANGE = Right.FIND_TASKS, Right.CANCEL
"""To look at jobs; to stop and resume them, for which one needs the right of the job's kind, too."""


_DONE = dict(zip(BulkKind, ("cancelled", "rescheduled", "redriven", "purged"), strict=True))
"""The outcome of what was simply done."""


def _makes(kind: BulkKind, about: str, *more: Param) -> Operation:
    """Declare an operation that makes a job. ``about`` is its docstring."""

    def check(doing: Doing, *, dry_run: bool, topic: str | None = None, **values: Any) -> None:
        biz_id, token = values.get("biz_id"), doing.token
        if topic is None and (biz_id is None or not (token is None or token.everywhere)):
            raise InvalidInput("say which topic; only those of a biz_id may be of all", "topic")
        if kind is BulkKind.RESCHEDULE:
            _deadline(doing, topic, values)
        if dry_run:
            return
        if values.get("confirm") != str(topic or biz_id):
            what = "the name of the topic" if topic else "the biz_id"
            raise InvalidInput(f"type {what} here to confirm", "confirm")
        if values.get("tasks") is None:
            raise InvalidInput("give the number of tasks that the dry run told", "tasks")

    def make(
        doing: Doing, *, rate: float, dry_run: bool, topic: str | None = None, tasks: int | None = None,
        **values: Any,
    ) -> Record:  # fmt: skip
        from toc.operate.bulk_jobs import make_job

        values.pop("confirm", None)  # it was checked before
        when = {one.name: values.pop(one.name, None) for one in WHEN}
        wanted = selection(doing, kind.status, topic, **values)
        if dry_run:
            return {"would_change": doing.center.store.selections.count(wanted)}
        details = {"selected": _texts(values)} | {k: v for k, v in _texts(when).items() if v is not None}
        job = BulkJob(secrets.token_hex(6), kind, topic or EVERYTHING, details, doing.by, rate, 0)
        return bulk_record(make_job(doing.center, job, wanted, seen=tasks or 0))

    make.__doc__, make.__name__ = about, str(kind)
    dead, came = ("dead ", "Died") if kind.status == "dead" else ("", "Due")
    return operation(
        f"bulk.{kind}", f"POST /v1/bulk:{kind}", kind.right, f"{kind.title()} all {dead}tasks that match",
        Param("topic", Value.TOPIC, "The tasks' topic. With a biz_id by default all topics."), BIZ_ID, TEXT,
        Param("due_after", Value.PAST, f"{came} from this time on.", option="--after"),
        Param("due_before", Value.PAST, f"{came} before this time.", option="--before"), ERROR, *more, *HOW,
        takes=f"Bulk{kind.name.title()}", place=Place.LONG, audited=False, check=check,
    )(make)  # fmt: skip


cancel_all = _makes(
    BulkKind.CANCEL, "Cancel all pending tasks that match. A handler that runs is not stopped."
)
reschedule_all = _makes(
    BulkKind.RESCHEDULE, "Give all pending tasks that match another deadline, and all tries.", *WHEN
)
redrive_all = _makes(
    BulkKind.REDRIVE, "Make all dead tasks that match pending again, due now. First repair the cause."
)
purge_all = _makes(BulkKind.PURGE, "Delete all dead tasks that match, for good.")


def typed(one: Operation) -> Operation:
    """Return what makes a job as the command line has it: it asks, and works on the job until that ends.

    Returns how many tasks had which outcome, what was done above all; with ``dry_run`` how many match.
    """
    kind = BulkKind(one.do.__name__)

    @wraps(one.do)
    def work(doing: Doing, *, dry_run: bool, **which: Any) -> Record:
        from toc.operate.bulk_jobs import work_off

        tasks = one.perform(doing, which | {"dry_run": True})["would_change"]
        if dry_run:
            return {f"would_{kind}": tasks}
        if not tasks:
            return {_DONE[kind]: 0}
        topic, biz_id = which.get("topic"), which.get("biz_id")
        doing.confirm(f"{kind} {tasks} {kind.status} tasks of {topic or f'{biz_id}, of all topics'}")
        seen = {"dry_run": False, "tasks": tasks, "confirm": str(topic or biz_id)}
        made = one.perform(doing, which | seen)
        # Nothing is asked between: an end by Ctrl-C there would leave the job to gateways.
        job = BulkJob(made["name"], kind, topic or EVERYTHING, {}, doing.by, MAX_RATE, made["tasks"])
        counts = {_DONE[kind]: 0, **work_off(doing.center, job, doing.progress)}
        if kind is BulkKind.REDRIVE:
            counts.pop("unknown", None)  # gone since they were chosen
        return counts

    about = "Works on a bulk job until that ends. Ctrl-C stops it; toc bulk resume lets a gateway go on."
    return replace(one, do=work, check=None, asks=kind is not BulkKind.REDRIVE, typed_about=about)


def _deadline(doing: Doing, topic: str | None, values: Record) -> datetime:
    """Return the new deadline. Refuses one that no task of the topic could have."""
    from toc.sdk.submission import RowMaker

    center = doing.center
    maker = RowMaker(center.clock, center.settings.max_delay, center.settings.max_body)
    of = None if topic is None else center.catalog.get(topic)
    due = maker.deadline(of, values.get("delay"), values.get("action_time"))
    maker.expiry(values.get("expires_at"), due)
    return from_ms(due)


def _texts(values: Record) -> Record:
    """Return values as JSON has them."""
    return {k: instant(to_ms(v)) if isinstance(v, datetime) else v for k, v in values.items()}


@operation("bulk.list", "GET /v1/bulk", _LOOK, "List bulk jobs",
    Param("limit", Value.WHOLE, "At most N jobs.", 100, least=1, most=1000), takes="BulkQuery",
)  # fmt: skip
def list_jobs(doing: Doing, limit: int) -> Record:
    """Show bulk jobs and how far they came, the newest first.

    toc: Example: toc bulk list --limit 10
    """
    from toc.operate.bulk_jobs import MOST_SEEN

    jobs = [job for job in doing.center.store.bulk.list(MOST_SEEN) if doing.sees(job.topic)]
    return {"jobs": [bulk_record(job) for job in jobs[:limit]]}


@operation("bulk.show", "GET /v1/bulk/{name}", _LOOK, "Show a bulk job", JOB)
def show(doing: Doing, name: str) -> Record:
    """Show a bulk job: how far it came, and how many tasks had which outcome.

    Its `state` is waiting (for a gateway), running, stopping, stopped or done; `error` is why it waits, or
    the last error about a task. The outcome `may_have_started` means that a try may be running or have run.
    """
    return bulk_record(_job(doing, name))


@operation("bulk.tasks", "GET /v1/bulk/{name}/tasks", _LOOK, "Show the outcome of each task of a bulk job",
           JOB, Param("outcome", BulkOutcome, "Only tasks with this outcome."),
           Param("next", Value.WHOLE, "The next of the page before.", 0, least=0, most=2**31),
           takes="BulkTasksQuery")  # fmt: skip
def outcomes(doing: Doing, name: str, next: int, outcome: BulkOutcome | None = None) -> Record:  # noqa: A002
    """Show what came of each task of a bulk job, a page at a time.

    A page may be empty although more follow: while `next` is not null, ask on with it.

    toc: Example: toc bulk tasks 3f9c0a11b2c4 --outcome may_have_started
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
    from toc.operate.bulk_jobs import stop_job

    return _changed(doing, stop_job(doing.center, name))


@operation("bulk.resume", "POST /v1/bulk/{name}:resume", _CHANGE, "Resume a bulk job", JOB,
           check=_may_change)  # fmt: skip
def resume(doing: Doing, name: str) -> Record:
    """Let a stopped bulk job go on where it stopped."""
    from toc.operate.bulk_jobs import check_room

    check_room(doing.center, _job(doing, name).by)
    doing.center.store.bulk.move(name, BulkState.STOPPED, BulkState.RUNNING)
    return _changed(doing, doing.center.store.bulk.get(name))


def _changed(doing: Doing, job: BulkJob) -> Record:
    doing.result["done"] = job.done
    return bulk_record(job)


def _job(doing: Doing, name: str) -> BulkJob:
    job = doing.center.store.bulk.get(name)
    if not doing.sees(job.topic):
        raise UnknownBulk(f"there is no such bulk job: {shown(name)}")
    return job


# --- pending tasks at the command line: one, or those of a biz_id on a topic

JOB_ID = Param("job_id", Value.JOB_ID, "Which task.", metavar="[JOB_ID]")


@operation("tasks.cancel", "", Right.CANCEL, "Cancel tasks",
           JOB_ID, replace(TOPIC, about="With --biz-id: its tasks on this topic."), BIZ_ID, TEXT,
           place=Place.LONG, audited=False)  # fmt: skip
def cancel(
    doing: Doing, job_id: int | None = None, topic: str | None = None, biz_id: int | str | None = None
) -> Record:  # fmt: skip
    """Cancel a task, or those of a biz_id on a topic.

    toc: Exits with 0 only if every task is cancelled and was never started. `toc bulk cancel` cancels all of
    a topic.

    Example: toc cancel --topic order.close --biz-id 42
    """
    if job_id is not None and topic is None and biz_id is None:
        return {"job_id": str(job_id), "outcome": doing.center.cancel(job_id).value}
    if job_id is not None or topic is None or biz_id is None:
        raise InvalidInput("give a JOB_ID, or --topic together with --biz-id")
    with audited(doing.center.store, doing.by, "tasks.cancel", topic, biz_id=str(biz_id)) as record:
        try:
            outcomes = doing.center.cancel_by_biz(topic, biz_id=biz_id)
        except PartialCancel as exc:
            record.update(Counter(one.value for one in exc.outcomes.values()))
            raise
        record.update(Counter(one.value for one in outcomes.values()))
    return {"tasks": [{"job_id": str(one), "outcome": outcome.value} for one, outcome in outcomes.items()]}


@operation("tasks.reschedule", "", Right.RESCHEDULE, "Reschedule a task",
           replace(JOB_ID, default=REQUIRED, metavar="JOB_ID"), *WHEN, audited=False)  # fmt: skip
def reschedule(doing: Doing, job_id: int, expires_at: datetime | None = None, **when: Any) -> Record:
    """Give a pending task another deadline, and all its tries.

    A task that expires before its new deadline needs --expires-at.

    toc: Exits with 0 only if it is rescheduled and was not due yet. `toc bulk reschedule` takes all of a
    topic, or of a biz_id.

    Examples: toc reschedule 912510244313854036 --delay 30m
    toc reschedule 912510244313854036 --action-time 2030-01-31T12:00:00Z
    """
    if when.keys() != {"action_time"}:
        when = {"action_time": _deadline(doing, None, when)}
    outcome = doing.center.reschedule(job_id, expires_at=expires_at, **when)
    moved = outcome in (RescheduleOutcome.RESCHEDULED, RescheduleOutcome.MAY_HAVE_STARTED)
    due_at = instant(to_ms(when["action_time"])) if moved else None
    return {"job_id": str(job_id), "outcome": outcome.value, "action_time": due_at}
