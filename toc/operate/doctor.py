"""``toc doctor``: examines every part, says of each whether it is well, and what to do if not.

It changes nothing and needs no right that toc does not need anyway. A part that cannot be asked is a finding;
the others are examined all the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from toc.coordination.assignment import TABLES, Spread
from toc.coordination.coordinator import SlotRow, SlotState, WorkerRow
from toc.coordination.session import Address
from toc.coordination.znodes import host_of
from toc.index import preflight
from toc.index.calls import BySlot
from toc.index.messages import SILENT_SECONDS, Peek
from toc.maintenance.depths import depths
from toc.model import errors
from toc.model.clock import from_ms
from toc.model.errors import IndexUnavailable, TocError
from toc.model.finding import Finding, Level
from toc.model.horizon import LEAST
from toc.model.topic import Delivery, Slot, Topic
from toc.observe.log import redact
from toc.operate.cluster import onlooker, open_operator
from toc.sdk.client import TimeoutCenter
from toc.store.records.table import NamedTable
from toc.store.store import Store
from toc.store.tasks.schedules import StoredSchedule

OVERDUE_MS = 10_000
"""Tasks that have been due for this many ms and have not started are reported."""
MOVE_SECONDS = 3.0
"""A slot that is moving is read again after this many seconds; a handover takes less."""
GONE_SECONDS = 86_400
"""For how long a host is named that was killed."""
SCHEDULES_OF_EACH_TABLE = 2000
"""How many are examined."""
SCHEDULE_OVERDUE_MS = 60_000
"""A worker that is alive has moved a schedule on by then."""
PUT_OFF_MS = 60_000
"""How far ahead suspects are put off at most."""

WORST_FIRST = (Level.REFUSE, Level.WARN, Level.NOTE, Level.OK)
_NOBODY = {
    Delivery.HANDLER: ("no worker handles it", "deploy an app that has a handler for it"),
    Delivery.PULL: ("no gateway is there", "start `toc gateway`"),
    Delivery.WEBHOOK: ("no worker sends webhooks", "start `toc worker --webhooks`"),
}


class Line(NamedTuple):
    """One line of the report: ``part`` is the subsystem, ``of`` the thing in it."""

    level: Level
    part: str
    of: str
    what: str
    do: str


def problems(lines: Iterable[Line]) -> list[Line]:
    """Return the lines that report a failure or a warning."""
    return [line for line in lines if line.level in (Level.REFUSE, Level.WARN)]


def findings(lines: Iterable[Line]) -> list[dict[str, str | None]]:
    """Return the lines as they are shown, without passwords."""
    return [
        {**line._asdict(), "level": line.level.value, "what": redact(line.what), "do": line.do or None}
        for line in lines
    ]


def exit_code(lines: Iterable[Line]) -> int:
    """0: all is well; 1: there are warnings; 2: something is wrong."""
    levels = {line.level for line in lines}
    return 2 if Level.REFUSE in levels else 1 if Level.WARN in levels else 0


def examine(
    center: TimeoutCenter, progress: Callable[[float, str], None] = lambda _part, _text: None
) -> list[Line]:
    """Return all findings, the worst first. Raises ConfigError when a setting makes no sense.

    ``progress`` gets the part done (0 to 1) and what is examined next: a server that does not answer costs
    its timeout, several times over.
    """
    settings, store = center.settings, center.store
    settings.need_database_urls()
    lines = _lines("database", store.examine())
    try:
        indexed = center.queues.present
    except (errors.StoreUnavailable, errors.SchemaBehind) as exc:
        return [*lines, *_unless_said(lines, "database", exc)]
    progress(0.2, "looking at Redis")
    lines += _redis(center) if indexed else _no_index()
    progress(0.4, "looking at topics and slots")
    topics: list[Topic] = []
    topics_read = False
    try:
        topics, topics_read = store.topics.list(), True
    except TocError as exc:
        lines += _unless_said(lines, "topics", exc)
    if topics_read and not topics:
        do = "toc topic create NAME --biz-type N --slots N"
        lines.append(Line(Level.NOTE, "topics", "-", "there are no topics yet", do))
    slots = [slot for topic in topics for slot in topic.slots()]
    peeks: BySlot[Peek] = {}
    with suppress(TocError):  # the server fails: reported elsewhere
        peeks = depths(store, center.queues, topics, slots, center.clock.now_ms())
    if indexed:
        lines += _answered(_index_of(center, topics))
        lines += _lines("redis", preflight.broken(center.queues, slots))
        lines += _without_index(peeks)
    progress(0.6, "looking at ZooKeeper and workers" if settings.zookeeper else "looking at workers")
    lines += _cluster(center, topics, lines)
    lines += _topics(topics, peeks, Spread(settings.databases, len(settings.database_urls)))
    lines += _answered(_damaged_rows(store))
    lines += _answered(target_lines(center, topics))
    progress(0.8, "looking at schedules and overdue tasks")
    if topics_read:  # else each would be said to have no topic
        lines += _answered(schedule_lines(center, topics))
        lines += _overdue(center, topics, peeks, lines)
    return sorted(lines, key=lambda line: WORST_FIRST.index(line.level))


def _lines(part: str, findings: Iterable[Finding]) -> list[Line]:
    return [Line(found.level, part, *found[1:]) for found in findings]


def _answered(lines: Iterator[Line]) -> Iterator[Line]:
    """Return lines up to where the schema or a server fails, which is reported elsewhere."""
    with suppress(TocError):
        yield from lines


def _unless_said(lines: list[Line], part: str, exc: TocError) -> list[Line]:
    """Return an error as a line, unless what is wrong with its server is reported already."""
    if _is_wrong(lines, "redis" if isinstance(exc, IndexUnavailable) else "database"):
        return []
    return [Line(Level.REFUSE, part, "-", str(exc), "see the other lines; then run this again")]


def _is_wrong(lines: Iterable[Line], part: str) -> bool:
    """Whether something is wrong with a part. Other errors may be due to that, and are not reported."""
    return any(line.part == part and line.level is Level.REFUSE for line in lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _when(milliseconds: int) -> str:
    return from_ms(milliseconds).isoformat(timespec="seconds")


# --- the index --------------------------------------------------------------------------------------------


def _no_index() -> Iterator[Line]:
    what = "there is no index: tasks that are submitted less than a second ahead start up to a second late"
    do = "for milliseconds always, set TOC_REDIS_URL and run `toc index on`"
    yield Line(Level.NOTE, "redis", "-", what, do)


def _redis(center: TimeoutCenter) -> Iterator[Line]:
    """Its servers, and whether the rows say that there is none."""
    try:
        yield from _lines("redis", preflight.examine(center.queues))
    except IndexUnavailable as exc:
        servers = ", ".join(map(str, center.queues.nodes.location.addresses))
        do = "bring it back, or correct TOC_REDIS_URL"
        yield Line(Level.REFUSE, "redis", servers, str(exc), do)
    with suppress(TocError):  # the schema or the server fails: reported elsewhere
        if not center.store.identity.indexed():
            what = "TOC_REDIS_URL is set, and the tasks are not indexed: workers and gateways are refused"
            yield Line(Level.REFUSE, "redis", "-", what, "unset it, or run `toc index on`")


def _index_of(center: TimeoutCenter, topics: list[Topic]) -> Iterator[Line]:
    """Whether the index belongs to this task table, and memory bounds the horizon of topics."""
    identity = center.store.identity
    yield from _lines("redis", preflight.owner(center.queues, identity.get()))
    bound = identity.horizon()
    shorter = sum(0 < bound.seconds < topic.horizon for topic in topics)
    what = f"since {_when(bound.since)} the horizon of {shorter} topics is {bound.seconds} s: {bound.why}"
    do = "give Redis more memory, add nodes, or raise TOC_REDIS_BUDGET"
    if shorter and bound.seconds <= LEAST:
        yield Line(Level.WARN, "redis", "-", f"{what}; it cannot be shorter", do)
    elif shorter:
        yield Line(Level.NOTE, "redis", "-", what, f"nothing is late by that; for a longer one, {do}")


def _without_index(peeks: BySlot[Peek]) -> Iterator[Line]:
    away = sum(isinstance(peek, IndexUnavailable) for peek in peeks.values())
    if away:
        what = (
            f"{away} of {len(peeks)} slots are out of reach from here: "
            "workers that cannot reach them either take their due tasks from the task table"
        )
        do = "bring Redis back; the metric toc_slots_without_redis counts the slots that workers cannot reach"
        yield Line(Level.WARN, "slots", "-", what, do)


# --- workers ----------------------------------------------------------------------------------------------


def _cluster(center: TimeoutCenter, topics: list[Topic], known: list[Line]) -> Iterator[Line]:
    place = None if center.settings.zookeeper is None else Address.parse(center.settings.zookeeper)
    try:
        if place is None:
            what = "TOC_ZOOKEEPER is not set: daemons share the work by rows in the first database"
            do = "set it for many hosts, or to drain, pin and weigh them"
            yield Line(Level.NOTE, "workers", "-", what, do)
            seen = onlooker(center)
            workers = seen.workers()
            moving = _moving(seen.slots(), lambda: onlooker(center).slots(), topics)
            silent = {host: age for host, age in seen.silent().items() if age < GONE_SECONDS}
        else:
            yield from _secrecy(place)
            with open_operator(center.settings) as operator:
                workers, rows = operator.workers(), operator.slots()
                yield Line(Level.OK, "zookeeper", place.hosts, "it serves", "")
                if nodes := operator.open_nodes():
                    what = f"anyone can change {', '.join(nodes)}: created before TOC_ZOOKEEPER named a user"
                    do = "in zkCli.sh, after addauth digest user:password: setAcl -R /toc/CLUSTER auth::cdrwa"
                    yield Line(Level.WARN, "zookeeper", "-", what, do)
                moving = _moving(rows, operator.slots, topics)
            silent = _silent(center, {row.member.host for row in workers})
    except errors.CoordinationUnavailable as exc:
        do = "bring ZooKeeper back; if it says NoAuth, name the user that created the nodes in TOC_ZOOKEEPER"
        yield Line(Level.REFUSE, "zookeeper", "-", str(exc), do)
        return
    except TocError as exc:
        yield from _unless_said(known, "workers", exc)
        return
    for host, seconds in sorted(silent.items()):
        what = f"its workers ended {seconds} s ago without leaving: it was killed, or is cut off"
        do = "start it again; what ran there runs elsewhere after its topic's prepare_timeout"
        yield Line(Level.WARN, "workers", host, what, do)
    if topics and not workers:
        yield from _nobody(center)
        return
    if workers:
        leader = next((row.member.host for row in workers if row.leader), None)
        hosts = ", ".join(sorted({row.member.host for row in workers}))
        text = f"{_count(len(workers), 'worker')} on {hosts}"
        if place is None:
            yield Line(Level.OK, "workers", "-", text, "")
        elif leader:
            yield Line(Level.OK, "workers", "-", f"{text}; {leader} leads", "")
        else:
            yield Line(Level.WARN, "workers", "-", f"{text}; nobody leads", "look at the daemons' logs")
    yield from _answered(_elsewhere(center, workers))
    if all("-embedded-" in row.member.worker_id for row in workers):
        yield from _answered(_suspects(center, topics))
    yield from _workers(workers, moving, topics)


def _suspects(center: TimeoutCenter, topics: list[Topic]) -> Iterator[Line]:
    """Look for tasks that several workers did not survive: only a daemon runs them."""
    where, soon = f" AND crashes>={center.settings.max_crashes:d}", center.clock.now_ms() + PUT_OFF_MS
    found = Counter(row.biz_type for row in center.store.scans.overdue(soon, where).rows)
    for topic in topics:
        if topic.delivery is Delivery.HANDLER and (tasks := found[topic.biz_type]):
            what = f"{_count(tasks, 'task')} that several workers did not survive: only a daemon runs them"
            yield Line(Level.WARN, "tasks", topic.name, what, "run toc worker --app ... beside them")


def _silent(center: TimeoutCenter, hosts: Collection[str]) -> dict[str, int]:
    """Those of the members that Redis remembers which are on other hosts and did not leave."""
    heard: dict[str, int] = {}
    with suppress(IndexUnavailable):  # reported elsewhere
        owner = center.queues.owner()
        for worker, seconds in (owner.members if owner else {}).items():
            heard[host_of(worker)] = min(seconds, heard.get(host_of(worker), seconds))
    return {host: age for host, age in heard.items() if host not in hosts and age > SILENT_SECONDS}


def _nobody(center: TimeoutCenter) -> Iterator[Line]:
    """Say that there is no worker, unless this Redis is another task table's, which is reported."""
    do = "start `toc worker --app ...`, or the application with center.worker(); its log says why if it ends"
    if center.settings.zookeeper is not None:
        with suppress(TocError):  # reported elsewhere
            owner = center.queues.owner()
            if owner is None:
                do += ". If one runs, it uses another Redis: "
                do += "compare TOC_REDIS_URL and TOC_NAMESPACE with its own"
            elif owner.identity != center.store.identity.get():
                return
    yield Line(Level.REFUSE, "workers", "-", "no worker is alive: nothing fires", do)


