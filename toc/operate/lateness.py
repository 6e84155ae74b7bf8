"""The last hour of all members, minute by minute: what was started, how late, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce

from toc.model.documents import instant, seconds
from toc.model.errors import InvalidDocument
from toc.model.minute import KEPT, LATENESS, MINUTE_MS, OTHERS, Tally, plus, read
from toc.observe import metrics
from toc.observe.exposition import quantile
from toc.operate.operation import Record
from toc.store.records.cluster import MinuteTable

BOUNDS = metrics.LATENESS.metric.buckets
NOTHING = [0] * (LATENESS + len(BOUNDS) + 1)
_COUNTS = ("starts", "processed", "failed", "dead")
ALIVE_MINUTES = 3
"""A member that has written none of the last minutes is not counted as one that can start tasks."""


@dataclass(slots=True)
class Hour:
    """The KEPT minutes before the present one. ``first_ms``: when they begin.

    ``topics``: by name, the Tally of each minute. ``members``: of each the age (ms) of its last minute.
    ``capacity``: the sum of the most starts that each living member has seen in a minute; None without one.
    """

    first_ms: int
    topics: dict[str, list[Tally]] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    capacity: int | None = None


def hour(table: MinuteTable, now_ms: int) -> Hour:
    """Read the last minutes of all members. Raises StoreUnavailable, SchemaBehind."""
    first = now_ms // MINUTE_MS - KEPT
    found = Hour(first * MINUTE_MS)
    most: dict[str, int] = {}
    for row in table.since(found.first_ms):
        with suppress(InvalidDocument):  # of a later version, or edited by hand
            minute, place = read(row.counts), row.minute // MINUTE_MS - first
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
    topics = [{"topic": name or "(others)", **_sums(found.topics[name])} for name in names]
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


def _sums(minutes: Sequence[Tally]) -> Record:
    """Return the sums of an hour, and how late (seconds) the starts were."""
    total = reduce(plus, minutes, NOTHING)
    late = {}
    for part in (50, 99):
        found = quantile(BOUNDS, [*total[LATENESS:], 0], part / 100)
        late[f"lateness_p{part}"] = None if found is None else round(found, 4)
    return dict(zip(_COUNTS, total, strict=False)) | late
