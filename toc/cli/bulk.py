"""What commands over many tasks share: options, selection, confirmation, progress, the audit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from toc.cli.output import progress_line, say
from toc.cli.values import biz_id, moment, who
from toc.model.errors import InvalidInput
from toc.model.task import TaskStatus

if TYPE_CHECKING:
    from toc.operate.bulk import BulkStep, Counts
    from toc.sdk.client import TimeoutCenter
    from toc.store.select import Selection

Biz = Annotated[
    str | None,
    typer.Option("--biz-id", metavar="ID", help="Id of the order or other object; a number if all digits."),
]
Text = Annotated[bool, typer.Option("--text", help="Treat the biz_id as a text even if it is all digits.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; show how many tasks would change.")]
Rate = Annotated[float | None, typer.Option("--rate", metavar="N", help="At most N tasks per second.")]


class Filters(NamedTuple):
    """The filters of a command, as the operator typed them."""

    topic: str | None = None
    biz_id: str | None = None
    text: bool = False
    """Whether the biz_id is a text even if it is all digits."""
    after: str | None = None
    before: str | None = None
    error: str | None = None

    def given(self) -> dict[str, str]:
        """Return the filters that were given."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, str)}


def selected(center: TimeoutCenter, status: TaskStatus, filters: Filters) -> Selection:
    """Turn filters into a selection. Raises InvalidInput, UnknownTopic or SchemaBehind before any change."""
    from toc.model.sharding import BizId
    from toc.operate import admin
    from toc.store.select import Selection

    topic, biz, text, after, before, error = filters
    now = center.clock.now_ms()
    since = None if after is None else moment(after, now)
    until = None if before is None else moment(before, now)
    if since is not None and until is not None and since >= until:
        raise InvalidInput(f"--after {after} is not before --before {before}: no task can match")
    if error == "":
        raise InvalidInput("--error is empty; give a part of the error's text")
    center.store.check_layout()
    return Selection(
        status,
        biz_type=None if topic is None else admin.get_topic(center.store, topic).biz_type,
        biz=None if biz is None else BizId.of(biz_id(biz, as_text=text)),
        since=since,
        before=until,
        error=error,
    )


def check_rate(rate: float | None) -> None:
    """Raise InvalidInput unless the rate is allowed."""
    if rate is not None and not 0.001 <= rate <= 1e6:  # nor NaN
        raise InvalidInput(f"--rate must be 0.001 to 1000000 per second, not {rate:g}")


def confirm(question: str, *, yes: bool) -> None:
    """Ask, unless ``yes``. Raises InvalidInput when nobody can answer, typer.Exit when the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question}: add --yes to confirm")
    if not typer.confirm(f"{question}?", err=True):
        say("nothing was done")
        raise typer.Exit(1)


def change(
    center: TimeoutCenter,
    action: str,
    steps: Iterator[BulkStep],
    job_ids: Sequence[int],
    filters: Filters,
    **more: str,
) -> Counts:
    """Take all steps, which change these tasks, as ``toc.operate.bulk.changed`` does. Returns the counts.

    Shows the progress: a bar on a terminal, else a line every few seconds.
    """
    from toc.operate.bulk import changed

    chosen = filters.given() | more
    selected = ", ".join(f"{name}={value}" for name, value in chosen.items())
    with progress_line("tasks", lines=True) as bar:

        def progress(step: BulkStep) -> None:
            bar(step.done / len(job_ids), f"{step.done} of {len(job_ids)}")

        return changed(
            center, who(), action, steps, job_ids,
            target=chosen.get("topic", "tasks"), progress=progress, selected=selected,
        )  # fmt: skip
