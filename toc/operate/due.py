"""What comes due when, by topic, over all tables; and how the last hour of all members went by minutes.

Workers keep counts of what comes due, which have an age; tables that are not in the sums are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from math import inf
from typing import TYPE_CHECKING

from toc.model.access import Action as Right
from toc.model.documents import instant, seconds
from toc.model.due import FAR, HOURS, MINUTES, NEAR, Counted, Step, pile_up, spread, sums, total
from toc.model.errors import InvalidDocument, InvalidInput, StoreUnavailable
from toc.model.minute import KEPT, LATENESS, MINUTE_MS, OTHERS, STARTS, Tally, plus
from toc.model.minute import read as read_minute
from toc.model.topic import Topic
from toc.observe.metrics import LATENESS as LATENESS_METRIC
from toc.observe.metrics import quantile
from toc.operate.operation import REQUIRED, Doing, Param, Place, Record, Value, operation
from toc.operate.topics import get_topic

if TYPE_CHECKING:
    from toc.store.records.cluster import MinuteTable
    from toc.store.servers.shards import Trouble
    from toc.store.store import Store

OLD_MS = (NEAR.spans - MINUTES) * NEAR.length
"""Minutes that were counted longer ago than this no longer reach to the end of the next hour."""
QUIET = 600
"""Tasks a minute that are never beyond the capacity: what has had little to do has shown little of it."""

AWAY = "its database server is out of reach"
WEEK = 7 * 86_400
TOPIC = Param("topic", Value.TOPIC, "Only this topic.", metavar="[TOPIC]")


# --- what comes due


def unread(store: Store, failed: Mapping[int, Trouble], *, servers: bool) -> list[Record]:
    """Return how tables without an answer are told: with the error of their server only if ``servers`` may be
    named."""
    return [
        {"table": store.name_of(table), "age": None, "error": str(error) if servers else AWAY}
        for table, error in sorted(failed.items())
    ]


class Due:
    """What comes due, by biz_type, from the present minute and hour on, as of ``now_ms``: the counts of all
    tables.

    ``oldest``: of each part the greatest age (ms) and its table. ``missing``: tables whose numbers are not
    in the sums, or do not cover the next hour; with the error of their server only if ``servers`` may be
    named. ``counted``: all biz_types.
    """

    def __init__(self, store: Store, now_ms: int, *, servers: bool = True) -> None:
        self.now_ms = now_ms
        kept = store.due_counts.kept(store.tables)
        counts: dict[str, list[Counted]] = {NEAR.name: [], FAR.name: []}
        ages: dict[str, list[tuple[int, str]]] = {NEAR.name: [], FAR.name: []}
        missing = unread(store, kept.unanswered, servers=servers)
        for table, rows in kept.items():
            name, found = store.name_of(table), {row.part: row.age for row in rows}
            for row in rows:
                counts[row.part].append(row.counts)
                ages[row.part].append((row.age, name))
            if len(found) < len(counts) or found[NEAR.name] > OLD_MS:
                age = found.get(NEAR.name)
                why = "no worker has counted it yet" if age is None or len(found) < len(counts) else "old"
                missing.append({"table": name, "age": None if age is None else seconds(age), "error": why})
        self._minutes = total(NEAR, counts[NEAR.name], now_ms, MINUTES)
        self._hours = total(FAR, counts[FAR.name], now_ms, HOURS)
        self.counted = sorted(self._minutes.keys() | self._hours.keys())
        self.oldest = {part: max(found, default=None) for part, found in ages.items()}
        self.missing = sorted(missing, key=lambda one: one["table"])

    def shown(self, biz_types: Sequence[int]) -> Record:
        """Return the sums of some biz_types: counts from now on, and each minute and hour."""
        minutes, hours = (
            [sum(column) for column in zip(*(spans[one] for one in biz_types if one in spans), strict=True)]
            or [0] * (length + 1)
            for spans, length in ((self._minutes, MINUTES), (self._hours, HOURS))
        )
        return sums(NEAR, minutes) | sums(FAR, hours) | {"minutes": minutes[1:], "hours": hours[1:]}


class _Asked(Due):
    """What comes due, for somebody who may see some topics, or asks for one.

    ``mine``: the names of the biz_types that this is about. ``rest``: those of no topic that there is, and
    ``capacity``, the most starts a minute of all workers, are for who sees everything. ``last`` is the
    last hour.
    """

    def __init__(self, doing: Doing, only: str | None) -> None:
        names = {topic.biz_type: topic.name for topic in _topics(doing, only)}
        whole = doing.may(Right.READ_CLUSTER)
        super().__init__(doing.center.store, doing.center.clock.now_ms(), servers=whole)
        self.mine = {
            biz_type: names[biz_type]
            for biz_type in self.counted
            if biz_type in names and doing.sees(names[biz_type]) and only in (None, names[biz_type])
        }
        self.whole = whole and only is None
        self.rest = [biz_type for biz_type in self.counted if biz_type not in names] if self.whole else []
        self.last = Hour(0)
        if whole or only:
            with suppress(StoreUnavailable):
                self.last = hour(doing.center.store.minutes, self.now_ms)
        self.capacity = self.last.capacity if whole else None


def _topics(doing: Doing, only: str | None) -> list[Topic]:
    """Return the topics, as last read while their table is away. Raises UnknownTopic unless one of them is
    ``only``, and StoreUnavailable if none is known."""
    catalog = doing.center.catalog
    with suppress(StoreUnavailable):
        catalog.refresh()
    known = catalog.known()
    if only is not None and only not in known:
        get_topic(doing.center.store, only)
    return list(known.values()) or doing.center.store.topics.list()


@operation("due.show", "GET /v1/due", Right.READ_TOPICS, "Show what comes due when",
           TOPIC, takes="DueQuery", place=Place.ALL)  # fmt: skip
def show(doing: Doing, topic: str | None = None) -> Record:
    """Show how many tasks come due in each minute of the next hour and each hour of the next week.

    Of each topic, of `others` (topics that are gone, or too small to be told apart), and of all these.
    `overdue`: waiting or running; due within an `hour`, a `day`, a `week`, or `later`. `minutes` are the next
    60, from `minutes_from` on, and `hours` the next 168. Workers count them in the background: `ages` are
    seconds, of the table counted the longest ago. `missing` names tables that are not, or not fully, in
    these numbers. `capacity`: the most tasks that the living workers have started in a minute; `beyond` are
    the minutes of the next hour in which more come due, of all topics.

    toc: Example: toc due order.close
    """
    found = _Asked(doing, topic)
    shown = [{"topic": name, **found.shown([biz_type])} for biz_type, name in found.mine.items()]
    if topic is not None and not shown:
        shown = [{"topic": topic, **found.shown([])}]
    shown.sort(key=lambda one: (-one["overdue"] - one["week"] - one["later"], one["topic"]))
    first, all_ = found.now_ms // NEAR.length, found.shown(found.counted)["minutes"]
    beyond = [
        {"at": instant((first + place) * NEAR.length), "due": count}
        for place, count in enumerate(all_)
        if found.capacity is not None and count > max(found.capacity, QUIET)
    ]
    return {
        "now": instant(found.now_ms),
        "minutes_from": instant(first * NEAR.length),
        "hours_from": instant(found.now_ms // FAR.length * FAR.length),
        "topics": shown,
        "others": found.shown(found.rest) if found.whole else None,
        "total": found.shown([*found.mine, *found.rest]),
        "ages": {
            part: {"oldest": oldest and seconds(oldest[0]), "table": oldest and oldest[1]}
            for part, oldest in found.oldest.items()
        },
        "missing": found.missing,
        "capacity": found.capacity,
        "beyond": beyond,
    }


@operation(
    "due.what_if", "GET /v1/due:what-if", Right.READ_TOPICS, "Show what would pile up",
    TOPIC,
    Param("pause", Value.SECONDS, "For how long.", REQUIRED, above=0, most=WEEK),
    Param("rate", Value.NUMBER, "Tasks a second that are started afterwards. Default: what the capacity "
          "leaves beside other topics.", least=0.001, most=1e6),
    takes="WhatIf", place=Place.ALL,
)  # fmt: skip
def what_if(doing: Doing, pause: float, topic: str | None = None, rate: float | None = None) -> Record:
    """Show how many tasks would wait after a pause from now on, of a topic or of all, and for how long.

    Of what is submitted by now; each hour after the next is taken to be even. `waiting` at the end of the
    pause, and in `steps` how many come due in each minute, later each hour, and wait at its end. Then `rate`
    tasks a second are started, or what other topics leave of the `capacity` (tasks a minute) of all workers,
    however few the topic's concurrency and run time allow: `best_minute` is the most of one topic that a
    minute of the last hour has started. At `drained`, after `drain_seconds`, nothing waits
    any more; null: not within a week, or no rate is known.

    toc: Example: toc what-if order.close --pause 2h --rate 50
    """
    if not 0 < pause <= WEEK:
        raise InvalidInput(f"a pause is more than 0 s and at most {WEEK} s (7d), not {pause:g} s", "pause")
    found = _Asked(doing, topic)
    capacity, paused = found.capacity, {*found.mine, *found.rest}
    own, others = found.shown(sorted(paused)), found.shown(sorted(set(found.counted) - paused))
    now, resumed = found.now_ms, found.now_ms + round(pause * 1000)
    beside = [count for _, _, count in spread(now, others["minutes"], others["hours"])]
    spans = spread(now, own["minutes"], own["hours"])
    steps = [Step(*span, other) for span, other in zip(spans, beside, strict=True)]
    started = [one[STARTS] for one in found.last.topics.get(topic or OTHERS, ()) if one]
    pile = pile_up(steps, own["overdue"], resumed, rate, None if capacity is None else capacity / 60)
    return {
        "topic": topic,
        "now": instant(now),
        "resumed": instant(resumed),
        "waiting": pile.waiting,
        "rate": rate,
        "capacity": capacity,
        "best_minute": max(started, default=None) if topic else None,
        "drained": None if pile.drained is None else instant(pile.drained),
        "drain_seconds": None if pile.drained is None else seconds(pile.drained - resumed),
        "steps": [{"at": instant(at), "due": due, "waiting": waiting} for at, due, waiting in pile.steps],
        "missing": found.missing,
    }


# --- the last hour

BOUNDS = LATENESS_METRIC.metric.buckets
NOTHING = [0] * (LATENESS + len(BOUNDS) + 1)
_COUNTS = ("starts", "processed", "failed", "dead")
ALIVE_MINUTES = 3
"""A member that has written none of the last minutes is not counted as one that can start tasks."""


@dataclass(slots=True)
class Hour:
    """The KEPT minutes before the present one. ``first_ms``: when they begin.

    ``topics``: by name, the Tally of each minute. ``members``: of each the age (ms) of its last minute.
    ``capacity``: the sum of the most starts that each living member has seen in a minute; None without one.
    ``worst``: by topic, the latest start (ms) of those more than a second late.
    """

    first_ms: int
    topics: dict[str, list[Tally]] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    capacity: int | None = None
    worst: Mapping[str, int] = field(default_factory=dict)


def hour(table: MinuteTable, now_ms: int) -> Hour:
    """Read the last minutes of all members. Raises StoreUnavailable, SchemaBehind."""
    first = now_ms // MINUTE_MS - KEPT
    found = Hour(first * MINUTE_MS)
    most: dict[str, int] = {}
    for row in table.since(found.first_ms):
        with suppress(InvalidDocument):  # of a later version, or edited by hand
            minute, place = read_minute(row.counts), row.minute // MINUTE_MS - first
            found.members[row.member] = max(now_ms - row.minute - MINUTE_MS, 0)
            most[row.member] = minute.most
            for topic, tally in minute.topics.items():
                if place < KEPT:  # else it is of the present one, by a clock that is ahead, or by its end
                    into = found.topics.setdefault(topic, [()] * KEPT)
                    into[place] = plus(into[place], tally)
    living = [member for member, age in found.members.items() if age < ALIVE_MINUTES * MINUTE_MS]
    if living:
        found.capacity = sum(most[member] for member in living)
    return found


def lateness_record(
    found: Hour, sees: Callable[[str], bool], only: str | None = None, *, whole: bool
) -> Record:
    """Return it as shown to somebody who ``sees`` some topics; ``whole``: and the members. ``only``: one
    topic alone."""
    names = [
        name for name in found.topics if only in (None, name) and (whole if name == OTHERS else sees(name))
    ]
    columns = zip(*(found.topics[name] for name in names), [NOTHING] * KEPT, strict=True)
    minutes = [reduce(plus, column, NOTHING) for column in columns]
    worst = found.worst.get
    topics = [{"topic": name or "(others)", **_sums(found.topics[name], worst(name, inf))} for name in names]
    topics.sort(key=lambda one: (-one["starts"], one["topic"]))
    members = [{"member": member, "age": seconds(age)} for member, age in sorted(found.members.items())]
    total: Record = {name: [minute[place] for minute in minutes] for place, name in enumerate(_COUNTS)}
    return {
        "minutes_from": instant(found.first_ms),
        "bounds": list(BOUNDS),
        "topics": topics,
        "total": total | {"lateness": [minute[LATENESS:] for minute in minutes]},
        "members": members if whole else None,
        "capacity": found.capacity if whole else None,
    }


def _sums(minutes: Sequence[Tally], worst: float) -> Record:
    """Return the sums of an hour, and how late (seconds) the starts were: as the wide buckets tell, but no
    later than the ``worst`` (ms) if one is known."""
    total = reduce(plus, minutes, NOTHING)
    late = {}
    for part in (50, 99):
        found = quantile(BOUNDS, [*total[LATENESS:], 0], part / 100)
        late[f"lateness_p{part}"] = None if found is None else round(min(found, worst / 1000), 4)
    return dict(zip(_COUNTS, total, strict=False)) | late


@operation("lateness.show", "GET /v1/lateness", Right.READ_TOPICS, "Show the last hour",
           TOPIC, takes="LatenessQuery")  # fmt: skip
def lateness(doing: Doing, topic: str | None = None) -> Record:
    """Show starts, outcomes and lateness of the last hour, minute by minute.

    `total` has the `starts`, `processed`, `failed` (to be tried again; not what a worker's death ended) and
    `dead` of each of the last 60 minutes, from `minutes_from` on, and in `lateness` of each minute the starts
    by how late they were: up to each of the `bounds` (seconds), then later ones. `topics` has sums over the
    hour. A try counts when its outcome is written; of tasks that consumers pull only the starts count, in no
    bucket. `members`: daemons and embedded workers, and for how many seconds each has written nothing; one
    that is killed loses its last minute.

    toc: The console draws how late the starts of each minute were; --json has the numbers. A worker that is
    killed loses those of its last minute.

    Examples: toc lateness
              toc lateness order.close --json
    """
    store = doing.center.store
    if topic is not None:
        get_topic(store, topic)
    found = hour(store.minutes, doing.center.clock.now_ms())
    found.worst = store.episodes.worst(found.first_ms)
    return lateness_record(found, doing.sees, topic, whole=doing.may(Right.READ_CLUSTER))
