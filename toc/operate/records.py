"""What is shown, in JSON: the command line prints it, the gateway answers with it.

job_ids are texts, instants RFC 3339 in UTC, durations seconds. The order of the keys is that of the columns
in tables. Nothing that asks a server is imported, so that commands start soon.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from toc.model.bulk import BulkState
from toc.model.clock import to_ms
from toc.model.documents import biz_id, instant, seconds
from toc.model.errors import IndexUnavailable, InvalidDocument, UnreadableTask
from toc.model.target import ATTRIBUTE as ROUTE
from toc.model.task import TaskStatus, check_body_length, decode_attribute
from toc.operate.operation import Record

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from toc.coordination.operator import Intents, Move
    from toc.coordination.views import SlotRow, WorkerRow
    from toc.index.messages import Peek
    from toc.model.access import Token
    from toc.model.bulk import BulkJob
    from toc.model.schedule import Fire
    from toc.model.target import Target
    from toc.model.task import TaskRow
    from toc.model.topic import Slot, Template, Topic
    from toc.sdk.schedules import Schedule

STATUS = {int(status): status.name.lower() for status in TaskStatus}


class TaskKnown(TypedDict):
    """What consumers and operators are told of a task."""

    job_id: str
    topic: str
    biz_id: int | str
    status: str
    action_time: str
    version: int
    tries: int
    expires_at: str | None
    failed_tries: int


class TaskShown(TaskKnown):
    """A task. ``next_time`` is when the next try is due, ``ended`` when the task ended. ``body_length`` is
    the bytes of its body, null without one. ``attribute`` is null if the token may not see values."""

    next_time: str | None
    ended: str | None
    attribute: dict[str, Any] | None
    dedup_key: str | None
    expired: bool
    body_length: int | None
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

    ``prepared`` is when its worker took it from its queue, ``row_read`` when the row was known. ``cause`` is
    that of the largest share, which come first; ``sentence`` says it for people, ``remedy`` what to do.
    """

    seconds: float
    prepared: str | None
    row_read: str | None
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


