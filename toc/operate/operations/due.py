"""What comes due when, by topic."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from toc.model.access import Action as Right
from toc.model.errors import StoreUnavailable
from toc.operate.operation import Doing, Param, Place, Record, Value, operation

if TYPE_CHECKING:
    from toc.model.topic import Topic

TOPIC = Param("topic", Value.TOPIC, "Only this topic.", metavar="[TOPIC]")


class DueCounts(TypedDict):
    """Pending tasks: of each topic, of `others` (topics that are gone, or too small to be told apart), and of
    all these.

    `overdue`: waiting or running; due within an `hour`, a `day`, a `week`, or `later`. `minutes` are the next
    60, from `minutes_from` on, and `hours` the next 168. Workers count them in the background: `ages` are
    seconds, of the table counted the longest ago. `missing` names tables that are not, or not fully, in
    these numbers.
    """

    now: str
    minutes_from: str
    hours_from: str
    topics: list[dict[str, Any]]
    others: dict[str, Any] | None
    total: dict[str, Any]
    ages: dict[str, Any]
    missing: list[dict[str, Any]]


@operation(
    "due.show", "GET /v1/due", Right.READ_TOPICS, "Show what comes due when",
    TOPIC, takes="DueQuery", gives=DueCounts, place=Place.ALL,
)  # fmt: skip
def show(doing: Doing, topic: str | None = None) -> Record:
    """Show how many tasks come due in each minute of the next hour and each hour of the next week."""
    from toc.operate.due import due, due_record

    topics = _topics(doing, topic)
    found = due(doing.center.store, doing.center.clock.now_ms())
    return due_record(found, topics, doing.sees, whole=doing.may(Right.READ_CLUSTER), only=topic)


def _topics(doing: Doing, topic: str | None) -> list[Topic]:
    """Return the topics, as last read while their table is away. Raises UnknownTopic unless one of them is
    ``topic``, and StoreUnavailable if none is known."""
    from toc.operate.admin import get_topic

    catalog = doing.center.catalog
    with suppress(StoreUnavailable):
        catalog.refresh()
    known = catalog.known()
    if topic is not None and topic not in known:
        get_topic(doing.center.store, topic)
    return list(known.values()) or doing.center.store.topics.list()
