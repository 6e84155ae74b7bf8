"""toc schedule create | list | show | alter | pause | resume | trigger | backfill | preview | delete"""

from __future__ import annotations

from dataclasses import replace

import typer

from toc.cli.operations import as_it_is, command, commands
from toc.cli.output import print_job_id, say, show
from toc.operate.operation import Record
from toc.operate.operations import schedules

app = typer.Typer(no_args_is_help=True, help="Recurring tasks: by cron expression or interval.")


command(app, schedules.create)(
    as_it_is(
        "Example: toc schedule create report.nightly --topic report.make --cron '0 2 * * *' --zone Asia/Tokyo"
    )
)


_LISTED = ("name", "topic", "cron", "zone", "every", "paused", "next_time", "fired", "skipped", "missed")


@command(app, schedules.list_schedules, limit=replace(schedules.LIMIT, default=1000, most=10_000))
def _show_list(record: Record, *, as_json: bool) -> None:
    found = record["schedules"]
    show(
        found if as_json else [{key: each[key] for key in _LISTED} for each in found],
        as_json=as_json,
        empty="no schedules; toc schedule create report.nightly --topic report.make --cron '0 2 * * *'",
    )
    for each in found:
        if each["stuck"]:
            say(f"{each['name']} does not fire: {each['stuck']}")
    if record["next"] is not None:
        say(f"there may be more: --after {record['next']}")


command(app, schedules.alter)(
    as_it_is(
        "A schedule that is declared in code returns to its declaration when a worker starts.\n\n"
        "Example: toc schedule alter report.nightly --cron '30 2 * * *'"
    )
)
commands(app, schedules.show_schedule, schedules.pause, schedules.resume)


@command(app, schedules.trigger)
def _show_job_id(record: Record, *, as_json: bool) -> None:
    print_job_id(record["job_id"], as_json=as_json)


command(app, schedules.backfill)(
    as_it_is(
        "Example: toc schedule backfill report.nightly --from 2030-01-01T00:00:00Z --to 2030-01-31T00:00:00Z"
    )
)


@command(app, schedules.preview_typed)
def _show_fires(record: Record, *, as_json: bool) -> None:
    """Example: toc schedule preview --cron '30 2 * * *' --zone Europe/Berlin --after 2030-03-30T00:00:00Z"""
    show(record["fires"], as_json=as_json, empty="it does not fire within a hundred years")


commands(app, schedules.delete)
