"""The SDK: register handlers; submit, cancel, reschedule and look up tasks.

Every change is written to the row first, then to the index. The row is the promise: if Redis is out of reach,
the task is acknowledged all the same, and the sweep indexes it later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload
from weakref import WeakSet

from typing_extensions import TypedDict, Unpack

from toc.failpoint import failpoint
from toc.model import errors
from toc.model.clock import Clock, Duration
from toc.model.handler import Handler
from toc.model.sharding import BizId
from toc.model.task import (
    Body,
    CancelOutcome,
    NewTask,
    OnConflict,
    Put,
    Request,
    RescheduleOutcome,
    Submission,
    Task,
    TaskRow,
)
from toc.model.topic import Declaration, Topic
from toc.observe.log import get_logger
from toc.sdk.changes import Change, Changes, InTransaction
from toc.sdk.handlers import Registry
from toc.sdk.hooks import Hooks
from toc.sdk.parts import Parts, StandIn, Within
from toc.sdk.schedules import Rule, Schedules
from toc.sdk.submission import OF_TIMES, at_any_time, check_job_id
from toc.store.tasks.callers_transaction import AfterCommit, connection_of

if TYPE_CHECKING:
    from toc.config import Settings
    from toc.sdk.parts import AnyConnection, AnySession
    from toc.worker.embedded import EmbeddedWorker

log = get_logger(__name__)

CANCEL_TOGETHER = 500
"""How many tasks one transaction of ``cancel_by_biz`` cancels."""

F = TypeVar("F", bound=Callable[..., Any])
Stored = TypeVar("Stored")


class Deadline(TypedDict, total=False):
    """What ``reschedule`` gives a task."""

    action_time: datetime | None
    delay: Duration | None
    expires_at: datetime | None


class DeadlineWithin(Deadline, Within, total=False):
    """The same in the caller's transaction."""


_centers: WeakSet[TimeoutCenter] = WeakSet()
_stand_in: StandIn | None = None


def stand_in(parts: StandIn | None, gone: Iterable[TimeoutCenter] = ()) -> None:
    """Have every center of this process use these parts, also those that are made later. None: their own.
    Those that are ``gone`` are none any more, although something may refer to them.

    For tests of applications (``toc.testing``): what the application has made at import is used as it is.
    """
    global _stand_in
    _stand_in = parts
    _centers.difference_update(gone)
    for center in all_centers():
        center.use(parts)


def process_clock() -> Clock:
    """Return the clock of this process: in a test of an application, the test's."""
    return Clock() if _stand_in is None else _stand_in.clock


def all_centers() -> list[TimeoutCenter]:
    """Return the centers of this process."""
    return list(_centers)


def _call(method: F) -> F:
    """Have ``on_call`` told of the calls of a method."""

    @wraps(method)
    def call(self: TimeoutCenter, *args: Any, **more: Any) -> Any:
        with self.hooks.call(method.__name__):
            return method(self, *args, **more)

    return cast(F, call)


