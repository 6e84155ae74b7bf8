"""How tasks look in answers: job_ids are texts, instants RFC 3339 in UTC, durations seconds."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from toc.model.errors import UnreadableTask
from toc.model.task import TaskRow, TaskStatus, decode_attribute
from toc.model.wire import instant as instant

STATUS = {int(status): status.name.lower() for status in TaskStatus}


class TaskShown(TypedDict):
    """A task. ``next_time`` is when the next try is due, ``ended`` when the task ended. ``body_length`` is
    the bytes of its body, null without one."""

    job_id: str
    topic: str
    biz_id: int | str
    status: str
    action_time: str
    next_time: str | None
    ended: str | None
    attribute: dict[str, Any]
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


class UnreadableShown(TypedDict):
    """A task whose row is damaged. ``unreadable`` says how."""

    job_id: str
    topic: str
    unreadable: str


def task(row: TaskRow, topic: str) -> TaskShown:
    """Show a task. Raises UnreadableTask."""
    pending = row.status == TaskStatus.PENDING
    try:
        return {
            "job_id": str(row.job_id),
            "topic": topic,
            "biz_id": row.biz_id if row.biz_key is None else row.biz_key,
            "status": STATUS.get(row.status, "unknown"),
            "action_time": instant(row.action_time),
            "next_time": instant(row.next_time) if pending else None,
            "ended": None if pending else instant(row.next_time),
            "attribute": decode_attribute(row.attribute),
            "dedup_key": row.dedup_key,
            "version": row.version,
            "tries": row.tries,
            "expires_at": instant(row.expires_at) if row.expires_at else None,
            "expired": bool(row.expired),
            "body_length": row.body_length,
            "failed_tries": row.attempts,
            "crashes": row.crashes,
            "last_error": row.last_error,
            "created": instant(row.gmt_create),
            "modified": instant(row.gmt_modified),
        }
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise UnreadableTask(row.job_id, type(exc).__name__) from None


def task_or_damage(row: TaskRow, topic: str) -> TaskShown | UnreadableShown:
    """Show one task of many: a damaged one keeps nobody from the others."""
    try:
        return task(row, topic)
    except UnreadableTask as exc:
        return {"job_id": str(row.job_id), "topic": topic, "unreadable": str(exc)}
