"""toc import youzan | lmstfy"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, nullcontext
from typing import Any

import typer

from toc.cli.output import progress_line, say, show_one
from toc.cli.values import Json, flag, load_settings, option, who
from toc.model.errors import NotInstalled

app = typer.Typer(
    no_args_is_help=True,
    help="Take over the jobs of another delay queue. Only reads from it; safe to repeat.",
)


REDIS = option(
    "URL",
    "The other queue's Redis: redis://host:6379/1 for database 1.",
    default=...,
    envvar="TOC_IMPORT_REDIS",
)
DRY_RUN = flag("--dry-run", "Write nothing; count what it holds.")


@app.command()
def youzan(
    redis: str = REDIS,
    dry_run: bool = DRY_RUN,
    buckets: str = option("PATTERN", "The keys of its buckets (bucket_name).", default="dq_bucket_*"),
    queues: str = option("PATTERN", "The keys of its ready queues (queue_name).", default="dq_queue_*"),
    as_json: Json = False,
) -> None:
    """Take over the jobs of ouqiang/delay-queue (0.3, 0.4) for the dialect --youzan.

    Exits with 1 if a job could not be taken over. Its default database is 1.

    Example: toc import youzan --redis redis://10.0.0.7:6379/1 --dry-run
    """
    _import("youzan", redis, dry_run=dry_run, as_json=as_json, buckets=buckets, queues=queues)


@app.command()
def lmstfy(redis: str = REDIS, dry_run: bool = DRY_RUN, as_json: Json = False) -> None:
    """Take over the jobs and dead letters of one pool of lmstfy (engine "redis") for the dialect --lmstfy.

    Exits with 1 if a job could not be taken over.

    Example: toc import lmstfy --redis redis://10.0.0.7:6379
    """
    _import("lmstfy", redis, dry_run=dry_run, as_json=as_json)


def _import(what: str, url: str, *, dry_run: bool, as_json: bool, **options: str) -> None:
    try:
        from toc.dialects.importing import Importing
        from toc.dialects.originals import ORIGINALS
    except ImportError as exc:
        raise NotInstalled(f"the dialects need {exc.name}", "dialects") from exc
    from toc.index.foreign import ForeignRedis
    from toc.operate.audit import audited
    from toc.sdk.client import TimeoutCenter

    settings = load_settings()
    settings.need_database_urls()
    began = time.monotonic()
    with (
        ExitStack() as ended,
        TimeoutCenter(settings) as center,
        closing(ForeignRedis(url)) as redis,
        progress_line("reading") as bar,
    ):

        def tell() -> None:
            bar(None, f"{report.found.total()} jobs found, {report.imported} imported")

        importing = Importing(center, redis, ORIGINALS[what](**options), tell, by=who(), dry_run=dry_run)
        report = importing.report
        audit: Any = nullcontext({}) if dry_run else audited(center.store, who(), f"import.{what}", what)
        with audit as record:
            try:
                importing.run()
            finally:  # it may have broken off
                record.update(vars(report))
                ended.callback(
                    show_one, {**record, "seconds": round(time.monotonic() - began, 1)}, as_json=as_json
                )
    if not report.complete:
        say("some jobs cannot be taken over, see refused and different; it is safe to run this again")
        raise typer.Exit(1)
    if not report.found:
        say("no job was found: is this the database in which the other queue keeps its jobs?")
    elif dry_run:
        say("nothing was written; run it without --dry-run")
    else:
        say(f"all {report.found.total()} jobs are tasks; run it again after the other queue has been stopped")
