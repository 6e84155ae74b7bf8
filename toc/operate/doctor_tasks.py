"""What ``toc doctor`` says of topics, targets, schedules and overdue tasks."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toc.coordination.assignment import Spread
from toc.index.calls import BySlot
from toc.index.messages import Peek
from toc.model import errors
from toc.model.finding import Level, Line, count, is_wrong
from toc.model.payload import GIVEN_BACK
from toc.model.topic import Delivery, Topic
from toc.sdk.client import TimeoutCenter
from toc.store.records.table import NamedTable
from toc.store.store import Store
from toc.store.tasks.scan import OverdueRows, of_types
from toc.store.tasks.schedules import StoredSchedule

OVERDUE_MS = 10_000
"""Tasks that have been due for this many ms and have not started are reported."""
PUT_OFF_MS = 60_000
"""How far ahead suspects, and tasks whose payload does not fit, are put off at most."""
SCHEDULES_OF_EACH_TABLE = 2000
"""How many are examined."""
SCHEDULE_OVERDUE_MS = 60_000
"""A worker that is alive has moved a schedule on by then."""


def damaged_lines(store: Store) -> Iterator[Line]:
    """Name the rows of small tables that count for nothing, because they hold what toc never writes."""
    tables: list[NamedTable[Any]] = [store.topics, store.templates, store.tokens, store.targets]
    for table in tables:
        for name in sorted(table.damaged()):
            what = "its row cannot be understood and counts for nothing: another program has changed it"
            do = "correct the row; the log says what is wrong"
            yield Line(Level.REFUSE, f"{table.noun}s", name, what, do)


def topic_lines(topics: list[Topic], peeks: BySlot[Peek], spread: Spread) -> Iterator[Line]:
    """The topics that are paused, have dead tasks, or whose slots need many connections."""
    dead, least = Counter[str](), ""
    for slot, peek in peeks.items():
        if isinstance(peek, Peek):
            dead[slot.topic] += peek.dead
            least = "at least " if peek.more else least
    for topic in topics:
        if topic.paused:
            what = "paused: tasks are kept, none is started"
            yield Line(Level.NOTE, "topics", topic.name, what, f"toc topic resume {topic.name}")
        if dead[topic.name]:
            what = f"{least}{count(dead[topic.name], 'dead task')}"
            yield Line(Level.WARN, "tasks", topic.name, what, f"toc dead list --topic {topic.name}")
        if spread.servers > 1 and spread.server(topic.slot_amount, 0) is None:
            what = "each slot has tasks on several database servers: its workers need connections to all"
            do = f"for fewer connections: toc topic alter {topic.name} --slots {spread.databases}"
            yield Line(Level.NOTE, "topics", topic.name, what, do)


def target_lines(center: TimeoutCenter, topics: Iterable[Topic]) -> Iterator[Line]:
    """The targets that are missing, paused, or locked for this host. Asks no receiver."""
    targets = {target.name: target for target in center.targets.list()}
    for topic in topics:
        name, what = topic.target, ""
        if topic.delivery is not Delivery.WEBHOOK or not name:
            continue
        if name not in targets:
            what = "it does not exist"
            do = f"toc target create {name}, or toc topic alter {topic.name} --target NAME"
        elif not targets[name].serves(topic.name):
            what = "it is not for that topic"
            do = f"toc target alter {name} --topics ..., or toc topic alter {topic.name} --target X"
        if what:
            what = f"topic {topic.name} sends to it, and {what}: its tasks wait"
            yield Line(Level.WARN, "targets", name, what, do)
    for target in targets.values():
        if target.paused:
            why = f": {target.paused_why}" if target.paused_why else ""
            what = f"paused by {target.paused_by}{why}; its tasks wait"
            yield Line(Level.NOTE, "targets", target.name, what, f"toc target resume {target.name}")
        try:
            center.store.targets.open(target)
        except errors.SecretsLocked as exc:
            yield Line(Level.WARN, "targets", target.name, str(exc), "set TOC_SECRET_KEY on this host")
        except errors.NotInstalled:
            pass  # this host sends none


def schedule_lines(center: TimeoutCenter, topics: Iterable[Topic]) -> Iterator[Line]:
    """The schedules that cannot be read or followed here, or that no worker moves on."""
    now, by_name = center.clock.now_ms(), {topic.name: topic for topic in topics}
    for one in center.store.schedules.of_each_table(SCHEDULES_OF_EACH_TABLE):
        try:
            what, do = _why_stuck(one, by_name, now)
        except (errors.InvalidSchedule, OverflowError) as exc:
            what, do = str(exc), f"toc schedule delete {one.name}; its tasks stay"
        if what:
            yield Line(Level.WARN, "schedules", one.name, what, do)


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
    if late > SCHEDULE_OVERDUE_MS:
        what = f"no worker has moved it on for {late // 1000} s"
        return what, "look for schedule_stuck in the logs of the daemons, which says why"
    return "", ""


def overdue_lines(
    center: TimeoutCenter, topics: list[Topic], peeks: BySlot[Peek], known: list[Line]
) -> Iterator[Line]:
    """Look for overdue tasks in the rows (a bounded read), so that entries missing in the index show too."""
    now = center.clock.now_ms()
    paused = {topic.name: str(topic.biz_type) for topic in topics if topic.paused}
    where = f" AND biz_type NOT IN ({','.join(paused.values())})" if paused else ""
    found = center.store.scans.overdue(now - OVERDUE_MS, where, center.store.leases.unstarted())
    names = {topic.biz_type: topic.name for topic in topics}
    strange: dict[int, list[int]] = {}
    late: dict[str, list[int]] = {}
    for row in found.rows:
        name = names.get(row.biz_type)
        if name is None:
            strange.setdefault(row.biz_type, []).append(row.job_id)
        else:
            late.setdefault(name, []).append(now - row.next_time)
    told_of = {*late, *paused}
    for slot, peek in peeks.items() if found.more else ():
        # Rows of a backlog were read instead of this topic's, whose slots tell.
        if slot.topic not in told_of and isinstance(peek, Peek) and peek.due and peek.next_due is not None:
            late_ms = peek.redis_now_ms - int(peek.next_due)
            if late_ms >= OVERDUE_MS:
                late.setdefault(slot.topic, []).extend([late_ms] * peek.due)
    more = "at least " if found.more else ""
    lines = []
    for name, overdue in late.items():
        what = f"{more}{count(len(overdue), 'task')} overdue, the first by {max(overdue) / 1000:.0f} s"
        lines.append(Line(Level.WARN, "tasks", name, what, f"toc late --topic {name} says why"))
    for biz_type, job_ids in strange.items():
        what = f"{more}{len(job_ids)} overdue tasks have a biz_type that no topic has"
        # Of a deleted topic if a process that could not read the topics has submitted them.
        do = f"create the topic again with that biz_type or, if it was deleted, toc cancel {min(job_ids)}"
        lines.append(Line(Level.REFUSE, "tasks", f"biz_type {biz_type}", what, do))
    if found.failed:
        why = next(iter(found.failed.values()))
        what = f"overdue tasks in {len(found.failed)} tables could not be looked up: {why}"
        if not is_wrong(known, "database"):
            lines.append(Line(Level.WARN, "tasks", "-", what, "see the other lines; then run this again"))
    elif not lines:
        do, aside = "", "; those of paused topics are not looked at" if paused else ""
        what = f"none is overdue by more than {OVERDUE_MS // 1000} s{aside}"
        if found.more:
            what, do = f"of those that were looked at {what}", "toc due counts what is overdue"
        lines.append(Line(Level.NOTE if found.more else Level.OK, "tasks", "-", what, do))
    yield from lines


def suspect_lines(center: TimeoutCenter, topics: list[Topic]) -> Iterator[Line]:
    """Look for tasks that several workers did not survive: only a daemon runs them."""
    rows = _put_off(center, topics, f"crashes>={center.settings.max_crashes:d}").rows
    found = Counter(row.biz_type for row in rows)
    for topic in topics:
        if topic.delivery is Delivery.HANDLER and (tasks := found[topic.biz_type]):
            what = f"{count(tasks, 'task')} that several workers did not survive: only a daemon runs them"
            yield Line(Level.WARN, "tasks", topic.name, what, "run toc worker --app ... beside them")


def due_soon_lines(center: TimeoutCenter, topics: list[Topic], spread: Spread) -> Iterator[Line]:
    """Look for tasks that were given back because their payload does not fit the handler, and on several
    servers for those whose row is on another server than its slot expects."""
    what, do = "given back, as the payload does not fit; dead after an hour", "toc get {} names the field"
    looked = [(Level.WARN, f"INSTR(last_error,'{GIVEN_BACK}')>0", what, do)]
    if spread.servers > 1:
        block = spread.databases - spread.databases // spread.servers  # the bits that tell the server
        apart = f"(job_id>>12&{block:d})<>(slot_crc&{block:d})"
        what, do = "not on the database server of its slot", "for fewer connections, no slot_basis"
        looked.append((Level.NOTE, apart, what, do))
    for level, where, what, do in looked:
        found = _put_off(center, topics, where)
        for topic in topics:
            if ids := [row.job_id for row in found.rows if row.biz_type == topic.biz_type]:
                some = count(len(ids), "task") + " or more" * found.more
                yield Line(level, "tasks", topic.name, f"{some} {what}", do.format(ids[0]))


def _put_off(center: TimeoutCenter, topics: Iterable[Topic], judge: str) -> OverdueRows:
    """Return those of the first tasks of topics, due or put off, of which a condition is true. A backlog of
    paused topics would hide them."""
    where = of_types([topic.biz_type for topic in topics if not topic.paused])
    return center.store.scans.overdue(center.clock.now_ms() + PUT_OFF_MS, where, judge)
