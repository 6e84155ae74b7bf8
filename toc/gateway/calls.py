"""Declares what a call of the native API is: its path, who may make it, what it takes and returns.

Every call is declared once, in the module of its subject; what operators can do is declared for every door
(toc.operate.operation). Routing, checks of roles, the OpenAPI document, the
page at /docs and the metrics are made from these declarations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.functional_validators import BeforeValidator, PlainValidator
from pydantic.json_schema import WithJsonSchema
from pydantic.types import StringConstraints
from pydantic_core import PydanticCustomError

from toc.gateway.exchange import Answer
from toc.gateway.problems import FORBIDDEN, INVALID, UNKNOWN_TASK, Problem, unknown_topic
from toc.model import access
from toc.model.access import Access, Token
from toc.model.documents import MAX_EXACT, parse_instant
from toc.model.errors import InvalidInput
from toc.model.sharding import MAX_BIZ_ID, MAX_KEY_BYTES, BizId, valid_job_id
from toc.model.task import Request, TaskRow
from toc.model.topic import NAME
from toc.operate.operation import Doing, Operation, Param, Place, Record, Value
from toc.operate.tasks import topic_of

if TYPE_CHECKING:
    from toc.gateway.service import Service

SMALL_BYTES = 256 << 10
"""Most bytes of the body of an ordinary request."""


def _instant(value: object) -> datetime:
    try:
        return parse_instant(value)
    except InvalidInput as exc:
        raise PydanticCustomError("instant", "{text}", {"text": str(exc)}) from None


Instant = Annotated[
    datetime, PlainValidator(_instant), WithJsonSchema({"type": "string", "format": "date-time"})
]
"""A time in a request: RFC 3339 with a zone."""


def _biz_id(value: Any) -> Any:
    """Return a biz_id as it is meant: a text of digits is that number, so "42" and 42 are the same."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        number = int(value)
        return number if str(number) == value and number <= MAX_BIZ_ID else value
    if isinstance(value, int) and abs(value) > MAX_EXACT:
        why = "many programs round numbers beyond 2^53: send this biz_id as a text of its digits"
        raise PydanticCustomError("biz_id", why)
    return value


_NUMBER = {"type": "integer", "minimum": 0, "maximum": MAX_EXACT}
_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_KEY_BYTES}
_OF_BIZ_ID = (
    "Id of the order or other object: 0 to 2^63-1, beyond 2^53 as a text of digits; "
    "or another text of 1 to 255 bytes."
)
TaskBizId = Annotated[
    Any,  # checked where rows are made, which names it in its errors
    BeforeValidator(_biz_id),
    WithJsonSchema({"anyOf": [_NUMBER, _TEXT], "description": _OF_BIZ_ID}),
]


def meant(value: str, *, text: bool) -> int | str:
    """Return the biz_id of a query. Raises Problem for digits that are no number unless it is a ``text``."""
    found = value if text else _biz_id(value)
    if found == value and value.isascii() and value.isdecimal() and value[0] != "0" and not text:
        raise Problem(
            INVALID, "as a number, biz_id is at most 2^63-1; add text=true if it is a text", field="biz_id"
        )
    return found


class Model(BaseModel):
    """What a request may hold. Anything else is refused; texts are never taken for numbers.

    ``surrogates``: lone ones are no mistake, and its fields replace them.
    """

    surrogates: ClassVar[bool] = False
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class NoFields(Model):
    """What a request may hold for a call that takes nothing."""


def takes_nothing(model: type[BaseModel]) -> bool:
    """Whether a request of that model may leave out its body: every field has a default."""
    return not any(one.is_required() for one in model.model_fields.values())


