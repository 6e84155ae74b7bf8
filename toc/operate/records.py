"""What operators see, in JSON: the command line prints it, the gateway answers with it.

The order of the keys is that of the columns in the tables of the command line. Nothing that asks a server is
imported, so that commands start soon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toc.model.clock import to_ms
from toc.model.documents import biz_id, instant, seconds
from toc.model.errors import IndexUnavailable, InvalidDocument, UnreadableTask
from toc.model.task import TaskStatus, check_body_length, decode_attribute

if TYPE_CHECKING:
    from datetime import datetime

    from toc.coordination.coordinator import WorkerRow
    from toc.coordination.operator import Intents, Move
    from toc.model.access import Token
    from toc.model.schedule import Fire
    from toc.model.target import Target
    from toc.model.task import TaskRow
    from toc.model.topic import Template, Topic
    from toc.operate.admin import SlotView
    from toc.operate.running import Running
    from toc.sdk.schedules import Schedule

STATUS = {int(status): status.name.lower() for status in TaskStatus}


def task_record(row: TaskRow, topic: str) -> dict[str, Any]:
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


def damaged_record(row: TaskRow, topic: str, error: UnreadableTask) -> dict[str, Any]:
    """Return a task whose row is damaged: ``unreadable`` says how."""
    return {"job_id": str(row.job_id), "topic": topic, "unreadable": str(error)}


def topic_record(topic: Topic) -> dict[str, Any]:
    """Return a topic with its policies. Durations are seconds."""
    first = dict.fromkeys(("name", "biz_type", "slot_amount", "topic_type", "paused"))
    return {
        **first,
        **topic.values(),
        **{name: _at(getattr(topic, name) or None) for name in ("resumed_at", "paused_at")},
    }


def template_record(template: Template) -> dict[str, Any]:
    """Return a topic template."""
    return {
        "pattern": template.pattern,
        "most_topics": template.most_topics,
        "policies": dict(template.policies),
    }


def token_record(token: Token) -> dict[str, Any]:
    """Return an access token, without its secret."""
    return {
        "name": token.name,
        "roles": sorted(role.value for role in token.roles),
        "topics": list(token.topics),
        "rate": token.rate,
        "expires_at": _at(token.expires_at),
        "revoked_at": _at(token.revoked_at),
        "created": instant(token.created),
        "created_by": token.created_by,
    }


def without_query(url: str) -> str:
    """Return a URL whose query is not shown: it may be a secret of the receiver."""
    before, mark, _ = url.partition("?")
    return f"{before}?***" if mark else url


def target_record(target: Target, *, whole_url: bool = True) -> dict[str, Any]:
    """Return a webhook target, without its secret and the values of its headers.

    Without ``whole_url`` its query is not shown.
    """
    return {
        "name": target.name,
        "url": target.url if whole_url else without_query(target.url),
        "paused": target.paused,
        "timeout": target.timeout,
        "concurrency": target.concurrency,
        "rate": target.rate,
        "dead_on": sorted(target.dead_on),
        "topics": list(target.topics),
        "headers": list(target.header_names),
        "paused_by": target.paused_by,
        "paused_why": target.paused_why,
        "previous_until": _at(target.previous_until),
        "created": instant(target.created),
        "modified": instant(target.modified),
    }


def schedule_record(schedule: Schedule) -> dict[str, Any]:
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
        "fired": schedule.fired,
        "skipped": schedule.skipped,
        "missed": schedule.missed,
        "missed_at": _time(schedule.missed_at),
        "stuck": schedule.stuck,
        "schedule_id": str(schedule.schedule_id),
        "created": _time(schedule.created),
        "modified": _time(schedule.modified),
    }


def fire_record(fire: Fire) -> dict[str, Any]:
    """Return a time at which a schedule fires: nominal with the offset of its zone, due in UTC."""
    return {"nominal": fire.nominal.isoformat(timespec="milliseconds"), "due": _time(fire.due)}


def ownership_record(view: SlotView) -> dict[str, Any]:
    """Return who owns a slot."""
    ownership = view.ownership
    return {
        "slot": str(view.slot),
        "state": ownership and str(ownership.state),
        "owner": ownership and ownership.owner,
        "since": _at((ownership and ownership.since) or None),
    }


def queue_record(view: SlotView) -> dict[str, Any]:
    """Return what is in a slot; ``overdue`` is seconds. All None if it is out of reach."""
    seen = view.queues
    if isinstance(seen, IndexUnavailable):
        return dict.fromkeys(("scheduled", "prepared", "dead", "next_due", "overdue"))
    return {
        "scheduled": seen.store,
        "prepared": seen.prepared,
        "dead": seen.dead,
        "next_due": None if seen.next_due is None else instant(seen.next_due),
        "overdue": None if view.overdue_ms is None else seconds(view.overdue_ms),
    }


def worker_record(row: WorkerRow) -> dict[str, Any]:
    """Return a worker."""
    return {
        "worker": row.member.worker_id,
        "host": row.member.host,
        "pid": row.member.pid,
        "version": row.member.version,
        "protocol": row.member.protocol,
        "weight": row.weight,
        "owned": row.owned,
        "assigned": row.assigned,
        "tables": row.tables,
        "tables_assigned": row.tables_assigned,
        "drained": row.drained,
        "out_of_reach": sorted(row.member.out_of_reach),
        "lost_threads": row.member.lost_threads,
        "leader": row.leader,
        "joined": instant(row.member.joined),
        "topics": None if row.member.topics is None else sorted(row.member.topics),
        "metrics": row.member.metrics,
        "weighed_by": row.weighed_by,
        "drained_by": row.drained_by,
        "drained_at": _at(row.drained_at),
    }


def running_record(one: Running) -> dict[str, Any]:
    """Return where a task runs."""
    return {
        "job_id": str(one.job_id),
        "slot": str(one.slot),
        "owner": one.worker,
        "host": one.host,
        "since": _at(one.since),
    }


def move_record(move: Move) -> dict[str, Any]:
    """Return a slot's move."""
    return {"slot": f"{move.topic}_{move.number}", "from": move.old, "to": move.new}


def intent_records(wanted: Intents) -> list[dict[str, Any]]:
    """Return what operators have asked for."""
    found = [
        *(("drain", host, None, one) for host, one in wanted.drains.items()),
        *(("weight", host, f"{one.to:g}", one) for host, one in wanted.weights.items()),
        *(("pin", str(slot), one.to, one) for slot, one in wanted.pins.items()),
    ]
    return [
        {"what": what, "of": of, "to": to, "by": one.by, "at": instant(one.at)} for what, of, to, one in found
    ]


def _at(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else instant(milliseconds)


def _time(value: datetime | None) -> str | None:
    return None if value is None else instant(to_ms(value))
