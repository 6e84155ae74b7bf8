"""Why tasks are late: what rows keep of late starts, and, of a task that waits, what can be seen now. Every
door shows the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, cast

from toc.model import lateness
from toc.model.access import Action as Right
from toc.model.clock import to_ms
from toc.model.errors import IndexUnavailable, SchemaBehind, Unavailable
from toc.model.lateness import CAUSES, LATE_MS, Cause, Span, Tried, Why, clock_time, stored_late
from toc.model.pull import LEASE_ENDED
from toc.model.task import TaskRow, TaskStatus
from toc.model.topic import Delivery, Topic
from toc.model.verdict import CRASHED
from toc.operate.cluster import living_workers
from toc.operate.due import unread
from toc.operate.operation import Doing, Param, Place, Record, Value, operation
from toc.operate.records import LateShown
from toc.operate.running import LEASED_MS, running, where_of
from toc.operate.tasks import TOPIC

if TYPE_CHECKING:
    from toc.coordination.views import WorkerRow
    from toc.sdk.client import TimeoutCenter
    from toc.store.servers.shards import Trouble

    Living = Callable[[TimeoutCenter], Sequence[WorkerRow] | None]

RECENT_MS = 45_000
"""What made tasks of a topic late so short a while ago still does."""
ROUNDS = 5
"""How often it is asked what is late, each time without the topics that were found."""
RUNNING = 1000
"""How many running tasks of a topic are read."""
DEFAULT_MS = 3_600_000


def may_be_late(row: TaskRow, now: int) -> bool:
    """Whether ``why`` may have something to say of a task. Reads nothing."""
    if row.status == TaskStatus.PENDING:
        return now - row.action_time > LATE_MS
    return row.status == TaskStatus.PROCESSED and not (row.late is None and row.last_error is None)


def _alive(center: TimeoutCenter) -> Sequence[WorkerRow] | None:
    with suppress(Unavailable):
        return living_workers(center)
    return None


def why(
    center: TimeoutCenter, row: TaskRow, topic: Topic | None, *, servers: bool = True, living: Living = _alive
) -> LateShown | None:
    """Return why a task is late, as it is shown, or None if it is not or nobody knows.

    ``servers``: whoever asks may know which servers and hosts there are. ``living``: returns the living
    workers, None if they are not known. Raises StoreUnavailable if the task's own server is away; while the
    first database is, the rest of its wait has no cause.
    """
    now = center.clock.now_ms()
    if not may_be_late(row, now):
        return None
    starts = lateness.late_starts(row.late, row.version)
    tries = [
        Tried(one.at, one.error == CRASHED, one.error)
        for one in (center.store.history(row.job_id) if row.last_error is not None else ())
        if one.version == row.version and not 200 <= (one.status or 0) < 300
    ]
    due = row.action_time
    if row.redrives:  # when that was is the time of its first try
        due = starts[0].due if starts else tries[0].at if tries else row.next_time
    ended = row.next_time if row.status == TaskStatus.PROCESSED else None
    explain = partial(lateness.explain, due, starts, tries, ended, lapsed=row.last_error == LEASE_ENDED)
    if ended is None and topic is not None:
        found = _so_far(center, row, topic, due, now, explain, living)
    else:
        found = explain(now)
    if found is None:
        return None
    if not servers:
        found = found._replace(spans=list(map(lateness.without_servers, found.spans)))
    return cast(LateShown, found.shown("TOPIC" if topic is None else topic.name))


def _so_far(
    center: TimeoutCenter, row: TaskRow, topic: Topic, due: int, now: int,
    explain: Callable[[int], Why | None], living: Living,
) -> Why | None:  # fmt: skip
    """Return why a pending task is late so far: until it runs, or is due again, its past tells; after that
    what can be seen now."""
    where = where_of(center, row, topic)
    started = None if where is None else where.since
    exact = topic.delivery is Delivery.PULL  # else it began before, and was perhaps in time
    if started is not None and started - due <= LATE_MS + (0 if exact else LEASED_MS):
        return None
    waits_since = max(row.next_time, due)
    if started is None and waits_since > now:
        return explain(now)
    until = now if started is None else started
    before = explain(min(waits_since, until))
    spans = [*(before.spans if before else ()), *stored_late(row.job_id, row.version, due)]
    if topic.paused_at and topic.paused:
        by = f" by {topic.paused_by}" if topic.paused_by else ""
        about = f"since {clock_time(topic.paused_at)} UTC{by}"
        spans.append(Span(Cause.PAUSED, topic.paused_at, until, about))
    elif topic.paused_at and topic.resumed_at > due:
        about = f"{clock_time(topic.paused_at)} to {clock_time(topic.resumed_at)} UTC"
        spans.append(Span(Cause.PAUSED, topic.paused_at, topic.resumed_at, about))
    begun = row.last_error is not None and not row.attempts  # a try that was not charged
    rest = Span(Cause.WORKER_KILLED if begun else Cause.UNKNOWN, 0, 0)
    if started is None:
        with suppress(Unavailable, SchemaBehind):
            rest = _now(center, row, topic, living)
    runs = not (started is None or exact)  # a worker writes what it saw at the end, a hand-out at once
    filled = lateness.fill(due, until, spans, rest)
    return Why(due, until, filled, started is None, row.attempts > 0, runs=runs)


def _now(center: TimeoutCenter, row: TaskRow, topic: Topic, living: Living) -> Span:
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
    if (rows := living(center)) is not None:
        able = [one for one in rows if one.member.can_handle(topic.name, topic.delivery)]
        if not able:
            return Span(Cause.NO_OWNER, 0, 0, f"no living worker handles {topic.name}")
        if all(one.drained for one in able):
            hosts = ", ".join(sorted({one.member.host for one in able}))
            return Span(Cause.NO_OWNER, 0, 0, f"drained: {hosts}")
    if topic.resume_rate and row.next_time < topic.resumed_at:
        return Span(Cause.RESUME_RATE, 0, 0, f"{topic.resume_rate} tasks a second")
    if topic.concurrency:
        ran = Counter(one.owner for one in running(center, [topic], RUNNING).tasks if one.since)
        if max(ran.values(), default=0) >= topic.concurrency:
            return Span(Cause.CONCURRENCY, 0, 0, f"{topic.concurrency} at once")
    return same or Span(Cause.BACKLOG, 0, 0)


def _waiting(
    center: TimeoutCenter, topics: Sequence[Topic], *, servers: bool
) -> tuple[list[Record], bool, list[Record]]:
    """Return of each topic how many tasks are late and have not started, with why the first has not; whether
    there are more than were read; and the tables that did not answer. A paused topic's too."""
    from toc.store.tasks.scan import DueRow, of_types

    store, by_type = center.store, {topic.biz_type: topic for topic in topics}
    before = center.clock.now_ms() - LATE_MS
    rows: list[DueRow] = []
    failed: dict[int, Trouble] = {}
    left, more = set(by_type), False
    for _ in range(ROUNDS):  # the backlog of one topic fills the pages of its tables
        due = store.scans.overdue(before, of_types(left), store.leases.unstarted())
        left -= {row.biz_type for row in due.rows}
        rows, failed, more = rows + due.rows, {**failed, **due.failed}, more or due.more
        if not (left and due.rows and due.more):
            break
    rows.sort(key=attrgetter("position"))
    tasks = Counter(row.biz_type for row in rows)
    first = {row.biz_type: row.job_id for row in reversed(rows)}
    found: list[Record] = []
    living = cache(_alive)
    for biz_type, job_id in first.items():
        topic, one = by_type[biz_type], store.get(job_id)
        shown = None if one is None else why(center, one, topic, servers=servers, living=living)
        if shown is not None and shown["started"] is None:  # else it has just started
            share = shown["shares"][0]
            found.append({
                "topic": topic.name, "cause": shown["cause"], "tasks": tasks[biz_type],
                "worst_seconds": shown["seconds"], "since": share["since"], "worst_job_id": str(job_id),
                "evidence": share["evidence"], "remedy": shown["remedy"],
            })  # fmt: skip
    found.sort(key=itemgetter("worst_seconds"), reverse=True)
    return found, more, unread(store, failed, servers=servers)


