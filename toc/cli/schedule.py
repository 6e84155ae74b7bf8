"""toc schedule create | list | show | alter | pause | resume | trigger | backfill | preview | delete"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.options import Group, Json, flag, grouped, option
from toc.cli.output import print_job_id, print_json, say, show, show_one
from toc.cli.values import attribute, audited, changing, duration, opened
from toc.model.clock import to_ms
from toc.model.schedule import Dst, Missed, Overlap, check_instant
from toc.model.schedule import preview as fires_of
from toc.model.wire import parse_instant
from toc.operate.records import fire_record, schedule_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from toc.model.schedule import Fire

app = typer.Typer(no_args_is_help=True, help="Recurring tasks: by cron expression or interval.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Such as report.nightly; it is the biz_id of its tasks.")
]
TOPIC = "The topic of its tasks."


class Rule(Group):
    """The times at which a schedule fires."""

    cron: str | None = option("EXPR", "Five fields, such as '0 9 * * MON-FRI'.")
    zone: str | None = option("ZONE", "The time zone of --cron, such as Europe/Berlin. Default UTC.")
    every: str | None = option("TIME", "A period instead of --cron: 30s, 15m, 1d.")
    anchor: str | None = option("TIME", "When --every begins, RFC 3339. Default 1970, UTC.")
    dst: Dst | None = option(None, "What to do with a time that the clock skips. Default cron: right after.")


class Policies(Group):
    """What a schedule does when it cannot just fire."""

    missed: Missed | None = option(None, "What runs after a stop longer than --window. Default latest.")
    window: str | None = option("TIME", "After a stop of at most this long, all run. Default 1d.")
    overlap: Overlap | None = option(None, "What to do if the one before has not ended. Default skip.")


Jitter = Annotated[
    str | None,
    typer.Option("--jitter", metavar="TIME", help="Delay by a part of this time, chosen by the name."),
]
Attribute = Annotated[
    str | None, typer.Option("--attribute", metavar="JSON", help="The data of each task for its handler.")
]


@app.command()
@grouped
def create(
    name: Name,
    topic: str = option("TOPIC", TOPIC, default=...),
    *,
    rule: Rule,
    policies: Policies,
    jitter: Jitter = None,
    attribute_json: Attribute = None,
    paused: bool = flag("--paused", "Begin only with `toc schedule resume`."),
    as_json: Json = False,
) -> None:
    """Create a schedule.

    Example: toc schedule create report.nightly --topic report.make --cron '0 2 * * *' --zone Europe/Berlin
    """
    options = _options(**_given(**rule, **policies, jitter=jitter, attribute=attribute_json))
    with changing("schedule.create", name, topic=topic, paused=paused, **options) as center:
        schedule = center.schedules.create(name, topic=topic, paused=paused, **options)
    show_one(schedule_record(schedule), as_json=as_json)


@app.command("list")
def list_schedules(
    after: str = option("NAME", "Begin after this name.", default=""),
    limit: int = option("N", "Show at most N.", default=1000, min=1, max=10_000),
    as_json: Json = False,
) -> None:
    """List the schedules by name.

    `missed` counts occurrences left out after stops, `skipped` those whose predecessor had not ended.
    """
    with opened() as center:
        found = center.schedules.list(after=after, limit=limit)
    records = [schedule_record(schedule) for schedule in found]
    if not as_json:
        keys = ("name", "topic", "when", "paused", "next_time", "fired", "skipped", "missed")
        records = [{key: _when(each) if key == "when" else each[key] for key in keys} for each in records]
    show(
        records,
        as_json=as_json,
        empty="no schedules; toc schedule create report.nightly --topic report.make --cron '0 2 * * *'",
        spare=("fired", "topic"),
    )
    for schedule in found:
        if schedule.stuck:
            say(f"{schedule.name} does not fire: {schedule.stuck}")
    if len(found) == limit:
        say(f"there may be more: --after {found[-1].name}")


@app.command("show")
def show_schedule(name: Name, as_json: Json = False) -> None:
    """Show a schedule and what it has done."""
    from toc.sdk.schedules import need

    with opened() as center:
        schedule = need(center.schedules.get(name), name)
    show_one(schedule_record(schedule), as_json=as_json)


@app.command()
@grouped
def alter(
    name: Name,
    topic: str | None = option("TOPIC", TOPIC),
    *,
    rule: Rule,
    policies: Policies,
    jitter: Jitter = None,
    attribute_json: Attribute = None,
    as_json: Json = False,
) -> None:
    """Change a schedule. Its next occurrence is replaced if it has not started.

    A schedule that is declared in code returns to its declaration when a worker starts.

    Example: toc schedule alter report.nightly --cron '30 2 * * *'
    """
    changes = _options(**_given(topic=topic, **rule, **policies, jitter=jitter, attribute=attribute_json))
    with changing("schedule.alter", name, **changes) as center:
        schedule = center.schedules.alter(name, **changes)
    show_one(schedule_record(schedule), as_json=as_json)


@app.command()
def pause(name: Name, as_json: Json = False) -> None:
    """Start no more occurrences. Those that fall into the pause are not made up for."""
    with changing("schedule.pause", name) as center:
        schedule = center.schedules.pause(name)
    show_one(schedule_record(schedule), as_json=as_json)


@app.command()
def resume(name: Name, as_json: Json = False) -> None:
    """Continue a paused schedule from now."""
    with changing("schedule.resume", name) as center:
        schedule = center.schedules.resume(name)
    show_one(schedule_record(schedule), as_json=as_json)


@app.command()
def trigger(name: Name, as_json: Json = False) -> None:
    """Run one task of the schedule now, and print its job_id. Changes nothing else."""
    with opened(account=True) as center, audited(center, "schedule.trigger", name) as record:
        job_id = center.schedules.trigger(name)
        record["job_id"] = str(job_id)
    print_job_id(job_id, as_json=as_json)


@app.command()
def backfill(
    name: Name,
    start: str = option("TIME", "The first nominal time, RFC 3339 with a zone.", "--from", default=...),
    end: str = option("TIME", "The last nominal time.", "--to", default=...),
    rate: float = option("N", "Start N per second.", default=10.0),
    dry_run: bool = flag("--dry-run", "Only count."),
    as_json: Json = False,
) -> None:
    """Run the past occurrences that have no task.

    Occurrences with a task are left alone, so it can be repeated. `may have run` counts those whose tasks may
    have run and been purged since: they run again.

    Example: toc schedule backfill report.nightly --from 2030-01-01T00:00:00Z
    --to 2030-01-31T00:00:00Z --dry-run
    """
    with opened(account=True) as center:
        begin, until = parse_instant(start), parse_instant(end)
        if dry_run:
            counts = center.schedules.backfill(name, begin, until, rate=rate, dry_run=True)
        else:
            details = {"from": begin, "to": until, "rate": rate}
            with audited(center, "schedule.backfill", name, **details) as record:
                counts = center.schedules.backfill(name, begin, until, rate=rate)
                record |= counts._asdict()
    show_one({**counts._asdict(), "dry_run": dry_run}, as_json=as_json)


@app.command()
@grouped
def preview(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which schedule.")] = None,
    *,
    rule: Rule,
    jitter: Jitter = None,
    count: int = option("N", "How many.", default=20, min=1, max=1000),
    after: str | None = option("TIME", "Begin after this time. Default now."),
    as_json: Json = False,
) -> None:
    """Show the next times at which a schedule fires, or would with these options.

    Example: toc schedule preview --cron '30 2 * * *' --zone Europe/Berlin --after 2030-03-30T00:00:00Z
    """
    from toc.sdk.schedules import define, need

    options = _options(**rule, **_given(jitter=jitter))
    begin = datetime.now(UTC) if after is None else parse_instant(after)
    if name is None:
        definition = define("preview", topic="preview", **options)
    else:
        with opened() as center:
            definition = need(center.schedules.get(name), name).definition.changed(**options)
    fires = fires_of(definition, to_ms(check_instant(begin)), count)
    show(_fires(fires, as_json=as_json), as_json=as_json, empty="it does not fire within a hundred years")


@app.command()
def delete(name: Name, as_json: Json = False) -> None:
    """Delete a schedule and cancel its next occurrence. Running tasks continue."""
    from toc.sdk.schedules import need

    with changing("schedule.delete", name) as center:
        need(center.schedules.delete(name) or None, name)
    if as_json:
        print_json({"name": name, "deleted": True})
    else:
        say(f"{name} is deleted")


def _when(record: dict[str, Any]) -> str:
    if record["every"] is not None:
        return f"every {timedelta(seconds=record['every'])}"
    return f"{record['cron']} {record['zone']}"


def _fires(fires: Sequence[Fire], *, as_json: bool) -> list[dict[str, Any]]:
    records = [fire_record(fire) for fire in fires]
    if as_json:
        return records
    return [
        {"day": f"{fire.nominal:%a}", "nominal": record["nominal"], "due (UTC)": record["due"]}
        for fire, record in zip(fires, records, strict=True)
    ]


def _given(**options: str | None) -> dict[str, str]:
    """Return the options that were given, as they were typed."""
    return {name: str(value) for name, value in options.items() if value is not None}


def _options(**given: Any) -> dict[str, Any]:
    """Return what was given, by the names of ``schedules.create``."""
    parse: dict[str, Any] = {
        **dict.fromkeys(("every", "window", "jitter"), duration), "anchor": parse_instant,
        "attribute": attribute,
    }  # fmt: skip
    return {name: parse[name](value) if name in parse else value for name, value in given.items()}