def task_record(row: TaskRow, topic: str) -> TaskShown:
    """Return a task. ``next_time`` is when its next try is due, ``ended`` when it ended.

    Raises UnreadableTask if its row is damaged.
    """
    check_body_length(row)
    pending = row.status == TaskStatus.PENDING
    try:
        return {
            "job_id": str(row.job_id),
            "topic": topic,
            "biz_id": biz_id(row.biz_id) if row.biz_key is None else row.biz_key,
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
    except InvalidDocument as exc:
        raise UnreadableTask(row.job_id, f"its attribute: {exc}") from None
    except (ValueError, TypeError, OverflowError) as exc:
        raise UnreadableTask(row.job_id, type(exc).__name__) from None


def task_shown(row: TaskRow, topic: str, *, values: bool) -> TaskShown:
    """Show a task; of its own URL without the query; its attribute only with ``values``.

    Raises UnreadableTask.
    """
    record = task_record(row, topic)
    attribute = record["attribute"] if values else None
    if attribute and isinstance(route := attribute.get(ROUTE), dict):
        hidden = {key: without_query(str(route[key])) for key in ("url", "path") if key in route}
        attribute = {**attribute, ROUTE: {**route, **hidden}}
    return {**record, "attribute": attribute}


def task_or_damage(show: Callable[[TaskRow, str], Any], row: TaskRow, topic: str) -> Record:
    """Show one task of many. A damaged one does not keep the others from being shown."""
    try:
        found: Record = show(row, topic)
    except UnreadableTask as exc:
        return {"job_id": str(row.job_id), "topic": topic, "unreadable": str(exc)}
    return found


def row_record(row: TaskRow, topic: str) -> Record:
    """Show a task at the command line, with the columns that only operators need. Raises UnreadableTask."""
    pending = row.status == TaskStatus.PENDING
    return {
        **task_record(row, topic),
        "biz_type": row.biz_type,
        "slot_amount": row.slot_amount,
        "attempt": row.attempts + 1 if pending else None,
        "due_in_seconds": round(row.action_time / 1000 - time.time(), 3) if pending else None,
    }


def without_query(url: str) -> str:
    """Return a URL whose query is not shown: it may be a secret of the receiver."""
    before, mark, _ = url.partition("?")
    return f"{before}?***" if mark else url


def topic_record(topic: Topic) -> Record:
    """Return a topic with its policies. Durations are seconds."""
    first = dict.fromkeys(("name", "biz_type", "slot_amount", "topic_type", "paused"))
    return {
        **first,
        **topic.values(),
        **{name: _at(getattr(topic, name) or None) for name in ("resumed_at", "paused_at")},
    }


def template_record(template: Template) -> Record:
    """Return a topic template."""
    return {
        "pattern": template.pattern,
        "most_topics": template.most_topics,
        "policies": dict(template.policies),
    }


def token_record(token: Token, now_ms: int) -> Record:
    """Return an access token, without its secret."""
    ended = "valid" if token.lives(now_ms) else "expired" if token.revoked_at is None else "revoked"
    return {
        "name": token.name,
        "roles": sorted(role.value for role in token.roles),
        "topics": list(token.topics),
        "rate": token.rate,
        "expires_at": _at(token.expires_at),
        "revoked_at": _at(token.revoked_at),
        "created": instant(token.created),
        "created_by": token.created_by,
        "state": ended,
    }


def target_record(target: Target, *, whole_url: bool = True) -> Record:
    """Return a webhook target, without its secret and the values of its headers.

    Without ``whole_url`` its query is not shown.
    """
    return {
        "name": target.name,
        "url": target.url if whole_url else without_query(target.url),
        **_as_they_are(target, "paused", "timeout", "concurrency", "rate"),
        "dead_on": sorted(target.dead_on),
        "topics": list(target.topics),
        "headers": list(target.header_names),
        **_as_they_are(target, "paused_by", "paused_why"),
        "previous_until": _at(target.previous_until),
        "created": instant(target.created),
        "modified": instant(target.modified),
    }


def schedule_record(schedule: Schedule) -> Record:
    """Return a schedule. ``missed`` is how many were; the policy is ``missed_policy``."""
    definition = schedule.definition
    every = definition.every
    return {
        "name": schedule.name,
        "topic": definition.topic,
        "cron": definition.cron,
        "zone": definition.zone if definition.cron else None,
        "every": None if every is None else every.total_seconds(),
        "anchor": _time(definition.anchor) if every is not None else None,
        "dst": str(definition.dst),
        "missed_policy": str(definition.missed),
        "window": definition.window.total_seconds(),
        "overlap": str(definition.overlap),
        "jitter": definition.jitter.total_seconds(),
        "attribute": dict(definition.attribute),
        "paused": schedule.paused,
        "next_time": None if schedule.paused else _time(schedule.next_time),
        "buffered": _time(schedule.buffered),
        "last_job_id": None if schedule.last_job_id is None else str(schedule.last_job_id),
        **_as_they_are(schedule, "fired", "skipped", "missed"),
        "missed_at": _time(schedule.missed_at),
        "stuck": schedule.stuck,
        "schedule_id": str(schedule.schedule_id),
        "created": _time(schedule.created),
        "modified": _time(schedule.modified),
    }


def fire_record(fire: Fire) -> Record:
    """Return a time at which a schedule fires: nominal with the offset of its zone, due in UTC."""
    return {"nominal": fire.nominal.isoformat(timespec="milliseconds"), "due": _time(fire.due)}


def bulk_record(job: BulkJob) -> Record:
    """Return a bulk job."""
    state: str = job.state
    if job.state is BulkState.RUNNING and not job.held:
        state = "waiting"
    elif job.state is BulkState.STOPPED and job.held:
        state = "stopping"
    return {
        **_as_they_are(job, "name", "kind", "topic", "by", "tasks", "done", "error", "rate"),
        "state": state,
        "counts": dict(job.counts),
        **job.details,
        "created": instant(job.created),
        "ended": _at(job.ended),
    }


def slot_record(slot: Slot, owner: SlotRow | None, peek: Peek | IndexUnavailable) -> Record:
    """Return a slot: who owns it and why, None if nobody has heard of it yet; and what is in it, None if it
    is out of reach. ``overdue``: for how many seconds, by Redis' clock, the earliest task that none has taken
    has been due."""
    seen = None if isinstance(peek, IndexUnavailable) else peek
    due = None if seen is None else seen.next_due
    return {
        "slot": str(slot),
        "state": owner and str(owner.state),
        "owner": owner and owner.owner,
        "since": _at((owner and owner.since) or None),
        "assigned": owner and owner.assigned,
        "why": owner and owner.reason,
        "scheduled": seen and seen.store,
        "prepared": seen and seen.prepared,
        "dead": seen and seen.dead,
        "next_due": None if due is None else instant(due),
        "overdue": None if seen is None or due is None else seconds(max(0, seen.redis_now_ms - int(due))),
    }


def worker_record(row: WorkerRow) -> Record:
    """Return a worker."""
    member = row.member
    return {
        "worker": member.worker_id,
        **_as_they_are(member, "host", "pid", "version", "protocol"),
        **_as_they_are(row, "weight", "owned", "assigned", "tables", "tables_assigned", "drained"),
        "out_of_reach": sorted(member.out_of_reach),
        "lost_threads": member.lost_threads,
        "leader": row.leader,
        "joined": instant(member.joined),
        "topics": None if member.topics is None else sorted(member.topics),
        "metrics": member.metrics,
    }


def move_record(move: Move) -> Record:
    """Return a slot's move."""
    return {"slot": f"{move.topic}_{move.number}", "from": move.old, "to": move.new}


def intent_records(wanted: Intents) -> list[Record]:
    """Return what operators have asked for."""
    found = [
        *(("drain", host, None, one) for host, one in wanted.drains.items()),
        *(("weight", host, f"{one.to:g}", one) for host, one in wanted.weights.items()),
        *(("pin", str(slot), one.to, one) for slot, one in wanted.pins.items()),
    ]
    return [
        {"what": what, "of": of, "to": to, "by": one.by, "at": instant(one.at)} for what, of, to, one in found
    ]


def _as_they_are(record: object, *names: str) -> Record:
    """Return fields of a record that JSON can carry."""
    return {name: getattr(record, name) for name in names}


def _at(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else instant(milliseconds)


def _time(value: datetime | None) -> str | None:
    return None if value is None else instant(to_ms(value))