@operation("late.list", "GET /v1/late", Right.FIND_TASKS, "See which tasks were late, and why",
           TOPIC, Param("cause", Cause, "Only by this cause: backlog.", metavar="CAUSE"),
           Param("after", Value.PAST, "Since this time; by default an hour ago."),
           Param("limit", Value.WHOLE, "Read at most N episodes, latest first.", 1000, least=1, most=10_000),
           takes="LateQuery", place=Place.ALL)  # fmt: skip
def late(
    doing: Doing, limit: int, topic: str | None = None, cause: Cause | None = None,
    after: datetime | None = None,
) -> Record:  # fmt: skip
    """Show how many tasks started more than a second late, by topic and cause, and the worst of each; and
    those that are late and have not started.

    `causes` by topic and cause, most tasks first, each with its worst task; `episodes`, of each process and
    some seconds, the latest first; `waiting`: by topic, what keeps tasks now. `more`: there were further
    episodes, which neither counts; `more_waiting`: further tasks, perhaps worse ones. `missing` names tables
    that did not answer.

    toc: `toc get JOB_ID` says it of one task.

    Example: toc late --topic order.close --after 1d
    """
    center = doing.center
    since = center.clock.now_ms() - DEFAULT_MS if after is None else to_ms(after)
    names: list[str] | None = None
    if topic is not None:
        names = [center.catalog.get(topic).name]
    elif doing.token is not None and not doing.token.everywhere:
        names = [name for name in center.catalog.known() if doing.sees(name)]
    found = center.store.episodes.list(since, limit, names, cause)
    servers = doing.may(Right.READ_CLUSTER)
    topics = [one for one in center.store.topics.list() if names is None or one.name in names]
    waiting, more_waiting, missing = _waiting(center, topics, servers=servers)
    if not servers:
        found = [lateness.without_servers(one)._replace(who="") for one in found]
    return {
        "waiting": [one for one in waiting if cause in (None, one["cause"])],
        "more_waiting": more_waiting,
        "missing": missing,
        "causes": [
            {**one.shown(), "remedy": CAUSES[one.cause].of(one.topic or "TOPIC")}
            for one in lateness.by_cause(found)
        ],
        "episodes": [one.shown() for one in found],
        "more": len(found) == limit,
    }
