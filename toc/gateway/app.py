"""The gateway as an ASGI application: finds the call, checks the caller's rights, and answers.

    route ─▶ token ─▶ rate ─▶ role ─▶ parameters and body ─▶ the call's handler ─▶ answer
                                                                                └─▶ problem

Every failure is answered as a problem, never with a trace. Queries, headers and bodies do not reach the log.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any, get_args
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from toc.gateway import calls, openapi, problems, pull_calls, tasks
from toc.gateway.calls import Asked, HttpCall, Model
from toc.gateway.connections import ClientGone
from toc.gateway.exchange import ESCAPED, Answer, Exchange, Receive, Scope, Send
from toc.gateway.problems import Problem
from toc.gateway.service import Service
from toc.gateway.shares import memory
from toc.model.access import Access, Token
from toc.model.documents import check_values, parse
from toc.model.errors import BodyTooLarge, InvalidDocument, TocError
from toc.model.task import Request
from toc.observe.log import get_logger, stack
from toc.operate.operations import OPERATIONS

log = get_logger(__name__)

CALLS: tuple[HttpCall, ...] = (
    *tasks.CALLS,
    *pull_calls.CALLS,
    *(calls.call_of(one) for one in OPERATIONS if one.route),
)
"""Every call of the native API. The first that fits a request is taken."""

MAX_PARAMETERS = 30
MAX_NAME = 255
"""Longest Idempotency-Key."""
OUT_OF_TIME = "the gateway stops and did not finish this in time; it may or may not be done"

CONSOLE = "/console"
"""The path of the console; all its pages are below."""

Console = Callable[[Scope, Exchange], Awaitable[Answer]]
"""Answers what is asked of the console. Its errors are pages already."""

_PAGE = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


class App:
    """The ASGI application of one gateway process."""

    def __init__(self, service: Service, console: Console | None = None) -> None:
        self._service = service
        self._console = console
        by_path: dict[str, dict[str, HttpCall]] = {}
        for call in CALLS:
            by_path.setdefault(call.path, {})[call.method] = call
        self._routes = [(path_pattern(path), by_method) for path, by_method in by_path.items()]
        self._pages = {
            "/healthz": lambda: _text("ok"),
            "/readyz": self._ready,
            "/openapi.json": lambda: Answer(openapi.document_bytes(CALLS)),
            "/docs": lambda: Answer(openapi.page(CALLS), 200, "text/html; charset=utf-8", _PAGE),
        }
        self._memory = memory()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        name, answer = "other", Answer(b"")
        exchange = Exchange(scope, receive, send, self._memory)
        try:
            exchange.check()
            page = self._pages.get(scope["path"])
            if page is not None:
                name = scope["path"]
                answer = _page(scope, page)
            elif scope["path"] == CONSOLE or scope["path"].startswith(f"{CONSOLE}/"):
                name = CONSOLE
                answer = await self._of_console(scope, exchange)
            else:
                call, path = self._find(scope)
                name = call.name
                answer = await self._call(call, path, scope, exchange)
            if answer.parts is not None:
                await exchange.stream(answer, answer.parts)
                exchange.end()
                return
            if page is None:
                answer = exchange.ready(answer)
        except ClientGone:
            self._service.pulls.release(answer.handed)
            exchange.end()
            return
        except (Exception, asyncio.CancelledError) as exc:
            self._service.pulls.release(answer.handed)
            problem = problem_for(exc, name)
            status, body = problem.kind.status, to_json(problem.body())
            answer = Answer(body, status, "application/problem+json", problem.headers)
        await exchange.answer(name, answer)

    async def _of_console(self, scope: Scope, exchange: Exchange) -> Answer:
        if self._console is None:
            why = "the console needs jinja2: pip install 'timeout-center[console]'"
            raise Problem(problems.NOT_INSTALLED, why)
        return await self._console(scope, exchange)

    # --- one call

    async def _call(self, call: HttpCall, path: dict[str, str], scope: Scope, exchange: Exchange) -> Answer:
        token = self._token(exchange)
        exchange.sender = token.name
        if token.may(call.access) is Access.FORBIDDEN:
            raise calls.forbidden(token, call.access)
        body: Any = None
        query = _query(call, scope["query_string"])
        raw = content_type = request = None
        model = call.body
        if model is None and exchange.has_body:  # ignored, it would mislead its sender
            model = calls.NoFields
        if model is not None:
            content_type = exchange.header(b"content-type")
            kind = (content_type or "application/json").partition(";")[0].strip().lower()
            is_json = kind == "application/json"
            is_raw = call.takes_raw and (query.raw or not is_json)
            if not is_json and not is_raw:
                raise Problem(problems.MEDIA_TYPE, "send application/json")
            longest = ESCAPED * self._service.center.settings.max_body if call.takes_raw else 0
            try:
                data = await exchange.body(call.most_bytes + longest)
            except BodyTooLarge as exc:  # of the request, not of a task: no field of it is wrong
                raise Problem(problems.TOO_LARGE, str(exc)) from None
            if call.named and (name := exchange.header(b"idempotency-key")) is not None:
                make = partial(_request, token, scope, content_type, name, data)
                request = await self._service.parsed(data, make)
            if is_raw:
                raw = data
            else:
                found = await self._service.parsed(data, partial(_parsed, model, data, call.most_values))
                body = None if call.body is None else found
            del data  # it may be much longer than what was read of it
        exchange.begin(f"token {token.name}")
        asked = Asked(self._service, call, token, path, query, body, raw, content_type, request)
        if not call.waits:
            return await call.handler(asked)
        with exchange.waiting():
            return await call.handler(asked)

    def _token(self, exchange: Exchange) -> Token:
        """Return the token of a request, and count the request against its rate. Raises Problem."""
        scheme, _, secret = (exchange.header(b"authorization") or "").partition(" ")
        told = scheme.lower() == "bearer" and secret != ""
        token = self._service.book.find(secret) if told else None
        if token is None:
            why = self._service.book.why_not(secret) if told else "no access token was sent"
            why += ": send `Authorization: Bearer TOKEN` with a token that `toc token create` made"
            raise Problem(problems.UNAUTHENTICATED, why, headers={"www-authenticate": "Bearer"})
        if wait := self._service.book.wait(token):
            why = f"this token may make {token.rate:g} requests per second at each gateway process"
            raise Problem(problems.RATE, why, headers={"retry-after": str(ceil(wait))})
        return token

    # --- routing

    def _find(self, scope: Scope) -> tuple[HttpCall, dict[str, str]]:
        path, method = scope["path"], scope["method"]
        if method == "HEAD":  # as GET: the server leaves out the body (RFC 9110, section 9.3.2)
            method = "GET"
        allowed: set[str] = set()
        for pattern, by_method in self._routes:
            if match := pattern.fullmatch(path):
                if call := by_method.get(method):
                    return call, match.groupdict()
                allowed |= by_method.keys()
        if allowed:
            methods = ", ".join(sorted(allowed | {"HEAD"} if "GET" in allowed else allowed))
            raise Problem(problems.METHOD, f"this path accepts {methods}", headers={"allow": methods})
        raise Problem(problems.NOT_FOUND, "there is no such call; /docs lists all")

    def _ready(self) -> Answer:
        ready, lacking = self._service.readiness()
        return _text("\n".join(["ok", *lacking] if ready else lacking), 200 if ready else 503)


def problem_for(error: BaseException, call: str) -> Problem:
    """Return the answer to a call of this name that fails. Of an error that should not be, the log tells."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, TocError):
        return problems.problem_of(error)
    if isinstance(error, asyncio.CancelledError):
        return Problem(problems.BUSY, OUT_OF_TIME, headers={"connection": "close"})
    log.error("call_failed", call=call, stack=stack(error))
    return Problem(problems.INTERNAL, "the gateway failed; its log tells more")


