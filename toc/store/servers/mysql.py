"""A server of MySQL 8 or MariaDB: batches of statements, the meaning of error codes, and its SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

import pymysql
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import URL

from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.sockets import KEEPALIVE_SECONDS
from toc.store.servers.mysql_connection import LOST, MySqlConnection, connector, error_code, server_name
from toc.store.servers.pool import Pool
from toc.store.servers.server import (
    DatabaseServer,
    Duplicate,
    Locked,
    Lost,
    ReadOnly,
    Refused,
    Transient,
)

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - sessions run in UTC, and the driver's datetimes are naive

_TRANSIENT = frozenset({1020, 1040, 1203, 1213})
"""Deadlock, too many connections: certainly rolled back."""
_READ_ONLY = frozenset({1290, 1792, 1836})
"""The server is read-only, as during a failover, and after it if it was the primary: rolled back."""
_LOCKED = frozenset({1205, 3572})
"""Timeout of a row lock (innodb_lock_wait_timeout) or a table lock (lock_wait_timeout); NOWAIT on MySQL."""
_NO_QUORUM = 1047
"""A node of a Galera cluster that has lost the others refuses every statement."""
_BEHIND = frozenset({1049, 1054, 1146})
"""Unknown database, column, table."""
_DUPLICATE = 1062
_OF_DRIVER = 2000
"""The first of the thousand codes of errors that no server has sent."""

TABLE_LOCK_SECONDS = 1
"""Seconds a batch waits for a locked table (LOCK TABLES, a long ALTER); the server's default is a year."""


class MySqlServer(DatabaseServer):
    """A MySQL 8 or MariaDB server that holds some of the databases."""

    table = "{}.{}".format
    after = "{}+INTERVAL {:d}000 MICROSECOND".format
    whole = "({}) DIV {:d}".format
    # The server converts, so that no datetime is parsed per row.
    milliseconds = "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',{}) DIV 1000".format
    text = "CONVERT({} USING utf8mb4)".format
    # The index is named: a list of most of a small table's keys would be found by a scan.
    by_primary_key = "{} FORCE INDEX (PRIMARY)".format
    dialect = mysql.dialect(paramstyle="format")
    greatest = "GREATEST"
    for_update = " FOR UPDATE"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    read_only = "SELECT @@global.read_only"

    def __init__(
        self,
        url: URL,
        databases: Sequence[int],
        *,
        connect_timeout: float = 3.0,
        read_timeout: float = 10.0,
        write_timeout: float = 10.0,
        keepalive: float = KEEPALIVE_SECONDS,
        pool_size: int = 8,
    ) -> None:
        connect = connector(
            url,
            connect_timeout,
            read_timeout,
            write_timeout,
            table_lock_timeout=TABLE_LOCK_SECONDS,
            keepalive=keepalive,
        )
        self._url = url
        self._keepalive = keepalive
        pool = Pool(connect, pool_size, connect_timeout + read_timeout)
        super().__init__(server_name(url), databases, pool)

    def _connect_within(self, seconds: float) -> MySqlConnection:
        return connector(self._url, seconds, seconds, seconds, keepalive=self._keepalive)()

    def translate(self, exc: Exception, *, sent: bool) -> Exception:
        """Translate a driver's error by its code. Omits texts of codes that quote data."""
        if not isinstance(exc, pymysql.err.MySQLError):
            return exc
        code = error_code(exc)
        if code == _DUPLICATE:
            return Duplicate(f"{self.name}: duplicate key")
        text = (
            f"{self.name}: {exc.args[1]} ({code})"
            if len(exc.args) > 1
            else f"{self.name}: MySQL error {code}"
        )
        if code in _BEHIND:
            return SchemaBehind(f"{text}: if this is the right server, run `toc db upgrade`")
        if code in _LOCKED:
            return Locked(text)
        if code in _READ_ONLY:
            return ReadOnly(text)
        if code in _TRANSIENT:
            return Transient(text)
        if code in LOST and sent:
            return Lost(text if code else f"{self.name}: the connection is closed")
        if isinstance(exc, (pymysql.err.DataError, pymysql.err.IntegrityError)):
            return Refused(f"{self.name}: a value was refused (MySQL error {code})")
        answered = sent and not _OF_DRIVER <= code < _OF_DRIVER + 1000 and code != _NO_QUORUM
        return Refused(text) if answered else StoreUnavailable(text)

    def identity(self, query: Callable[[str], Any]) -> tuple[Any, ...] | None:
        """Host name, port, server_id and data directory: hosts may share some of them, never all."""
        return tuple(query("SELECT @@hostname, @@port, @@server_id, @@datadir"))

    def instant(self, milliseconds: int) -> str:
        """A DATETIME literal."""
        second, millisecond = divmod(milliseconds, 1000)
        return f"'{_second(second)}.{millisecond:03d}'"

    def from_now(self, milliseconds: int) -> str:
        """An instant this many ms after now. A caller's session may have another zone than ours."""
        now = "UTC_TIMESTAMP(3)"
        return self.after(now, milliseconds) if milliseconds else now

    def appended(self, column: str, text: str, most: int) -> str:
        """An expression that appends a literal that needs no escaping and keeps the last ``most``
        characters."""
        added = f"CONVERT(X'{text.encode().hex()}' USING utf8mb4)"
        return f"RIGHT(CONCAT(COALESCE({column},''),{added}),{most:d})"

    def joined(self, parts: Sequence[str], by: str = ",") -> str:
        """A CONCAT_WS."""
        return f"CONCAT_WS('{by}',{','.join(parts)})"

    def by_whole_keys(self, name: str, where: str, *, wait: bool = True) -> str:
        """A locking read. The index is named, lest a small table be read, and locked, row by row."""
        lock = "LOCK IN SHARE MODE" if wait else "FOR UPDATE NOWAIT"  # the only NOWAIT that both kinds know
        return f"{name} FORCE INDEX (uk_dedup_{name[-4:]}) WHERE {where} {lock}"

    def or_lock(self, insert: str) -> str:
        """An INSERT with an update that changes nothing: a duplicate of a primary key is locked alone."""
        return f"{insert} ON DUPLICATE KEY UPDATE payload=payload"

    def union(self, selects: Iterable[str]) -> str:
        """A UNION ALL with parentheses around each select, which SQLite does not know."""
        return "(" + ") UNION ALL (".join(selects) + ")"


@lru_cache(4096)
def _second(second: int) -> str:
    """A second as SQL text. Rows that are written together share few."""
    return str(_EPOCH + timedelta(seconds=second))
