"""Connections that break, servers that hang, locks that are held: what was acknowledged holds."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from fault.kit.proxy import Proxy, through
from harness import secured
from harness.hands import meanwhile
from harness.patience import PATIENCE, until
from harness.rows import NewRow, insert, insert_many, known
from harness.secured import root_url
from harness.tables import engine_of, raw, refused
from sqlalchemy import Engine, create_engine, make_url

from benchmarks.local import MariaDB
from toc.loop import Reactor
from toc.model.clock import Clock
from toc.model.errors import DedupConflict, SchemaBehind, StoreUnavailable
from toc.model.pull import PullLease
from toc.model.sharding import BizId, table_of_job
from toc.model.task import TaskRow, TaskStatus
from toc.model.verdict import Failure, Nack
from toc.store.migrate import Migrator
from toc.store.servers import health, mysql
from toc.store.servers.health import MAX_LOCKED, UNKNOWN_SECONDS
from toc.store.servers.server import ALIVE, Lost, Refused, Statement, Transient
from toc.store.servers.shards import OF_TABLES, Answers, Trouble
from toc.store.store import Store
from toc.store.tasks import rows as sql
from toc.store.tasks.batch import Finish, Guard
from toc.store.tasks.pulls import HandOut
from toc.store.tasks.select import Selection


@pytest.fixture
def root(mariadb: MariaDB) -> Iterator[Engine]:
    with engine_of(root_url(mariadb), isolation_level="AUTOCOMMIT") as engine:
        yield engine


def test_a_full_pool_while_a_table_is_locked_does_not_mark_the_server_as_away(
    mysql_place: Any, root: Engine, new_row: NewRow
) -> None:
    store = mysql_place.open(pool_size=3, connect_timeout=0.2, read_timeout=1.2)
    row = new_row()
    insert(store, row)
    table = table_of_job(row.job_id, 16)
    server, name = store._shards.server_of[table], store._shards.names[table]
    with root.connect() as connection, ThreadPoolExecutor(3) as callers:

        def occupy(seconds: float) -> None:
            """Use all connections that there may be."""
            sleeps = [Statement(f"SELECT SLEEP({seconds})")] * 4
            for busy in [callers.submit(server.run, sleeps) for _ in range(3)]:
                busy.result()

        occupy(0.05)
        connection.exec_driver_sql(f"LOCK TABLES {name} WRITE")
        with structlog.testing.capture_logs() as logs:
            reader = store.tries_reader(Reactor())
            reader.ask([row.job_id], lambda _ids, _rows: None)
            assert until(lambda: bool(reader.run_once()) and "table_set_aside" in told(logs), 10)
            occupy(0.8)  # for longer than a question about the table waits for a connection
            connection.exec_driver_sql("UNLOCK TABLES")
            assert until(lambda: row.job_id in store.read_each([row.job_id]), 10)
    assert "database_away" not in told(logs)
    store.close()


def test_failures_that_are_no_packet_together_are_written_in_parts(launch: Any, new_row: NewRow) -> None:
    server = launch(MariaDB, config=["max_allowed_packet=4M"])
    Migrator([server.url], databases=1, tables=4).upgrade()
    with closing(Store([server.url], databases=1, tables=4, clock=Clock())) as store:
        rows = [new_row() for _ in range(1500)]
        insert_many(store, rows)
        error = "\\'🕰" * 340
        failures = [Failure(row.job_id, 0, 0, 0, 1, 0, row.next_time, error) for row in rows]
        assert store.fail(failures) == dict.fromkeys([row.job_id for row in rows], Guard.APPLIED)


def told(logs: Sequence[Any]) -> set[str]:
    """The events that were logged."""
    return {line["event"] for line in logs}


def test_connections_that_the_server_closed_are_replaced_unnoticed(
    through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
    rows = [new_row() for _ in range(6)]
    insert_many(through_proxy, rows[:5])
    ids = [row.job_id for row in rows]
    uses: list[Callable[[], object]] = [
        lambda: insert(through_proxy, rows[5]),
        lambda: through_proxy.read(ids),
        lambda: through_proxy.finish([(ids[0], 0)]),
        lambda: through_proxy.cancel_many([ids[1]]),
        lambda: through_proxy.reschedule(ids[2], 1_900_000_000_000),
        through_proxy.topics.list,
    ]
    for use in uses:
        proxy.cut()
        use()
    found = through_proxy.read(ids)
    assert [found[job_id].status for job_id in ids] == [2, 3, 0, 0, 0, 0]
    assert found[ids[2]].version == 1


def test_a_long_read_harms_no_other_of_its_server(mysql_place: Any, new_row: NewRow, sent: list[str]) -> None:
    with closing(mysql_place.open(read_timeout=1)) as store, structlog.testing.capture_logs() as logs:
        insert(store, row := new_row())
        tables = store._shards.group_tables(dict.fromkeys(store.tables))
        long = store._shards.each(tables, lambda server, _: server.run([Statement("SELECT SLEEP(3)")]))
        assert {type(error) for error in long.failed.values()} == {Lost}
        assert row.job_id in store.read_each([row.job_id])
        sent.clear()
        assert store.selections.count(Selection(TaskStatus.PENDING)) > 0
        assert len(sent) == 16, "a statement for each table: each has its own time"
        sent.clear()
        assert store.selections.count(Selection(TaskStatus.PENDING, held=True)) == 0
        assert sent
        assert all(text.count("LIMIT") == text.count("SELECT") for text in sent), "rows are read in pages"
    assert "database_away" not in told(logs)


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for_longer_than_any(
    mysql_place: Any, proxy: Proxy, new_row: NewRow
) -> None:
    if secured.SECURED:
        pytest.skip("the proxy speaks no TLS")
    row = new_row()
    url = through(proxy, mysql_place.urls[0])
    with closing(mysql_place.open(urls=[url], read_timeout=0.5)) as store:
        insert(store, row)
        proxy.drip(0.01)
        with pytest.raises(StoreUnavailable):
            store.get(row.job_id)
        proxy.drip(0.0)
        assert until(lambda: row.job_id in store.read_each([row.job_id]), 10)


class Reading:
    """Has the rows of two servers, of which the first is behind a proxy, read as a poller does."""

    def __init__(self, place: Any, proxy: Proxy, new_row: NewRow) -> None:
        self.proxy = proxy
        # Who waits for an answer that does not come waits for longer than a test may take.
        ways = {"connect_timeout": 600.0, "read_timeout": 600.0}
        self.store = place.open(urls=[through(proxy, place.urls[0]), place.urls[1]], **ways)
        self.health = self.store._shards.health[self.store._shards.servers[0]]
        self.row = next(row for row in iter(new_row, None) if table_of_job(row.job_id, place.tables) % 4 < 2)
        insert(self.store, self.row)
        self.reactor = Reactor()
        self.reader = self.store.tries_reader(self.reactor)
        assert self.reads(), "its usual time is known"
        self.health.answered(0.0)

    def ask(self) -> Answers[Any]:
        """Begin to read. Returns what will hold the answers."""
        answers = Answers[Any]()

        def take(_ids: object, found: Answers[Any]) -> None:
            answers.update(found)
            answers.unanswered.update(found.unanswered)

        self.reader.ask([self.row.job_id], take)
        return answers

    def hear(self, answers: Answers[Any]) -> bool:
        """Go on as a poller does. Returns whether the row was read, or could not be."""
        self.reactor.sleep(0.01)
        self.reactor.clear()
        self.reactor.hear()
        self.reader.run_once()
        return bool(answers or answers.unanswered)

    def reads(self) -> bool:
        """Whether the row is read."""
        answers = self.ask()
        assert until(partial(self.hear, answers), 10)
        return bool(answers)


@pytest.fixture
def reading(mysql_place: Any, proxy: Proxy, new_row: NewRow) -> Iterator[Reading]:
    if secured.SECURED:
        pytest.skip("the proxy speaks no TLS")
    one = Reading(mysql_place, proxy, new_row)
    yield one
    proxy.close()
    one.store.close()


def test_an_answer_that_stops_halfway_is_waited_for_by_no_poller(reading: Reading, proxy: Proxy) -> None:
    proxy.drip(0.01)
    answers = reading.ask()
    reading.hear(answers)
    assert reading.reader.under_way, "what has come is no answer"
    proxy.stall()
    assert until(partial(reading.hear, answers), 10)
    assert reading.health.away is not None
    proxy.drip(0.0)
    proxy.flow()
    assert until(reading.reads, 10)


@pytest.mark.parametrize("connection", ["old", "broken"])
def test_a_poller_does_not_wait_for_a_server_that_only_lets_itself_be_connected_to(
    reading: Reading, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, connection: str
) -> None:
    if connection == "old":
        for name in ("IDLE_SECONDS", "FRESH_SECONDS"):
            monkeypatch.setattr(f"toc.store.servers.server.{name}", 0.0)
    proxy.stall()
    answers = reading.ask()
    if connection == "broken":
        proxy.cut()
    assert until(partial(reading.hear, answers), 10)
    assert reading.health.away is not None
    proxy.flow()
    assert until(reading.reads, 10)


def test_a_server_whose_connections_were_cut_together_is_not_away(
    reading: Reading, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toc.store.servers.server.FRESH_SECONDS", PATIENCE)
    pool = reading.store._shards.servers[0]._pool
    for link in [pool.take(), pool.take()]:
        assert link is not None
        pool.give(link)
    proxy.cut()
    with structlog.testing.capture_logs() as logs:
        assert reading.reads()
    assert "database_away" not in told(logs)


def test_a_store_that_is_closed_while_its_server_is_asked_opens_no_connection(
    mysql_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, closed = mysql_store._shards.servers[0], threading.Event()
    mysql_store.close()
    monkeypatch.setattr(server, "ask_apart", lambda _seconds: closed.set())
    mysql_store._shards.health[server]._ask_server(closed)
    assert server._pool.take_idle() is None


def test_one_of_several_servers_is_waited_for_briefly_from_its_first_answer_on(mysql_store: Store) -> None:
    known = mysql_store._shards.health.values()
    assert {one.patience for one in known} == {UNKNOWN_SECONDS}
    mysql_store.read_each([table << 12 for table in mysql_store.tables]).whole()
    assert all(one._average is not None for one in known)


def test_a_server_that_is_slow_to_log_in_to_is_read_again(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_socket = mysql._opened

    def opened(url: Any, options: Any, seconds: float) -> Any:
        if seconds < 1:
            raise TimeoutError("a name is looked up")
        return open_socket(url, options, seconds)

    reading.store.close()
    monkeypatch.setattr(mysql, "_opened", opened)
    assert not reading.reads()
    assert until(reading.reads, 10)


def test_a_server_that_answers_is_back_although_all_connections_are_lent(reading: Reading) -> None:
    server = reading.store._shards.servers[0]
    lent = [server._pool.take() for _ in range(8)]
    reading.health.note(StoreUnavailable("as the test wants"))
    assert until(lambda: reading.health.away is None, 10)
    del lent


def test_a_finish_whose_answer_was_lost_is_done(through_proxy: Store, proxy: Proxy, new_row: NewRow) -> None:
    rows = [new_row() for _ in range(20)]
    insert_many(through_proxy, rows)
    through_proxy.finish([(rows[0].job_id, 0)])
    proxy.eat(b"SET status=2")

    cases = through_proxy.finish([(row.job_id, 0) for row in rows])

    assert proxy.stats.eaten == 1
    assert cases == {row.job_id: Finish.DONE if n else Finish.ALREADY for n, row in enumerate(rows)}


def test_a_cancel_whose_answer_was_lost_is_ours(through_proxy: Store, proxy: Proxy, new_row: NewRow) -> None:
    row = new_row()
    insert(through_proxy, row)
    proxy.eat(b"SET status=3")
    changed, before = through_proxy.cancel_many([row.job_id])[row.job_id]
    assert proxy.stats.eaten == 1
    assert changed
    assert before is not None
    assert before._replace(gmt_modified=row.gmt_modified) == row


def test_a_nack_whose_answer_was_lost_is_written_once_and_its_lease_is_gone(
    through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
    due = new_row(action_time=int(time.time() * 1000) - 10)
    insert(through_proxy, due)
    item = HandOut(due.job_id, due.biz_type, 16, 60_000, secrets.token_bytes(16))
    as_read = through_proxy.pulls.hand_out([item], int(time.time() * 1000))[due.job_id]
    lease = PullLease(due.job_id, as_read.version, due.biz_type, 0, item.nonce)
    proxy.eat(b"pull_nonce=NULL")
    nacked = through_proxy.pulls.nack([(lease, Nack(as_read, False, 60_000, "no"))]).whole()[due.job_id]
    assert proxy.stats.eaten == 1
    assert nacked is None
    row = through_proxy.pulls.read([due.job_id])[due.job_id]
    assert (row.nonce, row.next_time > as_read.now) == (b"", True)
    assert len(through_proxy.history(due.job_id)) == 1


def test_an_unanswered_failure_is_charged_once(through_proxy: Store, proxy: Proxy, new_row: NewRow) -> None:
    row = new_row()
    insert(through_proxy, row)
    proxy.eat(b"SET attempts=1")
    guard = through_proxy.fail([Failure(row.job_id, 0, 0, 0, 1, 0, row.next_time + 1, "boom")])
    assert proxy.stats.eaten == 1
    assert guard == {row.job_id: Guard.LOST}  # the caller reads again, and finds its own write
    after = known(through_proxy.get(row.job_id))
    assert (after.attempts, after.next_time) == (1, row.next_time + 1)


def test_a_redrive_whose_answer_was_lost_is_done(through_proxy: Store, proxy: Proxy, new_row: NewRow) -> None:
    row = new_row()
    insert(through_proxy, row)
    through_proxy.die([Failure(row.job_id, 0, 0, 0, 1, 0, row.next_time, "boom")])
    proxy.eat(b"SET status=0")
    (redriven,) = through_proxy.redrive([row.job_id], 1_900_000_000_000).values()
    assert proxy.stats.eaten == 1
    assert (redriven.status, redriven.version, redriven.next_time) == (0, 1, 1_900_000_000_000)


def test_what_is_written_in_batches_waits_once_for_rows_that_others_have_locked(
    mysql_store: Store, root: Engine, new_row: NewRow
) -> None:
    """Also while another table of their server is missing."""
    rows = [new_row(biz_id=7) for _ in range(4)]  # of one table
    shards = mysql_store._shards
    table = shards.table_of(rows[0].job_id)
    tables = {shards.table_of(row.job_id): row for row in map(new_row, range(100))}
    beside = next(one for one in tables if one != table and shards.server_of[one] is shards.server_of[table])
    other = tables[beside]
    for row in (*rows, other):
        insert(mysql_store, row)
    (held, free, later, last), gone = [row.job_id for row in rows], other.job_id
    name, away = shards.names[table], shards.names[beside]
    with root.connect().execution_options(isolation_level="READ COMMITTED") as holder:
        holder.exec_driver_sql(f"SELECT * FROM {name} WHERE job_id={held} FOR UPDATE")
        done = mysql_store.finish([(held, 0), (free, 0)])
        assert (done, list(done.unanswered)) == ({free: Finish.DONE}, [held])
        waited = int(_status(root, "Innodb_row_lock_waits"))
        missing = held + 4096 * 1024
        done = mysql_store.finish([(held, 0), (later, 0), (missing, 0)])
        assert done == {later: Finish.DONE, missing: Finish.MISSING}
        assert list(done.unanswered) == [held]
        assert int(_status(root, "Innodb_row_lock_waits")) == waited
        with root.connect() as connection:
            connection.exec_driver_sql(f"RENAME TABLE {away} TO {away}_away")
            try:
                done = mysql_store.finish([(held, 0), (last, 0), (gone, 0)])
                assert mysql_store.locked([held, last, gone]) <= {held}
            finally:
                connection.exec_driver_sql(f"RENAME TABLE {away}_away TO {away}")
        assert (done, sorted(done.unanswered)) == ({last: Finish.DONE}, sorted([held, gone]))
        holder.rollback()
    assert mysql_store.finish([(held, 0)]) == {held: Finish.DONE}
    assert until(lambda: mysql_store.finish([(gone, 0)]) == {gone: Finish.DONE})


def _status(engine: Engine, name: str) -> Any:
    with engine.connect() as connection:
        return connection.exec_driver_sql(f"SHOW GLOBAL STATUS LIKE '{name}'").one()[1]


@pytest.fixture(scope="module")
def switched(server_directory: Path, mariadb: MariaDB) -> Iterator[tuple[MariaDB, MariaDB]]:
    """An old primary, which is read-only, and the new one. The shared server is neither."""
    assert mariadb.port  # what starts here needs its program, too
    with MariaDB(server_directory / "old-primary") as old, MariaDB(server_directory / "new-primary") as new:
        user = "CREATE USER 'app'@'127.0.0.1' IDENTIFIED BY 's3cret'"
        for server in (old, new):
            Migrator([server.url], databases=1, tables=1).upgrade()
            with raw(root_url(server)) as connection:
                connection.exec_driver_sql(user)
                rights = "GRANT SELECT, INSERT, UPDATE, DELETE ON toc_0.* TO 'app'@'127.0.0.1'"
                connection.exec_driver_sql(rights)
                if server is old:
                    connection.exec_driver_sql("SET GLOBAL read_only = 1")
        yield old, new


def test_an_upgrade_by_an_account_without_the_rights_says_which_to_use(
    switched: tuple[MariaDB, MariaDB],
) -> None:
    url = f"mysql+pymysql://app:s3cret@127.0.0.1:{switched[1].port}"
    with pytest.raises(StoreUnavailable, match=r"1044.*run it as the account that may create tables"):
        Migrator([url], databases=1, tables=1).upgrade()


@pytest.mark.parametrize("use", ["look", "write"])
def test_after_a_switchover_nobody_goes_on_with_the_old_primary(
    switched: tuple[MariaDB, MariaDB], new_row: NewRow, use: str
) -> None:
    """Behind one address: it lives on, read-only, and keeps its connections."""
    old, new = switched
    row = new_row()
    with Proxy(old.port) as address, ThreadPoolExecutor(8) as threads:
        url = f"mysql+pymysql://app:s3cret@127.0.0.1:{address.port}"
        store = Store([url], databases=1, tables=1, clock=Clock())

        def found() -> set[bool]:
            """What many reads at once say, over many connections: whether the row is there."""
            return {one is not None for one in threads.map(store.get, [row.job_id] * 200)}

        assert found() == {False}
        address.target = new.port
        writer = Store([url], databases=1, tables=1, clock=Clock())
        insert(writer, row)
        assert False in found(), "connections lead to the old primary"
        if use == "look":
            assert store.scans.follow_switchover(0)
            assert store.scans.follow_switchover(0) == "", "the new primary takes writes"
        else:
            store.finish([(row.job_id, 0)]).whole()
        assert found() == {True}, "the row check must read what was committed"
        store.close()
        writer.close()


def test_a_wrong_password_says_where_it_stands(mariadb: MariaDB) -> None:
    url = make_url(root_url(mariadb)).set(username="nobody", password="wrong")
    text = url.render_as_string(hide_password=False)
    with (
        closing(Store([text], databases=1, tables=4, clock=Clock())) as store,
        pytest.raises(StoreUnavailable, match=r"Access denied.*TOC_DATABASE_URLS") as caught,
    ):
        store.topics.list()
    assert "wrong" not in str(caught.value)


def test_a_store_that_was_closed_with_marks_is_used_again_without_them(
    mysql_store: Store, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that takes them away has ended."""
    monkeypatch.setattr(health, "AGAIN_SECONDS", PATIENCE)
    row, shards = new_row(), mysql_store._shards
    insert(mysql_store, row)
    table = shards.table_of(row.job_id)
    marks = shards.health[shards.server_of[table]]
    monkeypatch.setattr(marks, "_fault", lambda _table: Refused("damaged"))
    away = partial(marks.mark_away, StoreUnavailable("away"))
    for mark in (away, partial(marks.set_aside, [table])):
        mark()
        assert row.job_id not in mysql_store.read_each([row.job_id])
        mysql_store.close()
        assert row.job_id in mysql_store.read_each([row.job_id])


