"""What a server gives to new sessions (SET GLOBAL, init_connect) changes nothing, or is refused by name.

The accounts have no SUPER, since init_connect does not run for those that do.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pymysql
import pytest
from conftest import Launch
from fault.conftest import Verdict
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisServer
from toc import CancelOutcome, NewTask, Settings, TimeoutCenter, Topic
from toc.model.errors import StoreUnavailable
from toc.model.finding import Level
from toc.store.migrate import Migrator

ATTRIBUTE = {"text": 'it\'s "quoted" \\ back\\\\slash || pipe ; \n ü 漢字 😀 %s', "n": 2**63}
BODY = bytes(range(256)) + b"\xbf'\xbf\\"


class Spoiled(NamedTuple):
    """A server of a test's own; ``root`` has the session of before, whatever is spoiled."""

    server: MariaDB
    root: Any

    def url(self, account: str) -> str:
        return f"mysql+pymysql://{account}:secret@127.0.0.1:{self.server.port}"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.root.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())


def root_of(server: MariaDB) -> Any:
    url = make_url(server.url)
    return pymysql.connect(
        host="127.0.0.1", port=server.port, user="root", password=str(url.password), autocommit=True
    )


@pytest.fixture
def spoiled(launch: Launch) -> Iterator[Spoiled]:
    server = launch(MariaDB, config=["log-bin=binlog", "server-id=1", "lower_case_table_names=1"])
    with root_of(server) as root:
        spoiled = Spoiled(server, root)
        for account in ("app", "logger"):
            spoiled.rows(f"CREATE USER '{account}'@'%' IDENTIFIED BY 'secret'")
            spoiled.rows(f"GRANT ALL ON `toc\\_%`.* TO '{account}'@'%'")
        spoiled.rows("GRANT BINLOG ADMIN ON *.* TO 'logger'@'%'")
        yield spoiled


@contextmanager
def with_defaults(spoiled: Spoiled, name: str, spoil: str) -> Iterator[str]:
    """While new sessions begin so; yields what another client sees of that. A failure tells the name."""
    before, usual = dict(spoiled.rows("SHOW GLOBAL VARIABLES")), seen(spoiled)
    try:
        spoiled.rows(spoil)
        differs = seen(spoiled).items() ^ usual.items()
        yield ", ".join(sorted({variable for variable, _ in differs}))
    except BaseException as exc:
        exc.add_note(name)
        raise
    after = dict(spoiled.rows("SHOW GLOBAL VARIABLES"))
    for variable, value in before.items():
        if value != after[variable] and not variable.startswith("gtid"):
            number = value.replace(".", "", 1).isdigit()
            spoiled.rows(f"SET GLOBAL {variable} = {value if number else repr(value)}")


def seen(spoiled: Spoiled) -> dict[str, Any]:
    """The state of a session of a client that sets nothing."""
    url = make_url(spoiled.url("logger"))
    with suppress(pymysql.MySQLError):
        connection = pymysql.connect(
            host=url.host, port=url.port or 0, user=url.username, password=url.password or "", autocommit=None
        )
        with connection, connection.cursor() as cursor:
            cursor.execute("SHOW SESSION VARIABLES")
            found = dict(cursor.fetchall())
            cursor.execute("SELECT @@in_transaction, DATABASE()")
            found["state"] = cursor.fetchone()
            found["timestamp"] = found.get("timestamp", "").startswith(
                "1000000000"
            )  # else it is the time of now
            return {name: value for name, value in found.items() if not name.startswith(("pseudo", "rand"))}
    return {"errors": True}


def in_each(*statements: str) -> str:
    return f"""SET GLOBAL init_connect = "{"; ".join(statements)}" """


RIGHT = {
    "autocommit off, as the manual shows": in_each("SET autocommit=0"),
    "autocommit off for all": "SET GLOBAL autocommit=0",
    "a transaction that is open": in_each("BEGIN", "SELECT 1"),
    "COMMIT begins another": "SET GLOBAL completion_type='CHAIN'",
    "COMMIT hangs up": "SET GLOBAL completion_type='RELEASE'",
    "SERIALIZABLE": "SET GLOBAL tx_isolation='SERIALIZABLE'",
    "READ UNCOMMITTED": "SET GLOBAL tx_isolation='READ-UNCOMMITTED'",
    "read-only transactions": "SET GLOBAL tx_read_only=1",
    "sql_mode: another language": "SET GLOBAL sql_mode="
    "'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,NO_UNSIGNED_SUBTRACTION,HIGH_NOT_PRECEDENCE'",
    "sql_mode: Oracle's": "SET GLOBAL sql_mode='ORACLE,EMPTY_STRING_IS_NULL'",
    "sql_mode: none": "SET GLOBAL sql_mode=''",
    "time zone": "SET GLOBAL time_zone='+09:00'",
    "texts in latin1": "SET GLOBAL character_set_server='latin1', GLOBAL character_set_connection='latin1'",
    "no index, no UPDATE": "SET GLOBAL sql_safe_updates=1",
    "no rows": "SET GLOBAL sql_select_limit=0",
    "no large joins": "SET GLOBAL max_join_size=1",
    "a millisecond for each statement": "SET GLOBAL max_statement_time=0.001",
    "unique keys unchecked": in_each("SET unique_checks=0, foreign_key_checks=0"),
    "waits": "SET GLOBAL innodb_lock_wait_timeout=0, GLOBAL lock_wait_timeout=0",
    "numbers and lists cut short": "SET GLOBAL group_concat_max_len=4, GLOBAL div_precision_increment=0, "
    "GLOBAL max_sort_length=64, GLOBAL innodb_strict_mode=0",
    "another engine": "SET GLOBAL default_storage_engine='MyISAM'",
    "another database": in_each("USE information_schema"),
}


