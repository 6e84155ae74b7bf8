"""toc db upgrade | check"""

from __future__ import annotations

from typing import Any

import typer

from toc.cli.output import say, show
from toc.cli.values import Json, load_settings

app = typer.Typer(no_args_is_help=True, help="The schema of the task table, over every shard.")


@app.command()
def upgrade() -> None:
    """Create missing databases and tables and bring every shard to the schema of this version.

    Safe to run again, also after it was interrupted half-way; two at once wait for each other.
    """
    _migrator().upgrade(progress=say)
    say("every shard is up to date")


@app.command()
def check(as_json: Json = False) -> None:
    """Say which shards are behind the schema of this version. Ends with 3 if any is."""
    shards = _migrator().check()
    show([_record(shard) for shard in shards], as_json=as_json, empty="no shards")
    behind = [shard for shard in shards if shard.behind]
    if behind:
        say(f"{len(behind)} of {len(shards)} databases are behind: run `toc db upgrade`")
        raise typer.Exit(3)


def _migrator() -> Any:
    from toc.store.migrate import Migrator

    settings = load_settings()
    settings.need_database_urls()
    return Migrator.from_settings(settings)


def _record(shard: Any) -> dict[str, Any]:
    return {
        "server": shard.server,
        "database": shard.database,
        "revision": shard.revision,
        "head": shard.head,
        "behind": shard.behind,
    }
