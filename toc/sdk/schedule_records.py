"""Schedules in JSON, as the command line prints them and the gateway answers with them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from toc.model import wire
from toc.model.clock import to_ms
from toc.model.schedule import Definition, Fire
from toc.sdk.schedules import Schedule


def schedule_record(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule. ``missed`` is how many were; the policy is ``missed_policy``."""
    definition: Definition = schedule.definition

    def at(value: datetime | None) -> str | None:
        return None if value is None else wire.instant(to_ms(value))

    every = definition.every
    return {
        "name": schedule.name,
        "topic": definition.topic,
        "cron": definition.cron,
        "zone": definition.zone if definition.cron else None,
        "every": None if every is None else every.total_seconds(),
        "anchor": at(definition.anchor) if every is not None else None,
        "dst": str(definition.dst),
        "missed_policy": str(definition.missed),
        "window": definition.window.total_seconds(),
        "overlap": str(definition.overlap),
        "jitter": definition.jitter.total_seconds(),
        "attribute": dict(definition.attribute),
        "paused": schedule.paused,
        "next_time": None if schedule.paused else at(schedule.next_time),
        "buffered": at(schedule.buffered),
        "last_job_id": None if schedule.last_job_id is None else str(schedule.last_job_id),
        "fired": schedule.fired,
        "skipped": schedule.skipped,
        "missed": schedule.missed,
        "missed_at": at(schedule.missed_at),
        "schedule_id": str(schedule.schedule_id),
        "created": at(schedule.created),
        "modified": at(schedule.modified),
    }


def fire_record(fire: Fire) -> dict[str, Any]:
    """Return a time at which a schedule fires: nominal with the offset of its zone, due in UTC."""
    return {"nominal": fire.nominal.isoformat(), "due": wire.instant(to_ms(fire.due))}
