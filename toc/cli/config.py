"""toc config show"""

from __future__ import annotations

import typer

from toc.cli.options import Json
from toc.cli.output import print_json, show
from toc.cli.values import load_settings

app = typer.Typer(no_args_is_help=True, help="The settings as toc understands them.")


@app.command("show")
def show_config(as_json: Json = False) -> None:
    """Show every setting, with passwords masked, and its source."""
    import os

    from toc.config import config_file

    settings = load_settings()
    if as_json:
        print_json(settings.masked())
        return
    path = config_file()
    given = {name.upper() for name, value in os.environ.items() if value}  # lower case counts too
    records = []
    for name, value in settings.masked().items():
        variable = f"TOC_{name.upper()}"
        source = "environment" if variable in given else str(path)
        records.append(
            {
                "setting": variable,
                "value": ",".join(value) or None if isinstance(value, list) else value,
                "from": source if name in settings.model_fields_set else "default",
            }
        )
    show(records, as_json=False, empty="")
