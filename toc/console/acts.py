"""What a reader may change: each action is one call of the API, offered on a page, with a form made of what
the call takes.

    Act("pause-topic", "POST /v1/topics/{topic}:pause", "topics/{topic}", "Pause", when=("paused", False))

A call with a ``dry_run``, and one that alters a record, is shown first and made when that is confirmed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from toc.console.shown import Column, Content, Facts, Field, Table, title_of
from toc.console.view import BY_NAME, Page, View, fields_of
from toc.gateway.calls import HttpCall
from toc.model.bulk import BulkKind
from toc.model.clock import parse_duration
from toc.model.documents import parse
from toc.model.errors import InvalidInput

_IN_PATH = re.compile(r"\{(\w+)\}")
_TYPED = ("dry_run", "tasks", "confirm")
"""Fields that no first form asks for."""
_AREAS = ("attribute", "body")


@dataclass(frozen=True)
class Act:
    """An action. ``name`` is in its address, ``at`` the path of the page that offers it, unless a value that
    the page shows, or was asked for, is none of some (``when``).

    ``given`` are values by the names of others that the page has. ``hides`` are fields that are not asked
    for. ``before`` is a call whose answer stands beside the form; with ``alters`` it is what the call
    changes. ``choices``: for a parameter, a call and the key of the list and of each value. ``then``: the
    page that follows, with names of what was sent and answered; otherwise the answer is shown.
    """

    name: str
    call: str
    at: str
    title: str
    when: tuple[str, Sequence[object]] | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    hides: Sequence[str] = ()
    danger: bool = False
    before: str = ""
    alters: bool = False
    choices: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    then: str = ""

    @property
    def http(self) -> HttpCall:
        """The call."""
        return BY_NAME[self.call]

    @property
    def about(self) -> str:
        """What the call does, in its own words."""
        doc = (self.http.tells or self.http.handler).__doc__ or ""
        return " ".join(doc.partition("\n\n")[0].split()).replace("`", "")

    @property
    def in_path(self) -> list[str]:
        """The names of the parameters of its path."""
        return _IN_PATH.findall(self.call)

    @property
    def previews(self) -> bool:
        """Whether it can tell what it would do."""
        return self.alters or "dry_run" in (self.http.body or self.http.query).model_fields

    def fields(self, values: Mapping[str, str], chosen: Mapping[str, Sequence[str]]) -> list[Field]:
        """Return the inputs with these values. What names the record that a page shows is not asked again."""
        fixed = [*(name for name in self.in_path if f"{{{name}}}" in self.at), *self.given]
        found = [Field(name, name, "hidden", values.get(name, "")) for name in fixed]
        for name in self.in_path:
            if name not in fixed:
                some = tuple(chosen.get(name, ()))
                kind = "select" if some else "text"
                found.append(Field(name, name, kind, values.get(name, ""), "", some, required=True))
        hidden = (*_TYPED, *self.hides, *fixed)
        asked = fields_of(self.call, values, leave_out=hidden)
        return [*found, *(one._replace(kind="area") if one.name in _AREAS else one for one in asked)]

    def read(self, form: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the path and the body that a form means. Raises InvalidInput."""
        path = {name: form.get(name, "").strip() for name in self.in_path}
        for name, value in path.items():
            if not value:
                raise InvalidInput("say which", name)
        model = (self.http.body or self.http.query).model_fields
        sent = {name: value for name, value in form.items() if name in model and name not in self.hides}
        body = {name: _meant(model[name].annotation, value) for name, value in sent.items() if value.strip()}
        return path, body


def _meant(kind: Any, typed: str) -> Any:
    """Return what a text in a form stands for. One that fits nothing stays a text, which the call refuses."""
    origin, args, value = get_origin(kind), get_args(kind), typed.strip()
    if origin is Annotated:
        return _meant(args[0], typed)
    if origin in (Union, UnionType):
        return typed if str in args else _meant(args[0], typed)
    if origin is list:
        return [_meant(args[0], one) for one in re.split(r"[\s,]+", value) if one]
    try:
        if origin is dict:
            return parse(value)
        if kind is bool:
            return value == "true"
        if kind is int:
            return int(value)
        if kind is float:
            return float(value) if value[-1].isdigit() else parse_duration(value)
    except ValueError:
        pass
    return typed


_JOB, _TOPIC, _TASK = "bulk/{name}", "topics/{topic}", "tasks/{job_id}"
_SCHEDULE, _TARGET, _CLUSTER, _TOKENS = "schedules/{name}", "targets/{name}", "workers", "tokens"
_HOSTS = {"host": ("GET /v1/workers", "workers", "host")}
_FIRES = "GET /v1/schedules/{name}:preview"
_PENDING, _DEAD = ("status", ("pending",)), ("status", ("dead",))

