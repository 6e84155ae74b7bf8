"""The last hour of all members, minute by minute: what was started, how late, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from toc.model.errors import InvalidDocument
from toc.model.minute import KEPT, MINUTE_MS, OTHERS, Tally, read
from toc.model.wire import instant, seconds
from toc.observe.exposition import quantile
from toc.observe.metrics import LATENESS
from toc.operate.operation import Record
from toc.store.records.minutes import MinuteTable

BOUNDS = LATENESS.metric.buckets
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
                    into = found.topics.setdefault(topic, [Tally()] * KEPT)
                    into[place] = into[place].plus(tally)
    living = [member for member, age in found.members.items() if age < ALIVE_MINUTES * MINUTE_MS]
    if living:
        found.capacity = sum(most[member] for member in living)
    return found


def lateness_record(found: Hour, sees: Callable[[str], bool], *, whole: bool, only: str | None) -> Record:
    """Return it as shown to somebody who ``sees`` some topics; ``whole``: and the members. ``only``: one
    topic alone."""
    names = [
        name
        for name in found.topics
        if (only is None or name == only) and (whole if name == OTHERS else sees(name))
    ]
    minutes = _added([found.topics[name] for name in names])
    topics = [{"topic": name or "(others)", **_sums(found.topics[name])} for name in names]
    topics.sort(key=lambda one: (-one["starts"], one["topic"]))
    return {
        "minutes_from": instant(found.first_ms),
        "bounds": list(BOUNDS),
        "topics": topics,
        "total": {
            "starts": [minute.starts for minute in minutes],
            "processed": [minute.processed for minute in minutes],
            "failed": [minute.failed for minute in minutes],
            "dead": [minute.dead for minute in minutes],
            "lateness": [_padded(minute) for minute in minutes],
        },
        "members": [{"member": member, "age": seconds(age)} for member, age in sorted(found.members.items())]
        if whole
        else None,
        "capacity": found.capacity if whole else None,
    }


def _added(topics: Sequence[Sequence[Tally]]) -> list[Tally]:
    minutes = [Tally()] * KEPT
    for topic in topics:
        minutes = [both.plus(own) for both, own in zip(minutes, topic, strict=True)]
    return minutes


def _sums(minutes: Sequence[Tally]) -> Record:
    """Return the sums of an hour, and how late (seconds) the starts were."""
    total = Tally()
    for minute in minutes:
        total = total.plus(minute)
    cells = [*_padded(total), 0]
    return {
        "starts": total.starts,
        "processed": total.processed,
        "failed": total.failed,
        "dead": total.dead,
        "lateness_p50": quantile(BOUNDS, cells, 0.5),
        "lateness_p99": quantile(BOUNDS, cells, 0.99),
    }


def _padded(minute: Tally) -> list[int]:
    """Return the counts of all buckets."""
    return [*minute.lateness, *[0] * (len(BOUNDS) + 1 - len(minute.lateness))]
