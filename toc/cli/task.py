"""toc submit | get | find | cancel | reschedule"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from toc.cli.bulk import Biz, Filters, Text, selected, show_selected
from toc.cli.operations import made
from toc.cli.options import JobId, Json, flag, option
from toc.cli.output import (
    body_record,
    print_bytes,
    print_job_id,
    row_record,
    say,
    show,
    show_one,
)
from toc.cli.values import attribute, biz_id, duration, file_bytes, job_number, opened
from toc.model.errors import InvalidInput, UnknownTask
from toc.model.task import OnConflict, TaskStatus
from toc.model.wire import parse_instant
from toc.observe.tracing import is_traced, trace_id
from toc.operate.operation import Record
from toc.operate.operations import cluster, pending
from toc.operate.records import running_record

if TYPE_CHECKING:
    pass

_KEEP = OnConflict.KEEP
TEXT_TYPE = "text/plain; charset=utf-8"
_MEANS = {
    "may_have_started": "a try may be running, or have run",
    "too_late": "it has ended already; `toc get` shows how",
    "unknown": "there is no such task; finished ones are purged after their topic's retention",
}
"""The explanation of each outcome other than the one that was asked for."""
_FOUND = (
    *("job_id", "topic", "biz_id", "biz_type", "status", "action_time", "due_in_seconds", "attempt"),
    *("version", "attribute"),
)
"""The columns of found tasks."""
_SPARE = ("biz_type", "version", "due_in_seconds", "biz_id", "attempt", "attribute")
"""Those that a narrow terminal drops."""
_BY_TIME = ("job_id", "biz_id", "status", "next_time", "ended", "action_time", "attempt", "dedup_key")
"""Those of tasks that are listed by time."""
_RARE = ("expired", "tries", "expires_at", "body_length", "unreadable")
"""Further columns, each shown if some task has it."""


Delay = Annotated[str | None, typer.Option(metavar="TIME", help="From now: seconds, 500ms, 30m, 7d.")]
ActionTime = Annotated[
    str | None, typer.Option(metavar="TIME", help="When: RFC 3339 with a zone, 2030-01-31T12:00:00Z.")
]


class Status(StrEnum):
    """A state of tasks, as it is typed."""

    PENDING = "pending"
    PROCESSED = "processed"
    CANCELLED = "cancelled"
    DEAD = "dead"


def submit(
    topic: Annotated[str, typer.Argument(help="The topic, as `toc topic list` shows it.")],
    biz: Biz = None,
    delay: Delay = None,
    action_time: ActionTime = None,
    attribute_json: str | None = option("JSON", "The task's data for the handler.", "--attribute"),
    dedup_key: str | None = option("KEY", "A second submit with this key returns the first task."),
    slot_basis: str | None = option("TEXT", "Chooses the slot instead of the biz_id."),
    text: Text = False,
    tries: int = option("N", "How many tries, instead of the topic's; 65535: no limit.", default=0),
    expires_at: str | None = option("TIME", "No try starts after it: RFC 3339 with a zone."),
    body: str | None = option("TEXT", "The task's body, as UTF-8."),
    body_file: str | None = option("FILE", "The task's body: the bytes of a file; - is stdin."),
    content_type: str | None = option(
        "TYPE", "Of the body. Default application/octet-stream; text/plain for --body."
    ),
    on_conflict: OnConflict = option(
        None, "If a task has the dedup key: keep it, refuse with an error, or replace it.", default=_KEEP
    ),
    target: str | None = option("NAME", "The webhook target to send it to. Default: its topic's."),
    url: str | None = option("URL", "A URL of its own; with --target a path: /paid."),
    as_json: Json = False,
) -> None:
    """Submit a task and print its job_id.

    Examples: toc submit order.close --biz-id 42 --delay 30m --attribute '{"reason": "unpaid"}'
              toc submit mail.send --biz-id 42 --delay 1d --body-file mail.eml --content-type message/rfc822
    """
    if biz is None:
        raise InvalidInput("--biz-id is missing; give the id of what the task belongs to, such as an order")
    if body is not None and body_file is not None:
        raise InvalidInput("give --body or --body-file, not both")
    with opened() as center:
        job_id = center.submit(
            topic,
            biz_id=biz_id(biz, as_text=text),
            delay=None if delay is None else duration(delay),
            action_time=None if action_time is None else parse_instant(action_time),
            attribute=attribute(attribute_json),
            dedup_key=dedup_key,
            slot_basis=slot_basis,
            tries=tries,
            expires_at=None if expires_at is None else parse_instant(expires_at),
            body=_body(body, body_file, center.settings.max_body),
            content_type=TEXT_TYPE if body is not None and content_type is None else content_type,
            on_conflict=on_conflict,
            target=target,
            url=url,
        )
    print_job_id(job_id, as_json=as_json)


def _body(text: str | None, file: str | None, most: int) -> bytes | None:
    """Return the body that the options name."""
    if text is not None:
        return text.encode(errors="surrogateescape")  # as it was typed, whatever the terminal's encoding
    return None if file is None else file_bytes("--body-file", file, most)


def get(
    wanted: JobId,
    body: bool = flag("--body", "Print the task's body and nothing else; with --json, in base64."),
    as_json: Json = False,
) -> None:
    """Show one task, or print its body. One that runs has an owner, with its host, and since when it has it.

    Examples: toc get 894573895733248
              toc get 894573895733248 --body > mail.eml
    """
    from toc.operate import admin
    from toc.operate.running import where_of

    job_id = job_number(wanted)
    with opened() as center:
        row = admin.get_row(center.store, job_id)
        task = center.get(job_id)
        if task is None:
            raise UnknownTask(f"task {job_id} was purged just now")
        if body and not as_json:
            if task.body is None:
                raise InvalidInput(f"task {job_id} has no body")
            print_bytes(task.body)
            return
        record = row_record(row, task.topic) | body_record(task, whole=body)
        record["history"] = [failed.shown() for failed in center.store.history(job_id)]
        topic = center.catalog.known().get(task.topic)
        where = None if topic is None else where_of(center, row, topic)
        if where is not None:
            record |= running_record(where)
        elif topic is not None:
            record["slot"] = str(topic.slot(row.slot_crc, row.slot_amount))
        share = center.settings.traces
    if is_traced(job_id, share):
        record["trace_id"] = trace_id(job_id)
    show_one(record, as_json=as_json)


def find(
    biz: Biz = None,
    topic: str | None = option(None, "Only tasks of this topic."),
    text: Text = False,
    status: Status | None = option(None, "Without --biz-id: tasks in this state. Default: pending."),
    after: str | None = option("TIME", "Due, or ended, from this time on: RFC 3339, or an age such as 2h."),
    before: str | None = option("TIME", "Due, or ended, before this time."),
    error: str | None = option("TEXT", "Only tasks whose last error contains this."),
    limit: int = option("N", "At most N tasks.", default=100, min=1, max=10_000),
    next: str | None = option("CURSOR", "Go on where the list before ended."),  # noqa: A002 - as in the API
    as_json: Json = False,
) -> None:
    """List the tasks of a biz_id, or what is due on a topic, or has ended, by time.

    Examples: toc find --biz-id 42
              toc find --topic order.close --after 2030-01-31T12:00:00Z
              toc find --topic order.close --status processed --after 2h --before 1h
    """
    from toc.operate import admin

    if biz is None:
        if topic is None:
            raise InvalidInput("--biz-id is missing, or --topic: write `toc find --biz-id 42`")
        filters = Filters(topic, after=after, before=before, error=error)
        _find_by_time(status or Status.PENDING, filters, limit, next, as_json=as_json)
        return
    if any(one is not None for one in (status, after, before, error, next)):
        raise InvalidInput("--status, --after, --before, --error and --next go without --biz-id")
    with opened() as center:
        found = admin.find_rows(center, biz_id(biz, as_text=text), topic)
    records = [row_record(row, name) for row, name in found]
    rare = [name for name in _RARE if any(record.get(name) for record in records)]
    if not as_json:
        records = [{key: record.get(key) for key in (*_FOUND, *rare)} for record in records]
    show(
        records,
        as_json=as_json,
        empty=f"no tasks of biz_id {biz}",
        spare=[*(one for one in rare if one != "unreadable"), *_SPARE],
    )


def _find_by_time(status: Status, filters: Filters, limit: int, after: str | None, *, as_json: bool) -> None:
    from toc.store.tasks.select import cursor_text, parse_cursor

    with opened() as center:
        wanted = selected(center, TaskStatus[status.name], filters)
        cursor = show_selected(
            partial(center.store.selections.page, wanted),
            limit,
            lambda row: row_record(row, filters.topic or ""),
            _BY_TIME,
            parse_cursor(after),
            as_json=as_json,
            empty=f"no {status} tasks",
            spare=("attempt", "dedup_key", "action_time"),
        )
    if cursor is not None:
        say(f"more follow: repeat it with --next {cursor_text(cursor)}")


@made(cluster.running_tasks)
def running(record: Record, *, as_json: bool) -> None:
    """Example: toc running --topic order.close"""
    show(record["tasks"], as_json=as_json, empty="nothing runs", spare=("slot",))
    if record["next"] is not None:
        say(f"more follow: repeat it with --next {record['next']}")


@made(pending.cancel)
def cancel(record: Record, values: Record, *, as_json: bool) -> None:
    """Exits with 0 only if every task is cancelled and was never started.

    Example: toc cancel --topic order.close --all --rate 200
    """
    _tell(record, values, "cancelled", as_json=as_json)


@made(pending.reschedule)
def reschedule(record: Record, values: Record, *, as_json: bool) -> None:
    """Exits with 0 only if every task is rescheduled and was not due yet.

    Example: toc reschedule --topic order.close --biz-id 42 --action-time 2030-01-31T12:00:00Z
    """
    _tell(record, values, "rescheduled", as_json=as_json)


def _tell(record: Record, values: Record, done: str, *, as_json: bool) -> None:
    """Show what came of one task or of many. Exit with 1 unless all are ``done``."""
    tasks = record.get("tasks")
    if tasks is None:
        show_one(record, as_json=as_json)
        counts = {record["outcome"]: 1} if "outcome" in record else record
    else:
        show(tasks, as_json=as_json, empty=f"no tasks of biz_id {values['biz_id']} on {values['topic']}")
        counts = Counter(task["outcome"] for task in tasks)
    if values["dry_run"] or not sum(counts.values()) > counts.get(done, 0):
        return
    if "outcome" in record:
        say(_MEANS[record["outcome"]])
    raise typer.Exit(1)
