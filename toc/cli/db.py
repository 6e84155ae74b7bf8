"""toc db upgrade | check"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from toc.cli.options import Json
from toc.cli.output import progress_line, say, show
from toc.cli.values import load_settings

app = typer.Typer(no_args_is_help=True, help="The schema of the task table, over every shard.")


@app.command()
def upgrade(
    new: Annotated[
        bool,
        typer.Option("--new", help="Also where tables are gone that there were: the new ones are empty."),
    ] = False,
) -> None:
    """Create missing databases and tables and bring every shard to the schema of this version.

    Safe to repeat, also after an interruption. Two that run at once wait for each other.
    """
    from toc.operate.admin import migrator, require_no_other
    from toc.sdk.client import TimeoutCenter

    settings = load_settings()
    if not new:
        require_no_other(settings, migrator(settings).check())
    began = time.monotonic()
    with progress_line("looking at every table") as bar:
        databases: dict[str, None] = {}

        def progress(
            server: str, database: str, revision: str, done: int, tables: int, seconds: float
        ) -> None:
            databases[database] = None
            text = f"{database}, revision {revision}: {done} of {tables} tables"
            bar((len(databases) - 1 + done / tables) / settings.databases, text)
            if not sys.stderr.isatty():
                say(f"{server} {text}, {seconds:.1f} s")

        migrator(settings).upgrade(progress, new=new)
    with TimeoutCenter(settings) as center:
        center.store.identity.get()  # from now on it says whether there is an index
    took = time.monotonic() - began
    say(f"every shard is up to date: {settings.databases} databases, {settings.tables} tables, {took:.1f} s")


@app.command()
def check(as_json: Json = False) -> None:
    """Show which shards are behind the schema of this version. Exits with 3 if any is."""
    from toc.operate.admin import migrator
    from toc.store.check import remedy_of

    shards = migrator(load_settings()).check()
    records = [
        {
            "server": shard.server,
            "database": shard.database,
            "revision": shard.revision,
            "head": shard.head,
            "behind": shard.behind,
            "missing_tables": list(shard.missing_tables) if as_json else len(shard.missing_tables),
            "unexpected_tables": list(shard.unexpected_tables) if as_json else len(shard.unexpected_tables),
        }
        for shard in shards
    ]
    show(records, as_json=as_json, empty="no shards")
    behind = [shard for shard in shards if shard.behind]
    if behind:
        say(f"{len(behind)} of {len(shards)} databases are behind: {remedy_of(behind)}")
        raise typer.Exit(3)
