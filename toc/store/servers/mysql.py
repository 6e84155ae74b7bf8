"""A server of MySQL 8 or MariaDB: connections, batches of statements, the meaning of error codes, and its
SQL.

The driver logs in over a socket that is opened here, in TLS if the URL or the server wants it. From then on
only this module uses the socket: each batch of statements is one query of MySQL's protocol (COM_QUERY), and
toc.store.servers.mysql_answers reads the answers.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any

import pymysql
from pymysql.constants import CLIENT, CR, ER
from pymysql.converters import decoders, escape_string
from pymysql.err import MySQLError, OperationalError
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import URL

from toc import sockets
from toc.model.errors import ConfigError, NotInstalled, SchemaBehind, StoreUnavailable
from toc.sockets import URL_FLAGS
from toc.store.servers import server as db
from toc.store.servers.mysql_answers import WHOLE, ends_left, read_answers
from toc.store.servers.pool import Pool
from toc.store.servers.server import DatabaseServer, Param, Result, Statement

_QUERY_FILES = frozenset({"ssl_ca", "ssl_cert", "ssl_key"})
_QUERY = _QUERY_FILES | {"ssl_key_password", "unix_socket"}
_QUERY_FLAGS = frozenset({"ssl_verify_cert", "ssl_verify_identity", "ssl_disabled"})

_SLOWEST = 1000
"""Bytes a second. A result that comes more slowly for longer than the timeout is none."""
_COM_QUERY = b"\x03"
_ANSWER_SECONDS = 0.0001
_MAX_ANSWER_SECONDS = 0.003
"""A patient caller waits before it reads the answers: _ANSWER_SECONDS for each statement, and at
most _MAX_ANSWER_SECONDS in all. Every answer is a packet of its own, and a caller that reads at
once wakes up for each."""
LOST = frozenset({0, 1053, 1180, 1317, 1927, 2006, 2013, 2014, 2027, 2055, 4031})
"""Codes of errors after which the outcome of a batch is unknown: gone away, lost, killed, shut down, a
malformed answer, or failed at COMMIT."""

_LOST_CONNECTION = "Lost connection to MySQL server during query"
MIN_PACKET = 4 << 20
"""Least max_allowed_packet, in bytes. A longer batch is of one body alone."""

_SESSION = {
    "autocommit": "ON",
    "completion_type": "NO_CHAIN",
    "sql_mode": "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION",
    "time_zone": "+00:00",
    "unique_checks": "ON",
    "sql_safe_updates": "OFF",
    "sql_big_selects": "ON",
    "sql_select_limit": "18446744073709551615",
    "innodb_lock_wait_timeout": "2",
}
"""What toc sets on each connection. What the server gives to sessions (SET GLOBAL, init_connect) could undo
commits, leave rows out of an answer, or change times and texts."""
_EXPECTED = {
    **_SESSION,
    **dict.fromkeys(("tx_isolation", "transaction_isolation"), "READ-COMMITTED"),
    **dict.fromkeys(("tx_read_only", "transaction_read_only"), "OFF"),
    **dict.fromkeys(("max_statement_time", "max_execution_time"), "0"),
    **dict.fromkeys(("character_set_client", "character_set_connection", "character_set_results"), "utf8mb4"),
    # The rest is only verified: few accounts may change it.
    "sql_log_bin": "ON",
    "binlog_format": "ROW or MIXED",
    "timestamp": "the time of now",
    "max_allowed_packet": f"{MIN_PACKET} or more",
}
"""What a connection must have. MySQL and MariaDB each know only one of two names."""
_SHOW = f"SHOW SESSION VARIABLES WHERE Variable_name IN ({','.join(map(repr, [*_EXPECTED, 'log_bin']))})"


def connector(
    url: URL, connect_timeout: float, read_timeout: float | None, write_timeout: float, *,
    database: str | None = None, lock_timeout: int | None = None,
) -> Callable[[], MySqlConnection]:  # fmt: skip
    """Return a function that opens a connection with the session settings of toc. Timeouts are seconds.

    ``lock_timeout``: seconds its statements wait for locked tables; None: the server's setting.

    Raises ConfigError for a database in the URL, as at run time every name is qualified, for an unknown or
    invalid query argument of it, and for an unreadable certificate or key. The function raises
    StoreUnavailable for a session that cannot be made as toc needs it.
    """
    if url.database:
        do = "leave it out: TOC_DATABASE_PREFIX and TOC_DATABASES name the databases"
        raise ConfigError(f"{server_name(url)}: its URL in TOC_DATABASE_URLS names a database; {do}")
    options = _options(url)
    session = [_set(lock_timeout), *_REST]
    if database is not None:
        session.insert(1, f"USE {database}")  # init_connect may have left it
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    disabled, required = tls.pop("ssl_disabled", False), any(tls.values())

    def read_context() -> ssl.SSLContext:
        """Return its TLS settings. Files that have changed, as renewed certificates do, are read anew."""
        return _context(*(Path(tls[name]).stat().st_mtime_ns for name in tls if name in _QUERY_FILES), **tls)

    try:
        read_context()
    except OSError as exc:
        where = f"{server_name(url)}: a certificate or key in the query of its URL"
        raise ConfigError(f"{where} cannot be read: {exc}") from exc

    def log_in() -> tuple[pymysql.connections.Connection[Any], socket.socket]:
        try:
            context = read_context()
            sock = _opened(url, options, connect_timeout)
        except OSError as exc:
            what = f"Can't connect to MySQL server on {url.host!r} ({exc})"
            raise OperationalError(CR.CR_CONN_HOST_ERROR, what) from exc
        driver: Any = pymysql.connections.Connection(
            host=url.host or "127.0.0.1",
            user=url.username,
            password=str(url.password or "").encode(),  # the driver would encode a str as latin-1
            database=database,
            charset="utf8mb4",
            autocommit=True,
            # FOUND_ROWS: an UPDATE counts the rows that it matched, so that the guard does not depend on
            # whether the new values differ from the old ones.
            client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
            read_timeout=read_timeout,
            write_timeout=write_timeout,
            defer_connect=True,
            ssl=context if required and not disabled else None,
            ssl_disabled=disabled or not required,
        )
        inside = _Tls(context)
        if not disabled:  # also if it is not required: then it is used if the server offers it
            driver.ssl, driver.ctx = True, inside
        with _parsed("greeting"):
            driver.connect(sock)
        return driver, inside.socket or sock

    def connect() -> MySqlConnection:
        connection = MySqlConnection(*log_in(), read_timeout, write_timeout)
        try:
            *_, off, shown = connection.batch(session)
            with _parsed("first answer"):
                found = {str(name).lower(): str(value) for name, value in shown.rows}
                _require_fit(server_name(url), found, stopped=int(off.rows[0][0]) > 10)
                connection.max_packet = int(found["max_allowed_packet"])
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


@contextlib.contextmanager
def _parsed(what: str) -> Iterator[None]:
    """Raise the driver's error if this is damaged, whatever the driver makes of it."""
    try:
        yield
    except (MySQLError, OSError, StoreUnavailable):
        raise
    except Exception as exc:
        if type(exc).__module__.split(".")[0] not in ("builtins", "struct", "binascii", "cryptography"):
            raise  # of a signal handler of the application
        if isinstance(exc, RuntimeError) and "cryptography" in str(exc):
            raise NotInstalled("MySQL 8's log-in without TLS needs cryptography", "rsa") from exc
        what = f"its {what} cannot be parsed ({type(exc).__name__}: {exc})"
        raise OperationalError(CR.CR_MALFORMED_PACKET, what) from exc


