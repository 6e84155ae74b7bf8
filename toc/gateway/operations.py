"""Calls made of what operators can do: ``toc.operate.operation`` declares it for every door."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from pydantic import Field, StringConstraints, create_model

from toc.gateway.calls import Answer, Asked, HttpCall, Instant, Model, Nothing, Query, TaskBizId, meant
from toc.gateway.problems import unknown_topic
from toc.model.sharding import BizId
from toc.model.topic import NAME
from toc.operate.operation import Doing, Operation, Param, Place, Record, Value

_TYPES: dict[Value, Any] = {
    Value.TEXT: str,
    Value.TOPIC: str,
    Value.WHOLE: int,
    Value.NUMBER: float,
    Value.SECONDS: float,
    Value.WHOLE_SECONDS: int,
    Value.FLAG: bool,
    Value.INSTANT: Instant,
    Value.PAST: Instant,
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
    pool: str = operation.place
    biz: Any = None
    if operation.place is Place.TASKS:
        biz = values.get("biz_id")
    elif operation.place is Place.SCHEDULE:
        biz = values["name"] if NAME.fullmatch(values["name"]) else "-"
    if biz is not None:
        server = service.center.store.server_of_biz(BizId.of(biz))
        service.check_there(server)
        pool = f"{pool}-{server}"
    record = await service.within(pool, partial(operation.perform, doing, values))
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
