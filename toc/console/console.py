"""The console as the gateway's application calls it: finds the page, who is logged in, and answers.

    path ─▶ login ─▶ rate ─▶ form: same site, CSRF token ─▶ right ─▶ the page's function ─▶ HTML
                                                                                       └─▶ a page with why not

Each page has a nonce of its own, without which no script runs and no htmx attribute counts. Nobody who is not
logged in learns anything, not even which pages there are.
"""

import asyncio
import gzip
import hashlib
import hmac
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from toc.console.pages import PAGES
from toc.console.pages.acts import offered
from toc.console.sessions import COOKIE, Session, Sessions
from toc.console.shown import Content, Note, following, number
from toc.console.view import NOTHING_DONE, Page, Readings, Redirect, View
from toc.gateway import problems
from toc.gateway.app import CONSOLE, path_pattern, problem_for
from toc.gateway.calls import forbidden
from toc.gateway.connections import ClientGone
from toc.gateway.exchange import Answer, Exchange, Scope
from toc.gateway.problems import Problem
from toc.gateway.service import Service
from toc.gateway.shares import Shares
from toc.model.access import Access
from toc.model.clock import span
from toc.model.errors import Busy, TocError

R = TypeVar("R")

STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_KEPT = {
    "cache-control": "public, max-age=31536000, immutable",
    "vary": "accept-encoding",
    "content-security-policy": "default-src 'none'; sandbox",
    "cross-origin-resource-policy": "same-origin",
}
LOGIN, LOGOUT, LIVE = f"{CONSOLE}/login", f"{CONSOLE}/logout", f"{CONSOLE}/live"
FORM_BYTES = 64 << 10
MAX_FIELDS = 100
EVERY_SECONDS = 5
"""How often an open page is brought up to date."""
FRESH_SECONDS = EVERY_SECONDS - 0.5
"""Open pages share what was read for one of them."""
MAX_LIVE = 128
"""Open pages that are brought up to date, of which a lone token has half: each is drawn every few seconds,
and calls of the API wait meanwhile."""
LOCAL = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")

_SAFE = {
    "cache-control": "no-store",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types htmx"
)


def _assets() -> dict[str, tuple[str, Answer, Answer]]:
    """Return what pages load: scripts, the style, the icon. By its name each has a path with its checksum, so
    that a browser keeps it for good, and the answers with it, plain and compressed."""
    found = {}
    for file in sorted(STATIC.iterdir()):
        if kind := TYPES.get(file.suffix):
            data = file.read_bytes()
            path = f"{CONSOLE}/static/{hashlib.sha256(data).hexdigest()[:16]}/{file.name}"
            packed = gzip.compress(data, 9, mtime=0)
            headers = {**_KEPT, "content-encoding": "gzip"}
            found[file.name] = (
                path, Answer(data, media_type=kind, headers=_KEPT),
                Answer(packed, media_type=kind, headers=headers),
            )  # fmt: skip
    return found


