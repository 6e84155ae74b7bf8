"""Schedules, for applications and operators: create, change, show, fire now, fire for the past.

Rows are written first, as everywhere: a schedule and its occurrences in one transaction, then the index. A
change takes the first step itself, so it holds when it returns, and the workers continue from there.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice, starmap, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from typing_extensions import TypedDict, Unpack

from toc.model import errors
from toc.model import schedule as rules
from toc.model.clock import Duration, from_ms
from toc.model.schedule_state import NEAR_MS, Planned, State, change, new_state, step
from toc.model.task import SCHEDULED_FOR, NewTask, TaskRow, scheduled_for_text
from toc.model.topic import ALL, Topic, any_matches, check_native
from toc.sdk.submission import instant_ms
from toc.store.store import Store
from toc.store.tasks.schedules import StoredSchedule, occurrence_key

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter

REPEATS = 10
MAX_BACKFILL = 100_000
BACKFILL_PAGE = 1000
Found = TypeVar("Found")


class Schedule(NamedTuple):
    """A schedule as it stands. Times are aware UTC.

    ``next_time`` is when the next occurrence is due that is not a task yet, jitter included. ``fired`` counts
    occurrences that became tasks, ``skipped`` those that did not because the one before had not ended,
    ``missed`` those left out after a stop, the last of which was noticed at ``missed_at``. ``buffered`` is
    the nominal time of an occurrence that waits for the one before. ``last_job_id`` is the last occurrence's
    task. ``stuck`` says why this host cannot follow it: it does not know its zone.
    """

    name: str
    schedule_id: int
    definition: rules.Definition
    paused: bool
    next_time: datetime | None
    buffered: datetime | None
    last_job_id: int | None
    fired: int
    skipped: int
    missed: int
    missed_at: datetime | None
    created: datetime
    modified: datetime
    stuck: str = ""


class Rule(TypedDict, total=False):
    """What a schedule does beside its name and topic: fields of ``Definition``, as a caller gives them."""

    cron: str | None
    every: Duration | None
    anchor: datetime
    zone: str
    dst: rules.Dst | str
    missed: rules.Missed | str
    window: Duration
    overlap: rules.Overlap | str
    jitter: Duration
    attribute: Mapping[str, Any] | None


class Backfill(NamedTuple):
    """What a backfill does, or would do.

    ``occurrences`` are those of the range. ``present`` have a task and are left alone. ``submitted`` had
    none. Of these, ``may_have_run`` are so old that their tasks may have run and been purged: they run again.
    """

    occurrences: int
    present: int
    submitted: int
    may_have_run: int


class Declared(NamedTuple):
    """A schedule declared in code; without a topic, that of the function's handler."""

    name: str
    topic: str | None
    function: Callable[..., Any]
    options: Rule


