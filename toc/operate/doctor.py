"""``toc doctor``: examines every part, says of each whether it is well, and what to do if not.

It changes nothing and needs no right that toc does not need anyway. A part that cannot be asked is a finding;
the others are examined all the same.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from toc.coordination.assignment import TABLES, Spread
from toc.coordination.session import Address
from toc.coordination.views import Onlooker, SlotRow, SlotState, WorkerRow
from toc.coordination.znodes import host_of
from toc.index import preflight
from toc.index.messages import SILENT_SECONDS
from toc.maintenance.depths import depths
from toc.model import errors
from toc.model.clock import from_ms
from toc.model.errors import IndexUnavailable, TocError
from toc.model.finding import Finding, Level, Line, count, is_wrong
from toc.model.horizon import LEAST
from toc.model.topic import Delivery, Slot, Topic
from toc.observe.log import redact
from toc.operate import doctor_tasks
from toc.operate.cluster import looking, slot_owners
from toc.sdk.client import TimeoutCenter

MOVE_SECONDS = 3.0
"""A slot that is moving is read again after this many seconds; a handover takes less."""
GONE_SECONDS = 86_400
"""For how long a host is named that was killed."""

WORST_FIRST = (Level.REFUSE, Level.WARN, Level.NOTE, Level.OK)
_NOBODY = {
    Delivery.HANDLER: ("no worker handles it", "deploy its handler: does the module of --app import it?"),
    Delivery.PULL: ("no gateway is there", "start `toc gateway`"),
    Delivery.WEBHOOK: ("no worker sends webhooks", "start `toc worker --webhooks`"),
}


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
    lines += _redis(center) if indexed else ()
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
    peeks = depths(store, center.queues, topics, slots, center.clock.now_ms())
    if indexed:
        lines += _answered("redis", _index_of(center, topics), lines)
        lines += _lines("redis", preflight.broken(center.queues, slots))
    progress(0.6, "looking at ZooKeeper and workers" if settings.zookeeper else "looking at workers")
    lines += _cluster(center, topics, lines)
    lines += _answered("workers", _other_rung(center), lines)
    spread = Spread(settings.databases, len(settings.database_urls))
    lines += doctor_tasks.topic_lines(topics, peeks, spread)
    lines += _answered("targets", doctor_tasks.target_lines(center, topics), lines)
    progress(0.8, "looking at schedules and overdue tasks")
    if topics_read:  # else each would be said to have no topic
        lines += _answered("tables", doctor_tasks.damaged_lines(store), lines)
        lines += _answered("schedules", doctor_tasks.schedule_lines(center, topics), lines)
        lines += _answered("tasks", doctor_tasks.due_soon_lines(center, topics, spread), lines)
        lines += doctor_tasks.overdue_lines(center, topics, peeks, lines)
    return sorted(lines, key=lambda line: WORST_FIRST.index(line.level))


def _lines(part: str, findings: Iterable[Finding]) -> list[Line]:
    return [Line(found.level, part, *found[1:]) for found in findings]


def _answered(part: str, lines: Iterator[Line], known: list[Line]) -> Iterator[Line]:
    """Return lines up to where the schema or a server fails, and that unless it is ``known``."""
    try:
        yield from lines
    except TocError as exc:
        yield from _unless_said(known, part, exc)


def _unless_said(lines: list[Line], part: str, exc: TocError) -> list[Line]:
    """Return an error as a line, unless what is wrong with its server is reported already."""
    if is_wrong(lines, "redis" if isinstance(exc, IndexUnavailable) else "database"):
        return []
    return [Line(Level.REFUSE, part, "-", str(exc), "see the other lines; then run this again")]


# --- the index --------------------------------------------------------------------------------------------


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
    since = from_ms(bound.since).isoformat(timespec="seconds")
    what = f"since {since} the horizon of {shorter} topics is {bound.seconds} s: {bound.why}"
    do = "give Redis more memory, add nodes, or raise TOC_REDIS_BUDGET"
    if shorter and bound.seconds <= LEAST:
        yield Line(Level.WARN, "redis", "-", f"{what}; it cannot be shorter", do)
    elif shorter:
        yield Line(Level.NOTE, "redis", "-", what, f"nothing is late by that; for a longer one, {do}")


# --- workers ----------------------------------------------------------------------------------------------


def _cluster(center: TimeoutCenter, topics: list[Topic], known: list[Line]) -> Iterator[Line]:
    place = None if center.settings.zookeeper is None else Address.parse(center.settings.zookeeper)
    try:
        with looking(center) as seen:
            workers, rows = seen.workers(), seen.slots()
            silent = seen.silent() if isinstance(seen, Onlooker) else _silent(center, workers)
        if place is not None:
            yield Line(Level.OK, "zookeeper", place.hosts, "it serves", "")
        moving = _moving(rows, partial(slot_owners, center), topics)
    except errors.CoordinationUnavailable as exc:
        do = "bring ZooKeeper back; if it says NoAuth, name the user that created the nodes in TOC_ZOOKEEPER"
        yield Line(Level.REFUSE, "zookeeper", "-", str(exc), do)
        return
    except TocError as exc:
        yield from _unless_said(known, "workers", exc)
        return
    for host, seconds in sorted((host, age) for host, age in silent.items() if age < GONE_SECONDS):
        what = f"its workers ended {seconds} s ago without leaving: it was killed, or is cut off"
        do = "start it again; what ran there runs elsewhere after its topic's prepare_timeout"
        yield Line(Level.WARN, "workers", host, what, do)
    if topics and not workers:
        do = "start `toc worker --app ...`, or the application with center.worker()"
        yield Line(Level.REFUSE, "workers", "-", "no worker is alive: nothing fires", do)
        return
    if workers:
        leader = next((row.member.host for row in workers if row.leader), None)
        hosts = ", ".join(sorted({row.member.host for row in workers}))
        text = f"{count(len(workers), 'worker')} on {hosts}"
        if place is None:
            yield Line(Level.OK, "workers", "-", text, "")
        elif leader:
            yield Line(Level.OK, "workers", "-", f"{text}; {leader} leads", "")
        else:
            yield Line(Level.WARN, "workers", "-", f"{text}; nobody leads", "look at the daemons' logs")
    yield from _answered("workers", _elsewhere(center, workers), known)
    if all("-embedded-" in row.member.worker_id for row in workers):
        yield from _answered("tasks", doctor_tasks.suspect_lines(center, topics), known)
    yield from _workers(workers, moving, topics)


def _other_rung(center: TimeoutCenter) -> Iterator[Line]:
    """Name the hosts whose members this command does not see: they take the slots of all others, too."""
    for host, what in center.store.other_rung(center.settings.zookeeper).items():
        yield Line(Level.REFUSE, "workers", host, what, "give everything the same TOC_ZOOKEEPER")


def _silent(center: TimeoutCenter, workers: Sequence[WorkerRow]) -> dict[str, int]:
    """Those of the members that Redis remembers which are on other hosts and did not leave."""
    heard: dict[str, int] = {}
    hosts = {row.member.host for row in workers}
    with suppress(IndexUnavailable):  # reported elsewhere
        owner = center.queues.owner()
        for worker, seconds in (owner.members if owner else {}).items():
            heard[host_of(worker)] = min(seconds, heard.get(host_of(worker), seconds))
    return {host: age for host, age in heard.items() if host not in hosts and age > SILENT_SECONDS}


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
            do = f"if others reach it, look at its network, or toc drain {host}, or without ZooKeeper stop it"
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