ACTS = (
    Act("cancel-task", "DELETE /v1/tasks/{job_id}", _TASK, "Cancel", when=_PENDING, danger=True),
    Act("reschedule-task", "PATCH /v1/tasks/{job_id}", _TASK, "Reschedule", when=_PENDING),
    Act("redrive-task", "POST /v1/dead:redrive", _TASK, "Redrive", when=_DEAD, given={"job_ids": "job_id"}),
    Act("submit", "POST /v1/topics/{topic}/tasks", _TOPIC, "Create a task", then=_TASK,
        hides=("slot_basis", "past", "on_conflict", "body_base64", "content_type", "target", "url")),
    Act("pause-topic", "POST /v1/topics/{topic}:pause", _TOPIC, "Pause", when=("paused", (False,)),
        then=_TOPIC),
    Act("resume-topic", "POST /v1/topics/{topic}:resume", _TOPIC, "Resume", when=("paused", (True,)),
        then=_TOPIC),
    Act("alter-topic", "PATCH /v1/topics/{topic}", _TOPIC, "Change policies",
        before="GET /v1/topics/{topic}", alters=True, then=_TOPIC),
    Act("cancel-all", "POST /v1/bulk:cancel", "tasks", "Cancel all that match", when=_PENDING, danger=True,
        then=_JOB),
    Act("reschedule-all", "POST /v1/bulk:reschedule", "tasks", "Reschedule all that match", when=_PENDING,
        then=_JOB),
    Act("redrive-all", "POST /v1/bulk:redrive", "dead", "Redrive all that match", then=_JOB),
    Act("purge-all", "POST /v1/bulk:purge", "dead", "Purge all that match", danger=True, then=_JOB),
    Act("stop-job", "POST /v1/bulk/{name}:stop", _JOB, "Stop", when=("state", ("running", "waiting")),
        then=_JOB),
    Act("resume-job", "POST /v1/bulk/{name}:resume", _JOB, "Resume",
        when=("state", ("stopped", "stopping")), then=_JOB),
    Act("drain", "POST /v1/hosts/{host}:drain", _CLUSTER, "Drain a host", choices=_HOSTS, then=_CLUSTER),
    Act("undrain", "POST /v1/hosts/{host}:undrain", _CLUSTER, "Undrain a host", choices=_HOSTS,
        then=_CLUSTER),
    Act("weigh", "POST /v1/hosts/{host}:weight", _CLUSTER, "Weigh a host", choices=_HOSTS, then=_CLUSTER),
    Act("unweigh", "POST /v1/hosts/{host}:unweight", _CLUSTER, "Unweigh a host", choices=_HOSTS,
        then=_CLUSTER),
    Act("pin", "POST /v1/slots/{slot}:pin", _CLUSTER, "Pin a slot", then=_CLUSTER),
    Act("unpin", "POST /v1/slots/{slot}:unpin", _CLUSTER, "Unpin a slot", then=_CLUSTER),
    Act("rebalance", "POST /v1/cluster:rebalance", _CLUSTER, "Rebalance"),
    Act("pause-schedule", "POST /v1/schedules/{name}:pause", _SCHEDULE, "Pause", before=_FIRES,
        when=("paused", (False,)), then=_SCHEDULE),
    Act("resume-schedule", "POST /v1/schedules/{name}:resume", _SCHEDULE, "Resume", before=_FIRES,
        when=("paused", (True,)), then=_SCHEDULE),
    Act("trigger-schedule", "POST /v1/schedules/{name}:trigger", _SCHEDULE, "Run now", before=_FIRES,
        then=_TASK),
    Act("test-target", "POST /v1/targets/{name}:test", _TARGET, "Test"),
    Act("pause-target", "POST /v1/targets/{name}:pause", _TARGET, "Pause", when=("paused", (False,)),
        then=_TARGET),
    Act("resume-target", "POST /v1/targets/{name}:resume", _TARGET, "Resume", when=("paused", (True,)),
        then=_TARGET),
    Act("create-token", "POST /v1/tokens", _TOKENS, "Create a token"),
    Act("revoke-token", "DELETE /v1/tokens/{name}", _TOKENS, "Revoke a token", danger=True,
        choices={"name": ("GET /v1/tokens", "tokens", "name")}, then=_TOKENS),
)  # fmt: skip
"""All actions, in the order in which pages offer them."""
BY_ACT = {one.name: one for one in ACTS}


def offered(found: Page, view: View, content: Content) -> list[tuple[Act, dict[str, str]]]:
    """Return the actions that a page offers to its reader, each with the values that its form begins with."""
    record = next((one.record for one in content.blocks if isinstance(one, Facts)), view.query)
    topic = view.path.get("topic") or record.get("topic") or view.query.get("topic")
    offers = []
    for act in ACTS:
        key, fit = act.when or ("", ())
        if act.at != found.path or (key in record and record[key] not in fit):
            continue
        if act.at == _JOB and not view.may(BulkKind(record["kind"]).right, topic):
            continue
        there = {**view.query, **view.path}
        there |= {name: there[of] for name, of in act.given.items()}
        asked = [one.name for one in act.fields(there, {})]
        values = {name: value for name, value in there.items() if name in asked}
        if "biz_id" in asked and values.get("biz_id") and not topic:
            # Those of one order are on several topics, and a call is about one.
            offers += [
                (replace(act, title=f"{act.title}: {one}"), {**values, "topic": one})
                for one in _topics(act, content)
                if view.may(act.http.access, one)
            ]
        elif view.may(act.http.access, topic):
            offers.append((act, values))
    return offers


def _topics(act: Act, content: Content) -> list[str]:
    """Return the topics of the tasks on a page that an action may change, as they stand there."""
    key, fit = act.when or ("", ())
    tables = [one for one in content.blocks if isinstance(one, Table)]
    tasks = [task for one in tables for task in one.records if not key or task[key] in fit]
    return list(dict.fromkeys(task["topic"] for task in tasks))


def generic(record: Mapping[str, Any]) -> list[Facts | Table]:
    """Return the blocks that show any answer: its values, and its lists of records as tables."""
    tables = {key: value for key, value in record.items() if _is_records(value)}
    rest = {key: value for key, value in record.items() if key not in tables}
    blocks: list[Facts | Table] = [Facts(columns=_columns(rest), record=rest)] if rest else []
    for key, records in tables.items():
        blocks.append(Table(title_of(key), columns=_columns(records[0]), records=records))
    return blocks


def _columns(record: Mapping[str, Any]) -> list[Column]:
    return [Column(key, title_of(key)) for key in record]


def _is_records(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