class Console:
    """The console of one gateway process."""

    def __init__(self, service: Service, secret: bytes) -> None:
        self._service = service
        self._sessions = Sessions(service.book, service.center.clock, secret)
        self._readings = Readings(service)
        self._open = Shares(MAX_LIVE, "too many pages are open to be brought up to date")
        assets = _assets()
        self._assets = {path: answers for path, *answers in assets.values()}
        self._routes = [(path_pattern(one.path, "/"), one) for one in PAGES]
        self._templates = Environment(
            loader=FileSystemLoader(STATIC.with_name("templates")), autoescape=True,
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False,
        )  # fmt: skip
        self._templates.globals.update(asset=lambda name: assets[name][0], root=CONSOLE, following=following,
                                       number=number, span=span)  # fmt: skip

    async def __call__(self, scope: Scope, exchange: Exchange) -> Answer:
        """Answer one request. Raises ClientGone."""
        path = scope["path"]
        if path in self._assets:
            return self._assets[path][_packs(exchange.header(b"accept-encoding"))]
        session = None
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        try:
            if method == "POST":
                _check_same_site(exchange)
            if path == LOGIN and method in ("GET", "POST"):
                return await self._login(method, scope, exchange)
            session = self._sessions.find(exchange.header(b"cookie"))
            if session is None:
                return self._stranger(method, scope, exchange)
            return await self._of_session(session, method, scope, exchange)
        except ClientGone:
            raise
        except Exception as exc:
            problem = problem_for(exc, CONSOLE)
        kind = problem.kind
        said = problem.detail.removesuffix(NOTHING_DONE) if method == "GET" else problem.detail
        note = Note(text=f"{said}.", level="bad", href=kind.type)
        return self._html(
            "page.html", session, kind.status, problem.headers, content=Content(kind.title, [note]), live=""
        )

    # --- who is there

    async def _login(self, method: str, scope: Scope, exchange: Exchange) -> Answer:
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if method == "GET":
            return self._login_page(scope, exchange, query.get("next", ""))
        exchange.sender = exchange.connection.address
        form = await _form(exchange)
        following = _within(form.get("next", ""))
        secret = form.get("token", "").strip()
        cookie = self._sessions.begin(secret)
        if cookie is None:
            why = self._service.book.why_not(secret)
            return self._login_page(scope, exchange, following, why, 401)
        return _redirect(following, cookie)

    def _login_page(
        self, scope: Scope, exchange: Exchange, following: str, why: str = "", status: int = 200
    ) -> Answer:
        # Browsers send Sec-Fetch-Site where they keep secure cookies, as at the outside of a proxy with TLS.
        local = LOCAL.fullmatch(exchange.header(b"host") or "") is not None
        secure = scope["scheme"] == "https" or local or exchange.header(b"sec-fetch-site") is not None
        return self._html(
            "login.html", None, status, {}, why=why, secure=secure, following=_within(following)
        )

    def _stranger(self, method: str, scope: Scope, exchange: Exchange) -> Answer:
        """Send who is not logged in to the login."""
        if method != "GET" or scope["path"] == LIVE:
            raise Problem(problems.UNAUTHENTICATED, "you are not logged in, or the login has ended: log in")
        here = _here(scope)
        if exchange.header(b"sec-fetch-site") in ("cross-site", "same-site"):
            # A link from elsewhere comes without the cookie, as that is SameSite=Strict. From here it has it.
            return self._html("again.html", None, 200, {}, here=here)
        return _redirect(f"{LOGIN}?next={quote(here, safe='')}" if here != CONSOLE else LOGIN)

    # --- pages

    async def _of_session(self, session: Session, method: str, scope: Scope, exchange: Exchange) -> Answer:
        token = session.token
        exchange.sender = token.name
        if wait := self._service.book.wait(token):
            why = "this access token has made its requests of this second"
            raise Problem(problems.RATE, why, headers={"retry-after": str(ceil(wait))})
        form: dict[str, str] = {}
        if method == "POST":
            form = await _form(exchange)
            if not hmac.compare_digest(form.pop("csrf", "").encode(), session.csrf.encode()):
                why = "the form is of another login: go back, reload the page, send it again"
                raise Problem(problems.FORBIDDEN, why)
        exchange.begin(f"token {token.name}")
        path, query = scope["path"], _query(scope["query_string"])
        if path == LOGOUT and method == "POST":
            return _redirect(LOGIN, "")
        if path == LIVE and scope["method"] == "GET":
            return self._live(session, exchange.header(b"cookie"), query.get("of", CONSOLE))
        mine = _menu(session)
        if path == CONSOLE and mine and mine[0].path:  # it may not see the first page
            return _redirect(f"{CONSOLE}/{mine[0].path}")
        found, values = self._find(path, method, session)
        view = View(self._service, self._readings, session, path, values, query, form)
        try:
            content = await found.shows(view)
        finally:
            if method == "POST":
                self._readings.forget()
        if isinstance(content, Answer):
            return content
        if isinstance(content, Redirect):
            return _redirect(content.href)
        draw = partial(
            self._html, "page.html", session, content.status, {}, content=content, live=_here(scope),
            now=found, acts=offered(found, view, content), packed=_packs(exchange.header(b"accept-encoding")),
        )  # fmt: skip
        try:
            return await self._drawn(draw)
        except Busy:
            if method != "POST":
                raise
            return draw()  # what a form has done is told: a new secret is not shown again

    def _find(self, path: str, method: str, session: Session) -> tuple[Page, Mapping[str, str]]:
        """Return a page, and what its path names. Raises Problem, also if it is not for the reader."""
        below = path.removeprefix(CONSOLE).strip("/")
        for pattern, one in self._routes:
            if one.method == method and (match := pattern.fullmatch(below)):
                if one.right is not None and not _may(one, session):
                    raise forbidden(session.token, one.right, "this page")
                return one, match.groupdict()
        raise Problem(problems.NOT_FOUND, "there is no such page")

    # --- live

    def _live(self, session: Session, cookies: str | None, of: str) -> Answer:
        parts = urlsplit(_within(of))
        found, values = self._find(parts.path, "GET", session)
        if not found.live:
            raise Problem(problems.NOT_FOUND, "this page is not brought up to date")
        query = _query(parts.query.encode())
        view = View(self._service, self._readings, session, parts.path, values, query, {}, FRESH_SECONDS)
        headers = {**_SAFE, "x-accel-buffering": "no"}
        events = self._events(found, view, cookies)
        return Answer(b"", media_type="text/event-stream", headers=headers, parts=events)

    async def _events(self, found: Page, view: View, cookies: str | None) -> AsyncIterator[bytes]:
        """Bring an open page up to date until its login ends or the process does."""
        last, name = "", view.session.token.name
        try:
            self._open.take(name)
        except Busy:  # the page stays as it was read and says so, and the browser asks again
            return
        try:
            while True:
                try:
                    html = await self._fragment(found, view)
                    yield _event(html) if html != last else b"event: same\ndata: .\n\n"
                    last = html
                except Busy:  # the next time, then
                    yield b": still here\n\n"
                for _ in range(EVERY_SECONDS):
                    await asyncio.sleep(1)
                    if self._service.stopping:
                        return
                    session = None
                    with suppress(TocError):
                        session = self._sessions.find(cookies)
                    if session is None:
                        yield _event(self._render("ended.html")) + b"event: end\ndata: .\n\n"
                        return
        finally:
            self._open.give(name)

    async def _fragment(self, found: Page, view: View) -> str:
        try:
            content = await found.shows(view)
        except Exception as exc:
            problem = problem_for(exc, CONSOLE)
            content = Content("", [Note(text=f"{problem.detail}.", level="bad", href=problem.kind.type)])
        acts = offered(found, view, content) if isinstance(content, Content) and content.title else []
        now_ms, csrf = view.now_ms, view.session.csrf
        draw = partial(self._render, "blocks.html", content=content, csrf=csrf, now_ms=now_ms, acts=acts)
        return await self._drawn(draw)

    # --- HTML

    async def _drawn(self, draw: Callable[[], R]) -> R:
        """Return what is drawn of a page, which may be long: off the event loop, one after the other, in
        turns of those who want pages. Raises Busy."""
        return await self._service.within("pages", draw, threads=1)

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    def _html(
        self, template: str, session: Session | None, status: int, headers: Mapping[str, str], *,
        packed: bool = False, **values: Any,
    ) -> Answer:  # fmt: skip
        nonce, now_ms = secrets.token_urlsafe(16), self._service.center.clock.now_ms()
        csrf, rest = session.csrf if session else "", {"now": None, "acts": [], **values}
        text = self._render(
            template, nonce=nonce, session=session, menu=_menu(session), csrf=csrf, now_ms=now_ms, **rest
        )
        policy = _POLICY.format(nonce=nonce)
        more = {**_SAFE, **headers, "content-security-policy": policy}
        data = text.encode("utf-8", "replace")
        if packed:
            data = gzip.compress(data, 6, mtime=0)
            more |= {"content-encoding": "gzip", "vary": "accept-encoding"}
        return Answer(data, status, "text/html; charset=utf-8", headers=more)


