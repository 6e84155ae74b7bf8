"""What commands over many tasks share: options, selection, confirmation, progress, the audit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from toc.cli.output import say
from toc.cli.values import biz_id, past, who
from toc.model.access import Action
from toc.model.errors import InvalidInput
from toc.model.task import TaskStatus
from toc.operate.operation import Doing

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter
    from toc.store.select import Selection

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


def confirm(question: str, *, yes: bool) -> None:
    """Ask, unless ``yes``. Raises InvalidInput when nobody can answer, typer.Exit when the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question}: add --yes to confirm")
    if not typer.confirm(f"{question}?", err=True):
        say("nothing was done")
        raise typer.Exit(1)
