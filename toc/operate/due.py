"""What comes due when, over all tables: the counts that workers keep, their ages, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toc.model.due import FAR, HOURS, MINUTES, NEAR, Counted, Part, Spans, read, sums, total
from toc.model.errors import InvalidDocument
from toc.model.topic import Topic
from toc.model.what_if import Step, pile_up, spread
from toc.model.wire import instant, seconds
from toc.operate.operation import Record
from toc.store.store import Store

OLD_MS = (NEAR.spans - MINUTES) * NEAR.length
"""Minutes that were counted longer ago than this no longer reach to the end of the next hour."""
QUIET = 600
"""Tasks a minute that are never beyond the capacity: what has had little to do has shown little of it."""


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


def due(store: Store, now_ms: int) -> Due:
    """Read the counts of all tables. A server that is away is named in ``missing``."""
    kept = store.due_counts.kept(store.tables)
    counts: dict[str, list[Counted]] = {NEAR.name: [], FAR.name: []}
    ages: dict[str, list[tuple[int, str]]] = {NEAR.name: [], FAR.name: []}
    missing: list[Record] = [
        {"table": store.name_of(table), "age": None, "error": str(error)}
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


def _meant(
    found: Due, topics: Sequence[Topic], sees: Callable[[str], bool], *, whole: bool, only: str | None
) -> tuple[dict[int, str], list[int]]:
    """Return the biz_types that are asked for and seen, with their names, and those of no topic."""
    names = {topic.biz_type: topic.name for topic in topics}
    mine = {
        biz_type: names[biz_type]
        for biz_type in found.counted
        if biz_type in names and sees(names[biz_type]) and only in (None, names[biz_type])
    }
    rest = [biz_type for biz_type in found.counted if biz_type not in names]
    return mine, rest if whole and only is None else []


def due_record(
    found: Due,
    topics: Sequence[Topic],
    sees: Callable[[str], bool],
    *,
    whole: bool,
    only: str | None,
    capacity: int | None,
) -> Record:
    """Return it as shown to somebody who ``sees`` some topics; ``whole``: and what is of no topic that there
    is, and the ``capacity`` (starts a minute) for all. ``only``: one topic alone."""
    mine, rest = _meant(found, topics, sees, whole=whole, only=only)
    shown = [{"topic": name, **found.shown([biz_type])} for biz_type, name in mine.items()]
    if only is not None and not shown:
        shown = [{"topic": only, **found.shown([])}]
    shown.sort(key=lambda one: (-one["overdue"] - one["week"] - one["later"], one["topic"]))
    beyond = []
    if whole and capacity is not None:
        first, all_ = found.now_ms // NEAR.length, found.shown(found.counted)["minutes"]
        most = max(capacity, QUIET)
        beyond = [
            {"at": instant((first + number) * NEAR.length), "due": count}
            for number, count in enumerate(all_)
            if count > most
        ]
    return {
        "now": instant(found.now_ms),
        "minutes_from": instant(found.now_ms // NEAR.length * NEAR.length),
        "hours_from": instant(found.now_ms // FAR.length * FAR.length),
        "topics": shown,
        "others": found.shown(rest) if whole and only is None else None,
        "total": found.shown([*mine, *rest]),
        "ages": {
            part: {
                "oldest": None if oldest is None else seconds(oldest[0]),
                "table": None if oldest is None else oldest[1],
            }
            for part, oldest in found.oldest.items()
        },
        "missing": found.missing,
        "capacity": capacity if whole else None,
        "beyond": beyond,
    }


def what_if_record(
    found: Due,
    topics: Sequence[Topic],
    sees: Callable[[str], bool],
    *,
    whole: bool,
    only: str | None,
    pause: float,
    rate: float | None,
    capacity: int | None,
) -> Record:
    """Return what would pile up in ``pause`` seconds, as ``due_record`` shows things. ``rate``: tasks a
    second that are started afterwards."""
    mine, rest = _meant(found, topics, sees, whole=whole, only=only)
    paused = [*mine, *rest]
    counts, others = (
        found.shown(some) for some in (paused, [one for one in found.counted if one not in paused])
    )
    now, resumed = found.now_ms, found.now_ms + round(pause * 1000)
    steps = [
        Step(begin, end, count, other)
        for (begin, end, count), (_, _, other) in zip(
            *(spread(now, each["minutes"], each["hours"]) for each in (counts, others)), strict=True
        )
    ]
    pile = pile_up(steps, counts["overdue"], resumed, rate, None if capacity is None else capacity / MINUTES)
    return {
        "topic": only,
        "now": instant(now),
        "resumed": instant(resumed),
        "waiting": pile.waiting,
        "rate": rate,
        "capacity": capacity,
        "drained": None if pile.drained is None else instant(pile.drained),
        "drain_seconds": None if pile.drained is None else seconds(pile.drained - resumed),
        "steps": [
            {"at": instant(step.begin), "due": step.due, "waiting": step.waiting} for step in pile.steps
        ],
        "missing": found.missing,
    }
