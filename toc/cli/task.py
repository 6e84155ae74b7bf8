"""toc submit | get | find | cancel | reschedule"""

from __future__ import annotations

from typing import Annotated

import typer

from toc.cli.output import print_json, say, show, show_one, task_record
from toc.cli.values import Biz, JobId, Json, Text, attribute, biz_id, duration, instant, opened
from toc.errors import InvalidInput


def submit(
    topic: Annotated[str, typer.Argument(help="The topic, as `toc topic list` shows it.")],
    biz: Biz = None,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="From now: seconds, 500ms, 30m, 7d.")
    ] = None,
    action_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="When: ISO 8601 with a zone, 2030-01-31T12:00:00Z.")
    ] = None,
    attribute_json: Annotated[
        str | None, typer.Option("--attribute", metavar="JSON", help="What the handler gets besides the ids.")
    ] = None,
    dedup_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The same key again returns the first task.")
    ] = None,
    slot_basis: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Chooses the slot instead of the biz_id.")
    ] = None,
    text: Text = False,
    as_json: Json = False,
) -> None:
    """Submit a task and print its job_id.

    Example: toc submit order.close --biz-id 42 --delay 30m --attribute '{"reason": "unpaid"}'
    """
    if biz is None:
        raise InvalidInput("--biz-id is missing; it is what the task belongs to, such as the order's id")
    with opened() as center:
        job_id = center.submit(
            topic,
            biz_id=biz_id(biz, as_text=text),
            delay=None if delay is None else duration(delay),
            action_time=None if action_time is None else instant(action_time),
            attribute=attribute(attribute_json),
            dedup_key=dedup_key,
            slot_basis=slot_basis,
        )
    if as_json:
        print_json({"job_id": job_id})
    else:
        print(job_id)


def get(job_id: JobId, as_json: Json = False) -> None:
    """Show one task.

    Example: toc get 894573895733248
    """
    from toc import admin

    with opened() as center:
        row = admin.get_row(center.store, job_id)
        topic = center.catalog.of_type(row.biz_type)
        record = task_record(row.to_task("?" if topic is None else topic.name))
    show_one(record | {"crashes": row.crashes, "last_error": row.last_error}, as_json=as_json)


def find(
    biz: Biz = None,
    topic: Annotated[str | None, typer.Option(help="Only tasks of this topic.")] = None,
    text: Text = False,
    as_json: Json = False,
) -> None:
    """List every task of one biz_id, oldest first.

    Example: toc find --biz-id 42
    """
    if biz is None:
        raise InvalidInput("--biz-id is missing: toc find --biz-id 42")
    with opened() as center:
        tasks = center.find(biz_id=biz_id(biz, as_text=text), topic=topic)
        show([task_record(task) for task in tasks], as_json=as_json, empty=f"no tasks of biz_id {biz}")


def cancel(
    job_id: Annotated[int | None, typer.Argument(metavar="[JOB_ID]", help="Which task.")] = None,
    topic: Annotated[str | None, typer.Option(help="With --biz-id: every task of it on this topic.")] = None,
    biz: Biz = None,
    text: Text = False,
    as_json: Json = False,
) -> None:
    """Cancel a task, or all tasks of a biz_id on a topic, and say what came of it.

    Ends with 0 only if every task is cancelled and was never started.

    Examples: toc cancel 894573895733248
              toc cancel --topic order.close --biz-id 42
    """
    with opened() as center:
        if job_id is not None and biz is None and topic is None:
            outcomes = {job_id: center.cancel(job_id)}
        elif job_id is None and biz is not None and topic is not None:
            outcomes = center.cancel_by_biz(topic, biz_id=biz_id(biz, as_text=text))
        else:
            raise InvalidInput("give a JOB_ID, or --topic together with --biz-id")
    records = [{"job_id": job, "outcome": outcome.value} for job, outcome in outcomes.items()]
    if job_id is not None:
        show_one(records[0], as_json=as_json)
    else:
        show(records, as_json=as_json, empty=f"no tasks of biz_id {biz} on {topic}")
    if any(record["outcome"] != "cancelled" for record in records):
        raise typer.Exit(1)


def reschedule(
    job_id: JobId,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="From now: seconds, 500ms, 30m, 7d.")
    ] = None,
    action_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="When: ISO 8601 with a zone, 2030-01-31T12:00:00Z.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Give a pending task another deadline, with all its tries.

    Example: toc reschedule 894573895733248 --delay 2h
    """
    from datetime import UTC, datetime, timedelta

    if (delay is None) == (action_time is None):
        raise InvalidInput("give --delay or --action-time")
    with opened() as center:
        if action_time is not None:
            due = instant(action_time)
        else:
            seconds = duration(delay or "")
            if seconds > center.settings.max_delay:
                raise InvalidInput(
                    f"{delay} is further ahead than TOC_MAX_DELAY={center.settings.max_delay:g} s"
                )
            due = datetime.now(UTC) + timedelta(seconds=seconds)
        outcome = center.reschedule(job_id, action_time=due)
    show_one({"job_id": job_id, "outcome": outcome.value, "action_time": due.isoformat()}, as_json=as_json)
    if outcome.value != "rescheduled":
        say("the task was not simply rescheduled")
        raise typer.Exit(1)
