"""Pending tasks at the command line: cancel or reschedule one, those of a biz_id on a topic, or all of it."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from toc.model.access import Action as Right
from toc.model.bulk import BulkKind
from toc.model.clock import to_ms
from toc.model.documents import instant
from toc.model.errors import InvalidInput, NotInFuture, PartialCancel
from toc.model.task import RescheduleOutcome, TaskStatus
from toc.operate.operation import Doing, Param, Place, Record, Value, operation
from toc.operate.operations.bulk import count_or_do
from toc.operate.operations.tasks import BIZ_ID, DRY_RUN, RATE, TYPED_TEXT

JOB_ID = Param("job_id", Value.JOB_ID, "Which task.", metavar="[JOB_ID]")
ALL = Param("all", Value.FLAG, "With --topic: all its pending tasks.", default=False)
MANY: Any = {"place": Place.LONG, "audited": False, "asks": True}


def _topic(text: str) -> Param:
    return Param("topic", Value.TOPIC, text, metavar="NAME")


@operation(
    "tasks.cancel", "", Right.CANCEL, "Cancel tasks",
    JOB_ID, _topic("With --biz-id: its tasks on this topic. With --all: every task."), BIZ_ID, TYPED_TEXT,
    ALL, RATE, DRY_RUN, **MANY,
)  # fmt: skip
def cancel(doing: Doing, *, dry_run: bool, rate: float | None = None, **which: Any) -> Record:
    """Cancel a task, those of a biz_id on a topic, or all of a topic."""
    job_id, chosen = _chosen(**which)
    if job_id is not None:
        if dry_run:
            return {"would_cancel": _pending(doing, job_id)}
        return {"job_id": str(job_id), "outcome": doing.center.cancel(job_id).value}
    if "biz_id" in chosen and not dry_run:
        return {"tasks": _cancel_by_biz(doing, chosen["topic"], chosen["biz_id"])}
    return count_or_do(doing, BulkKind.CANCEL, "cancelled", dry_run=dry_run, rate=rate, which=chosen)


def _cancel_by_biz(doing: Doing, topic: str, biz_id: int | str) -> list[Record]:
    from toc.operate.audit import audited

    partial: PartialCancel | None = None
    with audited(doing.center.store, doing.by, "tasks.cancel", topic, biz_id=str(biz_id)) as record:
        try:
            outcomes = doing.center.cancel_by_biz(topic, biz_id=biz_id)
        except PartialCancel as exc:
            partial, outcomes = exc, exc.outcomes
        record.update(Counter(outcome.value for outcome in outcomes.values()))
    if partial is not None:
        raise partial
    return [{"job_id": str(job_id), "outcome": outcome.value} for job_id, outcome in outcomes.items()]


@operation(
    "tasks.reschedule", "", Right.RESCHEDULE, "Reschedule tasks",
    JOB_ID,
    Param("delay", Value.SECONDS, "From now: seconds, 500ms, 30m, 7d."),
    Param("action_time", Value.INSTANT, "When: RFC 3339 with a zone, 2030-01-31T12:00:00Z."),
    _topic("With --biz-id: its pending tasks on this topic. With --all: all."), BIZ_ID, TYPED_TEXT, ALL, RATE,
    DRY_RUN,
    Param("expires_at", Value.INSTANT, "No try starts after it: RFC 3339 with a zone. Default: unchanged."),
    **MANY,
)  # fmt: skip
def reschedule(
    doing: Doing,
    *,
    delay: float | None = None,
    action_time: datetime | None = None,
    expires_at: datetime | None = None,
    dry_run: bool,
    rate: float | None = None,
    **which: Any,
) -> Record:
    """Give pending tasks, as chosen for `toc cancel`, another deadline and all tries.

    A task that expires before its new deadline needs --expires-at.
    """
    if (delay is None) == (action_time is None):
        raise InvalidInput("give --delay or --action-time")
    job_id, chosen = _chosen(**which)
    center, most = doing.center, doing.center.settings.max_delay
    if delay is not None and delay > most:
        raise InvalidInput(f"{delay:g} s is further ahead than TOC_MAX_DELAY={most:g} s")
    if job_id is not None:
        if dry_run:
            return {"would_reschedule": _pending(doing, job_id)}
        at = action_time or datetime.now(UTC) + timedelta(seconds=delay or 0)
        outcome = center.reschedule(job_id, action_time=at, expires_at=expires_at)
        moved = outcome in (RescheduleOutcome.RESCHEDULED, RescheduleOutcome.MAY_HAVE_STARTED)
        due_at = instant(to_ms(at)) if moved else None
        return {"job_id": str(job_id), "outcome": outcome.value, "action_time": due_at}
    if action_time is not None and action_time <= datetime.now(UTC) and not dry_run:
        raise NotInFuture(f"{action_time.isoformat()} is not after now; give a later time")
    when = {"delay": delay, "action_time": action_time, "expires_at": expires_at}
    return count_or_do(
        doing, BulkKind.RESCHEDULE, "rescheduled", dry_run=dry_run, rate=rate, which=chosen, when=when,
        ask="biz_id" not in chosen,
    )  # fmt: skip


def _chosen(*, job_id: int | None = None, all: bool, **which: Any) -> tuple[int | None, Record]:  # noqa: A002
    """Return the task that is named, or which tasks of a topic are meant. Raises InvalidInput."""
    of_topic = "topic" in which and ("biz_id" in which) != all
    if (not of_topic and job_id is None) or (job_id is not None and (all or which)):
        raise InvalidInput("give a JOB_ID, or --topic together with --biz-id or --all")
    return job_id, which


def _pending(doing: Doing, job_id: int) -> int:
    """Return 1 if a task is pending."""
    row = doing.center.store.get(job_id)
    return int(row is not None and row.status == TaskStatus.PENDING)