def test_errors_do_not_use_up_the_pool(place: Any, new_row: NewRow) -> None:
    store = place.open(pool_size=1, connect_timeout=1, read_timeout=1)
    row = new_row(dedup_key="k")
    insert(store, row)
    for _ in range(20):
        with pytest.raises(DedupConflict):
            insert(store, new_row(row.biz_id, dedup_key="k", attribute='{"x":1}'))
    assert store.get(row.job_id) == row
    store.close()


def test_a_refused_row_holds_up_no_other(mysql_store: Store, new_row: NewRow, root: Engine) -> None:
    rows = [new_row(biz_id=7) for _ in range(20)]
    insert_many(mysql_store, rows)
    one = rows[7].job_id
    with root.connect() as connection, refused(connection, mysql_store, one):
        cases = mysql_store.finish([(row.job_id, 0) for row in rows])
    assert cases == {row.job_id: Finish.DONE for row in rows if row.job_id != one}
    assert "not this one" in str(cases.unanswered[one])
    assert mysql_store.finish([(one, 0)]) == {one: Finish.DONE}


def test_a_lease_is_in_doubt_whose_table_is_locked_before_it_is_read(
    mysql_store: Store, root: Engine, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who thought that it was refused would give the task back, and leave its lease to run out."""
    mine, gone = (new_row(biz_id=7) for _ in range(2))  # of one table
    insert(mysql_store, mine)
    mysql_store.leases.identify("a worker")
    name = mysql_store._shards.names[mysql_store._shards.table_of(mine.job_id)]
    with root.connect() as holder:
        lock = partial(holder.exec_driver_sql, f"LOCK TABLES {name} WRITE")
        meanwhile(monkeypatch, sql, "read", lock)
        answers = mysql_store.leases.take({mine.job_id: 30, gone.job_id: 30})
        holder.exec_driver_sql("UNLOCK TABLES")
    assert not answers
    assert answers.unanswered.keys() == {mine.job_id, gone.job_id}
    assert not [error for error in answers.unanswered.values() if isinstance(error, OF_TABLES)]
    assert mysql_store.leases.living([mine.job_id])


Ids = Mapping[int, list[int]]


@pytest.mark.parametrize("error", [Lost("as the test wants"), SchemaBehind("as the test wants")])
def test_a_row_that_is_asked_alone_fails_for_a_reason_of_its_own(
    mysql_store: Store, new_row: NewRow, error: Trouble
) -> None:
    """Its batch, of which nothing was written, was refused."""
    job_id, other = (new_row(biz_id=7).job_id for _ in range(2))

    def send(_server: object, ids: Ids) -> None:
        (part,) = ids.values()
        if len(part) > 1:
            raise Refused("one of many")
        if part == [job_id]:
            raise error

    failed = mysql_store._shards.each(mysql_store._shards.group([job_id, other]), send).failed
    assert failed[job_id] is error


@pytest.mark.parametrize("error", [StoreUnavailable("it hangs"), Lost("it takes too long")])
def test_a_server_that_goes_away_while_its_tables_are_asked_one_by_one_is_asked_once(
    mysql_store: Store, error: StoreUnavailable
) -> None:
    """Nor does each table take all the time that an answer may take."""
    shards, asked = mysql_store._shards, list[list[int]]()
    tables = next(iter(mysql_store.tables_of_server()))
    by_table = {table: [table] for table in tables}

    def send(_server: object, ids: Ids) -> None:
        asked.append([*ids])
        raise Refused("one of many") if len(ids) > 1 else error

    failed = shards.each({shards.servers[0]: by_table}, send).failed
    assert asked == [[*tables], [tables[0]]]
    assert {failed[table] for table in tables} == {error}


def test_what_times_out_on_a_server_that_is_away_does_not_ask_it_again(
    mysql_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = next(iter(mysql_store._shards.health.values()))
    monkeypatch.setattr(health, "examine", None)
    monkeypatch.setattr(health, "away", StoreUnavailable("it hangs"))
    health.note(Lost("it hangs"))


def test_nothing_is_marked_while_no_thread_can_be_had_that_takes_marks_away(
    mysql_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = next(iter(mysql_store._shards.health.values()))

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        health.note(StoreUnavailable("it hangs"))
        assert health.away is None
    health.note(StoreUnavailable("it hangs"))
    assert health.troubled
    assert until(lambda: not health.troubled)


@pytest.mark.parametrize("what", ["the account has enough connections", "there is no descriptor"])
def test_a_server_is_not_away_because_no_more_connections_may_be_opened(
    mariadb: MariaDB, root: Engine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with root.connect() as connection:
        few = "'few'@'127.0.0.1' IDENTIFIED BY 's3cret' WITH MAX_USER_CONNECTIONS 1"
        connection.exec_driver_sql(f"CREATE OR REPLACE USER {few}")
    url = make_url(root_url(mariadb)).set(username="few", password="s3cret")
    text = url.render_as_string(hide_password=False)
    with closing(Store([text], databases=1, tables=4, clock=Clock())) as store:
        (server,) = store._shards.servers
        server.run([ALIVE])
        if what == "there is no descriptor":
            monkeypatch.setattr("toc.store.servers.server.none_left", lambda: True)
            monkeypatch.setattr(mysql, "_opened", refused_socket)
        with pytest.raises(Transient):
            server.ask_apart(5)


def refused_socket(*_: object) -> Any:
    raise OSError("too many open files")


def test_when_all_tables_are_locked_a_few_are_waited_for(
    mysql_store: Store, root: Engine, new_row: NewRow, sent: list[str]
) -> None:
    tables = next(iter(mysql_store.tables_of_server()))
    rows: dict[int, TaskRow] = {}
    while len(rows) < len(tables):
        row = new_row()
        if (table := mysql_store._shards.table_of(row.job_id)) in tables:
            rows[table] = row
    insert_many(mysql_store, list(rows.values()))
    tries = [(row.job_id, 0) for row in rows.values()]
    with root.connect() as holder:
        names = [f"{mysql_store._shards.names[table]} WRITE" for table in tables]
        holder.exec_driver_sql(f"LOCK TABLES {', '.join(names)}")
        sent.clear()
        done = mysql_store.finish(tries)
        asked = [text for text in sent if "version=version" in text]
        holder.exec_driver_sql("UNLOCK TABLES")
    assert not done
    assert len(set(asked)) <= MAX_LOCKED + 1, "the thread that asks for all again may have asked one"
    assert until(lambda: len(mysql_store.finish(tries)) == len(rows))


def test_connections_that_one_busy_moment_has_opened_are_closed_when_nobody_uses_them(
    mysql_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(mysql_place.root_url, isolation_level="AUTOCOMMIT")
    with closing(mysql_place.open()) as store, engine.connect() as onlooker:

        def connections() -> int:
            question = "SELECT COUNT(*) FROM information_schema.processlist WHERE id <> CONNECTION_ID()"
            return int(onlooker.exec_driver_sql(question).scalar_one())

        before = connections()
        together = threading.Barrier(4)

        def find(number: int) -> None:
            together.wait()
            store.find(BizId.of(number))

        for _ in range(5):
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(find, range(4)))
        store.close_unused()
        assert connections() > before  # they were used just now
        monkeypatch.setattr("toc.store.servers.server.UNUSED_SECONDS", 0.0)
        store.close_unused()
        assert until(lambda: connections() == before)
    engine.dispose()
