"""toc index on | off, toc sweep | rebuild"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from toc.cli.operations import as_it_is, command
from toc.cli.options import Json, option
from toc.cli.output import progress_line, say, show_one
from toc.cli.values import opened
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.operate.operations import index

if TYPE_CHECKING:
    from toc.maintenance.sweep import SweepCounts
    from toc.model.topic import Topic
    from toc.sdk.client import TimeoutCenter

app = typer.Typer(no_args_is_help=True, help="Whether there is an index in Redis, or the database alone.")


command(app, index.on, arguments=0)(as_it_is("Example: toc index on"))
command(app, index.off, arguments=0)(as_it_is("Example: toc index off"))


def sweep(as_json: Json = False) -> None:
    """Add the entries that Redis lacks, according to the rows, as workers always do: rebuild all topics."""
    rebuild(None, as_json=as_json)


def rebuild(topic: str | None = option("NAME", "Only this topic."), as_json: Json = False) -> None:
    """Fill the index from the rows at full speed, earliest due first. Harmless at any time.

    Workers do so by themselves when Redis has lost data; use this when none runs, or to be sure. Exits with 4
    if some rows could not be indexed: a Redis server is out of reach, or keys there are not toc's.
    """
    from toc.operate import admin

    with opened() as center:
        chosen = None if topic is None else admin.get_topic(center.store, topic)
        _refill(center, chosen, as_json=as_json)


def _refill(center: TimeoutCenter, topic: Topic | None, *, as_json: bool) -> None:
    from toc.maintenance.sweep import SweepCounts
    from toc.operate import admin

    counts, failure = SweepCounts(), None
    with progress_line("rows") as bar:

        def progress(part: float, seen: SweepCounts) -> None:
            nonlocal counts
            counts = seen
            bar(part, f"{seen.rows:,} rows, {seen.added:,} added")

        try:
            admin.refill(center, topic=topic, progress=progress)
        except (StoreUnavailable, SchemaBehind) as exc:
            failure = exc
    left = counts.failed + counts.broken
    if failure is None or counts.rows:
        show_one({"rows": counts.rows, "added": counts.added, "not_indexed": left}, as_json=as_json)
    if left:
        say(f"{left} rows were not indexed: Redis is out of reach, or has keys that toc did not write")
    if failure is not None:  # tables that were not read
        raise failure
    if left:
        raise typer.Exit(4)