def _elsewhere(center: TimeoutCenter, workers: Sequence[WorkerRow]) -> Iterator[Line]:
    """Name the hosts whose workers use another index: they hold slots, and look for the tasks elsewhere."""
    settled = center.clock.now_ms() - SILENT_SECONDS * 1000
    hosts = {
        row.member.worker_id: row.member.host
        for row in workers
        if row.member.joined < settled and not row.member.out_of_reach
    }
    suspects = preflight.unheard(center.queues, center.store.identity.get(), hosts)
    if suspects:  # a Redis that was just emptied hears of them again
        time.sleep(MOVE_SECONDS)
        suspects &= preflight.unheard(center.queues, center.store.identity.get(), hosts)
    what = "its workers use another index than this command: tasks of its slots, or of all others, wait"
    do = "give all hosts the same TOC_REDIS_URL and TOC_NAMESPACE"
    for host in sorted({hosts[worker] for worker in suspects}):
        yield Line(Level.REFUSE, "workers", host, what, do)


def _workers(workers: list[WorkerRow], moving: Mapping[Slot, str], topics: list[Topic]) -> Iterator[Line]:
    for row in workers:
        if row.member.out_of_reach:
            what = f"does not reach {', '.join(sorted(row.member.out_of_reach))}; it keeps its slots"
            host = row.member.host
            do = f"if others reach it, look at the network of {host}, or toc drain {host}"
            yield Line(Level.WARN, "workers", row.member.worker_id, what, do)
    newest = max((row.member.protocol for row in workers), default=0)
    older = {row.member.host: row.member for row in workers if row.member.protocol < newest}
    for host, member in sorted(older.items()):
        what = f"runs release {member.version} with protocol {member.protocol}; others have {newest}"
        do = "upgrade it: what needs the higher one is refused until then"
        yield Line(Level.WARN, "workers", host, what, do)
    for topic in topics:
        able = [row for row in workers if row.member.can_handle(topic.name, topic.delivery)]
        if workers and not able:
            what, do = _NOBODY[topic.delivery]
            yield Line(Level.REFUSE, "topics", topic.name, f"{what}: its tasks wait", do)
        elif able and topic.delivery is not Delivery.PULL and all(row.drained for row in able):
            hosts = ", ".join(sorted({row.member.host for row in able}))
            what = f"every host that handles it is drained ({hosts}): its tasks wait"
            yield Line(Level.REFUSE, "topics", topic.name, what, "toc undrain one of them")
    for slot, why in sorted(moving.items()):
        do = "see toc slots; if it lasts, read the log of that host"
        yield Line(Level.WARN, "slots", str(slot), why, do)
    if workers and not moving:
        what = "each slot that a worker can have is held by the one it is assigned to"
        yield Line(Level.OK, "slots", "-", what, "")


