"""One request for a page, by who is logged in: what it may ask the gateway for, and what it got.

A page asks by the calls of the native API, so it sees what a client with the same access token would. What
may hang, or is dear, it asks for as a ``part``: shared by all pages that would get the same, waited for a
moment only, and shown with its age.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from toc.console.sessions import Session
from toc.console.shown import Block, Column, Content, Field, Form, Note, Table, following
from toc.gateway.app import CALLS, CONSOLE, checked, problem_for
from toc.gateway.calls import Asked, HttpCall, forbidden
from toc.gateway.exchange import Answer
from toc.gateway.problems import INVALID, UNAVAILABLE, UNKNOWN_TOPIC, Problem
from toc.gateway.service import Service
from toc.model.access import Access, Action
from toc.model.clock import from_ms, parse_duration, span
from toc.model.errors import TocError

Values = Mapping[str, Any]
BY_NAME: Mapping[str, HttpCall] = {call.name: call for call in CALLS}
WAIT_SECONDS = 1.5
"""How long a page waits for a part."""
ASK_SECONDS = 5.0
"""How long it waits for what it cannot do without."""
CLUSTER_SECONDS = 5.0
"""Readings of ZooKeeper and Redis that are younger are good enough for a page."""
MOST_READINGS = 256
NOTHING_DONE = "; nothing was acknowledged: try again"
"""What an answer says that is of no use to who only looks."""


@dataclass(slots=True)
class Reading:
    """What a part was when it was read last. ``at``: when (ms). ``error``: why it could not be read since,
    and ``about`` where that is described."""

    value: Any = None
    at: int | None = None
    error: str = ""
    about: str = ""
    began: float = float("-inf")
    reading: asyncio.Task[None] | None = None


class Readings:
    """Parts that pages share. Each is read when a page wants it, once at a time. For one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._readings: dict[Any, Reading] = {}

    async def get(
        self, key: Any, read: Callable[[], Awaitable[Answer]], fresh: float, wait: float
    ) -> Reading:
        """Return the newest reading; one that began at most ``fresh`` seconds ago, if it can be had within
        ``wait`` seconds."""
        one = self._readings.pop(key, None) or Reading()
        self._readings[key] = one
        if len(self._readings) > MOST_READINGS:
            del self._readings[next(iter(self._readings))]
        now = self._service.center.clock.monotonic
        asked = now()
        while True:
            if one.reading is None:
                if one.began >= asked - fresh:
                    return one
                one.began = now()
                one.reading = asyncio.create_task(self._read(one, read))
            await asyncio.wait([one.reading], timeout=max(0.0, asked + wait - now()))
            if now() >= asked + wait:
                return one

    def forget(self) -> None:
        """Have everything read anew: something was changed."""
        for one in self._readings.values():
            one.began = float("-inf")

    async def _read(self, one: Reading, read: Callable[[], Awaitable[Answer]]) -> None:
        began = self._service.center.clock.now_ms()
        try:
            one.value, one.at, one.error = (await read()).content, began, ""
        except Exception as exc:
            problem = problem_for(exc, CONSOLE)
            one.error, one.about = problem.detail.removesuffix(NOTHING_DONE), problem.kind.type
        finally:
            one.reading = None


class Part(NamedTuple):
    """A part of a page. ``value`` is None if it was never read. ``notes`` say what is missing, and how old
    it is."""

    value: Any
    notes: list[Block]
    at: int | None


