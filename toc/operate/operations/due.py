"""What comes due when, by topic."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from toc.model.access import Action as Right
from toc.model.errors import InvalidInput
from toc.operate.operation import REQUIRED, Doing, Param, Place, Record, Value, operation

WEEK = 7 * 86_400
TOPIC = Param("topic", Value.TOPIC, "Only this topic.", metavar="[TOPIC]")


class DueCounts(TypedDict):
    """Pending tasks: of each topic, of `others` (topics that are gone, or too small to be told apart), and of
    all these.

    `overdue`: waiting or running; due within an `hour`, a `day`, a `week`, or `later`. `minutes` are the next
    60, from `minutes_from` on, and `hours` the next 168. Workers count them in the background: `ages` are
    seconds, of the table counted the longest ago. `missing` names tables that are not, or not fully, in
    these numbers. `capacity`: the most tasks that the living workers have started in a minute; `beyond` are
    the minutes of the next hour in which more come due, of all topics.
    """

    now: str
    minutes_from: str
    hours_from: str
    topics: list[dict[str, Any]]
    others: dict[str, Any] | None
    total: dict[str, Any]
    ages: dict[str, Any]
    missing: list[dict[str, Any]]
    capacity: int | None
    beyond: list[dict[str, Any]]


class Pile(TypedDict):
    """What would wait after a pause: `waiting` at its end, and in `steps` how many come due in each minute,
    later each hour, and wait at its end.

    Then `rate` tasks a second are started, or what other topics leave of the `capacity` (tasks a minute). At
    `drained`, after `drain_seconds`, nothing waits any more; null: not within a week, or no rate is known.
    """

    topic: str | None
    now: str
    resumed: str
    waiting: int
    rate: float | None
    capacity: int | None
    drained: str | None
    drain_seconds: float | None
    steps: list[dict[str, Any]]
    missing: list[dict[str, Any]]


class Lateness(TypedDict):
    """What was done in each of the last 60 minutes, from `minutes_from` on, the present one not included.

    `total` has the `starts`, `processed`, `failed` (to be tried again) and `dead` of each minute, and in
    `lateness` of each minute the starts by how late they were: up to each of the `bounds` (seconds), then
    later ones. `topics` has sums over the hour. A try counts when its outcome is written; of tasks that
    consumers pull only the starts count, in no bucket. `members`: daemons and embedded workers, and for how
    many seconds each has written nothing.
    """

    minutes_from: str
    bounds: list[float]
    topics: list[dict[str, Any]]
    total: dict[str, Any]
    members: list[dict[str, Any]] | None
    capacity: int | None


@operation(
    "due.show", "GET /v1/due", Right.READ_TOPICS, "Show what comes due when",
    TOPIC, takes="DueQuery", gives=DueCounts, place=Place.ALL,
)  # fmt: skip
def show(doing: Doing, topic: str | None = None) -> Record:
    """Show how many tasks come due in each minute of the next hour and each hour of the next week."""
    from toc.operate.due import due_record

    return due_record(doing, topic)


@operation(
    "due.what_if", "GET /v1/due:what-if", Right.READ_TOPICS, "Show what would pile up",
    TOPIC,
    Param("pause", Value.SECONDS, "For how long.", REQUIRED, above=0, most=WEEK),
    Param("rate", Value.NUMBER, "Tasks a second that are started afterwards. Default: what the capacity "
          "leaves beside other topics.", least=0.001, most=1e6),
    takes="WhatIf", gives=Pile, place=Place.ALL,
)  # fmt: skip
def what_if(doing: Doing, pause: float, topic: str | None = None, rate: float | None = None) -> Record:
    """Show how many tasks would wait after a pause from now on, of a topic or of all, and for how long.

    Of what is submitted by now; each hour after the next is taken to be even.
    """
    from toc.operate.due import what_if_record

    if not 0 < pause <= WEEK:
        raise InvalidInput(f"a pause is more than 0 s and at most {WEEK} s (7d), not {pause:g} s", "pause")
    return what_if_record(doing, topic, pause, rate)


@operation(
    "lateness.show", "GET /v1/lateness", Right.READ_TOPICS, "Show the last hour",
    TOPIC, takes="LatenessQuery", gives=Lateness,
)  # fmt: skip
def lateness(doing: Doing, topic: str | None = None) -> Record:
    """Show starts, outcomes and lateness of the last hour, minute by minute."""
    from toc.operate.admin import get_topic
    from toc.operate.lateness import hour, lateness_record

    store = doing.center.store
    if topic is not None:
        get_topic(store, topic)
    found = hour(store.minutes, doing.center.clock.now_ms())
    return lateness_record(found, doing.sees, topic, whole=doing.may(Right.READ_CLUSTER))
