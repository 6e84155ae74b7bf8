"""Webhook targets: where tasks are sent over HTTP, and which of them a task goes to.

A task goes to a URL of its own, to the target that is named with it, or to its topic's target, in this order.
What is named with the task is kept in its attribute, under a reserved key::

    {"toc-webhook": {"target": "shop"}}                      the URL of target shop
    {"toc-webhook": {"target": "shop", "path": "/paid"}}     that path of its host
    {"toc-webhook": {"url": "https://example.com/paid"}}     a URL of the task's own
"""

import base64
import contextlib
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from toc.model.errors import InvalidAttribute, InvalidInput, InvalidTarget, shown
from toc.model.sharding import is_whole
from toc.model.topic import EVERYTHING, NAME, NAME_HINT, Topic, any_matches, check_pattern

ATTRIBUTE = "toc-webhook"
"""The reserved key of a task's attribute."""

MAY_BE_DEAD = frozenset({400, 404, 422})
"""Answers by which a target may say that a task can never succeed."""
PREVIOUS_SECONDS = 86_400.0
"""After a rotation requests are also signed with the former secret, by default for this long."""
MAX_PREVIOUS_SECONDS = 30 * 86_400.0

REFRESH_SECONDS = 1.0
"""Seconds between two reads of the table of targets, in each process that sends."""
NOTICED_SECONDS = REFRESH_SECONDS + 0.5
"""After this many seconds each of them that reaches MySQL has read it again."""

MAX_URL = 2000
MAX_PATTERNS = 100
MAX_HEADERS = 50
MAX_HEADER_CHARS = 8000
"""Characters of all names and values of a target's headers together."""

