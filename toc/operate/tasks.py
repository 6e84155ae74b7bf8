"""Find tasks: those that match, and dead ones in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from typing_extensions import TypedDict

from toc.model.access import Action as Right
from toc.model.clock import to_ms
from toc.model.errors import InvalidInput, SchemaBehind, StoreUnavailable
from toc.model.errors import shown as shown_text
from toc.model.sharding import BizId
from toc.model.task import TaskStatus
from toc.operate.operation import Doing, Param, Place, Record, Value, operation
from toc.operate.records import TaskShown, UnreadableShown, row_record, task_or_damage, task_shown

if TYPE_CHECKING:
    from toc.model.catalog import TopicCatalog
    from toc.model.task import TaskRow
    from toc.store.tasks.select import Death, Page, Selection

R = TypeVar("R", "TaskRow", "Death")

MAX_ON_PAGE = 1000
TOPIC = Param("topic", Value.TOPIC, "Only this topic.", metavar="NAME")
BIZ_ID = Param("biz_id", Value.BIZ_ID, "Id of the order or other object; a number if all digits.")
TEXT = Param("text", Value.FLAG, "Treat the biz_id as a text even if it is all digits.", default=False)
DRY_RUN = Param("dry_run", Value.FLAG, "Change nothing; show how many tasks would change.", default=False)
STATUS = Param(
    "status", Literal["pending", "processed", "cancelled", "dead"], "Without a biz_id by default pending."
)
ERROR = Param("error", Value.TEXT, "Only tasks whose last error contains this.", least=1, most=1000)
NEWEST = Param("newest", Value.FLAG, "The latest first; not with a biz_id.", default=False)
LIMIT = Param("limit", Value.WHOLE, "At most N tasks.", 100, least=1, most=MAX_ON_PAGE)
NEXT = Param("next", Value.TEXT, "Go on where the page before ended.", most=100, metavar="CURSOR")
FILTERS = (
    BIZ_ID, TEXT, TOPIC, STATUS,
    Param("due_after", Value.PAST, "Due, or ended, from this time on.", option="--after"),
    Param("due_before", Value.PAST, "Due, or ended, before this time.", option="--before"),
    ERROR, NEWEST, LIMIT, NEXT,
)  # fmt: skip


class TaskPage(TypedDict):
    """Tasks in the order of their next time (or of their end), or ``newest`` first; with a biz_id in the
    order of submission.

    A page reads a bounded number of rows, so it may be empty although more follow: while ``next`` is not
    null, ask on with it.
    """

    tasks: list[TaskShown | UnreadableShown]
    next: str | None


@operation("task.find", "GET /v1/tasks", Right.FIND_TASKS, "Search tasks",
           *FILTERS, takes="Search", gives=TaskPage, place=Place.TASKS)  # fmt: skip
def search(
    doing: Doing, *, limit: int, newest: bool, next: str | None = None, **which: Any  # noqa: A002
) -> Record:  # fmt: skip
    """Show the tasks that match, a page at a time.

    toc: Examples: toc find --biz-id 42
    toc find --topic order.close --after 2030-01-31T12:00:00Z
    toc find --topic order.close --status processed --after 2h --before 1h
    """
    return shown(doing, page(doing, selection(doing, **which), next, limit, newest=newest))


def selection(
    doing: Doing, status: str | None = None, topic: str | None = None, biz_id: int | str | None = None,
    due_after: datetime | None = None, due_before: datetime | None = None, error: str | None = None,
) -> Selection:  # fmt: skip
    """Return what filters select, within what whoever asks may see. Raises InvalidInput, UnknownTopic."""
    from toc.store.tasks.select import END_OF_TIME, Selection

    if error == "":
        raise InvalidInput("error is empty; give a part of the error's text", "error")
    if status is not None and status.upper() not in TaskStatus.__members__:
        raise InvalidInput(
            f"{shown_text(status)} is no status: pending, processed, cancelled or dead", "status"
        )
    if doing.token is None:
        doing.center.store.check_layout()
    types: tuple[int, ...] | None = None
    if topic is not None:
        types = (doing.center.catalog.get(topic).biz_type,)
    elif doing.token is not None and not doing.token.everywhere:
        known = doing.center.catalog.known().values()
        types = tuple(one.biz_type for one in known if doing.sees(one.name))
    since, before = (
        None if at is None else min(max(0, to_ms(at)), END_OF_TIME) for at in (due_after, due_before)
    )
    if since is not None and before is not None and since >= before:
        raise InvalidInput("due_after is not before due_before: no task can match", "due_after")
    return Selection(
        TaskStatus[(status or "pending").upper()] if status or biz_id is None else None,
        biz_types=types,
        biz=None if biz_id is None else BizId.of(biz_id),
        since=since,
        before=before,
        error=error,
    )


def page(doing: Doing, wanted: Selection, after: str | None, limit: int, *, newest: bool = False) -> Page:
    """Return a page of selected rows; ``after`` is the next of the one before. At the command line, where
    nobody else waits, it is empty only at the end. Raises InvalidInput."""
    from toc.store.tasks.select import Page, parse_cursor

    selections = doing.center.store.selections
    found = selections.page(wanted, parse_cursor(after), limit, newest=newest)
    while doing.token is None and found.next is not None and len(found.rows) < limit:
        more = selections.page(wanted, found.next, limit - len(found.rows), newest=newest)
        found = Page(found.rows + more.rows, more.next)
    return found


def topics_of(doing: Doing, rows: Iterable[R]) -> list[tuple[R, str]]:
    """Return the rows that whoever asks may see, each with the name of its topic."""
    catalog, token = doing.center.catalog, doing.token
    if any(catalog.known_type(row.biz_type) is None for row in rows):
        with suppress(StoreUnavailable, SchemaBehind):  # another process may just have created it
            catalog.read_through()
    everything = token is None or token.everywhere
    named = [(row, topic_of(catalog, row, doing.sees, everything=everything)) for row in rows]
    return [(row, name) for row, name in named if name is not None]


def topic_of(
    catalog: TopicCatalog, row: TaskRow | Death, sees: Callable[[str], bool], *, everything: bool
) -> str | None:
    """Return the name of a task's topic for who ``sees`` some; None if it may not know of it.

    No pattern covers the tasks of deleted topics: only who may see ``everything`` sees them.
    """
    topic = catalog.known_type(row.biz_type)
    if topic is None:
        return f"biz_type-{row.biz_type}" if everything else None
    return topic.name if sees(topic.name) else None


def shown(doing: Doing, found: Page) -> Record:
    """Show a page as far as whoever asks may see it."""
    from toc.store.tasks.select import cursor_text

    values = doing.may(Right.READ_VALUES)
    show = row_record if doing.token is None else partial(task_shown, values=values)
    tasks = [task_or_damage(show, row, topic) for row, topic in topics_of(doing, found.rows)]
    return {"tasks": tasks, "next": cursor_text(found.next)}
