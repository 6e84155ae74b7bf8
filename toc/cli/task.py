"""toc submit | get | find | cancel | reschedule"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.bulk import Biz, DryRun, Filters, Rate, Text, change, confirm, selected
from toc.cli.operations import made
from toc.cli.options import JobId, Json, MaybeJobId, Yes, flag, option
from toc.cli.output import (
    body_record,
    print_bytes,
    print_job_id,
    row_record,
    say,
    show,
    show_one,
    show_pages,
)
from toc.cli.values import attribute, biz_id, duration, file_bytes, job_number, opened, who
from toc.model import wire
from toc.model.clock import to_ms
from toc.model.errors import InvalidInput, NotInFuture, PartialCancel, UnknownTask
from toc.model.task import CancelOutcome, OnConflict, RescheduleOutcome, TaskStatus
from toc.model.wire import parse_instant
from toc.observe.tracing import is_traced, trace_id
from toc.operate.operation import Record
from toc.operate.operations import cluster
from toc.operate.records import running_record

if TYPE_CHECKING:
    from toc.operate.bulk import Counts
    from toc.sdk.client import TimeoutCenter

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


Every = Annotated[bool, typer.Option("--all", help="With --topic: all its pending tasks.")]


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
    from toc.store.select import PAGE, cursor_text, parse_cursor

    cursor = parse_cursor(after)

    def pages() -> Iterator[list[dict[str, Any]]]:
        nonlocal cursor
        left = limit
        while left:
            page = center.store.selections.page(wanted, cursor, min(left, PAGE))
            left -= len(page.rows)
            cursor = page.next
            if page.rows:
                records = [row_record(row, filters.topic or "") for row in page.rows]
                yield records if as_json else [{key: one.get(key) for key in _BY_TIME} for one in records]
            if cursor is None:
                return

    with opened() as center:
        wanted = selected(center, TaskStatus[status.name], filters)
        spare = ("attempt", "dedup_key", "action_time")
        show_pages(pages(), as_json=as_json, empty=f"no {status} tasks", spare=spare)
    if cursor is not None:
        say(f"more follow: repeat it with --next {cursor_text(cursor)}")


@made(cluster.running_tasks)
def running(record: Record, *, as_json: bool) -> None:
    """Example: toc running --topic order.close"""
    show(record["tasks"], as_json=as_json, empty="nothing runs", spare=("slot",))
    if record["next"] is not None:
        say(f"more follow: repeat it with --next {record['next']}")


def cancel(
    wanted: MaybeJobId = None,
    topic: str | None = option(None, "With --biz-id: its tasks on this topic. With --all: every task."),
    biz: Biz = None,
    text: Text = False,
    every: Every = False,
    rate: Rate = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Cancel a task, those of a biz_id on a topic, or all of a topic.

    Exits with 0 only if every task is cancelled and was never started.

    Examples: toc cancel 894573895733248
              toc cancel --topic order.close --biz-id 42
              toc cancel --topic order.close --all --rate 200
    """
    from toc.operate.audit import audited

    job_id = None if wanted is None else job_number(wanted)
    one = _is_one(job_id, topic, biz, every)
    with opened(account=not one) as center:
        if dry_run:
            chosen = _would_change(center, job_id, Filters(topic, biz, text))
            show_one({"would_cancel": len(chosen)}, as_json=as_json)
            return
        if job_id is not None:
            outcomes = {job_id: center.cancel(job_id)}
        elif biz is not None and topic is not None:
            partial = None
            with audited(center.store, who(), "tasks.cancel", topic, biz_id=biz) as record:
                try:
                    outcomes = center.cancel_by_biz(topic, biz_id=biz_id(biz, as_text=text))
                except PartialCancel as exc:
                    partial, outcomes = exc, exc.outcomes
                record.update(Counter(outcome.value for outcome in outcomes.values()))
            if partial is not None:
                raise partial
        else:
            _cancel_all(center, topic or "", rate, yes=yes, as_json=as_json)
            return
    records = [{"job_id": job, "outcome": outcome.value} for job, outcome in outcomes.items()]
    if job_id is not None:
        show_one(records[0], as_json=as_json)
        if outcomes[job_id] is not CancelOutcome.CANCELLED:
            say(_MEANS[outcomes[job_id].value])
    else:
        show(records, as_json=as_json, empty=f"no tasks of biz_id {biz} on {topic}")
    if any(record["outcome"] != "cancelled" for record in records):
        raise typer.Exit(1)


def _cancel_all(center: TimeoutCenter, topic: str, rate: float | None, *, yes: bool, as_json: bool) -> None:
    from toc.operate import bulk

    filters = Filters(topic)
    chosen = _pending(center, filters)
    if chosen:
        confirm(f"cancel {len(chosen)} pending tasks of {topic}", yes=yes)
    counts = change(center, "tasks.cancel", bulk.cancel(center, chosen, rate), chosen, filters)
    _tell(counts, "cancelled", as_json=as_json)


