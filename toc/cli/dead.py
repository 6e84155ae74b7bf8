"""toc dead list | show | redrive | purge"""

from __future__ import annotations

from functools import partial

import typer

from toc.cli.bulk import Biz, Filters, Text, selected, show_selected
from toc.cli.operations import command
from toc.cli.options import Commands, JobId, Json, option
from toc.cli.output import row_record, say, show_one
from toc.cli.values import job_number, opened
from toc.model.task import TaskStatus
from toc.operate.operation import Record
from toc.operate.operations import dead

app = Commands(no_args_is_help=True, help="Tasks that ran out of tries.")


@app.command("list")
def list_dead(
    topic: str | None = option("NAME", "Only this topic."),
    biz: Biz = None,
    text: Text = False,
    after: str | None = option("TIME", "Died after: an age such as 2h, or RFC 3339 with a zone."),
    before: str | None = option("TIME", "Died before; written as for --after."),
    error: str | None = option("TEXT", "Only tasks whose last error contains this."),
    limit: int = option("N", "At most N tasks, newest first.", default=100, min=1, max=1_000_000),
    as_json: Json = False,
) -> None:
    """List dead tasks, newest first.

    Examples: toc dead list --topic order.close --limit 20
              toc dead list --after 2h --error "connection refused"
    """
    keys = ("job_id", "topic", "biz_id", "action_time", "failed_tries", "crashes", "ended", "last_error")
    with opened() as center:
        names = {each.biz_type: each.name for each in center.store.topics.list()}

        wanted = selected(center, TaskStatus.DEAD, Filters(topic, biz, text, after, before, error))
        show_selected(
            partial(center.store.selections.newest, wanted),
            limit,
            lambda row: row_record(row, names.get(row.biz_type, "?")),
            keys,
            as_json=as_json,
            empty="no dead tasks",
            spare=("crashes", "action_time", "ended"),
        )


@app.command("show")
def show_dead(wanted: JobId, as_json: Json = False) -> None:
    """Show everything that is stored about a task, with the error of each failed try."""
    from toc.operate import admin

    job_id = job_number(wanted)
    with opened() as center:
        row = admin.get_row(center.store, job_id)
        names = {each.biz_type: each.name for each in center.store.topics.list()}
        past = [failed.shown() for failed in center.store.history(job_id)]
    show_one(row_record(row, names.get(row.biz_type, "?")) | {"history": past}, as_json=as_json)


@command(app, dead.redrive, limit=None, next=None)
def _show_redriven(record: Record, values: Record, *, as_json: bool) -> None:
    """Example: toc dead redrive --error "connection refused" --after 2h --all --dry-run"""
    unknown = record.pop("unknown", 0)
    show_one(record, as_json=as_json)
    _all_of_them(values, unknown)


@command(app, dead.purge, limit=None, next=None)
def _show_purged(record: Record, values: Record, *, as_json: bool) -> None:
    """Asks first, unless JOB_IDs are given. Exits with 4 if some were left because their Redis server was out
    of reach.

    Example: toc dead purge --topic order.close --before 30d --all --dry-run
    """
    unknown = record.pop("unknown", 0)
    show_one(record, as_json=as_json)
    if record.get("left"):
        say(f"{record['left']} were left: their Redis server is out of reach; purge them again")
        raise typer.Exit(4)
    _all_of_them(values, unknown)


def _all_of_them(values: Record, unknown: int) -> None:
    """Report it and exit with 1 if some of the given ids were left alone."""
    if unknown and "job_ids" in values:
        say(f"{unknown} of them are unknown or not dead, and were left unchanged")
        raise typer.Exit(1)
