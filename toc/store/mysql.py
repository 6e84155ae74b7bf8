"""MySQL 8 and MariaDB: connections, multi-statement batches, and the meaning of error codes."""

from __future__ import annotations

import contextlib
import select
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import pymysql
from pymysql.constants import CLIENT, COMMAND, CR, ER
from sqlalchemy.engine import URL

from toc.config import URL_FLAGS
from toc.model.errors import ConfigError, SchemaBehind, StoreUnavailable
from toc.sockets import READ_BYTES, keep_timeouts, reader
from toc.store.packets import read_answers
from toc.store.pool import Pool, PooledConnection
from toc.store.server import (
    DatabaseServer,
    Duplicate,
    Exchange,
    Locked,
    Lost,
    Refused,
    Result,
    Statement,
    Transient,
)

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - sessions run in UTC, and the driver's datetimes are naive

_LOST = frozenset({0, 1053, 1180, 1317, 1927, 2006, 2013, 2014, 2027, 2055, 4031})
"""Gone away, lost, killed, shut down, malformed answer, or failed at COMMIT: the outcome of the batch is
unknown."""
_TRANSIENT = frozenset({1020, 1040, 1153, 1203, 1213, 1290, 1792, 1836})
"""Deadlock, too many connections, read-only (during a failover), larger than a packet may be: certainly
rolled back."""
_LOCKED = frozenset({1205, 3572})
"""Timeout of a row lock (innodb_lock_wait_timeout) or a table lock (lock_wait_timeout); NOWAIT on MySQL."""
_NO_QUORUM = 1047
"""A node of a Galera cluster that has lost the others refuses every statement."""
_BEHIND = frozenset({1049, 1054, 1146})
"""Unknown database, column, table."""
_DUPLICATE = 1062
_OF_DRIVER = 2000
"""The first of the thousand codes of errors that no server has sent."""

_QUERY_FILES = frozenset({"ssl_ca", "ssl_cert", "ssl_key"})
_QUERY = _QUERY_FILES | {"ssl_key_password", "unix_socket", "bind_address"}
_QUERY_FLAGS = frozenset({"ssl_verify_cert", "ssl_verify_identity", "ssl_disabled"})

_ANSWER_SECONDS = 0.0001
_MOST_ANSWER_SECONDS = 0.003
"""A patient caller waits before it reads the answers: _ANSWER_SECONDS for each statement, and at
most _MOST_ANSWER_SECONDS in all. Every answer is a packet of its own, and a caller that reads at
once wakes up for each."""

_PING_SECONDS = 0.5
"""Seconds without an answer after which a ping is sent. This is less than LOST_FAST_SECONDS, so a
batch that the server has dropped can be sent once more."""
_PING = b"\x01\x00\x00\x00\x0e"
"""A packet of one byte, COM_PING."""

_SESSION = (
    "SELECT @@max_allowed_packet",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    (
        "SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
        "innodb_lock_wait_timeout = 2"
    ),
)
TABLE_LOCK_SECONDS = 1
"""Seconds a batch waits for a locked table (LOCK TABLES, a long ALTER); the server's default is a year."""
_NONSENSE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError, struct.error)
"""Errors that the driver raises for a damaged greeting, besides its own."""


def connector(
    url: URL,
    connect_timeout: float,
    read_timeout: float | None,
    write_timeout: float,
    database: str | None = None,
    table_lock_timeout: int | None = None,
) -> Callable[[], Any]:
    """A function that opens a connection with the session settings of toc. Timeouts are seconds.

    ``table_lock_timeout``: seconds its statements wait for locked tables; None: the server's setting.

    A database in the URL is not used: at run time every name is qualified. Raises ConfigError for an unknown
    or invalid query argument of the URL, and for an unreadable certificate or key. So does the function, if
    the file has become unreadable.
    """
    options = _options(url)
    session = list(_SESSION)
    if table_lock_timeout is not None:
        session.append(f"SET SESSION lock_wait_timeout = {table_lock_timeout:d}")

    def make(*, at_once: bool = True) -> _Connection:
        try:
            return _Connection(
                host=url.host or "127.0.0.1",
                port=url.port or 3306,
                user=url.username,
                password=str(url.password or "").encode(),  # the driver would encode a str as latin-1
                database=database,
                charset="utf8mb4",
                autocommit=True,
                # FOUND_ROWS: an UPDATE counts the rows that it matched, so that the guard does not depend on
                # whether the new values differ from the old ones.
                client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
                connect_timeout=connect_timeout,
                read_timeout=read_timeout,
                write_timeout=write_timeout,
                defer_connect=not at_once,
                **options,
            )
        except OSError as exc:  # files: for the network the driver has its own error
            raise ConfigError(
                f"{server_name(url)}: a certificate or key in the query of its URL cannot be read: {exc}"
            ) from exc
        except _NONSENSE as exc:
            raise pymysql.err.OperationalError(
                CR.CR_MALFORMED_PACKET, f"its greeting cannot be parsed ({type(exc).__name__}: {exc})"
            ) from exc

    def connect() -> Any:
        connection = make()
        try:
            began = time.monotonic()
            limit, *_ = connection.batch(session)
            connection.first_answer = time.monotonic() - began
            connection.max_packet = int(limit.rows[0][0])
        except _NONSENSE as exc:  # a damaged answer
            connection.close()
            raise pymysql.err.OperationalError(
                CR.CR_MALFORMED_PACKET, f"its first answer cannot be parsed ({type(exc).__name__})"
            ) from exc
        except BaseException:
            connection.close()
            raise
        return connection

    make(at_once=False)  # makes the TLS settings now, not while a caller waits
    return connect