@dataclass(frozen=True, slots=True)
class View:
    """One request for a page. ``path`` and ``query`` are its parameters, ``form`` what was sent with it.

    Parts that were read at most ``fresh`` seconds ago are good enough.
    """

    service: Service
    readings: Readings
    session: Session
    url: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    form: Mapping[str, str]
    fresh: float = 0.0

    @property
    def now_ms(self) -> int:
        """The present."""
        return self.service.center.clock.now_ms()

    def ago(self, at: int) -> str:
        """Return how long ago an instant (ms) was."""
        return span(max(1.0, (self.now_ms - at) // 1000))

    def may(self, action: Action, topic: str | None = None) -> bool:
        """Whether who is logged in may do it."""
        return self.session.token.may(action, topic) is Access.ALLOWED

    def _asked(self, name: str, query: Values | None, body: Values | None, path: dict[str, str]) -> Asked:
        """Return the request of a call, checked. Raises Problem if it is not allowed."""
        call, token = BY_NAME[name], self.session.token
        if token.may(call.access) is Access.FORBIDDEN:
            raise forbidden(token, call.access)
        sent = {key: value for key, value in (query or {}).items() if value not in (None, "")}
        content = None if call.body is None else self._checked(call.body, body or {})
        return Asked(self.service, call, token, path, self._checked(call.query, sent), content)

    def _checked(self, model: type[BaseModel], typed: Values) -> Any:
        """Return what was typed in the types of its call. A time may be told from now on. Raises Problem."""
        at = dict(typed)
        for key, info in model.model_fields.items():
            found = re.fullmatch(r"([+-])([0-9]{1,5}[smhd])", str(typed.get(key)))
            if found and datetime in _types(info.annotation):
                ahead = int(found[1] + "1000") * int(parse_duration(found[2]))
                at[key] = from_ms(self.now_ms + ahead).isoformat()
        return checked(model, at)

    async def ask(
        self, name: str, query: Values | None = None, body: Values | None = None, /, **path: str
    ) -> Any:
        """Make a call of the native API, named as ``GET /v1/topics``, and return what it answers. Values of
        the query are texts; None and '' are left out. Raises Problem, TocError."""
        return (await self.call(name, query, body, **path)).content

    async def call(
        self, name: str, query: Values | None = None, body: Values | None = None, /, **path: str
    ) -> Answer:
        """Make a call as ``ask`` does, and return the whole answer."""
        asked = self._asked(name, query, body, path)
        if asked.call.method != "GET":
            return await asked.call.handler(asked)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await asked.call.handler(asked)
        except TimeoutError:
            raise Problem(UNAVAILABLE, "a server does not answer; try again in a moment") from None

    async def listed(
        self, title: str, name: str, key: str, columns: Sequence[Column],
        query: Mapping[str, str] | None = None, /, *blocks: Block, cursor: str = "next", empty: str = "None.",
    ) -> Content:  # fmt: skip
        """Return a page with the list that a call answers under a key. ``query`` is that of the page, its
        ``cursor`` where it begins, and ``blocks`` stand before the list."""
        part = await self.part(title, name, query)
        shown = [*blocks, *part.notes]
        if part.value is not None:
            further = part.value.get("next")
            more = following(self.url, query or {}, **{cursor: further}) if further else ""
            shown.append(Table(columns=columns, records=part.value[key], more=more, empty=empty))
        return Content(title, shown, part.at)

    async def part(
        self, what: str, name: str, query: Values | None = None, /, *, fresh: float = 0.0, **path: str
    ) -> Part:
        """Make a call that may hang or is dear. ``what`` names what it tells; a reading of at most ``fresh``
        seconds is good enough. Raises Problem if it is not allowed."""
        asked = self._asked(name, query, None, path)
        # What all see alike who may see it, or what this token sees.
        who = asked.token.roles if asked.call.access.cluster else asked.token.name
        key = name, tuple(sorted((query or {}).items())), tuple(sorted(path.items())), who
        read = partial(asked.call.handler, asked)
        one = await self.readings.get(key, read, max(fresh, self.fresh), WAIT_SECONDS)
        why = one.error or ("it is still being read" if one.reading is not None else "")
        old = "" if one.at is None else f"; this is as of {self.ago(one.at)} ago"
        note = Note(text=f"{what}: {why}{old}.", level="bad", href=one.about if one.error else "")
        return Part(one.value, [note] if why else [], one.at)


def fields_of(name: str, values: Mapping[str, str], *, leave_out: tuple[str, ...] = ()) -> list[Field]:
    """Return the inputs for what a call takes, with the values that they have."""
    asked = [one for one in _inputs(name) if one.name not in leave_out]
    return [one._replace(value=values.get(one.name, "")) for one in asked]


@cache
def _inputs(name: str) -> list[Field]:
    call = BY_NAME[name]
    found = []
    for key, info in (call.body or call.query).model_fields.items():
        choices = _choices(info.annotation)
        hint = _hint(info)
        if get_origin(info.annotation) is list:
            hint = hint.replace("May be repeated.", "Several with commas between.")
            hint, choices = f"{hint} Of: {', '.join(choices)}." if choices else hint, []
        kind = "select" if choices else "checkbox" if bool in _types(info.annotation) else "text"
        found.append(Field(key, key.replace("_", " "), kind, "", hint, choices, info.is_required()))
    return found


def marked(fields: list[Field], problem: Problem) -> tuple[list[Field], list[Block]]:
    """Return fields with an error at the one that it is about, or else a note of it."""
    about = "topic" if problem.kind is UNKNOWN_TOPIC else ""
    at = str(problem.more.get("field", about)).partition(".")[0]
    told = [one._replace(error=problem.detail) if one.name == at else one for one in fields]
    there = any(one.error and one.kind != "hidden" for one in told)
    text = f"{problem.kind.title}: {problem.detail}."
    return told, [] if there else [Note(text=text, level="bad", href=problem.kind.type)]


def _hint(info: FieldInfo) -> str:
    """Return what the call says of a field, and the form of a time."""
    types = _types(info.annotation)
    found = [info, *(one for one in types if isinstance(one, FieldInfo))]
    about = next((one.description for one in found if one.description), "")
    return f"{about} 2030-01-31T12:00:00Z, or from now: +2h, -30m" if datetime in types else about


def _types(kind: Any) -> list[Any]:
    return [one for part in (get_args(kind) or (kind,)) for one in ([part, *get_args(part)])]


def _choices(kind: Any) -> list[str]:
    for one in [kind, *_types(kind)]:
        if get_origin(one) is Literal:
            return list(get_args(one))
        if isinstance(one, type) and issubclass(one, StrEnum):
            return [member.value for member in one]
    return []


class Redirect(NamedTuple):
    """What a form answers with: the page that comes next."""

    href: str


Shows = Callable[[View], Awaitable[Content | Redirect | Answer]]


@dataclass(frozen=True, slots=True)
class Page:
    """The declaration of a page. ``path`` is that below /console, with parameters in braces. ``right``: only
    those have it in their menu and may see it. ``menu``: its name there. ``live``: while it is open, it is
    made anew every few seconds; otherwise only its age is. ``search``: the call that its form asks; a value
    that it refuses is told at its field."""

    path: str
    right: Action | None
    do: Shows
    menu: str = ""
    live: bool = False
    method: str = "GET"
    search: str = ""

    async def shows(self, view: View) -> Content | Redirect | Answer:
        """Return what it shows. Raises Problem, TocError."""
        try:
            return await self.do(view)
        except (Problem, TocError) as exc:
            problem = problem_for(exc, CONSOLE)
            if not self.search or problem.kind not in (INVALID, UNKNOWN_TOPIC):
                raise
        fields, notes = marked(fields_of(self.search, view.query, leave_out=("limit", "next")), problem)
        title = self.menu or problem.kind.title
        return Content(title, [*notes, Form(fields=fields)], view.now_ms, problem.kind.status)


def page(path: str, right: Action | None = None, **more: Any) -> Callable[[Shows], Page]:
    """Declare the decorated function as a page; ``more`` are further fields of Page."""
    return lambda do: Page(path, right, do, **more)