def path_pattern(path: str, without: str = "/:") -> re.Pattern[str]:
    """Return the pattern of a path. No parameter holds one of these characters or a line break."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", rf"(?P<\1>[^{without}\\n]+)", re.escape(path)))


def _request(token: Token, scope: Scope, content_type: str | None, name: str, data: bytes) -> Request:
    """Return the name of a request, which holds for its token and path only. Raises Problem."""
    if not (0 < len(name) <= MAX_NAME and name.isascii() and name.isprintable()):
        detail = f"an Idempotency-Key has 1 to {MAX_NAME} printable ASCII characters"
        raise Problem(problems.INVALID, detail, field="Idempotency-Key")
    payload = b"\0".join(((content_type or "").encode("latin-1"), scope["query_string"], data))
    return Request.of(f"{token.name} {scope['path']}", name, payload)


def _query(call: HttpCall, text: bytes) -> Any:
    """Return the parameters of the query. Raises Problem."""
    try:
        pairs = parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS
        )
    except ValueError:  # a UnicodeDecodeError, too
        raise Problem(problems.SYNTAX, "the query cannot be read: send UTF-8, percent-encoded") from None
    values = dict(pairs)
    if len(values) < len(pairs):
        raise Problem(problems.SYNTAX, "a parameter is in the query twice")
    return checked(call.query, values)


def checked(model: type[BaseModel], values: Mapping[str, Any]) -> Any:
    """Return what a request has in the types of its call. Raises Problem."""
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        raise invalid(exc, model) from None


def _parsed(model: type[Model], data: bytes, most: int) -> Model:
    """Return the body of a request. No body counts as one without fields. Raises Problem."""
    if not data and calls.takes_nothing(model):
        data = b"{}"
    try:
        check_values(data, most)
        return model.model_validate_json(data)
    except InvalidDocument as exc:
        raise Problem(problems.TOO_LARGE, f"{exc}; send less at once") from None
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            if model.surrogates and b"\\u" in data:
                with suppress(InvalidDocument, ValidationError):
                    return model.model_validate(parse(data, most=len(data), surrogates=True))
            why = first["msg"].partition(": ")[2]
            raise Problem(problems.SYNTAX, f"the body is not JSON: {why}") from None
        if not first["loc"] and first["type"] == "model_type":
            raise Problem(problems.SYNTAX, "the body is not a JSON object") from None
        raise invalid(exc, model) from None


def invalid(error: ValidationError, model: type[BaseModel]) -> Problem:
    """Return the answer that names the wrong fields, never their values."""
    found = []
    for one in error.errors(include_url=False, include_context=False, include_input=False)[:10]:
        at = [str(part) for part in one["loc"]]
        detail = _unknown(model, at[:-1]) if one["type"] == "extra_forbidden" else one["msg"]
        found.append({"field": ".".join(at), "detail": detail})
    return Problem(problems.INVALID, found[0]["detail"], field=found[0]["field"], errors=found)


def _unknown(model: type[BaseModel], path: Iterable[str]) -> str:
    """Say which fields the object at a path in a request may have, instead of one that it may not."""
    for name in path:
        field = model.model_fields.get(name)
        within = [] if field is None else [field.annotation, *get_args(field.annotation)]
        model = next((one for one in within if isinstance(one, type) and issubclass(one, BaseModel)), model)
    names = [field.alias or name for name, field in model.model_fields.items()]
    known = f"there are: {', '.join(names)}" if names else "there are none"
    return f"there is no such field; {known}"


def _page(scope: Scope, page: Callable[[], Answer]) -> Answer:
    if scope["method"] not in ("GET", "HEAD"):
        raise Problem(problems.METHOD, "this path accepts GET, HEAD", headers={"allow": "GET, HEAD"})
    return page()


def _text(text: str, status: int = 200) -> Answer:
    return Answer(f"{text}\n".encode(), status, "text/plain; charset=utf-8")
