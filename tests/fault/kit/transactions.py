"""An application that submits and changes tasks in its own transactions, and writes down beside each what it
did.

``python -m fault.kit.transactions PLACE URL SEED COUNT DUE`` runs COUNT random transactions over URL on tasks
that are due at DUE (ms). With ``kill`` at its end, it runs one fixed transaction in a process of its own for
each of COUNT lines of toc that this runs (0: for every line), which ends there as by SIGKILL.

Each step is a row of the table ``ops``, in the transaction of the step: its numbers tell the order, because
the second to change a task waits for the first. What the application has heard is a line of PLACE: per
transaction whether it was committed, and which outcomes of changes it was told.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from harness.rows import known
from sqlalchemy import BigInteger, Column, Engine, Integer, MetaData, String, Table, create_engine, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from toc import NewTask, TimeoutCenter
from toc.model.clock import from_ms
from toc.model.errors import InvalidInput, NotCommitted, StoreUnavailable

TOPIC = "test.sync"
metadata = MetaData()
ops = Table(
    "ops",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("tx", String(40), nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("op", String(12), nullable=False),
    Column("due", BigInteger, nullable=False),
)
AGAIN = 5
"""How often a transaction is run that is to end at a line."""
SHARED = 200
"""Dedup_keys that all processes use."""
FAILED = (StoreUnavailable, InvalidInput, DBAPIError)
"""A deadlock, a lock that is waited for too long, a cut connection; a dedup_key with another attribute."""


class Application:
    """One process of it."""

    def __init__(self, place: Path, engine: Engine, seed: int, due: int) -> None:
        self.center = TimeoutCenter()
        self._engine = engine
        self._dice = random.Random(seed)
        self._due = due
        self._said = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with engine.connect() as connection:
            shared = connection.execute(select(ops.c.job_id).where(ops.c.tx == "shared")).scalars().all()
        self._shared = list(shared)
        """Tasks that all processes change, so that they meet."""
        self._own: list[int] = []
        self._number = 0

    def transaction(self) -> None:
        """Run one of random steps, some of them within savepoints, and end it in one way or another."""
        self._number += 1
        tx, dice = f"{os.getpid()}-{self._number}", self._dice
        with Session(self._engine) as session:
            steps = _Steps(self, session, tx)
            try:
                steps.some(dice.randint(1, 4))
            except FAILED as exc:
                with suppress(DBAPIError):  # there may be none
                    session.connection().invalidate()  # a deadlock's victim has no savepoint to roll back to
                self._say(tx, "failed", why=type(exc).__name__)
                return
            if dice.random() < 0.2:
                session.rollback()
                self._say(tx, "rolled back", told=steps.told())
                return
            try:
                session.commit()
            except DBAPIError:
                self._say(tx, "unknown", told=steps.told())
                return
        self._say(tx, "committed", told=steps.told(), ops=steps.ops)
        self._own = [*self._own, *steps.met][-60:]

    def fixed(self, job_ids: list[int]) -> None:
        """Run one transaction with every kind of step."""
        with Session(self._engine) as session:
            steps = _Steps(self, session, f"{os.getpid()}-fixed")
            steps.submit(dedup_key=f"fixed-{os.getpid()}")
            with session.begin_nested():
                steps.submit_many()
            savepoint = session.begin_nested()
            steps.submit()
            savepoint.rollback()
            for job_id, change in zip(
                job_ids, (steps.cancel, steps.reschedule, steps.cancel_by_biz), strict=True
            ):
                change(job_id)
            session.commit()
            steps.told()
        self.center.close()

    def _say(self, tx: str, state: str, **more: Any) -> None:
        os.write(self._said, json.dumps({"tx": tx, "state": state, **more}).encode() + b"\n")


class _Steps:
    """The steps of one transaction."""

    def __init__(self, application: Application, session: Session, tx: str) -> None:
        self._center, self._dice = application.center, application._dice
        self._shared, self._own, self._due = application._shared, application._own, application._due
        self._session, self._tx = session, tx
        self.met: list[int] = []
        self.ops = 0
        self._changes: list[tuple[int, str, Any]] = []

    def some(self, count: int, depth: int = 0) -> None:
        """Make random steps."""
        dice = self._dice
        for _ in range(count):
            if self._changes and dice.random() < 0.3:
                time.sleep(0.02 * dice.random())  # others lock what is wanted next, and want what is locked
            kind = dice.random()
            known = dice.choice(
                self._shared if dice.random() < 0.6 else [*self._own, *self.met, *self._shared]
            )
            if kind < 0.2 and depth < 2:
                before = self.ops, len(self.met), len(self._changes)
                savepoint = self._session.begin_nested()
                self.some(dice.randint(1, 2), depth + 1)
                if dice.random() < 0.5:
                    savepoint.rollback()
                    self.ops = before[0]
                    del self.met[before[1] :], self._changes[before[2] :]
                else:
                    savepoint.commit()
            elif kind < 0.4:
                self.submit()
            elif kind < 0.5:
                self.submit_many()
            elif kind < 0.55:
                self.submit(dedup_key=f"shared-{dice.randrange(SHARED)}")
            elif kind < 0.8:
                self.cancel(known)
            else:
                self.reschedule(known)

    def submit(self, dedup_key: str | None = None) -> None:
        """One task."""
        due = from_ms(self._due + self._dice.randrange(1000))
        biz_id = self._dice.randrange(1000) if dedup_key is None else 7
        job_id = self._center.submit(
            TOPIC, biz_id=biz_id, action_time=due, dedup_key=dedup_key, **self._mine()
        )
        self._note("submit", job_id)

    def submit_many(self) -> None:
        """Three tasks, one with a body."""
        due = from_ms(self._due)
        tasks = [
            NewTask(TOPIC, self._dice.randrange(1000), action_time=due, body=body)
            for body in (None, b"x", None)
        ]
        for job_id in self._center.submit_many(tasks, **self._mine()):
            self._note("submit", job_id)

    def cancel(self, job_id: int) -> None:
        """One task."""
        self._changes.append((job_id, "cancel", self._center.cancel(job_id, **self._mine())))
        self._note("cancel", job_id)

    def reschedule(self, job_id: int) -> None:
        """One task, to another time."""
        due = self._due + self._dice.randrange(1000)
        change = self._center.reschedule(job_id, action_time=from_ms(due), **self._mine())
        self._changes.append((job_id, "reschedule", change))
        self._note("reschedule", job_id, due)

    def cancel_by_biz(self, job_id: int) -> None:
        """One task, the only one of its biz_id."""
        task = known(self._center.get(job_id))
        self._changes.append(
            (job_id, "by_biz", self._center.cancel_by_biz(TOPIC, task.biz_id, **self._mine()))
        )
        self._note("cancel", job_id)

    def _note(self, op: str, job_id: int, due: int = 0) -> None:
        self._session.execute(ops.insert().values(tx=self._tx, job_id=job_id, op=op, due=due))
        self.ops += 1
        if op == "submit":
            self.met.append(job_id)

    def _mine(self) -> Any:
        if self._dice.random() < 0.5:
            return {"session": self._session}
        return {"connection": self._session.connection()}

    def told(self) -> list[tuple[int, str, str]]:
        """What the outcomes of the changes are."""
        told = []
        for job_id, op, change in self._changes:
            with suppress(StoreUnavailable):
                try:
                    outcome = change.outcome
                except NotCommitted:
                    told.append((job_id, op, "not committed"))
                else:
                    told.append((job_id, op, "many" if isinstance(outcome, dict) else outcome.value))
        return told


class Lines:
    """The lines of toc that run, by all threads. ``at`` is called with each."""

    ROOMS = ("sdk/client", "sdk/changes", "tasks/callers_transaction")

    def __init__(self, at: Callable[[str], object]) -> None:
        self._at = at

    def trace(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        """A trace function."""
        name = frame.f_code.co_filename
        return self._line if name.removesuffix(".py").endswith(self.ROOMS) and "/toc/" in name else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            name = frame.f_code.co_filename.rpartition("/toc/")[2]
            self._at(f"{name}:{frame.f_lineno}")
        return self._line


def killed_at_lines(make: Callable[[], Application], engine: Engine, count: int, due: int) -> str:
    """Run the fixed transaction in processes that end at a line each. Returns of how many lines, and how many
    processes ended so."""
    read, write = os.pipe()
    seen: dict[str, None] = {}
    _forked(
        make,
        engine,
        due,
        lambda line: seen.setdefault(line),
        lambda: os.write(write, json.dumps([*seen]).encode()),
    )
    lines = json.loads(os.read(read, 1 << 16))
    chosen = random.Random(count).sample(lines, count or len(lines))
    ended = 0
    for line in chosen:
        ended += any(  # another thread need not come by a line each time
            os.waitstatus_to_exitcode(_forked(make, engine, due, partial(_die_at, line))) == -signal.SIGKILL
            for _ in range(AGAIN)
        )
    return json.dumps({"lines": len(lines), "killed": ended})


def _die_at(line: str, here: str) -> None:
    if here == line:
        os.kill(os.getpid(), signal.SIGKILL)


def _forked(
    make: Callable[[], Application],
    engine: Engine,
    due: int,
    at: Callable[[str], object],
    then: Callable[[], object] = lambda: None,
) -> int:
    """Run it in a child, and return how that ended. ``at`` is called with each line, ``then`` at the end."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    status = 1
    try:
        application = make()
        tasks = [NewTask(TOPIC, 10_000 * os.getpid() + n, action_time=from_ms(due)) for n in range(3)]
        job_ids = application.center.submit_many(tasks)
        with engine.begin() as connection:
            for job_id in job_ids:
                tx = f"{os.getpid()}-begun"
                connection.execute(ops.insert().values(tx=tx, job_id=job_id, op="submit", due=0))
        lines = Lines(at)
        threading.settrace(lines.trace)
        sys.settrace(lines.trace)
        application.fixed(job_ids)
        sys.settrace(None)
        then()
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    """Run what the command line says."""
    place, url, seed, count, due, *rest = sys.argv[1:]
    engine = create_engine(url, connect_args={"init_command": "SET innodb_lock_wait_timeout=2"})

    def make() -> Application:
        return Application(Path(place), engine, int(seed), int(due))

    if rest:
        print(killed_at_lines(make, engine, int(count), int(due)))
        return
    application = make()
    for _ in range(int(count)):
        application.transaction()
    application.center.close()


if __name__ == "__main__":
    main()