SECRET_PREFIX = "whsec_"  # noqa: S105 - the form that Standard Webhooks gives secrets
_SECRET_BYTES = 32
_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 24, 64

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?|")
_OURS = ("toc-", "webhook-")
_NOT_SETTABLE = frozenset(
    {
        "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
        "host", "http2-settings", "keep-alive", "proxy-authenticate", "proxy-authorization",
        "proxy-connection", "te", "traceparent", "tracestate", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers of the connection, of the message's form, and those that the sender sets itself."""
_URL = re.compile(r"[\x21-\x7e]+")
_PORTS = {"https": 443, "http": 80}
_NUMBER = re.compile(r"(?:0[xX][0-9A-Fa-f]*|[0-9]+)")
_MAX_LABEL = 63

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class Allow:
    """What the operator lets webhooks reach beside public addresses by https on port 443 (TOC_WEBHOOK_ALLOW).

    ``origins`` (``http://10.0.0.7:8080``) are schemes, hosts and ports that a URL may have; ``networks`` hold
    the addresses that may be connected to although they are not public. A receiver within one's own network
    needs both.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Raises ValueError for an entry that is neither an origin nor a network."""
        origins, networks = set(), []
        for entry in entries:
            if "://" in entry:
                origins.add(_origin_entry(entry))
            else:
                networks.append(_network(entry))
        self.origins: frozenset[str] = frozenset(origins)
        self.networks: tuple[Network, ...] = tuple(networks)

    def address(self, address: Address) -> bool:
        """Whether an address lies in one of the networks."""
        return any(address in network for network in self.networks if network.version == address.version)


NOTHING_ALLOWED = Allow()


def _network(entry: str) -> Network:
    try:
        return ipaddress.ip_network(entry)
    except ValueError as exc:
        raise ValueError(f"{shown(entry)} is neither an origin nor a network: {exc}") from exc


def _origin_entry(entry: str) -> str:
    try:
        parts = urlsplit(entry)
        origin = _origin(parts)
    except ValueError as exc:
        raise ValueError(f"{shown(entry)} is not an origin: {exc}") from exc
    if parts.scheme not in _PORTS or not parts.hostname or entry.lower() not in (origin, _short(parts)):
        raise ValueError(f"{shown(entry)} is not an origin: write SCHEME://HOST:PORT, http or https")
    return origin


def _origin(parts: SplitResult) -> str:
    """Return scheme, host and port of a URL. Raises ValueError."""
    port = _PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    if not port and parts.scheme in _PORTS:
        raise ValueError("there is no port 0")
    return f"{_short(parts)}:{port}"


def _short(parts: SplitResult) -> str:
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}"


@dataclass(frozen=True, slots=True)
class Target:
    """A receiver of webhooks, without its secrets. Instants are ms.

    ``timeout``: seconds for a whole request. ``concurrency``: requests in flight, and ``rate``:
    requests a second (None: no limit), both over all workers. ``dead_on``: answers that make a task
    dead at once; 400, 404 and 422 may be. ``topics`` are patterns of the topics that may use it.
    ``paused_by`` and ``paused_why`` say who paused it and why. Until ``previous_until`` the former
    secret signs too. ``change_id`` is a random number, a new one after every change. ``sealed``
    holds the secrets and the values of the headers, encrypted.
    """

    name: str
    url: str
    timeout: float = 15.0
    concurrency: int = 50
    rate: float | None = None
    dead_on: frozenset[int] = frozenset()
    topics: tuple[str, ...] = (EVERYTHING,)
    header_names: tuple[str, ...] = ()
    paused: bool = False
    paused_by: str = ""
    paused_why: str = ""
    previous_until: int | None = None
    created: int = 0
    modified: int = 0
    change_id: int = 0
    sealed: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_target_name(self.name)
        _number("timeout", self.timeout, 0.1, 300, "seconds")
        if not is_whole(self.concurrency, 1, 10_000):
            what = f"a whole number from 1 to 10000, not {shown(self.concurrency)}"
            raise InvalidTarget(f"concurrency must be {what}")
        if self.rate is not None:
            _number("rate", self.rate, 0.001, 1_000_000, "requests a second")
        odd = self.dead_on - MAY_BE_DEAD if isinstance(self.dead_on, frozenset) else [self.dead_on]
        if odd:
            what = ", ".join(sorted(map(shown, odd)))
            raise InvalidTarget(f"dead_on may hold 400, 404 and 422, not {what}")
        if not isinstance(self.topics, tuple) or not 1 <= len(self.topics) <= MAX_PATTERNS:
            raise InvalidTarget(f"topics must be 1 to {MAX_PATTERNS} patterns of topics; '*' is all")
        for pattern in self.topics:
            try:
                check_pattern(pattern)
            except InvalidInput as exc:
                raise InvalidTarget(f"topics: {exc}") from None

    def serves(self, topic: str) -> bool:
        """Whether tasks of a topic may be sent to it."""
        return any_matches(self.topics, topic)


@dataclass(frozen=True, slots=True, repr=False)
class TargetSecrets:
    """The parts of a target that are stored encrypted: its secrets, as ``whsec_`` and base64, and
    its headers."""

    secret: str
    previous: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def signing(self, target: Target, now_ms: int) -> list[bytes]:
        """Return the keys to sign with, the current one first."""
        keys = [signing_key(self.secret)]
        if self.previous is not None and now_ms < (target.previous_until or 0):
            keys.append(signing_key(self.previous))
        return keys


class Route(NamedTuple):
    """Where a task goes. All empty: nowhere.

    ``target``: the name of a target. ``path``: a path of its host, instead of its URL's. ``url``: a URL of
    the task's own; then ``target`` is its topic's.
    """

    target: str = ""
    path: str = ""
    url: str = ""


def route_of(topic: Topic, attribute: Mapping[str, Any]) -> Route:
    """Return where a task of a topic goes, given its attribute."""
    own = attribute.get(ATTRIBUTE)
    if not isinstance(own, dict):
        return Route(topic.target)
    target, path, url = (value if isinstance(value := own.get(key), str) else "" for key in Route._fields)
    return Route(target or topic.target, path, url)


def named_route(target: str | None, url: str | None, allow: Allow) -> dict[str, str] | None:
    """Return what a task's attribute holds, given what was named with it; None for nothing.

    If there is a target, ``url`` is a path, which begins with exactly one ``/``. Raises
    InvalidTarget.
    """
    if target is None:
        return None if url is None else {"url": check_url(url, allow)}
    route = {"target": check_target_name(target)}
    return route if url is None else route | {"path": check_path(url)}


def payload_of(attribute: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attribute as a receiver gets it: without the route."""
    return {key: value for key, value in attribute.items() if key != ATTRIBUTE}


def check_not_reserved(attribute: Mapping[str, Any] | None) -> None:
    """Raise InvalidAttribute if a caller's attribute has the reserved key: it could name any URL."""
    if isinstance(attribute, (dict, Mapping)) and ATTRIBUTE in attribute:
        raise InvalidAttribute(f"the key {ATTRIBUTE!r} of an attribute is reserved; give target or url")


def url_of(target: Target, path: str = "") -> str:
    """Return the URL to send to: the target's, or a path of its host."""
    if not path:
        return target.url
    parts = urlsplit(target.url)
    return f"{parts.scheme}://{parts.netloc}{check_path(path)}"


def check_target_name(name: object) -> str:
    """Return ``name`` if it is a valid name for a target. Raises InvalidTarget."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidTarget(f"target {shown(name)} is not a name: {NAME_HINT}")
    return name


def check_url(url: object, allow: Allow) -> str:
    """Return a URL with its scheme and host in lower case. Raises InvalidTarget.

    Only https on port 443 and the origins of ``allow`` are allowed. The host's addresses are
    checked when a request is sent.
    """
    if not isinstance(url, str) or len(url) > MAX_URL or not _URL.fullmatch(url) or "\\" in url:
        what = f"printable ASCII without spaces and backslashes, at most {MAX_URL} characters"
        do = "write a host with other letters as xn--..., and other characters as %XX"
        raise InvalidTarget(f"url must be {what}; {do}")
    try:
        parts = urlsplit(url)
        origin = _origin(parts)
    except ValueError as exc:
        raise InvalidTarget("url cannot be read: its host or its port is malformed") from exc
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidTarget("url must begin with https:// and a host")
    try:
        literal(parts.hostname)
    except ValueError as exc:
        raise InvalidTarget(f"url cannot be used: {exc}") from None
    if "@" in parts.netloc:
        raise InvalidTarget("url must not hold a user or a password; give them as a header")
    if "#" in url:
        raise InvalidTarget("url must not have a fragment, '#' and what follows: it would not be sent")
    if (parts.scheme, origin.rpartition(":")[2]) != ("https", "443") and origin not in allow.origins:
        raise InvalidTarget(f"url must be https on 443; TOC_WEBHOOK_ALLOW can list {origin} and its network")
    rest = url[url.index("//") + 2 + len(parts.netloc) :]
    return f"{origin.removesuffix(f':{_PORTS[parts.scheme]}')}{'' if rest.startswith('/') else '/'}{rest}"


def literal(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a URL's host is, or None for a name.

    Raises ValueError for a host that some resolvers read as an address although it is not written
    as one: ``127.1``, ``2130706433``, ``0x7f.0.0.1``, ``0177.0.0.1``. As in the URL standard of the
    WHATWG, that is any host whose last part is a number. Also raises ValueError for a name that DNS
    does not allow.
    """
    plain = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if "%" not in plain:  # a zone means something on one host alone
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(plain)
    if ":" in plain or "%" in plain or _NUMBER.fullmatch(plain.rstrip(".").rpartition(".")[2]):
        raise ValueError(f"{host[:100]!r} is not an address: write four decimal numbers, or IPv6")
    if not all(0 < len(label) <= _MAX_LABEL for label in plain.removesuffix(".").split(".")):
        raise ValueError(f"{host[:100]!r} is no name of a host: its parts have 1 to {_MAX_LABEL} characters")
    return None


def check_path(path: object) -> str:
    """Return a path of a target's host, perhaps with a query. Raises InvalidTarget.

    It begins with exactly one ``/``: after two of them would come another host.
    """
    fits = isinstance(path, str) and len(path) <= MAX_URL and _URL.fullmatch(path) is not None
    if not isinstance(path, str) or not fits or not re.match(r"/(?!/)", path) or set("\\#") & set(path):
        what = f"printable ASCII without spaces, backslashes and '#', at most {MAX_URL} characters"
        raise InvalidTarget(f"url must be a path of the target, which begins with exactly one '/': {what}")
    return path


def check_headers(headers: object) -> dict[str, str]:
    """Return a target's headers. Raises InvalidTarget, which names a header, never its value."""
    if not isinstance(headers, Mapping):
        raise InvalidTarget("headers must map names to values")
    found: dict[str, str] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidTarget(f"headers: {shown(name)} is not the name of a header")
        lower = name.lower()
        if lower in _NOT_SETTABLE or lower.startswith(_OURS):
            raise InvalidTarget(f"headers: {name} is set by the connection or by toc, not by a target")
        if lower in map(str.lower, found):
            raise InvalidTarget(f"headers: {name} is given twice")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            what = "printable ASCII that neither begins nor ends with a space"
            raise InvalidTarget(f"headers: the value of {name} must be {what}")
        found[name] = value
    if len(found) > MAX_HEADERS or sum(map(len, [*found, *found.values()])) > MAX_HEADER_CHARS:
        raise InvalidTarget(f"headers: at most {MAX_HEADERS}, of {MAX_HEADER_CHARS} characters together")
    return found


def new_secret() -> str:
    """Return a new signing secret, as Standard Webhooks writes it."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def signing_key(secret: str) -> bytes:
    """Return the bytes of a secret. Raises InvalidTarget."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not _MIN_SECRET_BYTES <= len(key) <= _MAX_SECRET_BYTES:
        raise InvalidTarget(f"secret is not {SECRET_PREFIX} and base64 of 24 to 64 bytes")
    return key


def _number(name: str, value: Any, low: float, high: float, unit: str) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not low <= value <= high:
        raise InvalidTarget(f"{name} must be {low:g} to {high:g} {unit}, not {shown(value)}")