class Query(BaseModel):
    """The parameters of a query. All of them are texts, which are read as what they stand for."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class Nothing(Query):
    """No parameters."""


@dataclass(slots=True)
class Asked:
    """One request for a call, checked against its declaration. ``path`` holds the parameters of the path.

    ``raw`` are the bytes of a request that is a task's body, which has no ``body`` then. ``request`` is the
    name that its caller gave it, if any.
    """

    service: Service
    call: HttpCall
    token: Token
    path: Mapping[str, str]
    query: Any
    body: Any
    raw: bytes | None = None
    content_type: str | None = None
    request: Request | None = None

    def may(self, topic: str, action: access.Action | None = None) -> bool:
        """Whether the call's token may make it on a topic, or do something else there."""
        return self.token.may(action or self.call.access, topic) is Access.ALLOWED

    def topic_of(self, row: TaskRow) -> str | None:
        """Return the name of a task's topic, or None if the token may not see it."""
        return topic_of(self.service.center.catalog, row, self.may, everything=self.token.everywhere)

    @property
    def topic(self) -> str:
        """The topic that the path names. Raises Problem (404) if the token may not know of it."""
        name = self.path["topic"]
        if not self.may(name):
            raise unknown_topic(name)
        return name

    async def row(self, **more: Any) -> tuple[TaskRow, str]:
        """The task that the path names, and its topic. Raises Problem (404, with ``more``) if the token may
        not see it, and StoreUnavailable or SchemaBehind if that cannot be told."""
        text = self.path["job_id"]
        job_id = int(text) if text.isdecimal() and text.isascii() and len(text) < 20 else 0
        row = await self.service.batcher.get(job_id) if valid_job_id(job_id) else None
        if row is not None:
            error = await self.service.read_through([row])
            topic = self.topic_of(row)
            if topic is not None:
                return row, topic
            if error is not None:
                raise error
        detail = "there is no such task; finished ones are purged after their retention"
        raise Problem(UNKNOWN_TASK, detail, **more)


Handler = Callable[[Asked], Awaitable[Answer]]


@dataclass(frozen=True)
class HttpCall:
    """The declaration of a call. ``path`` has parameters in braces; ``access`` says which roles may make it.

    ``gives`` describes the answer for the document, ``tells`` is the function whose docstring is in it, by
    default the handler. ``most_bytes`` and ``most_values`` bound the body of a request. ``waits``: its
    handler is cancelled when the client leaves. ``takes_raw``: a request may be a task's body. ``named``: it
    may have an Idempotency-Key.
    """

    method: str
    path: str
    access: access.Action
    handler: Handler
    summary: str
    query: type[Query] = Nothing
    body: type[Model] | None = None
    gives: Any = dict[str, Any]
    status: int = 200
    most_bytes: int = SMALL_BYTES
    most_values: int = 10_000
    waits: bool = False
    takes_raw: bool = False
    named: bool = False
    tells: Callable[..., Any] | None = None

    @property
    def told(self) -> Callable[..., Any]:
        """The function that says what it does."""
        return self.tells or self.handler

    @cached_property
    def name(self) -> str:
        """Its name for metrics, traces and the document: method and path."""
        return f"{self.method} {self.path}"


def forbidden(token: Token, action: access.Action, what: str = "this call", **more: Any) -> Problem:
    """The answer to a token whose roles or patterns do not allow an action."""
    if token.roles & action.roles:
        detail = f"{what} concerns the whole cluster: it needs an access token for all topics, *"
    else:
        roles, has = " or ".join(sorted(action.roles)), ", ".join(sorted(token.roles))
        detail = f"{what} needs an access token with the role {roles}; this one has {has}"
    return Problem(FORBIDDEN, detail, **more)


# --- calls made of what operators can do

_TYPES: dict[Value, Any] = {
    **dict.fromkeys((Value.TEXT, Value.TOPIC), str),
    **dict.fromkeys((Value.WHOLE, Value.WHOLE_SECONDS), int),
    **dict.fromkeys((Value.NUMBER, Value.SECONDS), float),
    **dict.fromkeys((Value.INSTANT, Value.PAST), Instant),
    Value.FLAG: bool,
    Value.BIZ_ID: TaskBizId,
    Value.JOB_ID: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,18}$")],
    Value.OBJECT: dict[str, Any],
    Value.HEADERS: dict[str, str],
}


