"""What commands over many tasks share: options, selection, confirmation, progress, the audit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from toc.cli.output import say, show_pages
from toc.cli.values import biz_id, past, who
from toc.model.access import Action
from toc.model.errors import InvalidInput
from toc.model.task import TaskStatus
from toc.operate.operation import Doing

if TYPE_CHECKING:
    from toc.model.task import TaskRow
    from toc.sdk.client import TimeoutCenter
    from toc.store.tasks.select import Cursor, Page, Selection

PAGE = 1000
"""Most tasks that are read, and shown, at once."""

Biz = Annotated[
    str | None,
    typer.Option("--biz-id", metavar="ID", help="Id of the order or other object; a number if all digits."),
]
Text = Annotated[bool, typer.Option("--text", help="Treat the biz_id as a text even if it is all digits.")]


class Filters(NamedTuple):
    """The filters of a command, as the operator typed them."""

    topic: str | None = None
    biz_id: str | None = None
    text: bool = False
    """Whether the biz_id is a text even if it is all digits."""
    after: str | None = None
    before: str | None = None
    error: str | None = None


def selected(center: TimeoutCenter, status: TaskStatus, filters: Filters) -> Selection:
    """Turn filters into a selection. Raises InvalidInput, UnknownTopic or SchemaBehind before any change."""
    from toc.operate.operations.tasks import selection

    topic, biz, text, after, before, error = filters
    if error == "":
        raise InvalidInput("--error is empty; give a part of the error's text")
    since, until = (None if at is None else past(at, center.clock.now_ms()) for at in (after, before))
    center.store.check_layout()
    return selection(
        Doing(center, who(), Action.FIND_TASKS),
        status.name.lower(),
        topic,
        None if biz is None else biz_id(biz, as_text=text),
        since,
        until,
        error,
    )


def show_selected(
    read: Callable[[Cursor | None, int], Page],
    limit: int,
    record: Callable[[TaskRow], dict[str, Any]],
    keys: Sequence[str],
    cursor: Cursor | None = None,
    *,
    as_json: bool,
    **more: Any,
) -> Cursor | None:
    """Print at most ``limit`` rows, a page at a time; return where the next one begins. As JSON a ``record``
    is whole, in a table it has these ``keys``; ``more`` is for ``show_pages``."""

    def pages() -> Iterator[list[dict[str, Any]]]:
        nonlocal cursor
        left = limit
        while left:
            page = read(cursor, min(left, PAGE))
            left -= len(page.rows)
            cursor = page.next
            if page.rows:
                records = list(map(record, page.rows))
                yield records if as_json else [{key: one.get(key) for key in keys} for one in records]
            if cursor is None:
                return

    show_pages(pages(), as_json=as_json, **more)
    return cursor


def confirm(question: str, *, yes: bool) -> None:
    """Ask, unless ``yes``. Raises InvalidInput when nobody can answer, typer.Exit when the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question}: add --yes to confirm")
    if not typer.confirm(f"{question}?", err=True):
        say("nothing was done")
        raise typer.Exit(1)
