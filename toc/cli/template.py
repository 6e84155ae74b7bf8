"""toc template create | list | show | alter | delete"""

from __future__ import annotations

import typer

from toc.cli.operations import as_it_is, command, commands
from toc.cli.output import show
from toc.operate.operation import Record
from toc.operate.operations import templates

app = typer.Typer(no_args_is_help=True, help="Patterns by which doors create topics when tasks come.")


command(app, templates.create)(
    as_it_is("Example: toc template create 'shop.*' --slots 8 --delivery pull --most-topics 50")
)


@command(app, templates.list_templates)
def _show_list(record: Record, *, as_json: bool) -> None:
    show(record["templates"], as_json=as_json, empty="no templates; toc template create 'shop.*' --slots 8")


commands(app, templates.show_template, templates.alter, templates.delete)
