"""Why a task is late, for whoever asks: what its row keeps of its late starts, and, of one that waits, what
can be seen now. Every door shows the same."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from toc.model.errors import IndexUnavailable, Unavailable
from toc.model.lateness import (
    LATE_MS,
    Cause,
    LateStart,
    Span,
    Tried,
    Why,
    clock_time,
    explain,
    fill,
    late_starts,
    without_servers,
)
from toc.model.pull import LEASE_ENDED
from toc.model.sharding import created_ms
from toc.model.task import TaskRow, TaskStatus
from toc.model.topic import Delivery, Topic
from toc.model.verdict import CRASHED
from toc.operate.cluster import workers
from toc.operate.running import where_of
from toc.operate.shown import LateShown
from toc.sdk.client import TimeoutCenter

RECENT_MS = 45_000
"""What made tasks of a topic late so short a while ago still does."""
SEEN = 20
"""How many episodes at the time of a task are read."""


def may_be_late(row: TaskRow, now: int) -> bool:
    """Whether ``why`` may have something to say of a task. Reads nothing."""
    if row.status == TaskStatus.PENDING:
        return now - row.action_time > LATE_MS
    return row.status == TaskStatus.PROCESSED and (
        row.late is not None or row.next_time - row.action_time > LATE_MS
    )


def why(
    center: TimeoutCenter, row: TaskRow, topic: Topic | None, *, servers: bool = True
) -> LateShown | None:
    """Return why a task is late, as it is shown, or None if it is not or nobody knows.

    ``servers``: whoever asks may know which servers and hosts there are. Raises StoreUnavailable.
    """
    now = center.clock.now_ms()
    if not may_be_late(row, now):
        return None
    starts = late_starts(row.late, row.version)
    tries = [
        Tried(one.at, one.error == CRASHED, one.error)
        for one in (center.store.history(row.job_id) if row.last_error is not None else ())
        if one.version == row.version and not 200 <= (one.status or 0) < 300
    ]
    due = row.action_time
    if row.redrives:  # when that was is the time of its first try
        due = starts[0].due if starts else tries[0].at if tries else row.next_time
    ended = row.next_time if row.status == TaskStatus.PROCESSED else None
    found: Why | None
    if ended is None and topic is not None:
        found = _so_far(center, row, topic, due, starts, tries, now)
    else:
        found = explain(due, starts, tries, ended, now, lapsed=row.last_error == LEASE_ENDED)
        if found is None and ended is not None and topic is not None:
            found = _counted(center, topic, due, ended)
    if found is None:
        return None
    if not servers:
        found = found._replace(spans=list(map(without_servers, found.spans)))
    return cast(LateShown, found.shown())


def _counted(center: TimeoutCenter, topic: Topic, due: int, ended: int) -> Why | None:
    """Return why a task may have been late whose row does not say it, as more were late than were written."""
    for one in center.store.episodes.of(topic.name, due, due, SEEN):
        if one.unwritten and ended - due > LATE_MS:
            about = f"so {one.tasks} tasks were late then, this one perhaps"
            return Why(due, min(ended, one.until), [Span(one.cause, due, min(ended, one.until), about)])
    return None


def _so_far(
    center: TimeoutCenter,
    row: TaskRow,
    topic: Topic,
    due: int,
    starts: Sequence[LateStart],
    tries: Sequence[Tried],
    now: int,
) -> Why | None:
    """Return why a pending task is late so far: until it runs, or is due again, its past tells; after that
    what can be seen now."""
    where = where_of(center, row, topic)
    started = None if where is None else where.since or now
    if started is not None and started - due <= LATE_MS:
        return None
    waits_since = max(row.next_time, due)
    if started is None and waits_since > now:
        return explain(due, starts, tries, None, now, lapsed=row.last_error == LEASE_ENDED)
    until = now if started is None else started
    lapsed = row.last_error == LEASE_ENDED
    before = explain(due, starts, tries, None, min(waits_since, until), lapsed=lapsed)
    spans = [] if before is None else list(before.spans)
    if not row.version and (stored := created_ms(row.job_id)) > due:
        spans.append(Span(Cause.STORED_LATE, due, stored, f"at {clock_time(stored)} UTC"))
    if topic.paused_at and (topic.paused or topic.resumed_at > due):
        ends = until if topic.paused else topic.resumed_at
        spans.append(Span(Cause.PAUSED, topic.paused_at, ends, _from(topic.paused_at, topic)))
    rest = None if started is not None else _now(center, row, topic)
    filled = fill(due, until, spans, rest or Span(Cause.UNKNOWN, 0, 0))
    return Why(due, until, filled, waits=started is None)


def _from(paused_at: int, topic: Topic) -> str:
    since = f"since {clock_time(paused_at)}"
    return f"{since} UTC" if topic.paused else f"{since[6:]} to {clock_time(topic.resumed_at)} UTC"


def _now(center: TimeoutCenter, row: TaskRow, topic: Topic) -> Span:
    """Return what keeps a task now that is due and does not run."""
    slot = topic.slot(row.slot_crc, row.slot_amount)
    if topic.delivery is Delivery.WEBHOOK and topic.target:
        for target in center.store.targets.list():
            if target.name == topic.target and target.paused:
                return Span(Cause.TARGET, 0, 0, f"target {target.name} is paused")
    if center.queues.present:
        peek = center.queues.peek([slot])[slot]
        if isinstance(peek, IndexUnavailable):
            return Span(Cause.REDIS, 0, 0, str(peek))
    now = center.clock.now_ms()
    latest = next(iter(center.store.episodes.of(topic.name, now - RECENT_MS, now, 1)), None)
    same = None if latest is None else Span(latest.cause, 0, 0, latest.evidence)
    if topic.delivery is Delivery.PULL:
        return same or Span(Cause.NO_CONSUMER, 0, 0)
    with suppress(Unavailable):
        rows = workers(center)
        able = [one for one in rows if one.member.topics is None or topic.name in one.member.topics]
        if not able:
            return Span(Cause.NO_OWNER, 0, 0, f"no living worker handles {topic.name}")
        if all(one.drained for one in able):
            hosts = ", ".join(sorted({one.member.host for one in able}))
            return Span(Cause.NO_OWNER, 0, 0, f"drained: {hosts}")
    if topic.resume_rate and row.next_time < topic.resumed_at:
        return Span(Cause.RESUME_RATE, 0, 0, f"{topic.resume_rate} tasks a second")
    return same or Span(Cause.BACKLOG, 0, 0)