def _secrecy(place: Address) -> Iterator[Line]:
    if place.credential is None:
        what = "no user is set, so anyone who can reach ZooKeeper can change who owns which slot"
        do = "set TOC_ZOOKEEPER=user:password@host:port: then only that user can change the nodes"
        yield Line(Level.NOTE, "zookeeper", place.hosts, what, do)
    elif not place.tls:
        what = "the password in TOC_ZOOKEEPER is sent unencrypted"
        do = "set secureClientPort in zoo.cfg, and append ?tls=true&ca=... to TOC_ZOOKEEPER"
        yield Line(Level.NOTE, "zookeeper", place.hosts, what, do)


def _moving(
    rows: Sequence[SlotRow], again: Callable[[], Sequence[SlotRow]], topics: list[Topic]
) -> dict[Slot, str]:
    """Return the slots that the assigned worker does not own, and still does not a little later: why."""
    moving = _not_owned(rows, topics)
    if moving:
        time.sleep(MOVE_SECONDS)
        later = _not_owned(again(), topics)
        moving = {slot: why for slot, why in later.items() if slot in moving}
    return moving


def _not_owned(rows: Sequence[SlotRow], topics: list[Topic]) -> dict[Slot, str]:
    amounts = {topic.name: topic.slot_amount for topic in topics}
    found = {
        Slot(row.topic, row.number): row.reason
        for row in rows
        if row.state is SlotState.MOVING and (row.topic in amounts or row.topic == TABLES)
    }
    absent = {slot for topic in topics for slot in topic.slots()}
    absent -= {Slot(row.topic, row.number) for row in rows}
    return found | dict.fromkeys(absent, "it is missing from the assignment")


