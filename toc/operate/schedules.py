"""Schedules. Who may do it on its topic sees a schedule."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from toc.model import schedule as rules
from toc.model.access import Action as Right
from toc.model.clock import to_ms
from toc.model.errors import InvalidSchedule, StoreUnavailable, UnknownSchedule, UnreadableSchedule
from toc.model.schedule import BACKFILL_RATE, MIN_BACKFILL_RATE, Definition, Dst, Missed, Overlap
from toc.model.topic import ALL
from toc.model.topic import NAME as FITTING
from toc.operate.operation import REQUIRED, Doing, Param, Place, Record, Value, operation
from toc.operate.records import fire_record, schedule_record

if TYPE_CHECKING:
    from toc.sdk.schedules import Schedule

NAME = Param("name", Value.TEXT, "Such as report.nightly; it is the biz_id of its tasks.", REQUIRED)
ABOUT_TOPIC = "The topic of its tasks."
WHEN = (
    Param("cron", Value.TEXT, "Five fields, such as '0 9 * * MON-FRI', or six with seconds first.",
          metavar="EXPR"),
    Param("zone", Value.TEXT, "The time zone of cron, such as Europe/Berlin. Default UTC.", metavar="ZONE"),
    Param("every", Value.SECONDS, "A period instead of cron: 30s, 15m, 1d."),
    Param("anchor", Value.INSTANT, "When every begins, RFC 3339. Default 1970, UTC."),
    Param("dst", Dst, "What to do with a time that the clock skips. Default cron: right after."),
)  # fmt: skip
POLICIES = (
    Param("missed", Missed, "What runs after a stop longer than window. Default latest."),
    Param("window", Value.SECONDS, "After a stop of at most this long, all run. Default 1d."),
    Param("overlap", Overlap, "What to do if the one before has not ended. Default skip."),
)
JITTER = Param("jitter", Value.SECONDS, "Delay by a part of this time, chosen by the name.")
ATTRIBUTE = Param("attribute", Value.OBJECT, "The data of each task for its handler.")
LIMIT = Param("limit", Value.WHOLE, "Show at most N.", 100, least=1, most=1000)
COUNT = Param("count", Value.WHOLE, "How many.", 20, least=1, most=1000)
AFTER = Param("after", Value.INSTANT, "Begin after this time. Default now.")


def _shown(doing: Doing, schedule: Schedule) -> Record:
    """Show a schedule; its attribute only to who may see values."""
    hidden = {} if doing.may(Right.READ_VALUES) else {"attribute": None}
    return schedule_record(schedule) | hidden


def _found(doing: Doing, name: str, **_: Any) -> Schedule:
    """Return a schedule. Raises UnknownSchedule if whoever asks may not see it, UnreadableSchedule."""
    from toc.sdk.schedules import need

    unknown = UnknownSchedule("there is no such schedule")  # nor does a name tell whether there is one
    try:
        schedule = doing.center.schedules.get(name) if FITTING.fullmatch(name) else None
    except InvalidSchedule as exc:  # this version does not understand its row, nor knows its topic
        if doing.token is None or doing.token.everywhere:
            raise UnreadableSchedule(str(exc)) from None
        raise unknown from None
    if doing.token is None:
        return need(schedule, name)
    if schedule is None or not doing.sees(schedule.definition.topic):
        raise unknown
    return schedule


def _deletable(doing: Doing, name: str) -> None:
    with suppress(UnreadableSchedule):
        _found(doing, name)


def _fires(definition: Definition, count: int, after: datetime | None) -> Record:
    begin = to_ms(rules.check_instant(after or datetime.now(UTC), "after"))
    return {"fires": [fire_record(fire) for fire in rules.preview(definition, begin, count)]}


_ONE = "/v1/schedules/{name}"
AT_ITS_SERVER: Any = {"place": Place.SCHEDULE}


@operation("schedule.list", "GET /v1/schedules", Right.READ_SCHEDULES, "List the schedules",
           Param("after", Value.TEXT, "Begin after this name.", "", most=128, metavar="NAME"), LIMIT,
           takes="Which", place=Place.ALL)  # fmt: skip
def list_schedules(doing: Doing, after: str, limit: int) -> Record:
    """List the schedules by name, a page at a time.

    `missed` counts occurrences left out after stops, `skipped` those whose predecessor had not ended. While
    `next` is not null, ask on with it as `after`.
    """
    topics = ALL if doing.token is None else doing.token.topics
    found = doing.center.schedules.list(after=after, limit=limit + 1, topics=topics)
    shown = [_shown(doing, one) for one in found[:limit]]
    return {"schedules": shown, "next": found[limit - 1].name if len(found) > limit else None}


@operation("schedule.show", f"GET {_ONE}", Right.READ_SCHEDULES, "Show a schedule", NAME, **AT_ITS_SERVER)
def show_schedule(doing: Doing, name: str) -> Record:
    """Show a schedule and what it has done.

    `paused_by`: who paused it at the command line, over HTTP or in the console, unless it was changed since.
    """
    schedule, by = _found(doing, name), None
    if schedule.paused:
        at = to_ms(schedule.modified)
        with suppress(StoreUnavailable):
            pauses = doing.center.store.audit.list(100, action="schedule.pause", target=name)
            by = next((one.actor for one in pauses if one.began <= at <= (one.ended or 0)), None)
    return _shown(doing, schedule) | {"paused_by": by}


@operation("schedule.create", "POST /v1/schedules", Right.CHANGE_SCHEDULE, "Create a schedule",
           NAME, Param("topic", Value.TOPIC, ABOUT_TOPIC, REQUIRED), *WHEN, *POLICIES, JITTER, ATTRIBUTE,
           Param("paused", Value.FLAG, "Begin only when it is resumed.", default=False), takes="NewSchedule",
           status=201, **AT_ITS_SERVER)  # fmt: skip
def create(doing: Doing, name: str, **options: Any) -> Record:
    """Create a schedule.

    toc: Example: toc schedule create report.nightly --topic report.make --cron '0 2 * * *' --zone Asia/Tokyo
    """
    return _shown(doing, doing.center.schedules.create(name, **options))


@operation("schedule.alter", f"PATCH {_ONE}", Right.CHANGE_SCHEDULE, "Change a schedule",
           NAME, Param("topic", Value.TOPIC, ABOUT_TOPIC), *WHEN, *POLICIES, JITTER, ATTRIBUTE,
           takes="AlteredSchedule", check=_found, **AT_ITS_SERVER)  # fmt: skip
def alter(doing: Doing, name: str, **changes: Any) -> Record:
    """Change a schedule. Its next occurrence is replaced if it has not started.

    A cron expression replaces a period, and the other way round.

    toc: A schedule that is declared in code returns to its declaration when a worker starts.

    Example: toc schedule alter report.nightly --cron '30 2 * * *'
    """
    return _shown(doing, doing.center.schedules.alter(name, **changes))


@operation("schedule.pause", f"POST {_ONE}:pause", Right.RUN_SCHEDULE, "Pause a schedule",
           NAME, check=_found, **AT_ITS_SERVER)  # fmt: skip
def pause(doing: Doing, name: str) -> Record:
    """Start no more occurrences. Those that fall into the pause are not made up for."""
    return _shown(doing, doing.center.schedules.pause(name))


@operation("schedule.resume", f"POST {_ONE}:resume", Right.RUN_SCHEDULE, "Resume a schedule",
           NAME, check=_found, **AT_ITS_SERVER)  # fmt: skip
def resume(doing: Doing, name: str) -> Record:
    """Continue a paused schedule from now."""
    return _shown(doing, doing.center.schedules.resume(name))


@operation("schedule.delete", f"DELETE {_ONE}", Right.CHANGE_SCHEDULE, "Delete a schedule",
           NAME, check=_deletable, **AT_ITS_SERVER)  # fmt: skip
def delete(doing: Doing, name: str) -> Record:
    """Delete a schedule and cancel its next occurrence. Running tasks continue."""
    if not doing.center.schedules.delete(name):
        raise UnknownSchedule("there is no such schedule: it was deleted just now")
    return {"name": name, "deleted": True}


@operation("schedule.trigger", f"POST {_ONE}:trigger", Right.RUN_SCHEDULE, "Run a schedule now",
           NAME, check=_found, **AT_ITS_SERVER)  # fmt: skip
def trigger(doing: Doing, name: str) -> Record:
    """Run one task of the schedule now, and show its job_id. It may be paused. Changes nothing else."""
    doing.result["job_id"] = str(doing.center.schedules.trigger(name))
    return {"job_id": doing.result["job_id"]}


@operation("schedule.backfill", f"POST {_ONE}:backfill", Right.RUN_SCHEDULE, "Run a schedule for the past",
           NAME, Param("from", Value.INSTANT, "The first nominal time, RFC 3339 with a zone.", REQUIRED),
           Param("to", Value.INSTANT, "The last nominal time.", REQUIRED),
           Param("rate", Value.NUMBER, "Start N per second.", BACKFILL_RATE, least=MIN_BACKFILL_RATE),
           Param("dry_run", Value.FLAG, "Only count.", default=False), takes="Range",
           place=Place.LONG, check=_found,
           details=lambda told: {key: value for key, value in told.items() if key != "dry_run"})  # fmt: skip
def backfill(doing: Doing, name: str, *, to: datetime, rate: float, dry_run: bool, **begin: Any) -> Record:
    """Run the past occurrences that have no task, one after the other.

    Occurrences with a task are `present` and left alone, so it can be repeated. `may have run` counts those
    whose tasks may have run and been purged since: they run again.

    toc: Example: toc schedule backfill report.nightly --from 2030-01-01T00:00:00Z --to 2030-01-31T00:00:00Z
    """
    schedules = doing.center.schedules
    counts = schedules.backfill(name, begin["from"], to, rate=rate, dry_run=dry_run)._asdict()
    doing.result.update(counts)
    return {**counts, "dry_run": dry_run}


@operation("schedule.preview", f"GET {_ONE}:preview", Right.READ_SCHEDULES, "See when a schedule fires",
           NAME, COUNT, AFTER, takes="WhichFires", place=Place.LONG)  # fmt: skip
def preview(doing: Doing, name: str, count: int, after: datetime | None = None) -> Record:
    """Show the next times at which a schedule fires, paused or not, with the offsets of its zone."""
    return _fires(_found(doing, name).definition, count, after)


@operation(
    "schedule.preview", "POST /v1/schedules:preview", Right.READ_SCHEDULES, "See when a schedule would fire",
    Param("name", Value.TEXT, "Which schedule. A new one's chooses the part of jitter.", metavar="[NAME]"),
    *WHEN, JITTER, COUNT, AFTER, takes="DefinitionToPreview", place=Place.LONG, changes=False,
)  # fmt: skip
def preview_given(
    doing: Doing, count: int, name: str | None = None, after: datetime | None = None, **options: Any
) -> Record:
    """Show the next times at which a schedule would fire: one that there is, with these options, or a new
    one. Stores nothing.

    toc: Example: toc schedule preview --cron '30 2 * * *' --zone Europe/Berlin --after 2030-03-30T00:00:00Z
    """
    from toc.sdk.schedules import define

    try:
        definition = _found(doing, name or "").definition.changed(**options)
    except UnknownSchedule:
        if name is not None and not options:
            raise
        definition = define(name or "preview", topic="preview", **options)
    return _fires(definition, count, after)
