"""lmstfy's admin API: which queues there are, and tokens for namespaces, which are access tokens of toc."""

from __future__ import annotations

import asyncio
import binascii
import re
import secrets
from base64 import b64decode
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import ClassVar

from toc.dialects import lmstfy_wire as wire
from toc.dialects.lmstfy_replies import refusal, reply, secret_of
from toc.dialects.lmstfy_tasks import NAME, PREFIX, prefix_of
from toc.dialects.lmstfy_wire import Query, Refused
from toc.dialects.port import BESIDE_BYTES, Dialect, Reply, Request
from toc.model import access
from toc.model.access import Access, Role, Token
from toc.model.errors import NameTaken, NotGranted, UnknownToken
from toc.model.topic import Template
from toc.operate.audit import audited
from toc.operate.operation import Place
from toc.operate.tokens import LONGEST, create_token, revoke_token

ROLES = frozenset({Role.PRODUCE, Role.CONSUME, Role.OPERATE})
"""What a token of lmstfy may do, on the queues of its namespace."""
SHORTEST_TOKEN = 20
EVERYWHERE_SECONDS = 1.0
"""Every gateway knows a new token after this many seconds."""
ENGINE = "redis"
"""lmstfy has several engines. This one is named as the engine of every pool."""
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_NO_PAGE = Reply(b"404 page not found", 404, "text/plain")
_UNAUTHORIZED = 401


