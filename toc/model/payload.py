"""Payload: what a typed handler takes instead of a Task, and how a task carries it.

a pydantic model, a dataclass or a TypedDict     its JSON object is the attribute; the body, as
                                                 application/json, if it is too long for that
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from itertools import starmap
from threading import Lock
from typing import Any, Generic, TypeVar

from typing_extensions import is_typeddict

from toc.model.clock import from_ms
from toc.model.documents import parse_object
from toc.model.errors import SHOWN_CHARS, InvalidHandler, InvalidPayload
from toc.model.raised import Misfit
from toc.model.task import MAX_ATTRIBUTE_CHARS, SCHEDULED_FOR, Dead, NewTask, Task, encode_attribute

T = TypeVar("T")
JSON = "application/json"
PATIENCE_MS = 3_600_000
"""How long a process gives back a task whose payload does not fit this version of its handler: as long as a
rolling deploy may take."""
AGAIN_MS, MOST_MS = 1000, 60_000
"""When it is looked at again: after as long as it has been given back, at least and at most this."""
MOST_TASKS = 100_000
"""Of how many tasks a process knows since when; what is more counts as the oldest of them does."""
GIVEN_BACK = "given back for an hour"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)
_LISTS = (list, tuple, deque)
_SPARE = ("extra_forbidden", "unexpected_keyword_argument")
SHOWN = 3
"""How many of the fields that do not fit are told."""
RENAMED = "if it was renamed, give the field both names"
"""What helps against a payload that has a key too many where one is missing."""


def is_payload(kind: object) -> bool:
    """Whether a parameter of this type takes a payload."""
    if not isinstance(kind, type):
        return False
    return hasattr(kind, "__pydantic_validator__") or is_dataclass(kind) or is_typeddict(kind)


class Payload(Generic[T]):
    """The payload of one handler. Raises InvalidHandler for a type of which JSON cannot be made."""

    def __init__(self, kind: type[T], of: str) -> None:
        from pydantic import TypeAdapter  # for those who have typed handlers
        from pydantic.errors import PydanticUserError

        self._name = kind.__name__
        self._patience = Patience()
        self._made_of = dict if is_typeddict(kind) else kind
        try:
            self._adapter = TypeAdapter(kind)
            self._adapter.rebuild()  # a model that names what is not defined yet is found now
        except (PydanticUserError, NameError) as exc:
            why = str(exc).splitlines()[0]
            raise InvalidHandler(f"{of}: its payload {self._name} cannot be used: {why}") from exc

    def fields(self, payload: T) -> dict[str, Any]:
        """Return the arguments of a submit that carry a payload. Raises InvalidPayload unless the
        handler could read it."""
        if not isinstance(payload, self._made_of):
            what = f"it is a {type(payload).__name__}, not a {self._name}"
            what += f": write {self._name}(**...)" * isinstance(payload, dict)
            raise InvalidPayload(f"the payload does not fit {self._name}: {what}")
        try:
            text = self._adapter.dump_json(payload, by_alias=True, round_trip=True, warnings="error")
            values = self._require_same(payload, self._adapter.validate_json(text))
            attribute = _sets_sorted(parse_object(text, most=len(text) + 1), values)
        except (ValueError, TypeError, RecursionError) as exc:
            error: Exception = exc
            try:  # a reader tells which field it is more plainly than a writer
                self._adapter.validate_json(self._adapter.dump_json(payload, by_alias=True, warnings=False))
            except (ValueError, TypeError, RecursionError) as plainer:
                error = plainer
            raise InvalidPayload(f"the payload does not fit {self._name}: {_misfit(error)}") from exc
        if len(told := _JSON.encode(attribute)) > MAX_ATTRIBUTE_CHARS:
            return {"body": told.encode(), "content_type": JSON}
        return {"attribute": attribute}

    def _require_same(self, payload: T, read: T) -> Any:
        """Return the values of a payload."""
        dump = partial(self._adapter.dump_python, by_alias=True, round_trip=True, serialize_as_any=True)
        values = dump(payload)
        if _instants(values) != _instants(dump(read)) or not _as_given(payload, read):
            raise ValueError(
                "as JSON it differs: a secret, NaN, a subclass's field, or a type in Any or a union is lost"
            )
        return values

    def read(self, task: Task | NewTask) -> T:
        """Return the payload of a task. Raises InvalidPayload, which quotes no value of it."""
        body_type = (not task.attribute and task.content_type) or ""
        text: str | bytes = b""
        try:
            if body_type.startswith(JSON):
                return self._adapter.validate_json(text := task.body or b"")
            try:
                return self._adapter.validate_json(text := encode_attribute(task.attribute))
            except ValueError:
                own = {name: value for name, value in (task.attribute or {}).items() if name != SCHEDULED_FOR}
                return self._adapter.validate_json(text := encode_attribute(own))
        except (ValueError, TypeError, RecursionError) as exc:
            why = _misfit(exc) + self._unread(text)
            if body_type and not body_type.startswith(JSON):
                why = f"its body is {body_type}, not {JSON}; an attribute is simpler"
            raise InvalidPayload(f"the payload does not fit {self._name}: {why}") from exc

    def _unread(self, text: str | bytes) -> str:
        """Say which keys beside a missing field no field reads: a default would hide that it was renamed."""
        try:
            self._adapter.validate_json(text, extra="forbid")
        except (ValueError, TypeError, RecursionError) as exc:  # a TypeError if pydantic is older than 2.12
            found = [(one["loc"], one["type"]) for one in getattr(exc, "errors", list)()]
            beside = {loc[:-1] for loc, kind in found if kind == "missing"}
            spare = [".".join(map(str, loc)) for loc, kind in found if kind in _SPARE and loc[:-1] in beside]
            keys = ", ".join(spare[:SHOWN])[:SHOWN_CHARS]
            return keys and f"; the payload has {keys}, which {self._name} does not read: {RENAMED}"
        return ""

    def read_in_time(self, task: Task, now_ms: int) -> T:
        """Return the payload for a try. Raises what ``Patience.end`` says."""
        try:
            return self.read(task)
        except InvalidPayload as exc:
            do = "" if RENAMED in str(exc) else ": give new fields a default"
            raise self._patience.end(task, now_ms, exc, _fields(exc), do) from exc


class Patience:
    """Since when this process has given back tasks that its version of their handler cannot read. Not since
    they were due: a pause or a redrive makes them late, too. Thread-safe."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], int] = {}
        self._lock = Lock()

    def end(self, task: Task, now_ms: int, error: Exception, fields: str, do: str = "") -> Misfit | Dead:
        """Return how a try ends: with Misfit for PATIENCE_MS, as another version of the handler may run
        elsewhere; then with Dead. ``fields`` do not fit; ``do``: what helps."""
        key = task.job_id, task.version
        with self._lock:
            since = now_ms - self._since.setdefault(key, now_ms)
            if len(self._since) > MOST_TASKS:
                oldest, at = next(iter(self._since.items()))
                if now_ms - at <= 2 * PATIENCE_MS:  # else it was read elsewhere
                    oldest, since = key, now_ms - at
                del self._since[oldest]
            if since >= PATIENCE_MS:
                self._since.pop(key, None)
        if since < PATIENCE_MS:
            why = f"{error}; {GIVEN_BACK}, as another version may read it{do}"
            return Misfit(now_ms + min(max(since, AGAIN_MS), MOST_MS), why, fields)
        return Dead(f"{error}, for an hour")