def _opened(url: URL, options: Mapping[str, Any], seconds: float) -> socket.socket:
    """Open a socket to the server. Raises OSError."""
    if "unix_socket" in options:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(seconds)
        sock.connect(options["unix_socket"])
        return sock
    sock = socket.create_connection((url.host or "127.0.0.1", url.port or 3306), seconds)
    sockets.keep_alive(sock)
    return sock


@lru_cache(8)
def _context(*_times: int, **tls: Any) -> ssl.SSLContext:
    """Return TLS settings; ``_times`` are when the files changed. Each process makes them once: reading the
    system's certificates takes 20 ms, in which no other thread runs. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = tls.get("ssl_verify_identity", False)
    if context.check_hostname or tls.get("ssl_verify_cert"):
        context.load_verify_locations(tls["ssl_ca"]) if "ssl_ca" in tls else context.load_default_certs()
    else:
        context.verify_mode = ssl.CERT_NONE
    if "ssl_cert" in tls:
        context.load_cert_chain(tls["ssl_cert"], tls.get("ssl_key"), tls.get("ssl_key_password"))
    return context


class _Tls:
    """The TLS of one connection. It keeps the socket, which the driver shows to nobody."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.socket: ssl.SSLSocket | None = None

    def wrap_socket(self, sock: socket.socket, server_hostname: str) -> ssl.SSLSocket:
        """Shake hands. The driver calls it if the server speaks TLS."""
        self.socket = self._context.wrap_socket(sock, server_hostname=server_hostname)
        return self.socket