class TimeoutCenter(Parts, Registry[int]):
    """One application's access to the timeout center. Thread-safe and fork-safe; connects on first use.

    ``settings`` default to the TOC_* variables and toc.toml, which are read at the first use: making a center
    needs none. Close it, or use it as a context manager.
    """

    def __init__(self, settings: Settings | None = None, *, clock: Clock | None = None) -> None:
        self.handlers: dict[str, Handler] = {}
        self.topics: dict[str, Declaration] = {}
        self.hooks = Hooks(self)
        self._changes = Changes(self)
        self._after_commit = AfterCommit(self._committed)
        self.schedules = Schedules(self)
        """Schedules: each submits a task at each of its times."""
        self.handled = self.schedules.handled
        super().__init__(settings, clock)
        _centers.add(self)
        if _stand_in is not None:
            self.use(_stand_in)

    def close(self) -> None:
        """Close every connection. May be called twice; the next use connects again."""
        self._after_commit.close()
        self.hooks.close()
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- handlers

    def worker(self, *, threads: int | None = None) -> EmbeddedWorker:
        """Return a worker that runs the handlers in this process: ``with center.worker():``, or ``async
        with``, as in a FastAPI lifespan. ``threads`` run plain functions: by default TOC_THREADS.

        See EmbeddedWorker.
        """
        from toc.worker.embedded import EmbeddedWorker  # what only submits need not load it

        return EmbeddedWorker(self, threads=threads)

    def schedule(
        self, /, name: str, *, topic: str | None = None, **options: Unpack[Rule]
    ) -> Callable[[F], F]:
        """Declare a schedule at the handler that runs its tasks: above or below ``@center.handler``.

        ``options`` are those of ``schedules.create``. A worker creates it when it starts, or changes it if it
        differs; nothing deletes it. Raises InvalidSchedule.
        """

        def register(function: F) -> F:
            self.schedules.declare(name, topic, function, **options)
            return function

        return register

    # --- submit

    @_call
    def submit(
        self,
        topic: str,
        *,
        biz_id: int | str,
        delay: Duration | None = None,
        action_time: datetime | None = None,
        attribute: Mapping[str, Any] | None = None,
        dedup_key: str | None = None,
        slot_basis: str | None = None,
        session: AnySession | None = None,
        connection: AnyConnection | None = None,
        tries: int = 0,
        expires_at: datetime | None = None,
        body: bytes | None = None,
        content_type: str | None = None,
        on_conflict: str = OnConflict.KEEP,
        target: str | None = None,
        url: str | None = None,
        past: str = "refuse",
        expires_in: Duration | None = None,
    ) -> int:
        """Store a task and return its job_id. From then on the task will run, unless it is cancelled.

        A job_id is a whole number above 2^53: keep it in a BIGINT column, send it in JSON as a text.

        ``delay`` is a timedelta, seconds or a text such as "30m"; ``action_time`` an aware datetime, rounded
        up to a millisecond. A second submit with the same topic, biz_id and ``dedup_key`` returns the first
        job_id. ``slot_basis`` chooses the slot (default: the biz_id). ``body`` holds at most TOC_MAX_BODY
        bytes; ``content_type`` is by default application/octet-stream.

        With ``session`` (a Session, or an AsyncSession within its ``run_sync``) or ``connection`` the row is
        written in the caller's transaction: the task exists exactly if that commits, and is indexed after it.
        Raises WrongShardConnection unless that server holds the task's shard; TwoPhase, Serializable.

        ``past="run"`` accepts a deadline that has passed, as of a backlog: the task is due now, and counts
        as late from now on only.

        ``tries`` is the number of all its tries, at most 65,534; 0: as many as its topic gives; 65,535: no
        limit. No try starts after ``expires_at``, an aware datetime not before the action_time, or
        ``expires_in`` (a duration) after it; without either, the topic's ``expires_in`` counts. A task that
        has not ended by then becomes cancelled if no try ever started, else dead. A running try may finish.

        ``on_conflict`` says what to do if a task already has the dedup_key. ``"keep"`` returns its job_id.
        ``"error"`` raises TaskExists. ``"replace"`` gives a pending task the new time, content and tries. If
        that task has ended, it loses its dedup_key and a new task is stored. ``put`` tells which happened.

        If the topic's delivery is webhook, ``target`` names the target that the task is sent to, instead of
        the topic's; its ``topics`` must include this one. ``url`` is a URL of its own or, with a target, a
        path of that target, such as "/paid". A task whose target is deleted later waits for it.

        Raises an InvalidInput before anything is written, StoreUnavailable when nothing was stored, and
        SubmitUnknown when the task may or may not be stored. After either, roll a ``session`` back.
        """
        task = NewTask(
            topic, biz_id, delay, action_time, attribute, dedup_key, slot_basis, tries, expires_at, body,
            content_type, on_conflict, target, url, past, expires_in,
        )  # fmt: skip
        if (theirs := self._theirs(session, connection)) is not None:
            return self._put_many([task], theirs)[0]
        return self._put(task).job_id

    @_call
    def put(self, task: NewTask, *, request: Request | None = None) -> Put:
        """Store a task, or do with the task that has its dedup_key what ``on_conflict`` says; return which.

        A task that is replaced while a try may be running runs again at its new time, but not before that
        try's lease has ended. A ``request`` that was answered within the last day gets that answer
        again, and changes nothing.

        Raises what ``submit`` raises, TaskExists, and RequestReused if the name was used for another request.
        """
        return self._put(task, request)

    def _put(self, task: NewTask, request: Request | None = None) -> Put:
        try:
            one = self._checked(task, request)
        except errors.InvalidInput as exc:
            return self._before(task, request, exc)

        def put() -> Put:
            self._check_places()
            stored = self.store.put(one)  # [rule: row-first]
            self._changes.apply([stored])
            return stored.put

        return self._traced([one], put, lambda stored: [stored.job_id])

    def _before(
        self, task: NewTask, request: Request | None, refused: errors.InvalidInput, topic: Topic | None = None
    ) -> Put:
        """Return what a submit that is ``refused`` was answered before, by its request or its dedup_key.

        What was valid the first time may not be when it is repeated, such as a time now past. Raises
        ``refused`` if there is no such answer; DedupConflict, TaskExists, RequestReused. ``topic`` takes the
        place of the task's.
        """
        if request is not None:
            answer = self.store.requests.answer(request, BizId.of(task.biz_id))
            if answer is not None:
                return answer
        if task.dedup_key is None or not isinstance(refused, OF_TIMES):
            raise refused
        one = self._intake.submission(at_any_time(task), lambda name: topic or self.catalog.get(name))
        kept = None if one.on_conflict is OnConflict.REPLACE else self.store.kept(one)
        if kept is None:
            raise refused
        return kept

    @_call
    def submit_many(self, tasks: Iterable[NewTask], **within: Unpack[Within]) -> list[int]:
        """Store many tasks, one round trip per server and thousand; return their job_ids in the order given.

        With bodies, a round trip holds about half a megabyte of them.

        All tasks are checked before any is written. Raises what ``submit`` raises, or PartialSubmit when one
        server failed after another had stored its part. ``session`` and ``connection``: as for ``submit``;
        if it raises, roll back.
        """
        return self._put_many(tasks, self._theirs(**within))

    def _put_many(self, tasks: Iterable[NewTask], theirs: InTransaction | None) -> list[int]:
        many: list[Submission] = []
        refused: dict[int, errors.InvalidInput] = {}
        for n, task in enumerate(tasks):
            try:
                one = self._checked(task)
            except OF_TIMES as exc:  # unless it was submitted before
                if task.dedup_key is None:
                    raise
                one, refused[n] = self._checked(at_any_time(task)), exc
            many.append(one)
        if any(one.on_conflict is not OnConflict.KEEP for one in many):
            raise errors.InvalidInput(
                "submit_many, session= and connection= accept only on_conflict='keep'; use put, one by one"
            )
        if theirs is not None:
            return self._traced(many, lambda: theirs.submit(many, refused), list)
        self._check_places()
        return self._traced(many, lambda: self.store.put_many(many, self._changes.stored, refused), list)

    @_call
    def index(self, job_ids: Iterable[int]) -> None:
        """Put tasks that were stored in a caller's transaction into the index now, after the commit.

        Optional: a thread does it after SQLAlchemy's commit, and the sweep within a second. Ignores ids that
        are unknown or not pending. Raises InvalidInput or StoreUnavailable.
        """
        checked = [check_job_id(job_id) for job_id in job_ids]
        self._check_layout()
        self._changes.add(self.store.read(checked).values())

    # --- change

    @overload
    def cancel(self, job_id: int) -> CancelOutcome: ...
    @overload
    def cancel(self, job_id: int, **within: Unpack[Within]) -> Change[CancelOutcome]: ...
    @_call
    def cancel(self, job_id: int, **within: Unpack[Within]) -> CancelOutcome | Change[CancelOutcome]:
        """Cancel a pending task. Raises StoreUnavailable when it is not known to be cancelled.

        Cancels the row, then removes the entry. The outcome is MAY_HAVE_STARTED if the entry is in the
        PrepareQueue after the due time, or if the index cannot be asked and the due time is near.

        With ``session`` or ``connection`` the row is cancelled in the caller's transaction; the ``outcome``
        of what is returned exists after the commit. Raises what ``submit`` raises with them.
        """
        job_id = check_job_id(job_id)
        self._check_places()
        if (theirs := self._theirs(**within)) is not None:
            return theirs.cancel([job_id], lambda outcomes: outcomes[job_id])
        return self._changes.cancel([job_id])[job_id]

    @overload
    def cancel_by_biz(self, topic: str, biz_id: int | str) -> dict[int, CancelOutcome]: ...
    @overload
    def cancel_by_biz(
        self, topic: str, biz_id: int | str, **within: Unpack[Within]
    ) -> Change[dict[int, CancelOutcome]]: ...
    @_call
    def cancel_by_biz(
        self, topic: str, biz_id: int | str, **within: Unpack[Within]
    ) -> dict[int, CancelOutcome] | Change[dict[int, CancelOutcome]]:
        """Cancel every task of one biz_id on a topic; return each outcome by job_id.

        Takes a few round trips per 500 tasks. Raises InvalidBizId, UnknownTopic, StoreUnavailable when
        nothing is known to be cancelled, or PartialCancel when it failed after some outcomes were known.
        ``session`` and ``connection``: as for ``cancel``, all in the caller's one transaction; the
        ``outcome`` of the Change is then that dict.
        """
        biz = BizId.of(biz_id)
        biz_type = self.catalog.get(topic).biz_type
        self._check_places()
        if (theirs := self._theirs(**within)) is not None:
            job_ids = theirs.ids(biz, biz_type)
            return theirs.cancel(job_ids, lambda outcomes: outcomes)
        job_ids = self.store.ids_of(biz, biz_type)
        outcomes: dict[int, CancelOutcome] = {}
        for first in range(0, len(job_ids), CANCEL_TOGETHER):
            try:
                outcomes |= self._changes.cancel(job_ids[first : first + CANCEL_TOGETHER])
            except (errors.StoreUnavailable, errors.SchemaBehind) as exc:
                if not outcomes:
                    raise
                raise errors.PartialCancel(outcomes, job_ids[first:]) from exc
        return outcomes

    @overload
    def reschedule(self, job_id: int, **deadline: Unpack[Deadline]) -> RescheduleOutcome: ...
    @overload
    def reschedule(self, job_id: int, **deadline: Unpack[DeadlineWithin]) -> Change[RescheduleOutcome]: ...
    @_call
    def reschedule(
        self,
        job_id: int,
        *,
        action_time: datetime | None = None,
        delay: Duration | None = None,
        expires_at: datetime | None = None,
        **within: Unpack[Within],
    ) -> RescheduleOutcome | Change[RescheduleOutcome]:
        """Give a pending task another deadline, as to ``submit``, and all its tries. Raises what that does.

        ``expires_at``: None leaves it as it is; what the topic's ``expires_in`` has given moves along. A task
        that expires before ``action_time`` needs another one: InvalidExpiry. ``session`` and ``connection``:
        as for ``cancel``.
        """
        job_id = check_job_id(job_id)
        self._check_places()
        theirs = self._theirs(**within)
        row = self.store.get(job_id)
        if row is None and theirs is None:
            return RescheduleOutcome.UNKNOWN
        topic = None if row is None else self.catalog.of_type(row.biz_type)
        due = self._intake.deadline(topic, delay, action_time)
        told = self._intake.expiry(expires_at, due)

        def expiry(row: TaskRow) -> int:
            topic = self.catalog.of_type(row.biz_type)
            by_topic = 0 if told or topic is None else topic.expires_in
            if by_topic and row.expires_at == row.action_time + 1000 * by_topic:
                return self._intake.expiry(None, due, by_topic)
            return told or row.expires_at

        if theirs is not None:
            return theirs.reschedule(job_id, due, expiry)
        changed, row = self.store.reschedule(job_id, due, expiry)
        failpoint("reschedule.row-written")
        return self._changes.judge_reschedule(row, due, changed=changed)

    # --- look up

    @_call
    def get(self, job_id: int) -> Task | None:
        """Return the task, or None. Raises StoreUnavailable."""
        job_id = check_job_id(job_id)
        self._check_layout()
        row = self.store.get(job_id)
        return None if row is None else self._task(row)

    @_call
    def find(self, *, biz_id: int | str, topic: str | None = None) -> list[Task]:
        """Return all stored tasks of a biz_id, oldest first.

        Raises StoreUnavailable; UnreadableTask if the row of one of them cannot be read.
        """
        biz = BizId.of(biz_id)
        biz_type = None if topic is None else self.catalog.get(topic).biz_type
        self._check_layout()
        rows = self.store.find(biz, biz_type)
        return [self._task(row) for row in rows]

    # --- inside

    def _theirs(
        self, session: AnySession | None = None, connection: AnyConnection | None = None
    ) -> InTransaction | None:
        """Return what works in the caller's transaction, if one was given."""
        if session is None and connection is None:
            return None
        if self.stands_in is not None:
            return self.stands_in.in_transaction(session, connection)
        self._check_layout()
        found = connection_of(session, connection)
        return InTransaction(self, self._after_commit, found)

    def _committed(self, whats: Sequence[int | Change[Any]]) -> None:
        """Index what a caller's transaction has done, if it was committed. The sweep does what fails."""
        try:
            self._changes.add(self.store.read(what for what in whats if isinstance(what, int)).values())
            for what in whats:
                if isinstance(what, Change):
                    with suppress(errors.NotCommitted):  # a savepoint was rolled back
                        _ = what.outcome
        except errors.TocError as exc:
            log.warning("commit_not_indexed", tasks=len(whats), error=str(exc))

    def _traced(
        self, many: Sequence[Submission], store: Callable[[], Stored], ids: Callable[[Stored], list[int]]
    ) -> Stored:
        """Store tasks, and write a span for each traced one. ``ids`` are those in the answer to ``store``."""
        if (tracing := self.tracing) is None:
            return store()
        began = time.time_ns()
        stored: Sequence[int | None] = [None] * len(many)
        error: Exception | None = None
        try:
            answer = store()
            stored = ids(answer)
        except Exception as exc:
            error = exc
            if isinstance(exc, errors.PartialSubmit):
                stored = exc.job_ids
            raise
        finally:
            tracing.submitted(began, many, [error if job_id is None else job_id for job_id in stored])
        return answer

    def _checked(
        self, task: NewTask, request: Request | None = None, topic: Topic | None = None
    ) -> Submission:
        """``topic`` takes the place of the task's."""
        one = self._intake.submission(task, lambda name: topic or self.catalog.get(name), request)
        self._check_payload(task)
        if task.target is not None:
            self.targets.check_usable(task.target, task.topic)
        return one

    def _task(self, row: TaskRow) -> Task:
        body = None
        if row.body_length is not None:
            body = Body(row.body_length, read=partial(self.store.body_of, row))
        topic = self.catalog.of_type(row.biz_type)
        return row.to_task(topic.name if topic else f"biz_type-{row.biz_type}", body)


def apart(center: TimeoutCenter) -> TimeoutCenter:
    """Return a center with the same settings and handlers but its own database connections.

    A worker's own stages use it: calls made by handlers may occupy every connection of the first, for as long
    as another program holds a row lock.
    """
    other = TimeoutCenter(center.settings, clock=center.clock)
    other.handlers, other.tracing, other._queues = center.handlers, center.tracing, center.queues
    other.topics, other.hooks = center.topics, center.hooks
    other.schedules.declared, other.schedules.handled = center.schedules.declared, center.schedules.handled
    return other
