"""Schedules that do not go on, for ``toc doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from toc.model.errors import InvalidSchedule, TocError
from toc.model.finding import Finding, Level
from toc.model.topic import Topic
from toc.sdk.client import TimeoutCenter
from toc.store.tasks.schedules import StoredSchedule

OF_EACH_TABLE = 2000
"""Schedules of a table that are examined."""
OVERDUE_MS = 60_000
"""A worker that is alive has moved a schedule on by then."""


def examine(center: TimeoutCenter, topics: Iterable[Topic]) -> list[Finding]:
    """Return the schedules that cannot be read or followed here, or that no worker moves on."""
    try:
        stored = center.store.schedules.of_each_table(OF_EACH_TABLE)
    except TocError:
        return []  # the schema or a server fails: reported elsewhere
    now, by_name = center.clock.now_ms(), {topic.name: topic for topic in topics}
    found = []
    for one in stored:
        try:
            what, do = _why_stuck(one, by_name, now)
        except (InvalidSchedule, OverflowError) as exc:
            what, do = str(exc), f"toc schedule delete {one.name}; its tasks stay"
        if what:
            found.append(Finding(Level.WARN, one.name, what, do))
    return found


def _why_stuck(stored: StoredSchedule, topics: Mapping[str, Topic], now: int) -> tuple[str, str]:
    """Return what holds a schedule up, and what to do; empty if nothing does. Raises InvalidSchedule."""
    definition, state = stored.definition, stored.state
    if state.paused:
        return "", ""
    if definition.unknown:
        do = f"update the time zones of this host, or toc schedule alter {stored.name} --zone ZONE"
        return definition.unknown, do
    topic = topics.get(definition.topic)
    if topic is None or topic.closed:
        what = f"there is no topic {definition.topic!r} that takes tasks"
        return what, f"toc topic create, or toc schedule alter {stored.name} --topic TOPIC"
    late = 0 if state.next_time is None else now - state.next_time - definition.offset
    if late > OVERDUE_MS:
        what = f"no worker has moved it on for {late // 1000} s"
        return what, "look for schedule_stuck in the logs of the daemons, which says why"
    return "", ""
