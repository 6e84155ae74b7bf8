"""toc db | config | doctor | sweep | rebuild, topic sync, secrets key: what is set up, and is it well?"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

import typer

from toc.cli.operations import act
from toc.cli.output import print_json, progress_line, say, show, show_one
from toc.cli.values import Json, flag, load_settings, opened, option
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.operate import topics

if TYPE_CHECKING:
    from toc.operate.topics import Step

db = typer.Typer(no_args_is_help=True, help="The schema of the task table, over every shard.")
config = typer.Typer(no_args_is_help=True, help="The settings as toc understands them.")


@db.command()
def upgrade(
    new: bool = flag("--new", "Also where tables are gone that there were: the new ones are empty."),
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
            text = f"{server} {database}, revision {revision}: {done} of {tables} tables, {seconds:.1f} s"
            bar((len(databases) - 1 + done / tables) / settings.databases, text)

        later = migrator(settings).upgrade(progress, new=new)
    with TimeoutCenter(settings) as center:
        center.store.identity.get()  # from now on it says whether there is an index
    took = time.monotonic() - began
    what = f"up to date or later than this version ({later[0]}), nothing to do" if later else "up to date"
    say(f"every shard is {what}: {settings.databases} databases, {settings.tables} tables, {took:.1f} s")


@db.command()
def check(as_json: Json = False) -> None:
    """Show which shards are behind the schema of this version. Exits with 3 if any is."""
    from toc.operate.admin import migrator
    from toc.store.check import remedy_of

    shards = migrator(load_settings()).check()
    names = ("server", "database", "revision", "head", "behind", "missing_tables", "unexpected_tables")

    def told(value: object) -> object:
        return len(value) if isinstance(value, tuple) and not as_json else value

    records = [{name: told(getattr(shard, name)) for name in names} for shard in shards]
    show(records, as_json=as_json, empty="no shards")
    behind = [shard for shard in shards if shard.behind]
    if behind:
        say(f"{len(behind)} of {len(shards)} databases are behind: {remedy_of(behind)}")
        raise typer.Exit(3)


@config.command("show")
def show_config(as_json: Json = False) -> None:
    """Show every setting, with passwords masked, and its source."""
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
        source = source if name in settings.model_fields_set else "default"
        text = ",".join(value) or None if isinstance(value, list) else value
        records.append({"setting": variable, "value": text, "from": source})
    show(records, as_json=False, empty="")


def doctor(
    problems: bool = flag("--problems", "Show only failures and warnings."), as_json: Json = False
) -> None:
    """Check servers, settings, clocks, workers and topics; say what to do.

    Exits with 0 when all is well, 1 when there are warnings, 2 when something is wrong. It changes nothing.
    """
    from toc.operate import doctor as doctors

    with opened() as center, progress_line("looking at the databases") as progress:
        lines = doctors.examine(center, progress)
    shown = doctors.problems(lines) if problems else lines
    show(doctors.findings(shown), as_json=as_json, empty="nothing is wrong")
    counts = Counter(line.level.value for line in lines)
    told = [f"{counts[one.value]} {one.value}" for one in doctors.WORST_FIRST if counts[one.value]]
    say(", ".join(told))
    raise typer.Exit(doctors.exit_code(lines))


def sweep(as_json: Json = False) -> None:
    """Add the entries that Redis lacks, according to the rows, as workers always do: rebuild all topics."""
    rebuild(None, as_json=as_json)


def rebuild(topic: str | None = option("NAME", "Only this topic."), as_json: Json = False) -> None:
    """Fill the index from the rows at full speed, earliest due first. Harmless at any time.

    Workers do so by themselves when Redis has lost data; use this when none runs, or to be sure. Exits with 4
    if some rows could not be indexed: a Redis server is out of reach, or keys there are not toc's.
    """
    from toc.maintenance.sweep import SweepCounts
    from toc.operate import admin

    counts, failure = SweepCounts(), None
    with opened() as center:
        chosen = None if topic is None else topics.get_topic(center.store, topic)
        with progress_line("rows") as bar:

            def progress(part: float, seen: SweepCounts) -> None:
                nonlocal counts
                counts = seen
                bar(part, f"{seen.rows:,} rows, {seen.added:,} added")

            try:
                admin.refill(center, topic=chosen, progress=progress)
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


def sync(
    app: str = option("MODULE:NAME", "Your TimeoutCenter: shop.deadlines:center.", default=...),
    dry_run: bool = flag("--dry-run", "Change nothing; show what would change, and what would be refused."),
    as_json: Json = False,
) -> None:
    """Create the topics that code declares, and alter what it names and what differs. Deletes none.

    Exits with 1 if something was refused.

    Example: toc topic sync --app shop.deadlines:center --dry-run
    """
    steps = synced(app, dry_run=dry_run)
    lines = [{"topic": step.topic, "action": step.action, "changes": step.changes_text()} for step in steps]
    records = [step.record() for step in steps] if as_json else lines
    show(records, as_json=as_json, empty="the app declares and handles no topic")
    say("this is the plan: nothing was changed" if dry_run else "this was done, but for what was refused")
    refused = [step for step in steps if step.refused]
    for step in refused:
        say(f"{step.topic}: {step.refused}")
    if refused:
        raise typer.Exit(1)


def synced(app: str, *, dry_run: bool = False) -> list[Step]:
    """Bring the topics to what an application declares, unless it is a ``dry_run``."""
    from toc.worker.app import load_app

    load_settings(daemon=not dry_run)
    with load_app(app) as center:
        center.store.check_layout()  # else no worker would start
        perform = None if dry_run else lambda what, **values: act(what, center, **values)
        return topics.sync_topics(center, center.declared(), perform)


def key() -> None:
    """Print a new key for TOC_SECRET_KEY. toc does not keep it: without it, stored secrets are lost."""
    from toc.store.records.targets import new_key

    print(new_key())
