"""toc dead list | show | redrive"""

from __future__ import annotations

from typing import Annotated

import typer

from toc.cli.output import row_record, say, show, show_one
from toc.cli.values import JobId, Json, opened
from toc.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="Tasks that ran out of tries.")

TopicName = Annotated[str | None, typer.Option("--topic", metavar="NAME", help="Only this topic.")]


@app.command("list")
def list_dead(
    topic: TopicName = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many, newest first.")] = 100,
    as_json: Json = False,
) -> None:
    """List dead tasks, newest first.

    Example: toc dead list --topic order.close --limit 20
    """
    from toc import admin

    with opened() as center:
        names = {each.biz_type: each.name for each in center.store.topics.list()}
        chosen = None if topic is None else admin.get_topic(center.store, topic)
        rows = admin.dead_tasks(center.store, topic=chosen, limit=limit)
    records = [row_record(row, names.get(row.biz_type, "?")) for row in rows]
    if not as_json:
        keys = ("job_id", "topic", "biz_id", "action_time", "attempts", "modified", "last_error")
        records = [{key: record[key] for key in keys} for record in records]
    show(records, as_json=as_json, empty="no dead tasks")


@app.command("show")
def show_dead(job_id: JobId, as_json: Json = False) -> None:
    """Show everything that is kept about a task, with its last error."""
    from toc import admin

    with opened() as center:
        row = admin.get_row(center.store, job_id)
        names = {each.biz_type: each.name for each in center.store.topics.list()}
    show_one(row_record(row, names.get(row.biz_type, "?")), as_json=as_json)


@app.command()
def redrive(
    job_ids: Annotated[list[int] | None, typer.Argument(metavar="[JOB_ID]...", help="Which tasks.")] = None,
    topic: TopicName = None,
    every: Annotated[bool, typer.Option("--all", help="With --topic: every dead task of it.")] = False,
    as_json: Json = False,
) -> None:
    """Give dead tasks all their tries again, due now. Do it once the cause is repaired.

    Examples: toc dead redrive 894573895733248 894573895733249
              toc dead redrive --topic order.close --all
    """
    from toc import admin

    if bool(job_ids) == (topic is not None and every) or every != (topic is not None):
        raise InvalidInput("give JOB_IDs, or --topic NAME together with --all")
    with opened() as center:
        topics = center.store.topics.list()
        if topic is not None:
            chosen = admin.all_dead_ids(center.store, admin.get_topic(center.store, topic))
        else:
            chosen = iter(admin.checked_job_ids(job_ids or []))
        result = admin.redrive(
            center.store,
            center.queues,
            topics,
            chosen,
            now_ms=center.clock.now_ms,
            progress=lambda count: say(f"{count} redriven"),
        )
    show_one({"redriven": result.tasks, "not_indexed_yet": result.unindexed}, as_json=as_json)
    if job_ids and result.tasks < len(set(job_ids)):
        say(f"{len(set(job_ids)) - result.tasks} of them are not dead, or not known, and were left alone")
        raise typer.Exit(1)
