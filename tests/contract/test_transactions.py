"""Tasks in the caller's transaction: they exist exactly if its rows do, and it locks nothing but theirs."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from contract.system import Contract
from harness.rows import known
from sqlalchemy import BigInteger, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from structlog.testing import capture_logs

from toc import CancelOutcome, NewTask, RescheduleOutcome
from toc.model import errors
from toc.operate.bulk_jobs import redrive

JoinMode = Literal["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    order_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)


class Elsewhere(DeclarativeBase):
    pass


class Note(Elsewhere):
    __tablename__ = "notes"
    note_id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture(scope="module")
def engine(contract: Contract) -> Iterator[Engine]:
    """An application's engine, as it comes: REPEATABLE READ, in another time zone."""
    url = contract.settings.need_database_urls()[0]
    engine = create_engine(make_url(url).set(database=f"{contract.prefix}0"))

    @event.listens_for(engine, "connect")
    def connected(driver: Any, _record: Any) -> None:
        driver.cursor().execute("SET time_zone='+08:00'")

    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def soon(seconds: float = 7200) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def indexed(contract: Contract, job_id: int) -> bool:
    return bool(contract.scores(job_id))


def appeared(system: Contract, job_id: int) -> bool:
    """Whether the commit of a task's transaction was followed."""
    return indexed(system, job_id) if system.has_index else system.center.get(job_id) is not None


def settle(contract: Contract) -> None:
    """Wait for what commits have begun."""
    contract.center.close()


# --- session=