def _packs(encodings: str | None) -> bool:
    """Whether who sends this Accept-Encoding understands gzip."""
    return any(one.strip().partition(";")[0] == "gzip" for one in (encodings or "").lower().split(","))


def _menu(session: Session | None) -> list[Page]:
    return [] if session is None else [one for one in PAGES if one.menu and _may(one, session)]


def _may(one: Page, session: Session) -> bool:
    return one.right is None or session.token.may(one.right) is not Access.FORBIDDEN


def _here(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return quote(scope["path"]) + (f"?{query}" if query else "")


def _within(path: str) -> str:
    """Return a path of the console that a request names, and for any other text the first page."""
    fits = path == CONSOLE or path.startswith((f"{CONSOLE}/", f"{CONSOLE}?"))
    return path if fits and path.isascii() and path.isprintable() and len(path) < 4096 else CONSOLE


def _query(text: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(text.decode("ascii"), errors="strict", max_num_fields=MAX_FIELDS))
    except ValueError:
        raise Problem(problems.SYNTAX, "the query cannot be read: send UTF-8, percent-encoded") from None


async def _form(exchange: Exchange) -> dict[str, str]:
    """Return what a form sends. Raises Problem."""
    kind = (exchange.header(b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Problem(problems.SYNTAX, "send a form")
    return _query(await exchange.body(FORM_BYTES))


def _check_same_site(exchange: Exchange) -> None:
    """Raise Problem for a form that another site sends."""
    site, origin = exchange.header(b"sec-fetch-site"), exchange.header(b"origin")
    own = origin is None or origin.partition("://")[2] == exchange.header(b"host")
    if not (own if site is None else site == "same-origin"):
        raise Problem(problems.FORBIDDEN, "forms are sent from the console's own pages only")


def _redirect(path: str, cookie: str | None = None) -> Answer:
    headers = {**_SAFE, "location": path}
    if cookie is not None:
        gone = "" if cookie else "; Max-Age=0"
        headers["set-cookie"] = f"{COOKIE}={cookie}; Path=/; Secure; HttpOnly; SameSite=Strict{gone}"
    return Answer(b"", 303, "text/plain; charset=utf-8", headers=headers)


def _event(html: str) -> bytes:
    return "".join(f"data: {line}\n" for line in html.splitlines()).encode("utf-8", "replace") + b"\n"
