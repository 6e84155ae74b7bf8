"""How tasks look in answers: job_ids are texts, instants RFC 3339 in UTC, durations seconds."""

from __future__ import annotations

import time
from typing import Any, cast

from typing_extensions import TypedDict

from toc.model.errors import UnreadableTask
from toc.model.target import ATTRIBUTE as ROUTE
from toc.model.task import TaskRow, TaskStatus
from toc.operate.records import damaged_record, task_record, without_query


class TaskShown(TypedDict):
    """A task. ``next_time`` is when the next try is due, ``ended`` when the task ended. ``body_length`` is
    the bytes of its body, null without one. ``attribute`` is null if the token may not see values."""

    job_id: str
    topic: str
    biz_id: int | str
    status: str
    action_time: str
    next_time: str | None
    ended: str | None
    attribute: dict[str, Any] | None
    dedup_key: str | None
    version: int
    tries: int
    expires_at: str | None
    expired: bool
    body_length: int | None
    failed_tries: int
    crashes: int
    last_error: str | None
    created: str
    modified: str


class Share(TypedDict):
    """A part of the time by which a task is late: a cause, how long it held, since when, and what was seen
    of it."""

    cause: str
    seconds: float
    since: str
    evidence: str


class LateShown(TypedDict):
    """Why a task started so many ``seconds`` late, or is that late so far: then ``started`` is null.

    ``cause`` is that of the largest share, which come first; ``sentence`` says it for people, ``remedy`` what
    to do about it.
    """

    seconds: float
    started: str | None
    cause: str
    sentence: str
    remedy: str
    shares: list[Share]


class TaskWithWhy(TaskShown):
    """A task, and why it is late; ``late`` is null if it is not, or if nobody knows."""

    late: LateShown | None


class UnreadableShown(TypedDict):
    """A task whose row is damaged. ``unreadable`` says how."""

    job_id: str
    topic: str
    unreadable: str


def task_shown(row: TaskRow, topic: str, *, values: bool) -> TaskShown:
    """Show a task; of its own URL without the query; its attribute only with ``values``.

    Raises UnreadableTask.
    """
    record = task_record(row, topic)
    if not values:
        return cast(TaskShown, {**record, "attribute": None})
    route = record["attribute"].get(ROUTE)
    if isinstance(route, dict):
        hidden = {key: without_query(str(route[key])) for key in ("url", "path") if key in route}
        record["attribute"] = {**record["attribute"], ROUTE: {**route, **hidden}}
    return cast(TaskShown, record)


def task_or_damage(row: TaskRow, topic: str, *, values: bool) -> TaskShown | UnreadableShown:
    """Show one task of many. A damaged one does not keep the others from being shown."""
    try:
        return task_shown(row, topic, values=values)
    except UnreadableTask as exc:
        return cast(UnreadableShown, damaged_record(row, topic, exc))


def row_record(row: TaskRow, topic: str) -> dict[str, Any]:
    """Show a task at the command line, with the columns that only operators need, or how it is damaged."""
    try:
        record = task_record(row, topic)
    except UnreadableTask as exc:
        return damaged_record(row, topic, exc)
    pending = row.status == TaskStatus.PENDING
    return record | {
        "biz_type": row.biz_type,
        "slot_amount": row.slot_amount,
        "attempt": row.attempts + 1 if pending else None,
        "due_in_seconds": round(row.action_time / 1000 - time.time(), 3) if pending else None,
    }