_REST = (
    "ROLLBACK",  # also ends a transaction that init_connect has begun
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
    "SELECT ABS(TIMESTAMPDIFF(SECOND, NOW(), SYSDATE()))",
    _SHOW,
)


def _set(lock_timeout: int | None) -> str:
    """Return the first statement of a connection."""
    values = [f"{name} = {value if value.isalnum() else repr(value)}" for name, value in _SESSION.items()]
    if lock_timeout is not None:
        values.append(f"lock_wait_timeout = {lock_timeout:d}")
    # One of these comments is code to MariaDB, the other to MySQL.
    kinds = "/*M! , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */"
    return f"SET SESSION {', '.join(values)} {kinds}"


def _require_fit(server: str, found: Mapping[str, str], *, stopped: bool) -> None:
    """Raise StoreUnavailable, which names them, if variables of a session are not as toc needs them."""
    wrong = []
    for name in sorted(found.keys() | _SESSION.keys()):
        value, expected = found.get(name, ""), _EXPECTED.get(name)
        if name == "max_allowed_packet":
            fits = int(value) >= MIN_PACKET
        elif name == "binlog_format":
            fits = value != "STATEMENT" or found.get("log_bin") != "ON"
        elif name == "timestamp":
            fits = not stopped
        elif name.startswith("max_"):
            fits = float(value) == 0
        else:
            fits = expected is None or set(value.split(",")) == set(expected.split(","))
        if not fits:
            wrong.append(f"{name} {value!r} instead of {expected}")
    if wrong:
        do = "correct the server's settings, its init_connect, or the proxy before it"
        raise StoreUnavailable(f"{server}: its sessions have {', '.join(wrong)}, whatever toc sets: {do}")


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


