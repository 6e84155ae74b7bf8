"""toc template create | list | show | alter | delete"""

from __future__ import annotations

import typer

from toc.cli.operations import command, commands
from toc.cli.output import show, show_one
from toc.operate.operation import Record
from toc.operate.operations import templates

app = typer.Typer(no_args_is_help=True, help="Patterns by which doors create topics when tasks come.")


@command(app, templates.create)
def _show_new(record: Record, *, as_json: bool) -> None:
    """Example: toc template create 'shop.*' --slots 8 --delivery pull --most-topics 50"""
    show_one(record, as_json=as_json)


@command(app, templates.list_templates)
def _show_list(record: Record, *, as_json: bool) -> None:
    show(record["templates"], as_json=as_json, empty="no templates; toc template create 'shop.*' --slots 8")


commands(app, templates.show_template, templates.alter)


@command(app, templates.delete)
def _show_deleted(record: Record, *, as_json: bool) -> None:
    show_one({"deleted": record["pattern"]}, as_json=as_json)
