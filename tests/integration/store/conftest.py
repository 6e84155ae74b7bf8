"""Task tables to test on: one in MariaDB spread over 4 databases, one in SQLite."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import pytest
from fault.kit.proxy import Proxy, through
from harness import secured
from harness.rows import NewRow
from harness.tables import engine_of
from sqlalchemy import create_engine

from benchmarks.local import MariaDB
from toc.model.clock import Clock
from toc.model.sharding import BizId, JobIds, crc32
from toc.model.task import TaskRow
from toc.store.migrate import Migrator
from toc.store.servers.mysql import MySqlServer
from toc.store.store import Store


class Place(NamedTuple):
    """Where a task table is."""

    urls: list[str]
    databases: int
    tables: int
    prefix: str
    root_url: str = ""
    """As its administrator."""

    def open(self, **options: Any) -> Store:
        """A store on it."""
        options = {"clock": Clock(), **options}
        urls = options.pop("urls", self.urls)
        return Store(urls, databases=self.databases, tables=self.tables, prefix=self.prefix, **options)

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """While a table, named as in SQL, is missing."""
        engine = create_engine(self.root_url or self.urls[0], isolation_level="AUTOCOMMIT")
        kept = name.replace("timeout_", "kept_")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {name} RENAME TO {kept}")
            try:
                yield
            finally:
                connection.exec_driver_sql(f"ALTER TABLE {kept} RENAME TO {name}")
        engine.dispose()


@pytest.fixture(scope="module")
def mysql_place(mariadb: MariaDB, module_database_prefix: str) -> Place:
    """Two "servers" (the same one twice) with two databases each, as if there were several."""
    server, question, query = mariadb.url.partition("?")
    urls = [mariadb.url, f"{server}/{question}{query}"]
    place = Place(urls, 4, 16, module_database_prefix, secured.root_url(mariadb))
    Migrator(list(map(secured.migrating, urls)), databases=4, tables=16, prefix=place.prefix).upgrade()
    return place


@pytest.fixture(scope="module")
def sqlite_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place([f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/toc.db"], 1, 4, "toc_")
    Migrator(place.urls, databases=1, tables=4).upgrade()
    return place


Reads = Callable[[int, str], int]


@pytest.fixture
def reads(mysql_place: Place) -> Iterator[Reads]:
    """How many rows the server reads for a statement on a task table, by its own counters."""
    engine = create_engine(mysql_place.root_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:

        def count(table: int, statement: str) -> int:
            # Which way it goes depends on what it knows of the table, and that it counts in its own time.
            database = f"{mysql_place.prefix}{table % mysql_place.databases}"
            connection.exec_driver_sql(f"ANALYZE TABLE {database}.timeout_task_{table:04d}")
            connection.exec_driver_sql("FLUSH STATUS")
            connection.exec_driver_sql(statement).all()
            found = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
            return sum(int(value) for _, value in found)

        yield count
    engine.dispose()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that the server is sent, from now on."""
    texts: list[str] = []
    run = MySqlServer.run

    def spy(self: MySqlServer, statements: Any, **options: Any) -> Any:
        texts.extend(statement.sql for statement in statements)
        return run(self, statements, **options)

    monkeypatch.setattr(MySqlServer, "run", spy)
    return texts


@pytest.fixture(params=["mysql", "sqlite"])
def place(request: pytest.FixtureRequest) -> Place:
    found = request.getfixturevalue(f"{request.param}_place")
    assert isinstance(found, Place)
    return found


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with closing(place.open()) as store:
        yield store


@pytest.fixture
def mysql_store(mysql_place: Place) -> Iterator[Store]:
    with closing(mysql_place.open()) as store:
        yield store


@pytest.fixture(scope="session")
def new_row() -> NewRow:
    """Makes rows as the client does; each with a biz_id of its own unless one is given."""
    clock = Clock()
    ids = JobIds(clock)

    def make(biz_id: int | str | None = None, slot_basis: str | None = None, **values: Any) -> TaskRow:
        now = clock.now_ms()
        biz = BizId.of(ids.make(0) if biz_id is None else biz_id)
        row = TaskRow(
            job_id=ids.make(biz.crc),
            biz_id=biz.number,
            biz_key=biz.key,
            biz_type=7,
            status=0,
            action_time=now + 60_000,
            next_time=now + 60_000,
            attribute="{}",
            version=0,
            attempts=0,
            crashes=0,
            slot_crc=biz.crc if slot_basis is None else crc32(slot_basis),
            slot_amount=16,
            dedup_key=None,
            last_error=None,
            gmt_create=now,
            gmt_modified=now,
        )
        row = row._replace(**values)
        return row if "next_time" in values else row._replace(next_time=row.action_time)

    return make


@pytest.fixture
def proxy(mariadb: MariaDB) -> Iterator[Proxy]:
    proxy = Proxy(mariadb.port)
    yield proxy
    proxy.close()


@pytest.fixture
def through_proxy(mysql_place: Place, proxy: Proxy) -> Iterator[Store]:
    """The task table in MariaDB, reached through the proxy (without TLS, so that it can read along)."""
    if secured.SECURED:
        pytest.skip("a proxy that eats replies must read along, which TLS is there to prevent")
    with closing(mysql_place.open(urls=[through(proxy, mysql_place.urls[0])])) as store:
        yield store


@pytest.fixture
def fresh_store(place: Place) -> Iterator[Store]:
    """A store whose task tables are empty."""
    store = place.open()
    for server in place.urls[:1]:
        with engine_of(server) as engine, engine.begin() as connection:
            for table in range(place.tables):
                schema = "" if server.startswith("sqlite") else f"{place.prefix}{table % place.databases}."
                connection.exec_driver_sql(f"DELETE FROM {schema}timeout_task_{table:04d}")
                connection.exec_driver_sql(f"DELETE FROM {schema}timeout_due")
    yield store
    store.close()
