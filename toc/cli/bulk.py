"""toc bulk list | show | tasks | stop | resume"""

from __future__ import annotations

import typer

from toc.cli.operations import command, commands
from toc.cli.output import say, show
from toc.operate.operation import Record
from toc.operate.operations import bulk

app = typer.Typer(no_args_is_help=True, help="Jobs of gateways that change many tasks.")
_LISTED = ("name", "kind", "topic", "state", "done", "tasks", "counts", "by", "error", "created")


@command(app, bulk.list_jobs, arguments=0)
def _show_list(record: Record, *, as_json: bool) -> None:
    """Example: toc bulk list --limit 10"""
    jobs = record["jobs"]
    if not as_json:
        jobs = [{key: job[key] for key in _LISTED} for job in jobs]
    show(jobs, as_json=as_json, empty="no bulk jobs")


@command(app, bulk.outcomes)
def _show_outcomes(record: Record, *, as_json: bool) -> None:
    """Example: toc bulk tasks 3f9c0a11b2c4 --outcome may_have_started"""
    show(record["tasks"], as_json=as_json, empty="no such tasks here")
    if record["next"] is not None:
        say(f"more follow: repeat it with --next {record['next']}")


commands(app, bulk.show, bulk.stop, bulk.resume)
