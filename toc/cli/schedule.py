"""toc schedule create | list | show | alter | pause | resume | trigger | backfill | preview | delete"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.output import print_json, say, show, show_one
from toc.cli.values import Json, attribute, audited, duration, instant, opened, who
from toc.model import wire
from toc.model.clock import to_ms
from toc.model.schedule import Dst, Missed, Overlap
from toc.observe.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from toc.model.schedule import Definition, Fire
    from toc.sdk.schedules import Schedule

log = get_logger(__name__)

app = typer.Typer(no_args_is_help=True, help="Tasks that come again and again: cron and intervals.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Such as report.nightly; it is the biz_id of its tasks.")
]
Cron = Annotated[
    str | None, typer.Option("--cron", metavar="EXPR", help="Five fields, such as '0 9 * * MON-FRI'.")
]
Zone = Annotated[
    str | None, typer.Option("--zone", metavar="ZONE", help="Of --cron, such as Europe/Berlin. Default UTC.")
]
Every = Annotated[
    str | None, typer.Option("--every", metavar="TIME", help="A period instead of --cron: 30s, 15m, 1d.")
]
Anchor = Annotated[
    str | None,
    typer.Option("--anchor", metavar="TIME", help="When --every begins, ISO 8601. Default 1970, UTC."),
]
DstPolicy = Annotated[
    Dst | None,
    typer.Option("--dst", help="A fixed time that the clock leaves out. Default cron: right after."),
]
MissedPolicy = Annotated[
    Missed | None,
    typer.Option("--missed", help="What runs after a stop longer than --window. Default latest."),
]
Window = Annotated[
    str | None, typer.Option("--window", metavar="TIME", help="After shorter stops all run. Default 1d.")
]
OverlapPolicy = Annotated[
    Overlap | None, typer.Option("--overlap", help="If the one before has not ended. Default skip.")
]
Jitter = Annotated[
    str | None,
    typer.Option("--jitter", metavar="TIME", help="Delay by a part of this that follows from the name."),
]
Attribute = Annotated[
    str | None, typer.Option("--attribute", metavar="JSON", help="The data of each task for its handler.")
]
Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="The topic of its tasks.")]


@app.command()
def create(
    name: Name,
    topic: Annotated[str, typer.Option("--topic", metavar="TOPIC", help="The topic of its tasks.")],
    cron: Cron = None,
    zone: Zone = None,
    every: Every = None,
    anchor: Anchor = None,
    dst: DstPolicy = None,
    missed: MissedPolicy = None,
    window: Window = None,
    overlap: OverlapPolicy = None,
    jitter: Jitter = None,
    attribute_json: Attribute = None,
    paused: Annotated[bool, typer.Option("--paused", help="Begin only with `toc schedule resume`.")] = False,
    as_json: Json = False,
) -> None:
    """Create a schedule.

    Example: toc schedule create report.nightly --topic report.make --cron '0 2 * * *' --zone Europe/Berlin
    """
    given = _given(
        cron=cron, zone=zone, every=every, anchor=anchor, dst=dst, missed=missed, window=window,
        overlap=overlap, jitter=jitter, attribute=attribute_json,
    )  # fmt: skip
    options = _options(**given)
    with opened(account=True) as center:
        with audited(center, "schedule.create", name, topic=topic, **given):
            schedule = center.schedules.create(name, topic=topic, paused=paused, **options)
        log.info("schedule_created", by=who(), schedule=name, topic=topic)
    show_one(schedule_record(schedule), as_json=as_json)


@app.command("list")
def list_schedules(
    after: Annotated[str, typer.Option(metavar="NAME", help="Begin after this name.")] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Show at most N.")] = 1000,
    as_json: Json = False,
) -> None:
    """List the schedules by name.

    `missed` counts what was left out after stops, `skipped` what was because the one before had not ended.
    """
    with opened() as center:
        found = center.schedules.list(after=after, limit=limit)
    records = [schedule_record(schedule) for schedule in found]
    if not as_json:
        keys = ("name", "topic", "when", "paused", "next_time", "fired", "skipped", "missed")
        records = [{**{key: _when(each) if key == "when" else each[key] for key in keys}} for each in records]
    show(
        records,
        as_json=as_json,
        empty="no schedules; toc schedule create report.nightly --topic report.make --cron '0 2 * * *'",
        spare=("fired", "topic"),
    )
    if len(found) == limit:
        say(f"there may be more: --after {found[-1].name}")


@app.command("show")
def show_schedule(name: Name, as_json: Json = False) -> None:
    """Show a schedule: what it does, what it has done, and what was missed."""
    from toc.sdk.schedules import need

    with opened() as center:
        schedule = need(center.schedules.get(name), name)
    show_one(schedule_record(schedule), as_json=as_json)


@app.command()
def alter(
    name: Name,
    topic: Topic = None,
    cron: Cron = None,
    zone: Zone = None,
    every: Every = None,
    anchor: Anchor = None,
    dst: DstPolicy = None,
    missed: MissedPolicy = None,
    window: Window = None,
    overlap: OverlapPolicy = None,
    jitter: Jitter = None,
    attribute_json: Attribute = None,
    as_json: Json = False,
) -> None:
    """Change a schedule. Its next occurrence is replaced if it has not started.

    What is declared in code goes back to that when a worker starts.

    Example: toc schedule alter report.nightly --cron '30 2 * * *'
    """
    given = _given(
        topic=topic, cron=cron, zone=zone, every=every, anchor=anchor, dst=dst, missed=missed, window=window,
        overlap=overlap, jitter=jitter, attribute=attribute_json,
    )  # fmt: skip
    changes = _options(**given)
    with opened(account=True) as center:
        with audited(center, "schedule.alter", name, **given):
            schedule = center.schedules.alter(name, **changes)
        log.info("schedule_changed", by=who(), schedule=name, changes=", ".join(changes))
    show_one(schedule_record(schedule), as_json=as_json)


@app.command()
def pause(name: Name, as_json: Json = False) -> None:
    """Start no more occurrences. What is left out so is not made up for."""
    with opened(account=True) as center:
        with audited(center, "schedule.pause", name):
            schedule = center.schedules.pause(name)
        log.info("schedule_changed", by=who(), schedule=name, changes="paused")
    show_one(schedule_record(schedule), as_json=as_json)


@app.command()
def resume(name: Name, as_json: Json = False) -> None:
    """Go on with a paused schedule, from now."""
    with opened(account=True) as center:
        with audited(center, "schedule.resume", name):
            schedule = center.schedules.resume(name)
        log.info("schedule_changed", by=who(), schedule=name, changes="resumed")
    show_one(schedule_record(schedule), as_json=as_json)


@app.command()
def trigger(name: Name, as_json: Json = False) -> None:
    """Run a task of the schedule now, and print its job_id. Changes nothing else."""
    with opened(account=True) as center:
        with audited(center, "schedule.trigger", name):
            job_id = center.schedules.trigger(name)
        log.info("schedule_triggered", by=who(), schedule=name, job_id=job_id)
    if as_json:
        print_json({"job_id": job_id})
    else:
        print(job_id)


@app.command()
def backfill(
    name: Name,
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help="The first nominal time, ISO 8601 with a zone.")
    ],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="The last nominal time.")],
    rate: Annotated[float, typer.Option("--rate", metavar="N", help="Start N a second.")] = 10.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    as_json: Json = False,
) -> None:
    """Run the occurrences of the past that have no task.

    Those that have one are left alone, so it can be repeated. `may have run` counts those whose tasks may
    have run and been purged since: they run again.

    Example: toc schedule backfill report.nightly --from 2030-01-01T00:00Z --to 2030-01-31T00:00Z --dry-run
    """
    with opened(account=True) as center:
        begin, until = instant(start), instant(end)
        if dry_run:
            counts = center.schedules.backfill(name, begin, until, rate=rate, dry_run=True)
        else:
            with audited(center, "schedule.backfill", name, start=start, end=end, rate=rate) as record:
                counts = center.schedules.backfill(name, begin, until, rate=rate)
                record |= counts._asdict()
            log.info("schedule_backfilled", by=who(), schedule=name, tasks=counts.submitted)
    show_one({**counts._asdict(), "dry_run": dry_run}, as_json=as_json)


@app.command()
def preview(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which schedule.")] = None,
    cron: Cron = None,
    zone: Zone = None,
    every: Every = None,
    anchor: Anchor = None,
    dst: DstPolicy = None,
    jitter: Jitter = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, max=1000, help="How many.")] = 20,
    after: Annotated[
        str | None, typer.Option("--after", metavar="TIME", help="Begin after this time. Default now.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the next times at which a schedule fires, or would with these options.

    Example: toc schedule preview --cron '30 2 * * *' --zone Europe/Berlin --after 2030-03-30T00:00Z
    """
    from toc.model.schedule import preview as fires_of
    from toc.sdk.schedules import define, need

    options = _options(cron=cron, zone=zone, every=every, anchor=anchor, dst=dst, jitter=jitter)
    begin = datetime.now(UTC) if after is None else instant(after)
    if name is None:
        definition = define("preview", topic="preview", **options)
    else:
        with opened() as center:
            definition = need(center.schedules.get(name), name).definition.changed(**options)
    fires = fires_of(definition, to_ms(_aware(begin)), count)
    show(_fires(fires, as_json=as_json), as_json=as_json, empty="it never fires again")