class LmstfyAdmin(Dialect):
    """The admin API of lmstfy, port 7778. It needs basic auth: any user, and as the password an access token
    of the role admin, which grants no more than it has."""

    name: ClassVar[str] = "lmstfy-admin"
    templates: ClassVar[tuple[Template, ...]] = ()
    largest: ClassVar[int] = BESIDE_BYTES

    def token(self, request: Request) -> Token:
        """Return the administrator's token that a request carries. Raises Refused without a valid one."""
        kind, _, text = (request.header(b"authorization") or "").partition(" ")
        try:
            secret = b64decode(text, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            secret = ""
        token = self.service.book.find(secret) if kind.lower() == "basic" else None
        if token is None or token.may(access.Action.CHANGE_TOKENS) is not Access.ALLOWED:
            raise Refused(_UNAUTHORIZED, "unauthorized")
        return token

    async def answer(self, request: Request) -> Reply:
        """Answer a request. Raises Refused for a mistake."""
        giver = request.token
        if giver is None:
            raise Refused(_UNAUTHORIZED, "unauthorized")
        parts = request.path.strip("/").split("/")
        query = Query(request.query)
        if request.method == "GET" and parts == ["version"]:
            return _render(
                {"version": version("timeout-center"), "build_commit": "", "build_date": ""}, "version"
            )
        engine = query.get("kind", ENGINE)
        if request.method == "GET" and parts == ["pools"]:
            return _render(["default"] if engine == ENGINE else [], "pools")
        if request.method == "GET" and parts == ["info"]:
            there = engine == ENGINE and query.get("pool") in ("", "default")
            return self._info(giver) if there else reply(None, 200)._replace(name="info")
        if len(parts) == 2 and parts[0] == "token" and request.method in ("GET", "POST"):
            do = self._list if request.method == "GET" else self._create
            return await do(parts[1], query, request, giver)
        if len(parts) == 3 and parts[0] == "token" and request.method == "DELETE":
            return await self._delete(parts[1], parts[2], giver)
        return _NO_PAGE._replace(headers=reply(None, 404).headers)

    def failed(self, request: Request, error: Exception) -> Reply:  # noqa: ARG002 - its signature
        """Answer a mistake or a failure."""
        if isinstance(error, Refused) and error.status == _UNAUTHORIZED:
            realm = (b"www-authenticate", b'Basic realm="Authorization Required"')
            answer = reply(None, _UNAUTHORIZED)
            return answer._replace(headers=(*answer.headers, realm))
        if isinstance(error, NotGranted):
            error = Refused(403, str(error))
        return refusal(error)

    # --- calls

    def _info(self, giver: Token) -> Reply:
        """List namespaces with their queues, those that the giver may see, as in the names of topics."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.service.center.catalog.known()):
            if name.startswith(PREFIX) and giver.may(access.Action.READ_TOPICS, name) is Access.ALLOWED:
                namespace, _, queue = name.removeprefix(PREFIX).partition(".")
                found.setdefault(namespace, []).append(queue)
        answer = _render(found, "info")
        return answer._replace(body=answer.body + b"\n", media_type="text/plain; charset=utf-8")

    async def _list(self, namespace: str, query: Query, _: Request, giver: Token) -> Reply:
        """List the names of the tokens of a namespace, each with what it is for."""
        _pool(query.get("pool"))
        every = await self.service.within(Place.FIRST, self.service.center.store.tokens.list)
        now = self.service.center.clock.now_ms()
        mine = [
            one
            for one in every
            if one.topics == (f"{prefix_of(namespace)}*",) and one.lives(now) and giver.covers(one)
        ]
        return _render({"tokens": {one.name: one.created_by.partition(": ")[2] for one in mine}}, "tokens")

    async def _create(self, namespace: str, query: Query, request: Request, giver: Token) -> Reply:
        form = Query(request.body if _is_form(request) else b"")
        description = form.get("description") or query.get("description")
        given = form.get("token") or query.get("token")
        if not description:
            raise Refused(400, "invalid description")
        if given and len(given) < SHORTEST_TOKEN:
            raise Refused(400, "the user token was too short")
        if len(namespace.encode()) > wire.LONGEST_NAME:
            raise Refused(400, "the namespace name was too long")
        if not wire.is_name(namespace):
            raise Refused(400, "namespace name contains forbidden characters")
        pool = query.get("pool")
        if given:
            named, given = wire.split_token(given)
            pool = pool or (named if named != "default" else "")
        _pool(pool)
        if len(secret_of(given)) > LONGEST:
            raise Refused(400, "the user token was too long")
        try:
            secret = await self.service.within(
                Place.FIRST, partial(self._make, namespace, description, given, giver)
            )
        except NameTaken:
            raise Refused(400, "token has already existed") from None
        await asyncio.sleep(EVERYWHERE_SECONDS)
        token = given or secret
        return _render({"token": f"{pool}:{token}" if pool else token}, "create", 201)

    async def _delete(self, namespace: str, text: str, giver: Token) -> Reply:
        """Revoke a token of a namespace, given by itself or by its name."""
        pool, secret = wire.split_token(text)
        _pool(pool)
        token = self.service.book.find(secret_of(secret))
        name = token.name if token is not None else secret
        every = await self.service.within(Place.FIRST, self.service.center.store.tokens.list)
        pattern = f"{prefix_of(namespace)}*"
        if any(one.name == name and one.topics == (pattern,) for one in every):
            with suppress(UnknownToken):  # it allows more than the giver's, or was just revoked
                await self.service.within(Place.FIRST, partial(self._revoke, name, giver))
            await asyncio.sleep(EVERYWHERE_SECONDS)
        return reply(None, 204)._replace(name="delete")

    # --- inside

    def _make(self, namespace: str, description: str, given: str, giver: Token) -> str:
        center = self.service.center
        words = _NO_NAME.sub("-", description).strip("-._")[:40]
        name = f"{words or NAME}-{secrets.token_hex(4)}"
        with audited(center.store, giver.name, "token.create", name, namespace=namespace):
            made = create_token(
                center.store,
                name,
                roles=ROLES,
                topics=[f"{prefix_of(namespace)}*"],
                clock=center.clock,
                by=f"{giver.name}: {description}"[:128],
                giver=giver,
                secret=secret_of(given) if given else None,
            )
        return made.secret

    def _revoke(self, name: str, giver: Token) -> str:
        store = self.service.center.store
        with audited(store, giver.name, "token.revoke", name):
            return revoke_token(store, name, giver=giver).name


def _render(content: object, name: str, status: int = 200) -> Reply:
    return reply(content, status, indent=True)._replace(name=name)


def _pool(name: str) -> None:
    if name not in ("", "default"):
        raise Refused(400, "pool not found")


def _is_form(request: Request) -> bool:
    kind = request.header(b"content-type") or ""
    return kind.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"