def test_all_that_a_server_gives_to_sessions_is_overruled(
    spoiled: Spoiled, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(55, "defaults of a server's sessions", "what toc sets anew")
    for name, spoil in RIGHT.items():
        with with_defaults(spoiled, name, spoil) as differs:
            assert differs
            everything_is_right(spoiled, clean_redis)
    line.prove(True, f"{len(RIGHT)} kinds, each seen by another client; all was stored and found again")


def everything_is_right(spoiled: Spoiled, clean_redis: RedisServer) -> None:
    prefix = f"TOC_{secrets.token_hex(3)}_"  # lower_case_table_names=1
    settings = Settings(
        database_urls=[spoiled.url("app")],
        databases=2,
        tables=2,
        database_prefix=prefix,
        redis_url=clean_redis.url,
    )
    migrator = Migrator([spoiled.url("app")], databases=2, tables=2, prefix=prefix)
    migrator.upgrade()
    assert not any(status.behind for status in migrator.check())
    with TimeoutCenter(settings) as center:  # what is not committed is gone with its connections
        center.store.check()
        center.store.check_layout()
        center.store.topics.create(Topic("order.close", 1, 4))
    with TimeoutCenter(settings) as center:
        options: dict[str, Any] = {"attribute": ATTRIBUTE, "body": BODY, "content_type": "a/b"}
        first = center.submit("order.close", biz_id="ü😀'\\", delay=3600, dedup_key="k'\\", **options)
        assert center.submit("order.close", biz_id="ü😀'\\", delay=3600, dedup_key="k'\\", **options) == first
        new = [NewTask("order.close", n, 3600, None, ATTRIBUTE, dedup_key="k") for n in range(4)]
        many = center.submit_many(new)
        assert center.submit_many(new) == many
        assert center.cancel(many[0]) is CancelOutcome.CANCELLED
        found = center.find(biz_id="ü😀'\\")
        assert [(task.job_id, task.attribute) for task in found] == [(first, ATTRIBUTE)]
        task = center.get(first)
        assert task is not None
        assert task.body == BODY
        clock = center.store.clocks().popitem()[1]
        assert isinstance(clock, float)
        assert abs(clock) < 60
        wrong = [line for line in center.store.examine() if line.level is Level.REFUSE]
        assert not wrong
        last = center.submit("order.close", biz_id=9, delay=3600)
        expected = {(first, 0), (last, 0), (many[0], 3), *((job_id, 0) for job_id in many[1:])}
    tables = [f"`{prefix.lower()}{n}`.timeout_task_{n:04d}" for n in range(2)]
    stored = [row for table in tables for row in spoiled.rows(f"SELECT job_id, status FROM {table}")]
    assert sorted(stored) == sorted(expected)
    engines = spoiled.rows(
        "SELECT DISTINCT engine, table_collation FROM information_schema.tables "
        f"WHERE table_schema LIKE '{prefix.lower()}%' AND table_name LIKE 'timeout%'"
    )
    assert engines == [("InnoDB", "utf8mb4_bin")]


REFUSED = {
    "packets": ("SET GLOBAL max_allowed_packet=1024", "max_allowed_packet"),
    "a clock that stands still": (in_each("SET timestamp=1000000000"), "timestamp"),
    "writes that no replica gets": (in_each("SET sql_log_bin=0"), "sql_log_bin"),
    "a log of statements": ("SET GLOBAL binlog_format='STATEMENT'", "binlog_format"),
}


def test_what_cannot_be_set_is_refused_by_name(spoiled: Spoiled, verdict: Verdict) -> None:
    line = verdict(55, "defaults of a server's sessions", "what cannot be set")
    for name, (spoil, variable) in REFUSED.items():
        with with_defaults(spoiled, name, spoil) as differs:
            assert variable in differs
            is_refused(spoiled, variable)
    line.prove(True, ", ".join(variable for _, variable in REFUSED.values()))


def is_refused(spoiled: Spoiled, variable: str) -> None:
    urls = [spoiled.url("logger")]
    with pytest.raises(StoreUnavailable, match=f"its sessions have {variable} .* instead of "):
        Migrator(urls, databases=1, tables=1, prefix="toc_refused_").upgrade()
    with TimeoutCenter(Settings(database_urls=urls, databases=1, tables=1)) as center:
        with pytest.raises(StoreUnavailable, match=f"its sessions have {variable} "):
            center.store.check()
        assert [line.level for line in center.store.examine()] == [Level.REFUSE]
    assert not spoiled.rows("SHOW DATABASES LIKE 'toc\\_refused%'")