class Schedules:
    """``center.schedules``. Thread-safe.

    Any method that asks a server raises StoreUnavailable when the server of that schedule does not answer.
    """

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self.declared: list[Declared] = []
        """What ``@center.schedule`` declares."""
        self.handled: list[tuple[str, object]] = []
        """The topics with their handlers, as registered."""

    @property
    def _store(self) -> Store:
        self._center._check_places()
        return self._center.store

    # --- create, look up

    def create(self, name: str, *, topic: str, paused: bool = False, **rule: Unpack[Rule]) -> Schedule:
        """Create a schedule: from now on a task of ``topic`` with the biz_id ``name`` at each of its times.

        ``rule`` has ``cron`` or ``every``. ``Definition`` explains the rest; numbers are seconds. Raises
        InvalidSchedule, InvalidPayload, UnknownTopic, TopicClosed, ScheduleExists; nothing is written then.
        """
        return self._create(define(name, topic=topic, **rule), paused=paused)

    def get(self, name: str) -> Schedule | None:
        """Return a schedule, or None."""
        stored = self._store.schedules.get(rules.check_schedule_name(name))
        return None if stored is None else _schedule(stored)

    def preview(self, name: str, *, count: int = 20, after: datetime | None = None) -> list[rules.Fire]:
        """Return the next times at which a schedule fires, paused or not; ``after`` defaults to now."""
        stored = self._stored(name)
        begin = self._center.clock.now_ms() if after is None else _instant("after", after)
        return rules.preview(stored.definition, begin, count)

    def list(self, *, after: str = "", limit: int = 1000, topics: Sequence[str] = ALL) -> list[Schedule]:
        """Return schedules by name: the first ``limit`` whose name is greater than ``after``.

        ``topics`` are patterns, such as "shop.*": it reads only the schedules of such topics. Leaves out rows
        that this version does not understand, which doctor names. Needs every server.
        """
        found: list[Schedule] = []
        while len(found) < limit:
            page = self._store.schedules.page(after, limit, topics)
            for stored in page:
                with contextlib.suppress(errors.InvalidSchedule):
                    if any_matches(topics, stored.definition.topic):
                        found.append(_schedule(stored))
            if len(page) < limit:
                break
            after = page[-1].name
        return found[:limit]

    # --- change

    def alter(self, /, name: str, **changes: Any) -> Schedule:
        """Change a schedule, by the names of ``create``'s parameters.

        The next occurrence is replaced if it has not started. Within a second of its time it is left as it
        is, as is one that was rescheduled by hand. Raises InvalidInput (nothing to change), InvalidSchedule,
        InvalidPayload, UnknownSchedule, UnknownTopic or TopicClosed.
        """
        if not changes:
            raise errors.InvalidInput(f"nothing to change on {errors.shown(name)}: name at least one option")
        return self._change(name, lambda definition: definition.changed(**changes))

    def pause(self, name: str) -> Schedule:
        """Start no more occurrences. Those that are left out so are not counted.

        One that waits for the one before is skipped, and counted. Raises UnknownSchedule.
        """
        return self._change(name, lambda definition: definition, paused=True)

    def resume(self, name: str) -> Schedule:
        """Continue from now. Raises UnknownSchedule."""
        return self._change(name, lambda definition: definition, paused=False)

    def delete(self, name: str) -> bool:
        """Delete a schedule and cancel its next occurrence. Returns whether there was one."""
        table = self._store.schedules
        for attempt in range(REPEATS):
            stored = table.get(rules.check_schedule_name(name))
            if stored is None:
                return attempt > 0
            try:
                planned = self._planned(stored, table.now(name))
            except errors.InvalidSchedule:  # of a later version, or damaged: its occurrences run, it does not
                planned = []
            if table.delete(stored, planned):
                return True
        raise errors.StoreUnavailable(f"schedule {name!r} keeps changing; try again")

    # --- fire besides

    def trigger(self, name: str) -> int:
        """Submit a task of the schedule now, paused or not, and return its job_id.

        Changes nothing else; its nominal time is now. Raises UnknownSchedule, SubmitUnknown.
        """
        definition = self._stored(name).definition
        attribute = _attribute(definition, self._center.clock.now_ms())
        delay = timedelta(milliseconds=1)  # topics may refuse a task that is due now
        return self._center.submit(definition.topic, biz_id=name, delay=delay, attribute=attribute)

    def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        rate: float = rules.BACKFILL_RATE,
        dry_run: bool = False,
    ) -> Backfill:
        """Submit the occurrences of the past, nominally due in [start, end], that have no task.

        Their tasks become due one after the other, ``rate`` per second, whether or not the earlier
        ones have ended. Repeating a backfill is safe while its tasks are kept; of two at once each
        counts what both submit. ``dry_run`` only counts. Raises UnknownSchedule, also if the schedule is
        deleted meanwhile, InvalidSchedule, PartialSubmit.
        """
        stored = self._stored(name)
        definition, now = stored.definition, self._store.schedules.now(name)
        begin, until = _instant("from", start), _instant("to", end)
        if begin > until:
            raise errors.InvalidSchedule(f"from {start.isoformat()} is later than to {end.isoformat()}", "to")
        until = min(until, now - definition.offset)
        if not rate >= rules.MIN_BACKFILL_RATE:
            what = f"rate = {rate} must be {rules.MIN_BACKFILL_RATE} a second or more"
            raise errors.InvalidSchedule(what, "rate")
        topic = self._center.catalog.get(definition.topic)
        kept_since = now - topic.retention * 1000
        upcoming = takewhile(lambda at: at <= until, definition.calendar.after(begin - 1))
        nominals = list(islice(upcoming, MAX_BACKFILL + 1))
        if len(nominals) > MAX_BACKFILL:
            what = f"these are more than {MAX_BACKFILL} occurrences; take a shorter range"
            raise errors.InvalidSchedule(what, "to")

        def task(number: int, nominal: int) -> NewTask:
            delay, key = 1 + int(number * 1000 / rate), occurrence_key(stored.state.schedule_id, nominal)
            after, attribute = timedelta(milliseconds=delay), _attribute(definition, nominal)
            return NewTask(definition.topic, name, after, attribute=attribute, dedup_key=key)

        present = submitted = may_have_run = 0
        for first in range(0, len(nominals), BACKFILL_PAGE):
            if first and self._stored(name).state.schedule_id != stored.state.schedule_id:
                raise errors.UnknownSchedule(f"schedule {name!r} was deleted meanwhile, and made anew")
            page = nominals[first : first + BACKFILL_PAGE]
            there = self._store.schedules.present(stored, page)
            lacking = [nominal for nominal in page if nominal not in there]
            present += len(there)
            may_have_run += sum(stored.state.created <= nominal < kept_since for nominal in lacking)
            if not dry_run and lacking:
                self._center.submit_many(starmap(task, enumerate(lacking, submitted)))
            submitted += len(lacking)
        return Backfill(len(nominals), present, submitted, may_have_run)

    # --- declared in code

    def declare(
        self, name: str, topic: str | None, function: Callable[..., Any], **options: Unpack[Rule]
    ) -> None:
        """Note a schedule for ``reconcile``. Raises InvalidSchedule, also if it is declared twice."""
        if any(declared.name == name for declared in self.declared):
            raise errors.InvalidSchedule(f"schedule {name!r} is declared twice")
        define(name, topic=topic or "unknown", **options)
        self.declared.append(Declared(name, topic, function, options))

    def reconcile(self, names: Collection[str] | None = None) -> dict[str, errors.TocError]:
        """Create the declared schedules, or those of these names, that do not exist, and change those that
        differ. Deletes none.

        A worker does it when it starts. Returns by name what could not be done.
        """
        failed: dict[str, errors.TocError] = {}
        for declared in self.declared:
            if names is None or declared.name in names:
                try:
                    self._reconcile(declared)
                except errors.TocError as exc:
                    failed[declared.name] = exc
        return failed

    def _reconcile(self, declared: Declared) -> None:
        topic = declared.topic or self._topic_of(declared)
        wanted = define(declared.name, topic=topic, **declared.options)
        if self._store.schedules.get(wanted.name) is None:
            with contextlib.suppress(errors.ScheduleExists):  # by another process that starts
                self._create(wanted, paused=False)
                return
        self._change(wanted.name, lambda _: wanted)

    def _topic_of(self, declared: Declared) -> str:
        topics = [topic for topic, function in self.handled if function is declared.function]
        if len(topics) != 1:
            raise errors.InvalidSchedule(
                f"schedule {declared.name!r} is declared at a function that is the handler of "
                f"{len(topics)} topics; give it a topic"
            )
        return topics[0]

    # --- inside

    def _create(self, definition: rules.Definition, *, paused: bool) -> Schedule:
        self._open_topic(definition)
        table = self._store.schedules
        now = table.now(definition.name)
        state = new_state(definition, secrets.randbits(63), now, paused=paused)
        return _schedule(self._begin(table.create(definition, state)))

    def _change(
        self, name: str, to: Callable[[rules.Definition], rules.Definition], *, paused: bool | None = None
    ) -> Schedule:
        table = self._store.schedules
        for _ in range(REPEATS):
            stored = self._step(self._stored(name), NEAR_MS)
            was, state = stored.definition, stored.state
            definition = to(was)
            if definition.to_json() == stored.text and paused in (None, state.paused):
                return _schedule(stored)
            if (definition.topic, definition.attribute) != (was.topic, was.attribute):
                self._open_topic(definition)
            now = table.now(name)
            planned = self._planned(stored, now if paused else now + NEAR_MS)
            instead, state = change(stored.definition, state, definition, planned, now, paused=paused)
            rows: list[TaskRow] = []
            if instead:
                topic = self._open_topic(definition)
                rows = [table.occurrence_row(definition, state, one, topic) for one in instead]
                again = {one.job_id: row.job_id for one, row in zip(planned, rows, strict=True)}
                last = state.last_job_id
                state = state._replace(last_job_id=None if last is None else again.get(last, last))
            changed = table.change(stored, definition, state, planned, rows)
            if changed is not None:
                self._center._changes.stored(rows)
                return _schedule(self._begin(changed))
        raise errors.StoreUnavailable(f"schedule {name!r} keeps changing; try again")

    def _begin(self, stored: StoredSchedule) -> StoredSchedule:
        """Take the first step of what is stored by now: if it fails, workers take it."""
        try:
            return self._step(stored)
        except (errors.StoreUnavailable, errors.SchemaBehind):
            return stored

    def _step(self, stored: StoredSchedule, ahead: int = 0) -> StoredSchedule:
        """Take the step that is due within ``ahead`` ms, and index its tasks. Returns the row after it.

        If another process has taken it, or the topic takes no tasks, or this host does not know the zone,
        there is none to take: workers continue.
        """
        table, look = self._store.schedules, stored.state.look
        topic = self._topic(stored.definition.topic)
        if look is None or topic is None or topic.closed or stored.definition.unknown:
            return stored
        now = table.now(stored.name)
        if look > now + ahead:
            return stored
        taken = step(stored.definition, stored.state, now, ended=table.ended(stored))
        moved = table.advance([table.move(stored, taken, topic)])
        for error in moved.failed.values():
            raise error
        for move in moved.done:
            self._center._changes.stored(move.rows)
            return stored._replace(state=move.state._replace(version=stored.state.version + 1))
        return table.get(stored.name) or stored

    def _planned(self, stored: StoredSchedule, later_than: int) -> Sequence[Planned]:
        """Return the occurrences that are tasks already and due later than this (ms), by nominal time."""
        topic = self._topic(stored.definition.topic)
        if topic is None:
            return []
        return self._store.schedules.planned(stored, topic.biz_type, later_than)

    def _open_topic(self, definition: rules.Definition) -> Topic:
        """Return its topic. Raises InvalidTopic, UnknownTopic, TopicClosed, InvalidPayload."""
        check_native(name := definition.topic)
        topic = self._center.catalog.get(name)
        if topic.closed:
            raise errors.TopicClosed(f"topic {name!r} is being deleted and takes no new task")
        self._center._check_payload(NewTask(name, definition.name, attribute=_attribute(definition, 0)))
        return topic

    def _topic(self, name: str) -> Topic | None:
        return self._center.catalog.known().get(name) or self._center.catalog.refresh().get(name)

    def _stored(self, name: str) -> StoredSchedule:
        return need(self._store.schedules.get(rules.check_schedule_name(name)), name)