def _tell(counts: Counts, done: str, *, as_json: bool) -> None:
    """Show the outcome of many tasks; exit with 1 unless all are ``done``."""
    show_one(counts or {done: 0}, as_json=as_json)
    if sum(counts.values()) > counts.get(done, 0):
        raise typer.Exit(1)


def reschedule(
    wanted: MaybeJobId = None,
    delay: Delay = None,
    action_time: ActionTime = None,
    topic: str | None = option(None, "With --biz-id: its pending tasks on this topic. With --all: all."),
    biz: Biz = None,
    text: Text = False,
    every: Every = False,
    rate: Rate = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    expires_at: str | None = option(
        "TIME", "No try starts after it: RFC 3339 with a zone. Default: unchanged."
    ),
    as_json: Json = False,
) -> None:
    """Give pending tasks, as chosen for `toc cancel`, another deadline and all tries.

    A task that expires before its new deadline needs --expires-at.
    Exits with 0 only if every task is rescheduled and was not due yet.

    Examples: toc reschedule 894573895733248 --delay 2h
              toc reschedule --topic order.close --biz-id 42 --action-time 2030-01-31T12:00:00Z
              toc reschedule --topic order.close --all --delay 1h --rate 100
    """
    if (delay is None) == (action_time is None):
        raise InvalidInput("give --delay or --action-time")
    job_id = None if wanted is None else job_number(wanted)
    one = _is_one(job_id, topic, biz, every)
    until = None if expires_at is None else parse_instant(expires_at)
    with opened(account=not one) as center:
        due = _due(center, delay, action_time)
        if not one or dry_run:
            chosen = _would_change(center, job_id, Filters(topic, biz, text))
            if dry_run:
                show_one({"would_reschedule": len(chosen)}, as_json=as_json)
            else:
                _reschedule_many(center, chosen, due, until, rate, topic or "", biz, yes=yes, as_json=as_json)
            return
        at = due()
        outcome = center.reschedule(job_id or 0, action_time=at, expires_at=until)
    moved = outcome in (RescheduleOutcome.RESCHEDULED, RescheduleOutcome.MAY_HAVE_STARTED)
    due_at = wire.instant(to_ms(at)) if moved else None
    show_one({"job_id": job_id, "outcome": outcome.value, "action_time": due_at}, as_json=as_json)
    if outcome is not RescheduleOutcome.RESCHEDULED:
        say(_MEANS[outcome.value])
        raise typer.Exit(1)


def _reschedule_many(
    center: TimeoutCenter,
    chosen: Sequence[int],
    due: Callable[[], datetime],
    expires_at: datetime | None,
    rate: float | None,
    topic: str,
    biz: str | None,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    from toc.operate import bulk

    if due() <= datetime.now(UTC):
        raise NotInFuture(f"{due().isoformat()} is not after now; give a later time")
    if chosen and biz is None:
        confirm(f"reschedule {len(chosen)} pending tasks of {topic}", yes=yes)
    at = wire.instant(to_ms(due()))
    steps = bulk.reschedule(center, chosen, due, rate, expires_at=expires_at)
    counts = change(center, "tasks.reschedule", steps, chosen, Filters(topic, biz), action_time=at)
    _tell(counts, "rescheduled", as_json=as_json)


def _would_change(center: TimeoutCenter, job_id: int | None, filters: Filters) -> Sequence[int]:
    """Return the pending tasks of a command: one if it is named, else all that the filters select."""
    if job_id is None:
        return _pending(center, filters)
    row = center.store.get(job_id)
    return [job_id] if row is not None and row.status == TaskStatus.PENDING else []


def _is_one(job_id: int | None, topic: str | None, biz: str | None, every: bool) -> bool:
    """Whether one task is named, rather than those of a topic. Raises InvalidInput when neither is."""
    one = job_id is not None and biz is None and topic is None and not every
    if not one and (job_id is not None or topic is None or (biz is not None) == every):
        raise InvalidInput("give a JOB_ID, or --topic together with --biz-id or --all")
    return one


def _due(center: TimeoutCenter, delay: str | None, action_time: str | None) -> Callable[[], datetime]:
    """Return the function that says when a task is to be due; it is called as each task is moved."""
    if action_time is not None:
        at = parse_instant(action_time)
        return lambda: at
    seconds = duration(delay or "")
    if seconds > center.settings.max_delay:
        raise InvalidInput(f"{delay} is further ahead than TOC_MAX_DELAY={center.settings.max_delay:g} s")
    return lambda: datetime.now(UTC) + timedelta(seconds=seconds)


def _pending(center: TimeoutCenter, filters: Filters) -> Sequence[int]:
    return center.store.selections.ids(selected(center, TaskStatus.PENDING, filters))
