"""A dialect's port as an ASGI application: the guard, the whole request, the answer, and what follows it.

    guard ─▶ token ─▶ body ─▶ answer ─▶ sent ─▶ what it handed out is processed, where the dialect says so
               └────────┴───────┴─▶ the dialect's own words for a mistake or a failure

A dialect knows nothing of this: it gets a Request and returns an Answer. Whatever it raises is answered in
its own words, never with a trace. No query, header or body reaches the log.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from toc.dialects.dialect_tasks import DialectTasks
from toc.failpoint import failpoint
from toc.gateway.connections import ClientGone
from toc.gateway.crowd import client_address
from toc.gateway.exchange import ESCAPED, Answer, Exchange, Headers, Receive, Scope, Send
from toc.gateway.problems import Problem
from toc.gateway.service import Service
from toc.gateway.shares import Shares
from toc.model.access import Token
from toc.model.documents import check_values, parse, whole_text
from toc.model.errors import Busy, InvalidDocument, InvalidInput, TocError
from toc.model.topic import Template
from toc.observe.log import get_logger, stack
from toc.pull.handed_out import HandedOut

log = get_logger(__name__)

ACKS = 20
ACK_AGAIN_SECONDS = 0.25
"""How many attempts are made to mark tasks as processed while their server does not answer, and the
pause between two attempts, in seconds."""
BESIDE_BYTES = 64 << 10
"""Bytes of a request beside a body."""
JSON = "application/json; charset=utf-8"
LARGEST = 2**63 - 1
MAX_VALUES = 10_000
"""Most values of a request. Of delay/task's content, which may be an object, it is the bound."""
ALL, LONG = "line-all", "line-long"
"""Threads for what asks all servers, and for what takes many steps, at the ports of dialects alone."""


class Request(NamedTuple):
    """One whole request. Names of headers are in lower case; ``path`` is decoded, ``query`` is not."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes = b""
    token: Token | None = None
    """What the dialect's ``token`` returned."""

    def header(self, name: bytes) -> str | None:
        """Return the first header of this name."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)

    @property
    def form(self) -> bytes:
        """Its body if that is a form, else nothing."""
        kind = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        return self.body if kind == "application/x-www-form-urlencoded" else b""


class Dialect(ABC):
    """A protocol of another system. One object for each process that serves it."""

    name: ClassVar[str]
    """The name of its option and in its metrics, and the beginning of the dedup_keys of its tasks."""
    templates: ClassVar[tuple[Template, ...]]
    """The patterns of its topics, with the policies of those that it creates."""
    guarded: ClassVar[bool] = True
    """Whether to refuse requests into which a browser may have been tricked: it has no tokens."""

    largest: ClassVar[int] = 0
    """Most bytes of the body of a request; 0: as many as a task's body may have in JSON."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.tasks = DialectTasks(service, self.name, self.templates)
        self.most_bytes = self.largest or ESCAPED * service.center.settings.max_body + BESIDE_BYTES

    def token(self, request: Request) -> Token | None:  # noqa: ARG002 - its signature
        """Return the access token of a request, None if it needs none. Its body has not been received.

        What it raises is answered by ``failed``.
        """
        return None

    @abstractmethod
    async def answer(self, request: Request) -> Answer:
        """Answer a request. Cancelled if its client leaves. What it raises is answered by ``failed``."""

    @abstractmethod
    def failed(self, request: Request, error: Exception) -> Answer:
        """Answer a request that failed: a mistake (InvalidInput), or a server that is out of reach.

        BodyTooLarge, without a body, if it was longer than ``most_bytes``. Must not raise.
        """


class Port:
    """The ASGI application of one dialect. ``memory`` is that of all dialects."""

    def __init__(self, dialect: Dialect, guard: Guard, memory: Shares) -> None:
        self._dialect = dialect
        self._guard = guard
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(scope, receive, send, self._memory)
        exchange.sender = scope["client"][0] if scope.get("client") else ""
        request = Request(scope["method"], scope["path"], scope["query_string"], scope["headers"])
        close, answer = False, Answer(b"")
        try:
            if (refused := self._guard.refuses(scope, browsers=not self._dialect.guarded)) is not None:
                answer, close = _plain(refused, 403), True
            else:
                exchange.check()
                token = self._dialect.token(request)
                body = await exchange.body(self._dialect.most_bytes)
                request = request._replace(body=body, token=token)
                exchange.begin(*(() if token is None else (f"token {token.name}",)))
                answer = await self._dialect.answer(request)
            answer = exchange.ready(answer)
        except ClientGone:
            self._dialect.service.pulls.release(answer.handed)
            exchange.end()
            return
        except asyncio.CancelledError:  # the gateway stops
            answer, close = self._dialect.failed(request, Busy("the gateway stops")), True
        except Problem as exc:
            answer = _plain(exc.detail, exc.kind.status)
        except Exception as exc:
            self._dialect.service.pulls.release(answer.handed)
            answer = self._failed(request, exc)
        given = await exchange.answer(f"{self._dialect.name} {answer.name}", answer, close=close)
        if given and answer.ends:
            await self._processed(answer.handed)

    async def _processed(self, handed: Sequence[HandedOut]) -> None:
        """Mark tasks as processed: their answer was given to a client not known to be gone."""
        service = self._dialect.service
        failpoint("pull.sent")
        leases = [one.key for one in handed]
        for _ in range(ACKS):
            outcomes = zip(leases, await service.pulls.ack(leases), strict=True)
            failed = {lease: what for lease, what in outcomes if isinstance(what, TocError)}
            if not (leases := list(failed)):
                return
            if service.stopping:
                break
            await asyncio.sleep(ACK_AGAIN_SECONDS)
        log.warning("rows_not_written", tries=len(leases), error=str(failed[leases[0]]))  # they come again

    def _failed(self, request: Request, error: Exception) -> Answer:
        if not isinstance(error, TocError):
            log.error("dialect_failed", dialect=self._dialect.name, stack=stack(error))
        return self._dialect.failed(request, error)