def _options(url: URL) -> dict[str, Any]:
    """Translate the query of a URL to the driver's options."""
    options: dict[str, Any] = {}
    for key, value in url.query.items():
        where = f"{server_name(url)}: {key!r} in the query of a database URL"
        name = "ssl_verify_identity" if key == "ssl_check_hostname" else key
        if not isinstance(value, str):
            raise ConfigError(f"{where} is given twice")
        if name in _QUERY_FILES and not Path(value).is_file():
            raise ConfigError(f"{where} is not a file: {value}")
        if name in _QUERY:
            options[name] = value
        elif name in _QUERY_FLAGS:
            if value.lower() not in URL_FLAGS:  # a typing error must not turn a check off
                raise ConfigError(f"{where} must be true or false")
            options[name] = URL_FLAGS[value.lower()]
        elif name != "charset":  # always utf8mb4
            raise ConfigError(f"{where} is not a known option")
    if "ssl_ca" in options:
        # A URL with a CA asks for a verified server. The driver alone would not check its name nor, with
        # ssl_verify_identity=false, its certificate.
        options.setdefault("ssl_verify_identity", True)
        options.setdefault("ssl_verify_cert", True)
    return options


class _Connection(pymysql.connections.Connection):
    """A connection that shares its TLS settings with the others of its process.

    The driver makes them for each connection, even if the server then speaks no TLS; reading the system's
    certificates takes 20 ms, in which no other thread runs. The kernel keeps the timeouts, and this class
    reads the answers to a batch itself.

    KILL QUERY between two statements of a batch makes the server silently drop the rest. So a long wait sends
    a ping: if the ping's answer comes instead, the server has finished with the batch.
    """

    _contexts: ClassVar[dict[str, ssl.SSLContext]] = {}
    first_answer = 0.0
    """Seconds until the server's first answer."""
    _waits = 1
    """How often a read waits, with a ping in between."""
    _may_ping = _pinged = False
    max_packet = 1 << 20
    """Most bytes that the server accepts at once: assumed until it has said its limit."""

    def connect(self, sock: Any = None) -> None:
        super().connect(sock)
        driver: Any = self  # it has no public way to its socket
        read, write = driver._read_timeout, driver._write_timeout
        waits = ceil((read or 0.0) / _PING_SECONDS)
        if None not in (read, write) and keep_timeouts(driver._sock, read / waits, write):
            self._waits = waits
            driver._read_timeout = driver._write_timeout = driver._current_timeout = None  # kernel timeouts
            driver._rfile.close()
            driver._rfile = reader(driver._sock)

    def _create_ssl_ctx(self, sslp: dict[str, Any]) -> ssl.SSLContext:
        settings = repr(sorted(sslp.items()))
        context = self._contexts.get(settings)
        if context is None:
            context = super()._create_ssl_ctx(sslp)  # type: ignore[misc]
            if sslp.get("check_hostname"):  # the driver leaves it out for the system's CAs
                context.check_hostname = True
            self._contexts[settings] = context
        return context

    def batch(self, statements: Sequence[str], answers_after: float = 0.0) -> list[Result]:
        """Send statements and return their results, read after ``answers_after`` seconds. Raises the driver's
        errors."""
        self.ask(statements)
        if answers_after:
            time.sleep(answers_after)
        return self.answers(len(statements))

    def ask(self, statements: Sequence[str]) -> None:
        """Send statements; ``answers`` reads their results."""
        driver: Any = self
        sql = ";".join(statements).encode()
        if len(sql) >= self.max_packet:
            # Otherwise the server would hang up halfway, which looks like a broken connection.
            raise pymysql.err.OperationalError(
                ER.NET_PACKET_TOO_LARGE,
                f"a batch of {len(sql)} bytes is larger than its max_allowed_packet ({self.max_packet})",
            )
        driver._execute_command(COMMAND.COM_QUERY, sql)

    def answers(self, count: int) -> list[Result]:
        """Read the results of the ``count`` statements that were sent."""
        driver: Any = self
        if driver._current_timeout != driver._read_timeout:
            driver._sock.settimeout(driver._read_timeout)
            driver._current_timeout = driver._read_timeout
        self._may_ping, self._pinged = count > 1, False
        try:
            return read_answers(
                self._receive, driver.decoders, count, driver._next_seq_id, lambda: self._pinged
            )
        except BaseException:
            if self._pinged:  # its answer would be taken for one to the next batch
                driver._force_close()
            raise

    def _receive(self) -> bytes:
        driver: Any = self
        try:
            data = self._read()
        except OSError as exc:
            driver._force_close()
            raise pymysql.err.OperationalError(
                CR.CR_SERVER_LOST, f"Lost connection to MySQL server during query ({exc})"
            ) from exc
        if not data:
            driver._force_close()
            raise pymysql.err.OperationalError(
                CR.CR_SERVER_LOST, "Lost connection to MySQL server during query"
            )
        return data

    def _read(self) -> bytes:
        driver: Any = self
        tls = isinstance(driver._sock, ssl.SSLSocket)  # its socket, not the kernel, keeps the timeout
        if tls and not driver._sock.pending() and not _readable(self, _PING_SECONDS):
            self._ping()
        for left in reversed(range(self._waits)):
            try:
                data: bytes = driver._rfile.read1(READ_BYTES)
                break
            except TimeoutError:
                if not left:
                    raise
                self._ping()
        return data

    def _ping(self) -> None:
        """Ask whether the server waits for another batch."""
        driver: Any = self
        if self._may_ping:
            self._may_ping, self._pinged = False, True
            driver._sock.sendall(_PING)