def need(found: Found | None, name: str) -> Found:
    """Return what was found under the name of a schedule. Raises UnknownSchedule if that is nothing."""
    if found is None:
        raise errors.UnknownSchedule(f"there is no schedule {name!r}; `toc schedule list` shows all")
    return found


def define(
    name: str, *, topic: str, attribute: Mapping[str, Any] | None = None, **options: Any
) -> rules.Definition:
    """Return a checked definition, as a caller gives it. Raises InvalidSchedule."""
    try:
        return rules.Definition(name, topic, attribute=attribute or {}, **options).check_given(options)
    except TypeError as exc:
        raise errors.InvalidSchedule(str(exc).removeprefix("Definition.__init__() ")) from exc


def _schedule(stored: StoredSchedule) -> Schedule:
    state: State = stored.state

    def at(instant: int | None) -> datetime | None:
        return None if instant is None else from_ms(instant)

    return Schedule(
        stored.name, state.schedule_id, stored.definition, state.paused,
        at(None if state.next_time is None else state.next_time + stored.definition.offset),
        at(state.buffered), state.last_job_id, state.fired, state.skipped, state.missed, at(state.missed_at),
        from_ms(state.created), from_ms(state.modified),
        stored.definition.unknown,
    )  # fmt: skip


def _attribute(definition: rules.Definition, nominal: int) -> dict[str, Any]:
    """Return the attribute of a task for a nominal time (ms)."""
    return {**definition.attribute, SCHEDULED_FOR: scheduled_for_text(nominal)}


def _instant(name: str, value: datetime) -> int:
    instant = instant_ms(value, name)
    rules.check_instant(value, name)
    return instant