# --- topics and their tasks -------------------------------------------------------------------------------


def _damaged_rows(store: Store) -> Iterator[Line]:
    """Name the rows of small tables that count for nothing, because they hold what toc never writes."""
    tables: list[NamedTable[Any]] = [store.topics, store.templates, store.tokens, store.targets]
    for table in tables:
        for name in sorted(table.damaged()):
            what = "its row cannot be understood and counts for nothing: another program has changed it"
            do = "correct the row; the log says what is wrong"
            yield Line(Level.REFUSE, f"{table.noun}s", name, what, do)


def _topics(topics: list[Topic], peeks: BySlot[Peek], spread: Spread) -> Iterator[Line]:
    dead: Counter[str] = Counter()
    for slot, peek in peeks.items():
        if isinstance(peek, Peek):
            dead[slot.topic] += peek.dead
    for topic in topics:
        if topic.paused:
            what = "paused: tasks are kept, none is started"
            yield Line(Level.NOTE, "topics", topic.name, what, f"toc topic resume {topic.name}")
        if dead[topic.name]:
            what = _count(dead[topic.name], "dead task")
            yield Line(Level.WARN, "tasks", topic.name, what, f"toc dead list --topic {topic.name}")
        if spread.servers > 1 and spread.server(topic.slot_amount, 0) is None:
            what = (
                f"each of its {topic.slot_amount} slots has tasks on several database servers: "
                f"its workers need connections to all of these"
            )
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