class Guard:
    """Who may use a port without a token.

    ``networks``: the clients' networks; none for a port on loopback. ``hosts``: names by which clients know
    the port. A web page can let a browser ask any address, and what an ``<img>`` asks over plain HTTP has
    neither an Origin nor a Sec-Fetch-Site. So whatever looks like a browser's is refused; a browser that
    hides what it is, is kept out by ``networks`` alone. Nor can a page use a host name that its owner lets
    point to this machine (DNS rebinding).
    """

    def __init__(self, networks: Sequence[IPv4Network | IPv6Network], hosts: Sequence[str]) -> None:
        self._networks = tuple(networks)
        self._hosts = frozenset({"localhost", *(host.lower().rstrip(".") for host in hosts)})

    def refuses(self, scope: Scope, *, browsers: bool = False) -> str | None:
        """Return why a request is refused. None: it is not refused.

        ``browsers``: requests of browsers are allowed too.
        """
        client = client_address(scope["client"][0]) if scope.get("client") else None
        if not client or not (client.is_loopback or any(client in network for network in self._networks)):
            return "this address may not use the port"
        if browsers:
            return None
        hosts = 0
        for name, value in scope["headers"]:
            text = value.strip().lower()
            if name == b"origin" or (name == b"sec-fetch-site" and text not in (b"none", b"same-origin")):
                return "pages of browsers may not use the port"
            if _of_browser(name, text):
                return "browsers may not use the port"
            if name == b"host":
                hosts += 1
                if hosts > 1 or not self._ours(value.decode("latin-1")):
                    return "the port has no such name"
        return None

    def _ours(self, host: str) -> bool:
        """Whether a Host header is ours: a numeric address cannot be led elsewhere, a name can."""
        try:
            parts = urlsplit(f"//{host.strip()}")
            name = parts.hostname or ""
            return "@" not in parts.netloc and (name.rstrip(".") in self._hosts or bool(ip_address(name)))
        except ValueError:
            return False


def _of_browser(name: bytes, value: bytes) -> bool:
    """Whether a header, in lower case, is one that browsers send and clients of queues do not."""
    if name == b"user-agent":  # a page cannot change it
        return value.startswith(b"mozilla/") and b"powershell" not in value
    if name == b"accept":
        return value.startswith((b"image/", b"text/css")) or (
            b"text/html" in value and not value.startswith(_ACCEPT_OF_JAVA)
        )
    return False


_ACCEPT_OF_JAVA = b"text/html, image/gif, image/jpeg, "
"""How the Accept begins that Java's HttpURLConnection sends by default."""


def _plain(why: str, status: int) -> Answer:
    return Answer(f"{why}\n".encode(), status, "text/plain; charset=utf-8", name="refused")


# --- JSON objects and their fields


class NotUnderstood(InvalidInput):
    """A request that is no JSON object in UTF-8, or has a value of another type."""


def parsed(data: bytes) -> dict[str, Any]:
    """Return a JSON object; of a repeated name the last value counts. Raises NotUnderstood."""
    try:
        check_values(data, MAX_VALUES)
        found = parse(data, most=len(data), surrogates=True)
    except InvalidDocument:
        raise NotUnderstood("the request is not JSON in UTF-8") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise NotUnderstood("the request is not a JSON object")
    return found


def text(values: dict[str, Any], name: str) -> str:
    """Return a text, empty if it is missing. Raises NotUnderstood."""
    value = values.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise NotUnderstood(f"{name} must be a text")
    return whole_text(value)


def number(values: dict[str, Any], name: str) -> int:
    """Return a whole number of 64 bits, 0 if it is missing. Raises NotUnderstood."""
    value = values.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not -LARGEST - 1 <= value <= LARGEST:
        raise NotUnderstood(f"{name} must be a whole number")
    return value


def to_json(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def to_go_json(value: Any, *, sort_keys: bool = False, indent: bool = False) -> bytes:
    """Return a value as JSON, byte for byte as Go's encoder writes it: safe in HTML."""
    look: dict[str, Any] = {"indent": 4} if indent else {"separators": (",", ":")}
    text = json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, **look)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")