def call_of(operation: Operation) -> HttpCall:
    """Return the call of an operation. What its path does not name is in the query of a GET or DELETE,
    otherwise in the body."""
    method, _, path = operation.route.partition(" ")
    in_query = method in ("GET", "DELETE")
    rest = [one for one in operation.params if f"{{{one.name}}}" not in path and not one.typed]
    texts = any(one.name == "text" for one in rest)
    fields: Any = {one.name: _field(one, in_query=in_query, texts=texts) for one in rest}
    takes: Any = None
    if fields:
        doc = operation.do.__doc__
        takes = create_model(operation.takes, __base__=Query if in_query else Model, __doc__=doc, **fields)
    return HttpCall(
        method, path, operation.right, partial(_perform, operation), operation.title,
        query=takes if takes and in_query else Nothing,
        body=None if in_query else takes,
        gives=operation.gives, status=operation.status, tells=operation.do,
    )  # fmt: skip


def _field(param: Param, *, in_query: bool, texts: bool) -> tuple[Any, Any]:
    """Return a field as pydantic has it: its type, and its default with its bounds. ``texts``: another field
    says whether a biz_id is a text."""
    kind: Any = _TYPES[param.kind] if isinstance(param.kind, Value) else param.kind
    if in_query and param.kind is Value.BIZ_ID:
        kind = str
    elif texts and param.kind is Value.BIZ_ID:
        kind = int | str
    bounds: dict[str, Any] = {}
    if isinstance(param.kind, type) and issubclass(param.kind, StrEnum):
        kind = Annotated[kind, Field(strict=False)]  # the names of its members are texts
    if param.many:
        kind = list[kind]
    if param.many or kind is str:
        bounds |= {"min_length": param.least, "max_length": param.most}
    elif kind in (int, float):
        bounds |= {"ge": param.least, "gt": param.above, "le": param.most}
    if kind is float:
        bounds["allow_inf_nan"] = False
    if param.default is None:
        kind = kind | None
    return kind, Field(param.default, description=param.about or None, **bounds)


async def _perform(operation: Operation, asked: Asked) -> Answer:
    """Do what was asked for, in the name of the token, where nothing else waits for the same server."""
    service, values = asked.service, _values(operation, asked)
    for param in operation.params:
        if param.kind is Value.TOPIC and param.name in values and not asked.may(values[param.name]):
            raise unknown_topic(values[param.name])
    doing = Doing(service.center, asked.token.name, operation.right, asked.token)
    do = partial(operation.perform, doing, values)
    biz: Any = None
    if operation.place is Place.TASKS:
        biz = values.get("biz_id")
    elif operation.place is Place.SCHEDULE:
        biz = values["name"] if NAME.fullmatch(values["name"]) else "-"
    if biz is None:
        record = await service.within(operation.place, do)
    else:
        record = await service.at_server(
            service.center.store.server_of_biz(BizId.of(biz)), do, operation.place
        )
    if operation.settles:
        await asyncio.sleep(operation.settles)  # what the answer says must be true
    return Answer(record, operation.status)


def _values(operation: Operation, asked: Asked) -> Record:
    """Return the values that were sent, those of the path first, and the defaults of others."""
    sent = asked.query if asked.body is None else asked.body
    values: Record = dict(asked.path)
    for param in operation.params:
        value = getattr(sent, param.name, None)
        if value is not None or (param.null and param.name in sent.model_fields_set):
            values.setdefault(param.name, value)
    text = values.pop("text", None)
    if isinstance(values.get("biz_id"), str) and (asked.body is None or text is not None):
        values["biz_id"] = meant(values["biz_id"], text=bool(text))
    if "job_ids" in values:
        values["job_ids"] = list(map(int, values["job_ids"]))
    return values