class MySqlConnection:
    """A connection that runs batches of statements. The kernel keeps its timeouts, if it can.

    ``driver`` is the driver's, which has logged in and closes it.
    """

    max_packet = 1 << 20
    """Most bytes that the server accepts at once: assumed until it has said its limit."""

    def __init__(
        self, driver: pymysql.connections.Connection[Any], sock: socket.socket, read_timeout: float | None,
        write_timeout: float,
    ) -> None:  # fmt: skip
        self.driver = driver
        self._sock = sock
        self._read_timeout, self._write_timeout = read_timeout, write_timeout
        self._kernel = read_timeout is not None and sockets.keep_timeouts(sock, read_timeout, write_timeout)
        self._received = b""
        """What ``answered`` has received."""
        self._at = self._ends = 0
        """Up to where it was looked at, and how many ends of lists ``ask`` has yet to be answered with."""
        self._sent = (0, 0)
        """Numbers of statements and packets of the last batch."""

    def execute(self, statements: Sequence[Statement], transaction: bool, patient: bool) -> list[Result]:
        """Run the statements; on an error roll back as far as still possible. ``patient``: see
        ``DatabaseServer.run``."""
        parts = _with_parameters(statements)
        transaction = transaction and len(parts) > 1  # one statement is a transaction of its own
        if transaction:
            parts = ["START TRANSACTION", *parts, "COMMIT"]
        try:
            results = self.batch(parts, patient=patient)
        except MySQLError as exc:
            # An error ends the batch and leaves the transaction open. Roll back now: closing the connection
            # would release the locks only when the server notices.
            if transaction and error_code(exc) not in LOST:
                with contextlib.suppress(MySQLError):
                    self.batch(["ROLLBACK"])
            raise
        return results[1:-1] if transaction else results

    def batch(self, parts: Sequence[str], *, patient: bool = False) -> list[Result]:
        """Send statements without parameters and return their results."""
        self._send(parts)
        if patient:
            time.sleep(min(len(parts) * _ANSWER_SECONDS, _MAX_ANSWER_SECONDS))
        return self.answers()

    def ask(self, statements: Sequence[Statement]) -> None:
        """Send statements. ``answers`` returns their results."""
        self._send(_with_parameters(statements))
        self._at, self._ends = 0, 2 * len(statements)

    def _send(self, statements: Sequence[str]) -> None:
        query = _COM_QUERY + ";".join(statements).encode()
        if len(query) > self.max_packet:
            # Otherwise the server would hang up halfway, which looks like a broken connection.
            what = f"a batch of {len(query)} bytes is larger than its max_allowed_packet ({self.max_packet})"
            raise OperationalError(ER.NET_PACKET_TOO_LARGE, what)
        parts = [query[at : at + WHOLE] for at in range(0, len(query) + 1, WHOLE)]
        self._sent = len(statements), len(parts)
        packets = [struct.pack("<I", len(part) | (n & 0xFF) << 24) + part for n, part in enumerate(parts)]
        try:
            if not self._kernel:
                self._sock.settimeout(self._write_timeout)
            self._sock.sendall(b"".join(packets))
        except OSError as exc:
            raise OperationalError(CR.CR_SERVER_GONE_ERROR, f"MySQL server has gone away ({exc!r})") from exc

    def answers(self) -> list[Result]:
        """Return the results of the statements that were sent."""
        self._ends = 0
        if not self._kernel:
            self._sock.settimeout(self._read_timeout)
        return read_answers(self._receive, decoders, *self._sent, self._begin)

    def _begin(self) -> None:
        """Bound the time of a result, which may come byte by byte."""
        self._until = time.monotonic() + (self._read_timeout or inf)

    def answered(self, seconds: float) -> bool:
        """Whether all that was asked is answered, or the server hangs up, within ``seconds``. If nothing is
        asked: whether it says anything."""
        until = time.monotonic() + seconds
        while True:
            self._at, self._ends = ends_left(self._received, self._at, self._ends)
            if self._received and not self._ends:
                return True
            try:
                data = self._arriving(until - time.monotonic())
            except OSError:
                data = b""  # ``answers`` meets it again
            if not data:
                return data is not None
            self._received += data

    def _arriving(self, seconds: float) -> bytes | None:
        return sockets.receive(self._sock, seconds, self._read_timeout, kernel=self._kernel)

    def descriptor(self) -> int:
        """Return the socket's."""
        return self._sock.fileno()

    def close(self) -> None:
        """Say good-bye and close. Raises the driver's error if it is closed."""
        self.driver.close()

    def _receive(self) -> bytes:
        if self._received:
            got, self._received = self._received, b""
            return got
        late = time.monotonic() > self._until
        try:
            data = self._arriving(0.0) if late else self._sock.recv(sockets.READ_BYTES)
            if not data:
                raise ConnectionError("timed out" if data is None else "it has hung up")
        except OSError as exc:
            why = "timed out" if isinstance(exc, BlockingIOError) else exc  # the former is the kernel's
            raise OperationalError(CR.CR_SERVER_LOST, f"{_LOST_CONNECTION} ({why})") from exc
        self._until += len(data) / _SLOWEST
        return data


def server_name(url: URL) -> str:
    """Return host:port, for messages."""
    return f"{url.host or '127.0.0.1'}:{url.port or 3306}"


def error_code(exc: BaseException) -> int:
    """Return the code of an error of the driver; 0 if it has none."""
    code: Any = exc.args[0] if exc.args else 0
    return code if isinstance(code, int) else 0