@app.command()
def delete(name: Name, as_json: Json = False) -> None:
    """Delete a schedule and cancel its next occurrence. What runs is left alone."""
    from toc.sdk.schedules import need

    with opened(account=True) as center:
        with audited(center, "schedule.delete", name):
            deleted = center.schedules.delete(name)
        if not deleted:
            need(None, name)
        log.info("schedule_deleted", by=who(), schedule=name)
    if as_json:
        print_json({"name": name, "deleted": True})
    else:
        say(f"{name} is deleted")


def schedule_record(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule for display. Durations are seconds."""
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


def _when(record: dict[str, Any]) -> str:
    if record["every"] is not None:
        return f"every {timedelta(seconds=record['every'])}"
    return f"{record['cron']} {record['zone']}"


def _fires(fires: Sequence[Fire], *, as_json: bool) -> list[dict[str, Any]]:
    if as_json:
        return [{"nominal": fire.nominal.isoformat(), "due": wire.instant(to_ms(fire.due))} for fire in fires]
    return [
        {
            "day": f"{fire.nominal:%a}",
            "nominal": fire.nominal.isoformat(),
            "due (UTC)": wire.instant(to_ms(fire.due)),
        }
        for fire in fires
    ]


def _given(**options: str | None) -> dict[str, str]:
    """Return the options that were given, as they were typed."""
    return {name: str(value) for name, value in options.items() if value is not None}


def _options(**given: Any) -> dict[str, Any]:
    """Return what was given, by the names of ``schedules.create``."""
    parse: dict[str, Any] = {
        "every": duration,
        "window": duration,
        "jitter": duration,
        "anchor": instant,
        "attribute": attribute,
    }
    return {
        name: parse[name](value) if name in parse else value
        for name, value in given.items()
        if value is not None
    }


def _aware(at: datetime) -> datetime:
    from toc.model.errors import NaiveDatetime

    if at.utcoffset() is None:
        raise NaiveDatetime(f"{at.isoformat()} has no time zone; append Z or an offset such as +01:00")
    return at