def _overdue(
    center: TimeoutCenter, topics: list[Topic], peeks: BySlot[Peek], known: list[Line]
) -> Iterator[Line]:
    """Look for overdue tasks in the rows (a bounded read), so that entries missing in the index show too."""
    now = center.clock.now_ms()
    paused = {topic.name: str(topic.biz_type) for topic in topics if topic.paused}
    where = f" AND biz_type NOT IN ({','.join(paused.values())})" if paused else ""
    found = center.store.scans.overdue(now - OVERDUE_MS, f"{where} AND {center.store.leases.unstarted()}")
    names = {topic.biz_type: topic.name for topic in topics}
    strange: dict[int, list[int]] = {}
    late: dict[str, list[int]] = {}
    waits: Counter[str] = Counter()
    taken: Collection[int] = ()
    with suppress(TocError):  # the server fails: reported elsewhere
        taken = center.store.leases.living([row.job_id for row in found.rows])
    for row in found.rows:
        name = names.get(row.biz_type)
        if name is None:
            strange.setdefault(row.biz_type, []).append(row.job_id)
        else:
            late.setdefault(name, []).append(now - row.next_time)
            waits[name] += row.job_id in taken
    told_of = {*late, *paused}
    for slot, peek in peeks.items() if found.more else ():
        # Rows of a backlog were read instead of this topic's, whose slots tell.
        if slot.topic not in told_of and isinstance(peek, Peek) and peek.due and peek.next_due is not None:
            late_ms = peek.redis_now_ms - int(peek.next_due)
            if late_ms >= OVERDUE_MS:
                late.setdefault(slot.topic, []).extend([late_ms] * peek.due)
    more = "at least " if found.more else ""
    lines = [
        _late_line(topic, late[topic.name], waits[topic.name], more) for topic in topics if topic.name in late
    ]
    deleted: Collection[int] = ()
    with suppress(TocError):  # the server fails: reported elsewhere
        deleted = center.store.topics.retired() if strange else ()
    for biz_type, job_ids in strange.items():
        what = f"{more}{len(job_ids)} overdue tasks have a biz_type that no topic has"
        do = "create the topic again with that biz_type"
        if biz_type in deleted:
            # Nothing uses a biz_type again. A process that could not read the topics has submitted them.
            what = f"{more}{len(job_ids)} overdue tasks are of a deleted topic, and never run"
            do = f"toc cancel {min(job_ids)}" + ("; then run this again" if job_ids[1:] else "")
        lines.append(Line(Level.REFUSE, "tasks", f"biz_type {biz_type}", what, do))
    if found.failed:
        why = next(iter(found.failed.values()))
        what = f"overdue tasks in {len(found.failed)} tables could not be looked up: {why}"
        if not _is_wrong(known, "database"):
            do = "see the other lines; then run this again"
            lines.append(Line(Level.WARN, "tasks", "-", what, do))
    elif not lines:
        aside = "; those of paused topics are not looked at" if paused else ""
        what = f"none is overdue by more than {OVERDUE_MS // 1000} s{aside}"
        lines.append(Line(Level.OK, "tasks", "-", what, ""))
    yield from lines


def _late_line(topic: Topic, overdue: Sequence[int], waits: int, more: str) -> Line:
    """Tell by how many ms tasks are overdue; ``waits`` of them wait in workers for a handler."""
    first_ms = max(overdue)
    what = f"{more}{_count(len(overdue), 'task')} overdue, the first by {first_ms / 1000:.0f} s"
    do = f"toc slots --topic {topic.name}: does every slot have an owner? If so, toc late says why"
    if topic.delivery is Delivery.PULL:
        do = "only consumers take them: do they pull this topic, and fast enough?"
    if waits:
        what += f"; {waits} of them wait in workers that cannot start more"
        do = "its handlers are slow or too few: see toc top; add hosts or threads"
    if topic.resumed_at and first_ms > OVERDUE_MS:
        what += f"; it was resumed at {_when(topic.resumed_at)}"
        what += f", at most {topic.resume_rate} waiting tasks a second" if topic.resume_rate else ""
    return Line(Level.WARN, "tasks", topic.name, what, do)
