"""``session=`` and ``connection=`` in a test.

The application's transaction is in a database of its own, the kit's rows are not. So what is done in it is
kept until it commits, and then done: for a session when the session commits, although the test may roll
everything back around it (``join_transaction_mode="create_savepoint"``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event

from toc.model.errors import InvalidInput, NotCommitted, TocError
from toc.model.sharding import BizId
from toc.model.task import CancelOutcome, RescheduleOutcome, Submission, TaskRow, check_expiry
from toc.sdk.changes import Change, InTransaction
from toc.sdk.client import TimeoutCenter
from toc.store.tasks.callers_transaction import connection_of
from toc.store.tasks.plan import PENDING, Expiry, same_task

T = TypeVar("T")


class _Step:
    """Something to do at the commit. ``scopes`` are the transaction and savepoints that were open."""

    def __init__(self, do: Callable[[], Any], scopes: list[Any], row: TaskRow | None = None) -> None:
        self.do = do
        self.scopes = scopes
        self.row = row
        """That of a task that is submitted."""
        self.is_open = True
        self.found: list[Any] = []

    def outcome(self) -> Any:
        """What doing it returned. Raises NotCommitted."""
        if not self.found:
            raise NotCommitted("the transaction or savepoint of this change was rolled back")
        return self.found[0]


class Journal(InTransaction):
    """What is submitted and changed in the transactions of one session or connection, until they end."""

    def __init__(self, center: TimeoutCenter, reach: Callable[[], None]) -> None:
        self._store, self._changes, self.reach = center.store, center._changes, reach
        self.steps: list[_Step] = []
        self.scopes: list[Any] = [self]
        """The transaction and its savepoints that are open."""

    def open_scopes(self) -> list[Any]:
        """The transaction and the savepoints in which the next step is taken."""
        return list(self.scopes)

    def commit(self) -> None:
        """The outermost transaction commits. Raises StoreUnavailable before anything is done."""
        if self.steps:
            self.reach()
        steps, self.steps = self.steps, []
        for step in steps:
            step.found.append(step.do())
            step.is_open = False

    def drop(self, scope: Any) -> None:
        """A transaction or savepoint was rolled back."""
        self._forget([step for step in self.steps if scope in step.scopes])

    def _forget(self, steps: Sequence[_Step]) -> None:
        for step in steps:
            self.steps.remove(step)
            step.is_open = False

    def _add(self, do: Callable[[], Any], row: TaskRow | None = None) -> _Step:
        self.reach()
        self.steps.append(_Step(do, self.open_scopes(), row))
        return self.steps[-1]

    def _change(self, do: Callable[[], T]) -> Change[T]:
        step = self._add(do)
        return Change(lambda: step.is_open, step.outcome)

    def _own(self) -> list[TaskRow]:
        """The tasks that were submitted in the transaction."""
        return [step.row for step in self.steps if step.row is not None]

    # --- submits and changes, done at the commit

    def submit(self, many: Sequence[Submission], refused: Mapping[int, InvalidInput]) -> list[int]:
        """Store tasks; return their job_ids in order. ``refused``: why one, by number, is not to be new."""
        job_ids, steps = [], []
        try:
            for n, one in enumerate(many):
                kept = self._named(one) if one.row.dedup_key is not None else None
                if kept is None and n in refused:
                    raise refused[n]
                if kept is None:
                    steps.append(self._add(partial(self._store.put, one), one.row))
                job_ids.append(one.row.job_id if kept is None else kept)
        except TocError:
            self._forget(steps)
            raise
        return job_ids

    def _named(self, one: Submission) -> int | None:
        """The task that has this dedup_key, stored or submitted in the same transaction. Raises
        DedupConflict."""
        key = (one.row.biz_id, one.row.biz_type, one.row.dedup_key)
        for row in self._own():
            if key == (row.biz_id, row.biz_type, row.dedup_key):
                return same_task(one.row, row)
        kept = self._store.kept(one)
        return None if kept is None else kept.job_id

    def ids(self, biz: BizId, biz_type: int) -> list[int]:
        """The tasks of a biz_id, with those of the transaction."""
        wanted = (biz.number, biz.key, biz_type)
        mine = {row.job_id for row in self._own() if (row.biz_id, row.biz_key, row.biz_type) == wanted}
        return sorted({*self._store.ids_of(biz, biz_type), *mine})

    def cancel(self, job_ids: Sequence[int], answer: Callable[[dict[int, CancelOutcome]], T]) -> Change[T]:
        """Cancel tasks."""
        return self._change(lambda: answer(self._changes.cancel(job_ids)))

    def reschedule(self, job_id: int, due: int, expiry: Expiry) -> Change[RescheduleOutcome]:
        """Give a task another deadline. Raises InvalidExpiry."""
        row = self._store.get(job_id) or next((row for row in self._own() if row.job_id == job_id), None)
        if row is not None and row.status == PENDING:
            check_expiry(expiry(row), due)

        def do() -> RescheduleOutcome:
            changed, row = self._store.reschedule(job_id, due, expiry)
            return self._changes.judge_reschedule(row, due, changed=changed)

        return self._change(do)


class OfSession(Journal):
    """That of a Session."""

    def __init__(self, center: TimeoutCenter, reach: Callable[[], None], session: Any) -> None:
        super().__init__(center, reach)
        self._session = session
        self._committed: list[Any] = []
        """Transactions that have committed and are about to end."""
        event.listen(session, "before_commit", lambda _session: self.steps and self.reach())
        event.listen(session, "after_commit", lambda session: self._committed.append(_innermost(session)))
        event.listen(session, "after_transaction_end", self._ended)

    def open_scopes(self) -> list[Any]:
        """Its transactions that are open."""
        scopes, one = [], _innermost(self._session)
        while one is not None:
            scopes.append(one)
            one = one.parent
        return scopes

    def _ended(self, _session: Any, transaction: Any) -> None:
        if transaction not in self._committed:
            self.drop(transaction)
            return
        self._committed.remove(transaction)
        if transaction.parent is None:
            self.commit()


def _innermost(session: Any) -> Any:
    return session.get_nested_transaction() or session.get_transaction()


class Transactions:
    """The applications' transactions of one test after the other."""

    def __init__(self, reach: Callable[[], None]) -> None:
        self._center: Any = None
        self._reach = reach
        self._journals: WeakKeyDictionary[Any, Journal] = WeakKeyDictionary()
        hooks: dict[str, Callable[..., object]] = {
            "savepoint": lambda connection, _name: self._of(connection).scopes.append(object()),
            "release_savepoint": lambda connection, *_: self._ended(connection),
            "rollback_savepoint": lambda connection, *_: self._of(connection).drop(self._ended(connection)),
            "commit": self._commit,
            "rollback": lambda connection: self._of(connection).drop(self._of(connection)),
        }
        for name, hook in hooks.items():  # of all engines: a savepoint may be older than the first task
            event.listen(Engine, name, partial(self._hear, hook))

    def follow(self, center: TimeoutCenter | None) -> None:
        """Follow those of a test with this center. None: it is over."""
        self._center = center
        self._journals.clear()

    def _hear(self, hook: Callable[..., object], *about: Any) -> None:
        if self._center is not None:
            hook(*about)

    def of(self, session: Any, connection: Any) -> Journal:
        """What works in the transaction of a session or connection. Raises what production raises."""
        found = connection_of(session, connection)
        if session is None:
            if not found.in_transaction():
                found.begin()  # as the first statement of production would
            return self._of(found)
        session = session() if hasattr(session, "registry") else session  # a scoped_session
        session = getattr(session, "sync_session", session)
        if session not in self._journals:
            self._journals[session] = OfSession(self._center, self._reach, session)
        return self._journals[session]

    def _of(self, connection: Connection) -> Journal:
        return self._journals.setdefault(connection, Journal(self._center, self._reach))

    def _commit(self, connection: Connection) -> None:
        try:
            self._of(connection).commit()
        except TocError:
            self._of(connection).drop(self._of(connection))
            connection.connection.rollback()  # SQLAlchemy leaves it open after a commit that failed
            raise

    def _ended(self, connection: Connection) -> object:
        """Return the innermost savepoint, which is open no more. None if there is none."""
        scopes = self._of(connection).scopes
        return scopes.pop() if len(scopes) > 1 else None
