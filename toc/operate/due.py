"""What comes due when, over all tables: the counts that workers keep, their ages, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toc.model.due import FAR, HOURS, MINUTES, NEAR, Counted, Part, Spans, read, total
from toc.model.errors import InvalidDocument
from toc.model.topic import Topic
from toc.model.wire import instant, seconds
from toc.operate.operation import Record
from toc.store.store import Store

OLD_MS = (NEAR.spans - MINUTES) * NEAR.length
"""Minutes that were counted longer ago than this no longer reach to the end of the next hour."""
DAY_HOURS = 24
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

    def shown(self, biz_types: Sequence[int]) -> Record:
        """Return the sums of some biz_types: counts from now on, and each minute and hour."""
        minutes, hours = (
            [sum(column) for column in zip(*(spans[one] for one in biz_types if one in spans), strict=True)]
            or [0] * (length + 1)
            for spans, length in ((self.minutes, MINUTES), (self.hours, HOURS))
        )
        return {
            "overdue": minutes[0],
            "hour": sum(minutes[1:]),
            "day": sum(hours[1 : DAY_HOURS + 1]),
            "week": sum(hours[1:]),
            "later": hours[0],
            "minutes": minutes[1:],
            "hours": hours[1:],
        }


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

    def sums(part: Part, spans: int) -> Spans:
        return total(part, counts[part.name], now_ms, spans)

    return Due(
        now_ms,
        sums(NEAR, MINUTES),
        sums(FAR, HOURS),
        {part: max(found, default=None) for part, found in ages.items()},
        sorted(missing, key=lambda one: one["table"]),
    )


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
    names = {topic.biz_type: topic.name for topic in topics}
    counted = found.minutes.keys() | found.hours.keys()
    mine = {
        biz_type: names[biz_type]
        for biz_type in counted & names.keys()
        if sees(names[biz_type]) and only in (None, names[biz_type])
    }
    rest = sorted(counted - names.keys()) if whole and only is None else []
    shown = [{"topic": name, **found.shown([biz_type])} for biz_type, name in mine.items()]
    if only is not None and not shown:
        shown = [{"topic": only, **found.shown([])}]
    shown.sort(key=lambda one: (-one["overdue"] - one["week"] - one["later"], one["topic"]))
    beyond = []
    if whole and capacity is not None:
        first, all_ = found.now_ms // NEAR.length, found.shown(sorted(counted))["minutes"]
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