@pytest.mark.parametrize("by", ["session", "connection"])
def test_a_task_is_there_and_indexed_after_the_commit_and_not_at_the_release_of_a_savepoint(
    idle: Contract, engine: Engine, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(idle.center.hooks, "on_call", [lambda name, *_: called.append(name)])
    with Session(engine) if by == "session" else engine.connect() as place, place.begin():
        where: Any = {by: place}
        with place.begin_nested():
            job_id = idle.center.submit("c.plain", biz_id=1, delay=3600, **where)
        savepoint = place.begin_nested()
        lost = idle.center.submit("c.plain", biz_id=1, delay=3600, **where)
        savepoint.rollback()
        settle(idle)
        assert idle.center.get(job_id) is None
        assert not indexed(idle, job_id)
    idle.wait(lambda: appeared(idle, job_id), "the commit is followed")
    settle(idle)
    assert "index" not in called
    assert idle.center.get(lost) is None
    idle.center.index([job_id, lost])
    assert not indexed(idle, lost)


@pytest.mark.parametrize(("mode", "ends_it"), [
    ("conditional_savepoint", False),
    ("rollback_only", False),
    ("create_savepoint", False),
    ("control_fully", True),
])  # fmt: skip
def test_a_session_that_joined_a_transaction_is_followed_once_that_commits(
    either: Contract, engine: Engine, mode: JoinMode, ends_it: bool
) -> None:
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            job_id = either.center.submit("c.plain", biz_id=3, delay=3600, session=session)
            change = either.center.cancel(
                either.center.submit("c.plain", biz_id=3, delay=3600, session=session), session=session
            )
            session.commit()
        if not ends_it:
            settle(either)
            assert either.center.get(job_id) is None
            assert not indexed(either, job_id)
            with pytest.raises(errors.NotCommitted, match="still open"):
                _ = change.outcome
            outer.commit()
    either.wait(lambda: appeared(either, job_id), "the outer commit is followed")
    assert change.outcome is CancelOutcome.CANCELLED
    del change
    gc.collect()  # warns of what it opened in parts of the center that were closed


def test_a_commit_that_no_thread_can_follow_succeeds(
    contract: Contract, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_is_left(_do: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(contract.center._after_commit._threads, "run_detached", none_is_left)
    with capture_logs() as lines, Session(engine) as session, session.begin():
        job_id = contract.center.submit("c.plain", biz_id=4, delay=3600, session=session)
    assert known(contract.center.get(job_id)).biz_id == 4
    told = [(line["event"], line["tasks"], line["error"]) for line in lines]
    assert told == [("commit_not_followed", 1, "can't start new thread")]
    assert not indexed(contract, job_id), "the sweep adds it"


def test_with_several_binds_the_caller_names_that_of_the_task(idle: Contract, engine: Engine) -> None:
    other = create_engine("sqlite://")
    Elsewhere.metadata.create_all(other)
    try:
        with Session(binds={Base: engine, Elsewhere: other}) as session, session.begin():
            session.add_all([Order(), Note(note_id=5)])
            with pytest.raises(errors.WrongShardConnection, match="no default bind"):
                idle.center.submit("c.plain", biz_id=5, delay=3600, session=session)
            ours = session.connection(bind_arguments={"mapper": Order.__mapper__})
            job_id = idle.center.submit("c.plain", biz_id=5, delay=3600, connection=ours)
        idle.wait(lambda: appeared(idle, job_id), "the commit is followed")
        with Session(engine, binds={Elsewhere: other}) as session, session.begin():
            session.add(Note(note_id=6))
            job_id = idle.center.submit("c.plain", biz_id=5, delay=3600, session=session)
        idle.wait(lambda: appeared(idle, job_id), "the commit is followed")
    finally:
        other.dispose()


def test_a_scoped_session_is_a_session(idle: Contract, engine: Engine) -> None:
    session = scoped_session(sessionmaker(engine))
    job_id = idle.center.submit("c.plain", biz_id=6, delay=3600, session=session)  # type: ignore[arg-type]
    session.commit()
    session.remove()
    idle.wait(lambda: appeared(idle, job_id), "the commit is followed")


def test_what_cannot_be_joined_is_refused_by_name(idle: Contract, engine: Engine) -> None:
    before, submit = idle.rows(), idle.center.submit
    with Session(engine, twophase=True) as session, pytest.raises(errors.TwoPhase, match="outbox"):
        submit("c.plain", biz_id=7, delay=9, session=session)
    with engine.connect() as connection:
        two = connection.begin_twophase()
        with pytest.raises(errors.TwoPhase):
            idle.center.cancel_by_biz("c.plain", 7, connection=connection)
        two.rollback()
        with Session(engine) as session, pytest.raises(errors.InvalidInput, match="not both"):
            submit("c.plain", biz_id=7, delay=9, session=session, connection=connection)
    with Session(engine) as session, pytest.raises(errors.InvalidInput, match="on_conflict"):
        submit("c.plain", biz_id=7, delay=9, dedup_key="x", on_conflict="replace", session=session)
    with pytest.raises(errors.WrongShardConnection, match="not int"):
        submit("c.plain", biz_id=7, delay=9, session=5)  # type: ignore[arg-type]
    at_once = engine.execution_options(isolation_level="AUTOCOMMIT")
    with at_once.connect() as connection, pytest.raises(errors.NoTransaction, match="AUTOCOMMIT"):
        submit("c.plain", biz_id=7, delay=9, connection=connection)
    with Session(at_once) as session, pytest.raises(errors.NoTransaction):
        idle.center.submit_many([NewTask("c.plain", 7, delay=9)], session=session)
    level = "SERIALIZABLE"
    locks = engine.execution_options(isolation_level=level)
    with locks.connect() as connection, pytest.raises(errors.Serializable, match="outbox"):
        submit("c.plain", biz_id=7, delay=9, connection=connection)
    by_default = create_engine(engine.url, isolation_level=level)
    with Session(by_default) as session, pytest.raises(errors.Serializable):
        submit("c.plain", biz_id=7, delay=9, session=session)
    by_default.dispose()
    assert idle.rows() == before


def test_rights_that_the_caller_lacks_are_named(contract: Contract, engine: Engine) -> None:
    user = f"{contract.prefix}app"
    contract.query(f"CREATE USER '{user}'@'127.0.0.1' IDENTIFIED BY 'pw'")
    contract.query(f"GRANT SELECT ON `{contract.prefix}0`.* TO '{user}'@'127.0.0.1'")
    theirs = create_engine(engine.url.set(username=user, password="pw"))
    try:
        with theirs.begin() as connection, pytest.raises(errors.WrongShardConnection, match="GRANT SELECT"):
            contract.center.submit_many(
                [NewTask("c.plain", n, delay=9) for n in range(20)], connection=connection
            )
    finally:
        theirs.dispose()
        contract.query(f"DROP USER '{user}'@'127.0.0.1'")


# --- async


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # of SQLAlchemy, outside run_sync
@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
def test_an_async_session_submits_and_changes_things(either: Contract, engine: Engine, driver: str) -> None:
    center = either.center
    kept = center.submit("c.plain", biz_id=8, delay=3600)

    def work(session: Session) -> Any:
        session.add(Order())
        one = center.submit("c.plain", biz_id=8, delay=3600, session=session, dedup_key=f"k-{driver}")
        many = center.submit_many([NewTask("c.plain", 8, delay=3600, body=b"%s")], session=session)
        moved = center.reschedule(kept, action_time=soon(), session=session)
        return one, many[0], moved

    async def run() -> Any:
        other = create_async_engine(engine.url.set(drivername=f"mysql+{driver}"))
        try:
            async with AsyncSession(other) as session, session.begin():
                with pytest.raises(errors.InvalidInput, match="run_sync"):
                    center.submit("c.plain", biz_id=8, delay=3600, session=session)
                done = await session.run_sync(work)
                gone = await session.run_sync(lambda _: center.cancel(done[1], session=session))
            async with AsyncSession(other) as session:  # a driver's own errors have our names
                with pytest.raises(errors.StoreUnavailable, match="1205"):
                    await session.run_sync(blocked)
            return *done, gone
        finally:
            await other.dispose()

    def blocked(session: Session) -> None:
        session.execute(text("SET innodb_lock_wait_timeout=1"))
        with engine.begin() as connection:
            center.cancel(kept, connection=connection)
            center.cancel(kept, session=session)

    one, two, moved, gone = asyncio.run(run())
    either.wait(lambda: appeared(either, one), "the commit is followed")
    assert gone.outcome is CancelOutcome.CANCELLED
    assert either.status(two) == 3
    assert moved.outcome is RescheduleOutcome.RESCHEDULED


# --- changes


def changes(
    contract: Contract, biz_id: int, **where: Any
) -> tuple[list[int], list[tuple[Callable[[], object], object]]]:
    """Two cancels and a reschedule; how their outcomes are read, and what they are once committed."""
    center: Any = contract.center
    job_ids = center.submit_many([NewTask("c.plain", biz_id, delay=3600) for _ in range(4)])
    one = center.cancel(job_ids[0], **where)
    moved = center.reschedule(job_ids[1], action_time=soon(), **where)
    every = center.cancel_by_biz("c.plain", biz_id, **where)
    expected = dict.fromkeys(job_ids, CancelOutcome.CANCELLED)
    return job_ids, [
        (lambda: one.outcome, CancelOutcome.CANCELLED),
        (lambda: every.outcome, expected),
        (lambda: moved.outcome, RescheduleOutcome.RESCHEDULED),  # and cancelled then
    ]


@pytest.mark.parametrize("by", ["session", "connection"])
def test_the_outcome_of_a_change_exists_after_the_commit(idle: Contract, engine: Engine, by: str) -> None:
    with Session(engine) as session, session.begin():
        where: Any = {"session": session} if by == "session" else {"connection": session.connection()}
        job_ids, outcomes = changes(idle, 90 + len(by), **where)
        for outcome, _ in outcomes:
            with pytest.raises(errors.NotCommitted, match="still open"):
                outcome()
        assert {idle.status(job_id) for job_id in job_ids} == {0}
    idle.wait(lambda: not any(indexed(idle, job_id) for job_id in job_ids), "entries are taken out")
    assert {idle.status(job_id) for job_id in job_ids} == {3}
    for outcome, expected in outcomes:
        assert outcome() == expected


def test_a_reschedule_moves_row_and_entry_at_the_commit(contract: Contract, engine: Engine) -> None:
    job_id = contract.center.submit("c.plain", biz_id=10, delay=3600, body=b"x")
    (score,) = contract.scores(job_id).values()
    with engine.begin() as connection:
        change = contract.center.reschedule(job_id, action_time=soon(), connection=connection)
        assert repr(change) == "<Change: read .outcome after the commit>"
    contract.wait(lambda: list(contract.scores(job_id).values()) > [score + 3_000_000], "the entry is moved")
    assert change.outcome is RescheduleOutcome.RESCHEDULED
    task = known(contract.center.get(job_id))
    assert (task.version, task.body) == (1, b"x")


def test_a_change_that_was_rolled_back_has_no_outcome(idle: Contract, engine: Engine) -> None:
    with Session(engine) as session:
        job_ids, outcomes = changes(idle, 11, session=session)
        session.rollback()
        with session.begin_nested() as savepoint:
            outcomes += changes(idle, 12, session=session)[1]
            savepoint.rollback()
        session.commit()
    for outcome, _ in outcomes:
        with pytest.raises(errors.NotCommitted, match="rolled back"):
            outcome()
    assert {idle.status(job_id) for job_id in job_ids} == {0}


def test_what_has_ended_or_never_was_is_answered_so(idle: Contract, engine: Engine) -> None:
    job_id = idle.center.submit("c.plain", biz_id=13, delay=3600)
    idle.end(job_id)
    with engine.begin() as connection:
        late = idle.center.cancel(job_id, connection=connection)
        later = idle.center.reschedule(job_id, action_time=soon(), connection=connection)
        never = idle.center.cancel(job_id + 1, connection=connection)
        nothing = idle.center.reschedule(job_id + 1, action_time=soon(), connection=connection)
    assert (late.outcome, later.outcome) == (CancelOutcome.TOO_LATE, RescheduleOutcome.TOO_LATE)
    assert (never.outcome, nothing.outcome) == (CancelOutcome.UNKNOWN, RescheduleOutcome.UNKNOWN)


def test_a_dead_task_that_is_redriven_before_its_change_is_judged_was_not_changed(
    contract: Contract, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redrive that has waited for the row goes through at the commit."""
    center = contract.center
    monkeypatch.setattr(center._after_commit._threads, "run_detached", lambda _tell: None)
    job_id = center.submit("c.plain", biz_id=18, delay=3600)
    contract.query(f"UPDATE {contract.table(job_id)} SET status=4 WHERE job_id={job_id}")
    with engine.begin() as connection:
        late = center.cancel(job_id, connection=connection)
        later = center.reschedule(job_id, action_time=soon(), connection=connection)
    assert redrive(center, [job_id])["redriven"] == 1
    assert (later.outcome, late.outcome) == (RescheduleOutcome.TOO_LATE, CancelOutcome.TOO_LATE)
    assert indexed(contract, job_id)


def test_a_transaction_sees_and_changes_what_it_has_submitted(idle: Contract, engine: Engine) -> None:
    center = idle.center
    with engine.begin() as connection:
        one, two = center.submit_many([NewTask("c.plain", 14, delay=3600)] * 2, connection=connection)
        moved = center.reschedule(one, action_time=soon(), connection=connection)
        gone = center.cancel(two, connection=connection)
        again = center.cancel(two, connection=connection)
        of_now: Any = {"delay": 60, "dedup_key": "now", "connection": connection}
        ends = center.submit("c.plain", biz_id=14, expires_at=soon(), **of_now)
        with pytest.raises(errors.DedupConflict, match="another body"):
            center.submit("c.plain", biz_id=14, body=b"another", **of_now)
        with pytest.raises(errors.InvalidExpiry):
            center.reschedule(ends, action_time=soon(9999), connection=connection)
        by_topic = center.submit("c.expires", biz_id=14, delay="2h", connection=connection)
        for delay in ("30m", "9h"):
            center.reschedule(by_topic, delay=delay, connection=connection)
    two_hours = known(center.get(by_topic))
    assert two_hours.expires_at == two_hours.action_time + timedelta(hours=2)
    assert moved.outcome is RescheduleOutcome.RESCHEDULED
    assert gone.outcome is again.outcome is CancelOutcome.CANCELLED
    assert idle.status(one) == 0


def test_submit_many_stores_none_if_one_clashes(idle: Contract, engine: Engine) -> None:
    center = idle.center
    center.submit("c.plain", biz_id=15, delay=3600, dedup_key="taken")
    before = idle.rows()
    tasks = [
        NewTask("c.plain", n, delay=3600, body=b"b" if n % 2 else None, dedup_key="new" if n % 3 else None)
        for n in range(15)
    ]
    with engine.begin() as connection:
        clash = NewTask("c.plain", 15, delay=3600, dedup_key="taken", attribute={"other": 1})
        for wrong in (clash, tasks[1]._replace(body=b"other")):
            with pytest.raises(errors.DedupConflict):
                center.submit_many([*tasks, wrong], connection=connection)
            assert idle.rows() == before
        job_ids = center.submit_many(
            [*tasks, NewTask("c.plain", 15, delay=3600, dedup_key="taken")], connection=connection
        )
    assert len(set(job_ids)) == 16
    assert idle.rows() == before + 15
    assert known(center.get(job_ids[1])).body == b"b"


def test_a_submit_that_is_repeated_after_its_time_is_the_task_that_it_was(
    idle: Contract, engine: Engine
) -> None:
    center, past = idle.center, datetime.now(UTC) - timedelta(hours=1)
    job_id = center.submit("c.plain", biz_id=16, delay=3600, dedup_key="late")
    again, new = (
        NewTask("c.plain", 16, action_time=past, dedup_key="late"),
        NewTask("c.plain", 17, delay=3600),
    )
    with engine.begin() as connection:
        first, _, same = center.submit_many([again, new, again], connection=connection)
        assert (first, same) == (job_id, job_id)
        of_past: Any = {"action_time": past, "connection": connection}
        assert center.submit("c.plain", biz_id=16, dedup_key="late", **of_past) == job_id
        with pytest.raises(errors.NotInFuture):
            center.submit_many([new, again._replace(dedup_key="nobody's")], connection=connection)
        with pytest.raises(errors.NotInFuture):
            center.submit("c.plain", biz_id=17, **of_past)
    assert len(center.find(biz_id=17)) == 1