def server_name(url: URL) -> str:
    """Return host:port, for messages."""
    return f"{url.host or '127.0.0.1'}:{url.port or 3306}"


class MySqlServer(DatabaseServer):
    """A MySQL 8 or MariaDB server that holds some of the databases."""

    greatest = "GREATEST"
    for_update = " FOR UPDATE"

    def __init__(
        self,
        url: URL,
        databases: Sequence[int],
        *,
        connect_timeout: float,
        read_timeout: float,
        write_timeout: float,
        pool_size: int,
    ) -> None:
        connect = connector(
            url, connect_timeout, read_timeout, write_timeout, table_lock_timeout=TABLE_LOCK_SECONDS
        )
        self._url = url

        def connected() -> Any:
            connection = connect()
            self.first_answer = connection.first_answer
            return connection

        pool = Pool(connected, pool_size, connect_timeout + read_timeout)
        super().__init__(server_name(url), databases, pool)

    def _connect_within(self, seconds: float) -> Any:
        return connector(self._url, seconds, seconds, seconds)()

    def _execute(
        self,
        connection: Any,
        statements: Sequence[Statement],
        transaction: bool,
        patient: bool,
    ) -> list[Result]:
        parts = _with_parameters(connection, statements)
        transaction = transaction and len(parts) > 1  # one statement is a transaction of its own
        if transaction:
            parts = ["START TRANSACTION", *parts, "COMMIT"]
        after = min(len(parts) * _ANSWER_SECONDS, _MOST_ANSWER_SECONDS) if patient else 0.0
        try:
            results: list[Result] = connection.batch(parts, after)
        except pymysql.err.MySQLError as exc:
            # An error ends the batch and leaves the transaction open. Roll back now: closing the connection
            # would release the locks only when the server notices.
            if transaction and _code(exc) not in _LOST:
                with contextlib.suppress(pymysql.err.MySQLError):
                    connection.batch(["ROLLBACK"])
            raise
        return results[1:-1] if transaction else results

    def _ask(self, link: PooledConnection, statements: Sequence[Statement]) -> None:
        link.driver.ask(_with_parameters(link.driver, statements))
        link.answers = len(statements)

    def _answered(self, link: PooledConnection, seconds: float) -> bool:
        return _readable(link.driver, seconds)

    def _answers(self, link: PooledConnection) -> list[Result]:
        results: list[Result] = link.driver.answers(link.answers)
        return results

    def _hung_up(self, connection: Any) -> bool:
        # A server sends nothing on an idle connection: a readable socket means that it has closed it.
        # Checking before a batch is sent keeps "not sent" apart from "unknown".
        return _readable(connection, 0.0)

    def translate(self, exc: Exception, *, sent: bool) -> Exception:
        """Translate a driver's error by its code. Omits texts of codes that quote data."""
        if not isinstance(exc, pymysql.err.MySQLError):
            return exc
        code = _code(exc)
        if code == _DUPLICATE:
            return Duplicate(f"{self.name}: duplicate key")
        text = (
            f"{self.name}: {exc.args[1]} ({code})"
            if len(exc.args) > 1
            else f"{self.name}: MySQL error {code}"
        )
        if code in _BEHIND:
            return SchemaBehind(f"{text}: run `toc db upgrade`")
        if code in _LOCKED:
            return Locked(text)
        if code in _TRANSIENT:
            return Transient(text)
        if code in _LOST and sent:
            return Lost(text if code else f"{self.name}: the connection is closed")
        if isinstance(exc, (pymysql.err.DataError, pymysql.err.IntegrityError)):
            return Refused(f"{self.name}: a value was refused (MySQL error {code})")
        answered = sent and not _OF_DRIVER <= code < _OF_DRIVER + 1000 and code != _NO_QUORUM
        return Refused(text) if answered else StoreUnavailable(text)

    def connections(self) -> Statement:
        """A query for this account's connections, which every account may see."""
        return Statement("SHOW PROCESSLIST")

    def waits_for_lock(self, exchange: Exchange, rows: Sequence[Any]) -> bool:
        """Check the state that the server shows, such as "Waiting for table metadata lock"."""
        own = exchange.driver.thread_id()
        states = [str(row[6]) for row in rows if row[0] == own]
        return any("lock" in state for state in states)

    def identity(self, query: Callable[[str], Any]) -> tuple[Any, ...] | None:
        """Host name, port, server_id and data directory: hosts may share some of them, never all."""
        return tuple(query("SELECT @@hostname, @@port, @@server_id, @@datadir"))

    def table(self, database: str, name: str) -> str:
        """``toc_3.timeout_task_0011``."""
        return f"{database}.{name}"

    def instant(self, milliseconds: int) -> str:
        """A DATETIME literal."""
        second, millisecond = divmod(milliseconds, 1000)
        return f"'{_second(second)}.{millisecond:03d}'"

    def from_now(self, milliseconds: int) -> str:
        """An instant this many ms after NOW(3). Sessions run in UTC."""
        return f"NOW(3)+INTERVAL {milliseconds * 1000:d} MICROSECOND" if milliseconds else "NOW(3)"

    def after(self, column: str, milliseconds: int) -> str:
        """An instant this many ms after that of a column."""
        return f"{column}+INTERVAL {milliseconds * 1000:d} MICROSECOND"

    def milliseconds(self, column: str) -> str:
        """An expression in milliseconds: the server converts, so that no datetime is parsed per row."""
        return f"TIMESTAMPDIFF(MICROSECOND,'1970-01-01',{column}) DIV 1000"

    def text(self, column: str) -> str:
        """An expression that reads VARBINARY as utf8mb4."""
        return f"CONVERT({column} USING utf8mb4)"

    def appended(self, column: str, text: str, most: int) -> str:
        """An expression that appends a literal that needs no escaping and keeps the last ``most``
        characters."""
        added = f"CONVERT(X'{text.encode().hex()}' USING utf8mb4)"
        return f"RIGHT(CONCAT(COALESCE({column},''),{added}),{most:d})"

    def joined(self, parts: Sequence[str], by: str = ",") -> str:
        """A CONCAT_WS."""
        return f"CONCAT_WS('{by}',{','.join(parts)})"

    def first_due(self, table: int, name: str, status: int, start: str, end: str) -> str:
        """A SELECT with MIN over an index, which is answered while planning: half the cost of LIMIT 1."""
        return (
            f"SELECT {table:d} FROM {name} WHERE status={status:d} AND next_time>={start} "
            f"HAVING MIN(next_time)<{end}"
        )

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


def _with_parameters(driver: Any, statements: Sequence[Statement]) -> list[str]:
    """The statements as sent to the server."""
    return [sql % tuple(map(driver.escape, params)) if params else sql for sql, params in statements]


def _readable(connection: Any, seconds: float) -> bool:
    """Whether the server sends data or hangs up within ``seconds``."""
    socket = connection._sock  # the driver has no public way to it
    if socket is None:
        return True
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@lru_cache(4096)
def _second(second: int) -> str:
    """A second as SQL text. Rows that are written together share few."""
    return str(_EPOCH + timedelta(seconds=second))


def _code(exc: BaseException) -> int:
    code: Any = exc.args[0] if exc.args else 0
    return code if isinstance(code, int) else 0
