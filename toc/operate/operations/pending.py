"""Pending tasks at the command line: cancel or reschedule one, those of a biz_id on a topic, or all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from toc.model.access import Action as Right
from toc.model.clock import to_ms
from toc.model.errors import InvalidInput, NotInFuture, PartialCancel
from toc.model.task import RescheduleOutcome, TaskStatus
from toc.model.wire import instant
from toc.operate.operation import Doing, Param, Place, Record, Value, operation
from toc.operate.operations.tasks import BIZ_ID, DRY_RUN, RATE, TYPED_TEXT, chosen_by, selection

if TYPE_CHECKING:
    from toc.operate.bulk import BulkStep

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
    from toc.operate import bulk

    _check(**which)
    center, topic = doing.center, which.get("topic", "")
    if dry_run:
        return {"would_cancel": len(_pending(doing, **which))}
    if "job_id" in which:
        return {"job_id": str(which["job_id"]), "outcome": center.cancel(which["job_id"]).value}
    if "biz_id" in which:
        return {"tasks": _cancel_by_biz(doing, topic, which["biz_id"])}
    chosen = _pending(doing, **which)
    if chosen:
        doing.confirm(f"cancel {len(chosen)} pending tasks of {topic}")
    steps = bulk.cancel(center, chosen, rate)
    return _changed(doing, "tasks.cancel", steps, chosen, topic=topic) or {"cancelled": 0}


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
    from toc.operate import bulk

    if (delay is None) == (action_time is None):
        raise InvalidInput("give --delay or --action-time")
    _check(**which)
    center, most = doing.center, doing.center.settings.max_delay
    if delay is not None and delay > most:
        raise InvalidInput(f"{delay:g} s is further ahead than TOC_MAX_DELAY={most:g} s")

    def due() -> datetime:
        return action_time or datetime.now(UTC) + timedelta(seconds=delay or 0)

    if dry_run:
        return {"would_reschedule": len(_pending(doing, **which))}
    if "job_id" in which:
        at = due()
        outcome = center.reschedule(which["job_id"], action_time=at, expires_at=expires_at)
        moved = outcome in (RescheduleOutcome.RESCHEDULED, RescheduleOutcome.MAY_HAVE_STARTED)
        due_at = instant(to_ms(at)) if moved else None
        return {"job_id": str(which["job_id"]), "outcome": outcome.value, "action_time": due_at}
    if due() <= datetime.now(UTC):
        raise NotInFuture(f"{due().isoformat()} is not after now; give a later time")
    chosen = _pending(doing, **which)
    if chosen and "biz_id" not in which:
        doing.confirm(f"reschedule {len(chosen)} pending tasks of {which['topic']}")
    steps = bulk.reschedule(center, chosen, due, rate, expires_at=expires_at)
    told = {name: value for name, value in which.items() if name != "all"}
    return _changed(doing, "tasks.reschedule", steps, chosen, **told, action_time=due()) or {"rescheduled": 0}


def _check(*, all: bool, **which: Any) -> None:  # noqa: A002 - as it is typed
    """Raise InvalidInput unless one task is named, or those of a topic are."""
    of_topic = "topic" in which and ("biz_id" in which) != all
    if not (of_topic or "job_id" in which) or ("job_id" in which and (all or len(which) > 1)):
        raise InvalidInput("give a JOB_ID, or --topic together with --biz-id or --all")


def _pending(doing: Doing, *, job_id: int | None = None, all: bool, **which: Any) -> Sequence[int]:  # noqa: A002, ARG001
    """Return the pending tasks that are meant."""
    store = doing.center.store
    if job_id is None:
        return store.selections.ids(selection(doing, "pending", **which))
    row = store.get(job_id)
    return [job_id] if row is not None and row.status == TaskStatus.PENDING else []


def _changed(
    doing: Doing, action: str, steps: Iterator[BulkStep], chosen: Sequence[int], **which: Any
) -> Record:
    from toc.operate import bulk

    counts = bulk.changed(
        doing.center, doing.by, action, steps, chosen, target=which["topic"], selected=chosen_by(which),
        progress=lambda step: doing.progress(f"{step.done} of {len(chosen)}"),
    )  # fmt: skip
    return dict(counts)
