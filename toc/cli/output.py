"""What commands print: one table for people, or JSON for programs. Results on stdout, all else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from toc.clock import from_ms
from toc.task import TaskStatus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from toc.store.history import FailedTry
    from toc.task import Task, TaskRow
    from toc.topic import Topic


def say(text: str) -> None:
    """A remark for the person who watches, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """``value`` as JSON on stdout. job_ids are numbers of up to 63 bits."""
    print(json.dumps(value, ensure_ascii=False, indent=2))


def console() -> Console:
    """Where tables go: stdout, as wide as the terminal, or wide enough for a pipe."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200)


def show(
    records: Sequence[Mapping[str, Any]], *, as_json: bool, empty: str, title: str | None = None
) -> None:
    """Print records of like keys: a JSON array, or a table whose columns are the keys.

    ``empty`` is said instead of a table without rows.
    """
    if as_json:
        print_json(list(records))
    elif not records:
        say(empty)
    else:
        console().print(table(records, title))


def table(records: Sequence[Mapping[str, Any]], title: str | None = None) -> RenderableType:
    """Records of like keys as a table; numbers to the right."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left")
    for key, value in records[0].items():
        drawn.add_column(
            key.replace("_", " "), justify="right" if isinstance(value, (int, float)) else "left"
        )
    for record in records:
        drawn.add_row(*(Text(_cell(value)) for value in record.values()))
    return drawn


def show_one(record: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one record: a JSON object, or a line per key."""
    if as_json:
        print_json(dict(record))
        return
    width = max(len(key) for key in record)
    for key, value in record.items():
        lines = [_cell(each) for each in value] if isinstance(value, list) else [_cell(value)]
        for number, line in enumerate(lines or ["-"]):
            print(f"{'' if number else key.replace('_', ' '):<{width}}  {line}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def instant(milliseconds: float) -> str:
    """ISO 8601 in UTC, with milliseconds."""
    return from_ms(int(milliseconds)).isoformat(timespec="milliseconds")


def status_name(status: int) -> str:
    """``pending``, ``processed``, ``cancelled`` or ``dead``."""
    return TaskStatus(status).name.lower()


def task_record(task: Task) -> dict[str, Any]:
    """A task for display."""
    return {
        "job_id": task.job_id,
        "topic": task.topic,
        "biz_id": task.biz_id,
        "status": status_name(task.status),
        "action_time": task.action_time.isoformat(timespec="milliseconds"),
        "due_in_seconds": round((task.action_time - datetime.now(UTC)).total_seconds(), 3)
        if task.status is TaskStatus.PENDING
        else None,
        "attempt": task.attempt,
        "version": task.version,
        "attribute": task.attribute,
    }


def row_record(row: TaskRow, topic: str) -> dict[str, Any]:
    """A row with what only operators need."""
    return {
        "job_id": row.job_id,
        "topic": topic,
        "biz_id": row.biz_id if row.biz_key is None else row.biz_key,
        "biz_type": row.biz_type,
        "status": status_name(row.status),
        "action_time": instant(row.action_time),
        "next_time": instant(row.next_time) if row.status == TaskStatus.PENDING else None,
        "ended": None if row.status == TaskStatus.PENDING else instant(row.next_time),
        "attempts": row.attempts,
        "crashes": row.crashes,
        "version": row.version,
        "last_error": row.last_error,
        "attribute": json.loads(row.attribute),
        "dedup_key": row.dedup_key,
        "slot_amount": row.slot_amount,
        "created": instant(row.gmt_create),
        "modified": instant(row.gmt_modified),
    }


def history_record(tries: Sequence[FailedTry]) -> list[Any]:
    """Failed tries for display."""
    return [{**failed._asdict(), "at": instant(failed.at)} for failed in tries]


def topic_record(topic: Topic) -> dict[str, Any]:
    """A topic for display. Durations are seconds."""
    return {
        "name": topic.name,
        "biz_type": topic.biz_type,
        "slot_amount": topic.slot_amount,
        "topic_type": str(topic.topic_type),
        "paused": topic.paused,
        "retries": topic.retries,
        "backoff": str(topic.backoff),
        "backoff_base": topic.backoff_base,
        "backoff_cap": topic.backoff_cap,
        "prepare_timeout": topic.prepare_timeout,
        "max_runtime": topic.max_runtime,
        "horizon": topic.horizon,
        "retention": topic.retention,
        "concurrency": topic.concurrency,
        "former_slots": topic.former_slots or None,
        "resume_rate": topic.resume_rate or None,
        "resumed_at": instant(topic.resumed_at) if topic.resumed_at else None,
    }
