"""Connections to MySQL 8 and MariaDB: the driver's, with our session, timeouts and batches of statements."""

from __future__ import annotations

import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from socket import IPPROTO_TCP
from typing import Any, ClassVar

import pymysql
from pymysql.constants import CLIENT, COMMAND, CR, ER, SERVER_STATUS
from sqlalchemy.engine import URL

from toc import sockets
from toc.config import URL_FLAGS
from toc.model.errors import ConfigError, StoreUnavailable
from toc.store.mysql_answers import read_answers
from toc.store.server import Result

_QUERY_FILES = frozenset({"ssl_ca", "ssl_cert", "ssl_key"})
_QUERY = _QUERY_FILES | {"ssl_key_password", "unix_socket", "bind_address"}
_QUERY_FLAGS = frozenset({"ssl_verify_cert", "ssl_verify_identity", "ssl_disabled"})

_READ_BYTES = 1 << 16
"""Most bytes of one read."""
_PING_SECONDS = 0.5
"""Seconds without an answer after which a ping is sent. This is less than LOST_FAST_SECONDS, so a
batch that the server has dropped can be sent once more."""
_PING = b"\x01\x00\x00\x00\x0e"
"""A packet of one byte, COM_PING."""

LEAST_PACKET = 4 << 20
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
    "max_allowed_packet": f"{LEAST_PACKET} or more",
}
"""What a connection must have. MySQL and MariaDB each know only one of two names."""
_SHOW = f"SHOW SESSION VARIABLES WHERE Variable_name IN ({','.join(map(repr, [*_EXPECTED, 'log_bin']))})"
_NONSENSE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError, struct.error)
"""Errors that the driver raises for a damaged greeting, besides its own."""


def connector(
    url: URL,
    connect_timeout: float,
    read_timeout: float | None,
    write_timeout: float,
    database: str | None = None,
    table_lock_timeout: int | None = None,
    keepalive: float = sockets.KEEPALIVE_SECONDS,
) -> Callable[[], Any]:
    """A function that opens a connection with the session settings of toc. Timeouts are seconds, and so is
    ``keepalive``, after which the kernel probes an idle connection.

    ``table_lock_timeout``: seconds its statements wait for locked tables; None: the server's setting.

    A database in the URL is not used: at run time every name is qualified. Raises ConfigError for an unknown
    or invalid query argument of the URL, and for an unreadable certificate or key. So does the function, if
    the file has become unreadable. It raises StoreUnavailable for a session that cannot be made as toc needs
    it.
    """
    options = _options(url)
    session = [_set(table_lock_timeout), *_REST]
    if database is not None:
        session.insert(1, f"USE {database}")  # init_connect may have left it

    def make(*, at_once: bool = True) -> MySqlConnection:
        try:
            return MySqlConnection(
                keepalive=keepalive,
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
            *_, off, shown = connection.batch(session)
            connection.first_answer = time.monotonic() - began
            found = {str(name).lower(): str(value) for name, value in shown.rows}
            _require_fit(server_name(url), found, stopped=int(off.rows[0][0]) > 10)
            connection.max_packet = int(found["max_allowed_packet"])
            # From the greeting the driver knows the server's own sql_mode, by which it would escape texts.
            driver: Any = connection
            driver.server_status &= ~SERVER_STATUS.SERVER_STATUS_NO_BACKSLASH_ESCAPES
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


_REST = (
    "ROLLBACK",  # also ends a transaction that init_connect has begun
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
    "SELECT ABS(TIMESTAMPDIFF(SECOND, NOW(), SYSDATE()))",
    _SHOW,
)


def _set(table_lock_timeout: int | None) -> str:
    """Return the first statement of a connection."""
    values = [f"{name} = {value if value.isalnum() else repr(value)}" for name, value in _SESSION.items()]
    if table_lock_timeout is not None:
        values.append(f"lock_wait_timeout = {table_lock_timeout:d}")
    # One of these comments is code to MariaDB, the other to MySQL.
    kinds = "/*M! , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */"
    return f"SET SESSION {', '.join(values)} {kinds}"


def _require_fit(server: str, found: Mapping[str, str], *, stopped: bool) -> None:
    """Raise StoreUnavailable, which names them, if variables of a session are not as toc needs them."""
    wrong = []
    for name in sorted(found.keys() | _SESSION.keys()):
        value, expected = found.get(name, ""), _EXPECTED.get(name)
        if name == "max_allowed_packet":
            fits = int(value) >= LEAST_PACKET
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
        raise StoreUnavailable(
            f"{server}: its sessions have {', '.join(wrong)}, whatever toc sets: correct the server's "
            "settings, its init_connect, or the proxy before it"
        )


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


class MySqlConnection(pymysql.connections.Connection):
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
    _kernel = True
    """Whether the kernel keeps the timeouts."""
    _may_ping = _pinged = False
    max_packet = 1 << 20
    """Most bytes that the server accepts at once: assumed until it has said its limit."""

    def __init__(self, *, keepalive: float, **options: Any) -> None:
        self._keepalive = keepalive
        super().__init__(**options)

    def connect(self, sock: Any = None) -> None:
        """Connect, and let the kernel keep the timeouts if there is no TLS."""
        super().connect(sock)
        driver: Any = self  # it has no public way to its socket
        if not driver.unix_socket:
            for option, value in sockets.keepalive(self._keepalive).items():
                driver._sock.setsockopt(IPPROTO_TCP, option, value)
        read, write = driver._read_timeout, driver._write_timeout
        waits = ceil((read or 0.0) / _PING_SECONDS)
        if None not in (read, write) and sockets.keep_timeouts(driver._sock, read / waits, write):
            self._waits = waits
            driver._read_timeout = driver._write_timeout = driver._current_timeout = None  # kernel timeouts
            # The driver's own reads do not know the kernel's timeouts: from here on, only ``answers`` reads.
            driver._rfile.close()
            driver._rfile = None
        else:
            self._kernel = False

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
        if not self._kernel:
            decrypted = isinstance(driver._sock, ssl.SSLSocket) and driver._sock.pending()
            if not decrypted and not readable(self, _PING_SECONDS):
                self._ping()
        for left in reversed(range(self._waits)):
            try:
                data: bytes = driver._sock.recv(_READ_BYTES)
                break
            except (TimeoutError, BlockingIOError):  # the latter is the kernel's timeout
                if not left:
                    raise TimeoutError("timed out") from None
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


def readable(connection: Any, seconds: float) -> bool:
    """Whether the server sends data or hangs up within ``seconds``."""
    socket = connection._sock  # the driver has no public way to it
    return socket is None or sockets.readable(socket, seconds)
