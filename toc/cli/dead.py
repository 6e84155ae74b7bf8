"""toc dead list | show | redrive | purge"""

from __future__ import annotations

from dataclasses import replace

import typer

from toc.cli.operations import command
from toc.cli.output import say, show, show_one
from toc.cli.task import get, show_tasks
from toc.operate.operation import Record
from toc.operate.operations import dead
from toc.operate.operations.tasks import LIMIT

app = typer.Typer(no_args_is_help=True, help="Tasks that ran out of tries.")
app.command("show")(get)

_LISTED = ("job_id", "topic", "biz_id", "action_time", "failed_tries", "crashes", "ended", "last_error")


@command(app, dead.list_dead, arguments=0, status=None, newest=None, limit=replace(LIMIT, most=10_000))
def _show_list(record: Record, *, as_json: bool) -> None:
    """Examples: toc dead list --topic order.close --limit 20
    toc dead list --after 2h --error "connection refused"
    """
    show_tasks(record, _LISTED, as_json=as_json, empty="no dead tasks")


@command(app, dead.groups, arguments=0)
def _show_groups(record: Record, *, as_json: bool) -> None:
    """Example: toc dead groups --topic order.close"""
    show(record["groups"], as_json=as_json, empty="no dead tasks")


@command(app, dead.redrive)
def _show_redriven(record: Record, values: Record, *, as_json: bool) -> None:
    """Example: toc dead redrive --error "connection refused" --after 2h --all --dry-run"""
    unknown = record.pop("unknown", 0)
    show_one(record, as_json=as_json)
    _all_of_them(values, unknown)


@command(app, dead.purge)
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
