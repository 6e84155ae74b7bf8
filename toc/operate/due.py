"""What comes due when, over all tables: the counts that workers keep, their ages, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from toc.model.access import Action as Right
from toc.model.documents import instant, seconds
from toc.model.due import (
    FAR,
    HOURS,
    MINUTES,
    NEAR,
    Counted,
    Part,
    Spans,
    Step,
    pile_up,
    read,
    spread,
    sums,
    total,
)
from toc.model.errors import InvalidDocument, StoreUnavailable
from toc.model.topic import Topic
from toc.operate.admin import get_topic
from toc.operate.lateness import hour
from toc.operate.operation import Doing, Record
from toc.store.store import Store

OLD_MS = (NEAR.spans - MINUTES) * NEAR.length
"""Minutes that were counted longer ago than this no longer reach to the end of the next hour."""
QUIET = 600
"""Tasks a minute that are never beyond the capacity: what has had little to do has shown little of it."""

AWAY = "its database server is out of reach"


@dataclass(slots=True)
class Due:
    """What comes due, by biz_type, from the present minute and hour on, as of ``now_ms``.

    ``oldest``: of each part the greatest age (ms) and its table. ``missing``: tables whose numbers are not
    in the sums, or do not cover the next hour.
    """

    now_ms: int
    minutes: Spans
    hours: Spans
    oldest: dict[str, tuple[int, str] | None] = field(default_factory=dict)
    missing: list[Record] = field(default_factory=list)

    @property
    def counted(self) -> list[int]:
        """All biz_types."""
        return sorted(self.minutes.keys() | self.hours.keys())

    def shown(self, biz_types: Sequence[int]) -> Record:
        """Return the sums of some biz_types: counts from now on, and each minute and hour."""
        minutes, hours = (
            [sum(column) for column in zip(*(spans[one] for one in biz_types if one in spans), strict=True)]
            or [0] * (length + 1)
            for spans, length in ((self.minutes, MINUTES), (self.hours, HOURS))
        )
        return sums(NEAR, minutes) | sums(FAR, hours) | {"minutes": minutes[1:], "hours": hours[1:]}


def due(store: Store, now_ms: int, *, servers: bool = True) -> Due:
    """Read the counts of all tables. What is ``missing`` is told with the error of its server only if
    ``servers`` may be named."""
    kept = store.due_counts.kept(store.tables)
    counts: dict[str, list[Counted]] = {NEAR.name: [], FAR.name: []}
    ages: dict[str, list[tuple[int, str]]] = {NEAR.name: [], FAR.name: []}
    missing: list[Record] = [
        {"table": store.name_of(table), "age": None, "error": str(error) if servers else AWAY}
        for table, error in kept.unanswered.items()
    ]
    for table, rows in kept.items():
        name, found = store.name_of(table), {}
        for row in rows:
            try:
                counts[row.part].append(read(row.counts))
            except (InvalidDocument, KeyError):  # of a later version, or edited by hand
                continue
            found[row.part] = row.age
            ages[row.part].append((row.age, name))
        if len(found) < len(counts) or found[NEAR.name] > OLD_MS:
            age = found.get(NEAR.name)
            why = "no worker has counted it yet" if age is None or len(found) < len(counts) else "old"
            missing.append({"table": name, "age": None if age is None else seconds(age), "error": why})

    def added(part: Part, spans: int) -> Spans:
        return total(part, counts[part.name], now_ms, spans)

    return Due(
        now_ms,
        added(NEAR, MINUTES),
        added(FAR, HOURS),
        {part: max(found, default=None) for part, found in ages.items()},
        sorted(missing, key=lambda one: one["table"]),
    )


class _Asked:
    """What comes due, for somebody who may see some topics, or asks for one.

    ``mine``: the names of the biz_types that this is about. ``rest``: those of no topic that there is, and
    ``capacity``, the most starts a minute of all workers, are for who sees everything.
    """

    def __init__(self, doing: Doing, only: str | None) -> None:
        now = doing.center.clock.now_ms()
        names = {topic.biz_type: topic.name for topic in _topics(doing, only)}
        whole = doing.may(Right.READ_CLUSTER)
        self.due = due(doing.center.store, now, servers=whole)
        counted = self.due.counted
        self.mine = {
            biz_type: names[biz_type]
            for biz_type in counted
            if biz_type in names and doing.sees(names[biz_type]) and only in (None, names[biz_type])
        }
        self.whole = whole and only is None
        self.rest = [biz_type for biz_type in counted if biz_type not in names] if self.whole else []
        self.capacity = None
        if whole:
            with suppress(StoreUnavailable):
                self.capacity = hour(doing.center.store.minutes, now).capacity


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


def due_record(doing: Doing, only: str | None) -> Record:
    """Return what comes due, of all topics that may be seen or of one."""
    asked = _Asked(doing, only)
    found, capacity = asked.due, asked.capacity
    shown = [{"topic": name, **found.shown([biz_type])} for biz_type, name in asked.mine.items()]
    if only is not None and not shown:
        shown = [{"topic": only, **found.shown([])}]
    shown.sort(key=lambda one: (-one["overdue"] - one["week"] - one["later"], one["topic"]))
    first, all_ = found.now_ms // NEAR.length, found.shown(found.counted)["minutes"]
    beyond = [
        {"at": instant((first + place) * NEAR.length), "due": count}
        for place, count in enumerate(all_)
        if capacity is not None and count > max(capacity, QUIET)
    ]
    return {
        "now": instant(found.now_ms),
        "minutes_from": instant(first * NEAR.length),
        "hours_from": instant(found.now_ms // FAR.length * FAR.length),
        "topics": shown,
        "others": found.shown(asked.rest) if asked.whole else None,
        "total": found.shown([*asked.mine, *asked.rest]),
        "ages": {
            part: {"oldest": oldest and seconds(oldest[0]), "table": oldest and oldest[1]}
            for part, oldest in found.oldest.items()
        },
        "missing": found.missing,
        "capacity": capacity,
        "beyond": beyond,
    }


def what_if_record(doing: Doing, only: str | None, pause: float, rate: float | None) -> Record:
    """Return what would pile up in ``pause`` seconds; ``rate``: tasks a second that are started
    afterwards."""
    asked = _Asked(doing, only)
    found, capacity, paused = asked.due, asked.capacity, {*asked.mine, *asked.rest}
    own, others = found.shown(sorted(paused)), found.shown(sorted(set(found.counted) - paused))
    now, resumed = found.now_ms, found.now_ms + round(pause * 1000)
    beside = [count for _, _, count in spread(now, others["minutes"], others["hours"])]
    spans = spread(now, own["minutes"], own["hours"])
    steps = [Step(*span, other) for span, other in zip(spans, beside, strict=True)]
    pile = pile_up(steps, own["overdue"], resumed, rate, None if capacity is None else capacity / 60)
    return {
        "topic": only,
        "now": instant(now),
        "resumed": instant(resumed),
        "waiting": pile.waiting,
        "rate": rate,
        "capacity": capacity,
        "drained": None if pile.drained is None else instant(pile.drained),
        "drain_seconds": None if pile.drained is None else seconds(pile.drained - resumed),
        "steps": [{"at": instant(at), "due": due, "waiting": waiting} for at, due, waiting in pile.steps],
        "missing": found.missing,
    }