def _instants(value: Any) -> Any:
    """Return a value with its datetimes as instants: in an hour that comes twice, zones make them differ."""
    if isinstance(value, dict):
        return {name: _instants(one) for name, one in value.items()}
    if isinstance(value, _LISTS):
        return isinstance(value, list), [*map(_instants, value)]
    return value - from_ms(0) if isinstance(value, datetime) and value.utcoffset() is not None else value


def _as_given(one: Any, read: Any) -> bool:
    """Whether what is read has the classes of what was given: JSON knows fields alone."""
    if isinstance(read, dict):
        return isinstance(one, dict) and all(_as_given(one.get(name), value) for name, value in read.items())
    if isinstance(read, _LISTS):
        return isinstance(one, type(read)) and all(map(_as_given, one, read))
    if isinstance(one, Enum) and isinstance(read, Enum):  # they are equal if their texts or numbers are
        return type(one) is type(read)
    if not is_payload(type(read)):
        return not is_payload(type(one))
    names = [field.name for field in fields(read)] if is_dataclass(read) else type(read).model_fields
    pairs = ((getattr(one, name, None), getattr(read, name, None)) for name in names)
    return isinstance(one, type(read)) and all(starmap(_as_given, pairs))


def _sets_sorted(told: Any, value: Any) -> Any:
    """Return what is ``told`` of a value as JSON, in one order: that of a set differs in each process."""
    if isinstance(told, dict) and isinstance(value, dict):
        return told | dict(zip(told, map(_sets_sorted, told.values(), value.values()), strict=False))
    if isinstance(told, list) and isinstance(value, (set, frozenset)):
        return sorted(told, key=_JSON.encode)
    within = value if isinstance(told, list) and isinstance(value, _LISTS) else ()
    return [*map(_sets_sorted, told, within)] if within and len(told) == len(within) else told


def _fields(error: InvalidPayload) -> str:
    """Name the fields that do not fit, nothing within them, which may be what they hold."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()[:SHOWN]
    return ", ".join(dict.fromkeys(str((*one["loc"], "all of it")[0]) for one in found)) or "all of it"


def _misfit(error: Exception) -> str:
    """What does not fit, without values unless the caller has just given them."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    found = error.errors(include_url=False, include_context=False, include_input=False)
    parts = [f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in found[:SHOWN]]
    return "; ".join(parts) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