def _with_parameters(statements: Sequence[Statement]) -> list[str]:
    """Return the statements as sent to the server."""
    return [sql % tuple(map(_literal, params)) if params else sql for sql, params in statements]


def _literal(value: Param) -> str:
    if value is None:
        return "NULL"
    return f"'{escape_string(value)}'" if isinstance(value, str) else f"X'{value.hex()}'"


# --- the server

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - sessions run in UTC, and the driver's datetimes are naive

_ROLLED_BACK: Sequence[tuple[set[int], type[Exception]]] = (
    # timeout of a row lock (innodb_lock_wait_timeout) or a table lock (lock_wait_timeout); NOWAIT on MySQL
    ({1205, 3572}, db.Locked),
    # the server is read-only, as during a failover, and after it if it was the primary
    ({1290, 1792, 1836}, db.ReadOnly),
    # deadlock; too many connections, of all or of this account
    ({1020, 1040, 1203, 1213, 1226}, db.Transient),
)
"""Codes of errors after which a batch is certainly rolled back."""
_NO_QUORUM = 1047
"""A node of a Galera cluster that has lost the others refuses every statement."""
_BEHIND = frozenset({1049, 1054, 1146})
"""Unknown database, column, table."""
NO_RIGHT = frozenset({1044, 1142, 1143})
"""The account may not use this database, table or column."""
_DENIED = frozenset({1044, 1045, 1130, 1698})
"""The account is refused: for this database, at all, from this host, without a password."""
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
        self, url: URL, databases: Sequence[int], *,
        connect_timeout: float = 3.0, read_timeout: float = 10.0, write_timeout: float = 10.0,
        pool_size: int = 8,
    ) -> None:  # fmt: skip
        connect = self._connect = partial(connector, url)
        ours = connect(connect_timeout, read_timeout, write_timeout, lock_timeout=TABLE_LOCK_SECONDS)
        super().__init__(server_name(url), databases, Pool(ours, pool_size, connect_timeout + read_timeout))

    def _connect_within(self, seconds: float) -> MySqlConnection:
        return self._connect(seconds, seconds, seconds)()

    def translate(self, exc: Exception, *, sent: bool) -> Exception:
        """Translate a driver's error by its code. Omits texts of codes that quote data."""
        if not isinstance(exc, MySQLError):
            return exc
        code = error_code(exc)
        if code == _DUPLICATE:
            return db.Duplicate(f"{self.name}: duplicate key")
        text = f"{exc.args[1]} ({code})" if len(exc.args) > 1 else f"MySQL error {code}"
        text = f"{self.name}: {text}"
        if code in _DENIED and not sent:
            return db.Denied(f"{text}; user and password are those of TOC_DATABASE_URLS")
        if code in _BEHIND:
            return SchemaBehind(f"{text}: if this is the right server, run `toc db upgrade`")
        for codes, error in _ROLLED_BACK:
            if code in codes:
                return error(text)
        if code in LOST and sent:
            return db.Lost(text if code else f"{self.name}: the connection is closed")
        if isinstance(exc, (pymysql.err.DataError, pymysql.err.IntegrityError)):
            return db.Refused(f"{self.name}: a value was refused (MySQL error {code})")
        answered = sent and not _OF_DRIVER <= code < _OF_DRIVER + 1000 and code != _NO_QUORUM
        return db.Refused(text) if answered else StoreUnavailable(text)

    def identity(self, query: Callable[[str], Any]) -> tuple[Any, ...] | None:
        """Host name, port, server_id and data directory: hosts may share some of them, never all."""
        return tuple(query("SELECT @@hostname, @@port, @@server_id, @@datadir"))

    def instant(self, milliseconds: int) -> str:
        """A DATETIME literal."""
        return _instant(milliseconds)

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
def _instant(milliseconds: int) -> str:
    """An instant as SQL text. Rows that are written together share many."""
    at = _EPOCH + timedelta(0, 0, milliseconds * 1000)
    return f"'{at.isoformat(' ', 'milliseconds')}'"
