"""toc dead list | show | redrive | purge"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.bulk import Biz, DryRun, Filters, Rate, Text, change, check_rate, confirm, selected
from toc.cli.options import Commands, Group, JobId, Json, Yes, flag, grouped, option
from toc.cli.output import row_record, say, show_one, show_pages
from toc.cli.values import job_number, opened
from toc.model.errors import InvalidInput
from toc.model.task import TaskStatus

if TYPE_CHECKING:
    from toc.model.task import TaskRow
    from toc.sdk.client import TimeoutCenter
    from toc.store.select import Selection

app = Commands(no_args_is_help=True, help="Tasks that ran out of tries.")

PAGE = 1000
"""Most tasks that are read, and shown, at once."""
ALL = "Every task that the filters select."
JobIds = Annotated[list[str] | None, typer.Argument(metavar="[JOB_ID]...", help="Which tasks.")]


class Which(Group):
    """Which dead tasks, by the names of Filters' fields."""

    topic: str | None = option("NAME", "Only this topic.")
    biz_id: Biz = None
    text: Text = False
    after: str | None = option("TIME", "Died after: an age such as 2h, or RFC 3339 with a zone.")
    before: str | None = option("TIME", "Died before; written as for --after.")
    error: str | None = option("TEXT", "Only tasks whose last error contains this.")


@app.command("list")
@grouped
def list_dead(
    which: Which,
    limit: int = option("N", "At most N tasks, newest first.", default=100, min=1, max=1_000_000),
    as_json: Json = False,
) -> None:
    """List dead tasks, newest first.

    Examples: toc dead list --topic order.close --limit 20
              toc dead list --after 2h --error "connection refused"
    """
    keys = ("job_id", "topic", "biz_id", "action_time", "failed_tries", "crashes", "ended", "last_error")
    with opened() as center:
        names = {each.biz_type: each.name for each in center.store.topics.list()}

        def shown(row: TaskRow) -> dict[str, Any]:
            record = row_record(row, names.get(row.biz_type, "?"))
            return record if as_json else {key: record[key] for key in keys}

        pages = _newest(center, selected(center, TaskStatus.DEAD, Filters(**which)), limit)
        show_pages(
            (list(map(shown, rows)) for rows in pages),
            as_json=as_json,
            empty="no dead tasks",
            spare=("crashes", "action_time", "ended"),
        )


@app.command("show")
def show_dead(wanted: JobId, as_json: Json = False) -> None:
    """Show everything that is stored about a task, with the error of each failed try."""
    from toc.operate import admin

    job_id = job_number(wanted)
    with opened() as center:
        row = admin.get_row(center.store, job_id)
        names = {each.biz_type: each.name for each in center.store.topics.list()}
        past = [failed.shown() for failed in center.store.history(job_id)]
    show_one(row_record(row, names.get(row.biz_type, "?")) | {"history": past}, as_json=as_json)


@app.command()
@grouped
def redrive(
    wanted: JobIds = None,
    *,
    which: Which,
    every: bool = flag("--all", ALL),
    rate: Rate = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make dead tasks pending again, due now, with all their tries. First repair the cause.

    Examples: toc dead redrive 894573895733248 894573895733249
              toc dead redrive --topic order.close --all --rate 100
              toc dead redrive --error "connection refused" --after 2h --all --dry-run
    """
    from toc.operate import bulk

    filters, job_ids = _wanted(wanted, which, every, rate)
    with opened(account=True) as center:
        chosen = _chosen(center, job_ids, filters)
        if dry_run:
            show_one({"would_redrive": len(chosen)}, as_json=as_json)
            return
        steps = bulk.redrive(center, chosen, rate)
        counts = change(center, "tasks.redrive", steps, chosen, filters)
    counts = counts or {"redriven": 0, "not_indexed_yet": 0}
    show_one(counts, as_json=as_json)
    _all_of_them(job_ids, counts["redriven"])


@app.command()
@grouped
def purge(
    wanted: JobIds = None,
    *,
    which: Which,
    every: bool = flag("--all", ALL),
    rate: Rate = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete dead tasks and their rows for good. Asks first, unless JOB_IDs are given.

    Exits with 4 if some were left because their Redis server was out of reach.

    Examples: toc dead purge 894573895733248
              toc dead purge --topic order.close --before 30d --all --dry-run
    """
    from toc.operate import bulk

    filters, job_ids = _wanted(wanted, which, every, rate)
    with opened(account=True) as center:
        chosen = _chosen(center, job_ids, filters)
        if dry_run:
            show_one({"would_purge": len(chosen)}, as_json=as_json)
            return
        if chosen and not job_ids:  # JOB_IDs are a choice already
            confirm(f"delete {len(chosen)} dead tasks for good", yes=yes)
        steps = bulk.purge_dead(center, chosen, rate)
        counts = change(center, "tasks.purge", steps, chosen, filters)
    counts = counts or {"purged": 0, "left": 0}
    show_one(counts, as_json=as_json)
    if counts["left"]:
        say(f"{counts['left']} were left: their Redis server is out of reach; purge them again")
        raise typer.Exit(4)
    _all_of_them(job_ids, counts["purged"])


def _newest(center: TimeoutCenter, wanted: Selection, limit: int) -> Iterator[list[TaskRow]]:
    """Yield at most ``limit`` rows, in pages that are not empty."""
    cursor = None
    while limit:
        page = center.store.selections.newest(wanted, cursor, min(limit, PAGE))
        if page.rows:
            yield page.rows
        limit -= len(page.rows)
        cursor = page.next
        if cursor is None:
            return


def _wanted(
    wanted: list[str] | None, which: Which, every: bool, rate: float | None
) -> tuple[Filters, list[int]]:
    """Return what is chosen: filters, or job_ids. Raises InvalidInput unless it is one of the two."""
    filters, job_ids = Filters(**which), [job_number(one) for one in wanted or ()]
    filtered = bool(filters.given())
    if bool(job_ids) == (filtered and every) or every != filtered:
        raise InvalidInput("give JOB_IDs, or --topic NAME (or another filter) together with --all")
    check_rate(rate)
    return filters, job_ids


def _chosen(center: TimeoutCenter, job_ids: list[int], filters: Filters) -> Sequence[int]:
    if job_ids:
        center.store.check_layout()
        rows = center.store.read(job_ids)
        return [job_id for job_id, row in rows.items() if row.status == TaskStatus.DEAD]
    return center.store.selections.ids(selected(center, TaskStatus.DEAD, filters))


def _all_of_them(job_ids: list[int], done: int) -> None:
    """Report it and exit with 1 if some of the given ids were left alone."""
    if job_ids and done < len(set(job_ids)):
        say(f"{len(set(job_ids)) - done} of them are unknown or not dead, and were left unchanged")
        raise typer.Exit(1)
