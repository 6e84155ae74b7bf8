"""Parses TOC_REDIS_URL.

    redis://[user:password@]host[:6379][/db]             rediss:// for TLS
    unix://[user:password@]/path/redis.sock[?db=0]
    redis+cluster://[user:password@]h1:p1,h2:p2          rediss+cluster:// for TLS
    redis+sentinel://[user:password@]h1:p1,h2:p2/service rediss+sentinel:// for TLS

User and password are those of the data servers, percent-encoded where they contain ``@ : / ? # %``. Options
follow ``?``: db, ssl_ca_certs, ssl_ca_path, ssl_certfile, ssl_keyfile, ssl_password, ssl_cert_reqs (required,
optional, none), ssl_check_hostname, sentinel_username, sentinel_password. With TLS, the server's name is
verified unless an option says otherwise.
"""

import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from toc import sockets
from toc.model.errors import ConfigError
from toc.sockets import URL_FLAGS

_PATH_OPTIONS = frozenset({"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"})
_TEXT_OPTIONS = _PATH_OPTIONS | {"ssl_password", "ssl_cert_reqs"}
_VERIFY = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}
_EXAMPLE = "redis://host:6379, redis+cluster://h1:p1,h2:p2 or redis+sentinel://h1:p1,h2:p2/service"


User = tuple[str, str]
"""Name and password; both empty without a login."""


class Topology(Enum):
    """How to find the server of a key."""

    SINGLE = "single"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


class Address(NamedTuple):
    """A server's address. For a Unix socket ``port`` is 0 and ``host`` is the path."""

    host: str
    port: int

    def __str__(self) -> str:
        if self.port == 0:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Location:
    """A parsed URL. Its repr holds no password."""

    kind: Topology
    addresses: tuple[Address, ...]
    """The server, some nodes of the cluster, or the sentinels."""
    service: str | None = None
    database: int = 0
    tls: Mapping[str, str | bool] | None = field(default=None, repr=False)
    """The options whose names begin with ssl; None without TLS."""
    user: User = field(default=("", ""), repr=False)
    sentinel_user: User = field(default=("", ""), repr=False)

    def open(self, address: Address, timeout: float) -> socket.socket:
        """Connect to a server. ``timeout`` (seconds) is for each step. Raises OSError."""
        unix = address.port == 0
        sock = socket.socket(socket.AF_UNIX) if unix else socket.create_connection(address, timeout)
        try:
            if unix:
                sock.settimeout(timeout)
                sock.connect(address.host)
                return sock
            sockets.keep_alive(sock)
            if self.tls is None:
                return sock
            return self.tls_context(self.tls).wrap_socket(sock, server_hostname=address.host)
        except BaseException:
            sock.close()
            raise

    @staticmethod
    def tls_context(options: Mapping[str, Any]) -> ssl.SSLContext:
        """Return a context for a connection; its certificates are read anew. Raises OSError."""
        context = ssl.create_default_context()
        context.check_hostname = options["ssl_check_hostname"]
        context.verify_mode = _VERIFY[options.get("ssl_cert_reqs", "required")]
        if "ssl_certfile" in options:
            context.load_cert_chain(
                options["ssl_certfile"], options.get("ssl_keyfile"), options.get("ssl_password")
            )
        authorities = options.get("ssl_ca_certs"), options.get("ssl_ca_path")
        if any(authorities):
            context.load_verify_locations(*authorities)
        return context

    def login(self, *, sentinel: bool) -> list[tuple[str | int, ...]]:
        """Return the commands that a new connection begins with."""
        name, password = self.sentinel_user if sentinel else self.user
        commands: list[tuple[str | int, ...]] = []
        if name or password:
            commands.append(("AUTH", name, password) if name else ("AUTH", password))
        if self.database and not sentinel:
            commands.append(("SELECT", self.database))
        return commands


def parse(url: str) -> Location:
    """Parse ``url``. Raises ConfigError, whose text never contains the URL."""
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(f"TOC_REDIS_URL cannot be parsed; expected {_EXAMPLE}") from None
    if parts.fragment:  # "user:1#2@host" would connect to the host "user"
        raise ConfigError('TOC_REDIS_URL has a "#"; in a password, write it %23')
    scheme, _, kind_name = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss", "unix") or kind_name not in ("", "cluster", "sentinel"):
        raise ConfigError(f"TOC_REDIS_URL begins with {parts.scheme!r}; expected {_EXAMPLE}")
    kind = Topology(kind_name or "single")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    sentinel_user = query.pop("sentinel_username", ""), query.pop("sentinel_password", "")
    tls_options = _tls_options(query)
    if scheme != "rediss" and tls_options:
        raise ConfigError("TOC_REDIS_URL has ssl options but no TLS: begin it with rediss")
    service, database = None, "0"
    if scheme == "unix":
        if kind is not Topology.SINGLE or hosts or not parts.path:
            raise ConfigError("TOC_REDIS_URL for a Unix socket must look like unix:///path/redis.sock")
        addresses: tuple[Address, ...] = (Address(unquote(parts.path), 0),)
    elif kind is Topology.SENTINEL:
        addresses = _addresses(hosts, 26379)
        service = unquote(parts.path.strip("/"))
        if not service or "/" in service:
            raise ConfigError(f"TOC_REDIS_URL names no service; expected {_EXAMPLE}")
    else:
        addresses = _addresses(hosts, 6379)
        database = parts.path.strip("/") or "0"
    if kind is Topology.SINGLE and len(addresses) > 1:
        raise ConfigError("TOC_REDIS_URL names several hosts: begin it with redis+cluster or redis+sentinel")
    database = query.pop("db", database)
    if query:
        raise ConfigError(f"TOC_REDIS_URL has an unknown option: {', '.join(sorted(query))}")
    if not database.isdecimal() or (kind is Topology.CLUSTER and int(database)):
        raise ConfigError("the database in TOC_REDIS_URL must be a whole number, and 0 in a cluster")
    user = unquote(username), unquote(password)
    tls_options.setdefault("ssl_check_hostname", tls_options.get("ssl_cert_reqs") != "none")
    tls = tls_options if scheme == "rediss" else None
    return Location(kind, addresses, service, int(database), tls, user, sentinel_user)


def _addresses(hosts: str, default_port: int) -> tuple[Address, ...]:
    found = []
    for host in filter(None, hosts.split(",")):
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host, str(default_port)
        if not name or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError("TOC_REDIS_URL has a host that is not host:port")
        found.append(Address(unquote(name.strip("[]")), int(port)))
    if not found:
        raise ConfigError(f"TOC_REDIS_URL names no host; expected {_EXAMPLE}")
    return tuple(found)


def _tls_options(query: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {name: query.pop(name) for name in _TEXT_OPTIONS & query.keys()}
    if options.get("ssl_cert_reqs", "required") not in _VERIFY:
        raise ConfigError("ssl_cert_reqs in TOC_REDIS_URL must be required, optional or none")
    for name in _PATH_OPTIONS & options.keys():  # else each connection would fail
        if not os.path.exists(options[name]):  # noqa: PTH110 - Path.exists raises for what it may not see
            raise ConfigError(f"TOC_REDIS_URL names {name}={options[name]}, which does not exist")
    if "ssl_check_hostname" in query:
        flag = URL_FLAGS.get(query.pop("ssl_check_hostname").lower())
        if flag is None:
            raise ConfigError("ssl_check_hostname in TOC_REDIS_URL must be true or false")
        options["ssl_check_hostname"] = flag
    return options
