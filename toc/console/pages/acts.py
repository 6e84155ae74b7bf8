"""What a reader may change, and bulk jobs. Each action is one call of the API, offered on a page, with a form
made of what the call takes.

    Act("pause-topic", "POST /v1/topics/{topic}:pause", "topics/{topic}", "Pause", when=("paused", False))

A form is asked for, sent, if it can be shown what it would do, shown and confirmed, and only then done: so is
a call with a ``dry_run``, and one that alters a record. What is refused stands at its field, with what was
typed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from toc.console import shown
from toc.console.shown import Block, Column, Content, Facts, Field, Form, Lines, Note, Table, columns
from toc.console.view import BY_NAME, Page, Redirect, View, fields_of, marked, page
from toc.gateway.calls import HttpCall, forbidden
from toc.gateway.problems import IN_USE, NOT_FOUND, Problem, problem_of
from toc.model.access import Access, Action
from toc.model.bulk import BulkKind
from toc.model.clock import parse_duration
from toc.model.documents import parse
from toc.model.errors import InvalidInput, TocError
from toc.model.topic import EVERYTHING

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
    changes. ``choices``: for a parameter, a call and the key of the list and of each value. Then follows the
    page that offers it, or another (``then``), with names of what was sent and answered; or, if it ``tells``,
    the answer is shown.
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
    tells: bool = False

    @property
    def http(self) -> HttpCall:
        """The call."""
        return BY_NAME[self.call]

    @property
    def about(self) -> str:
        """What the call does, in its own words."""
        doc = self.http.told.__doc__ or ""
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
        """Return the path and the body that a form means. Raises InvalidInput.

        What the call does not know is in it, for the call to refuse: left out, more tasks might match.
        """
        path = {name: form.get(name, "").strip() for name in self.in_path}
        for name, value in path.items():
            if not value:
                raise InvalidInput("say which", name)
        model = (self.http.body or self.http.query).model_fields
        aside = {*self.hides, "sure", *(path.keys() - model.keys())}
        sent = {name: value for name, value in form.items() if name not in aside and value.strip()}
        body = {name: _meant(model[name].annotation, v) if name in model else v for name, v in sent.items()}
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
_GOES, _PAUSED = ("paused", (False,)), ("paused", (True,))

ACTS = (
    Act("cancel-task", "DELETE /v1/tasks/{job_id}", _TASK, "Cancel", when=_PENDING, danger=True, tells=True),
    Act("reschedule-task", "PATCH /v1/tasks/{job_id}", _TASK, "Reschedule", when=_PENDING, tells=True),
    Act("redrive-task", "POST /v1/dead:redrive", _TASK, "Redrive", when=_DEAD, given={"job_ids": "job_id"},
        tells=True),
    Act("submit", "POST /v1/topics/{topic}/tasks", _TOPIC, "Create a task", then=_TASK,
        hides=("slot_basis", "past", "on_conflict", "body_base64", "content_type", "target", "url")),
    Act("pause-topic", "POST /v1/topics/{topic}:pause", _TOPIC, "Pause", when=_GOES),
    Act("resume-topic", "POST /v1/topics/{topic}:resume", _TOPIC, "Resume", when=_PAUSED),
    Act("alter-topic", "PATCH /v1/topics/{topic}", _TOPIC, "Change policies",
        before="GET /v1/topics/{topic}", alters=True),
    Act("cancel-all", "POST /v1/bulk:cancel", "tasks", "Cancel all that match", when=_PENDING, danger=True,
        then=_JOB),
    Act("reschedule-all", "POST /v1/bulk:reschedule", "tasks", "Reschedule all that match", when=_PENDING,
        then=_JOB),
    Act("redrive-all", "POST /v1/bulk:redrive", "dead", "Redrive all that match", then=_JOB),
    Act("purge-all", "POST /v1/bulk:purge", "dead", "Purge all that match", danger=True, then=_JOB),
    Act("stop-job", "POST /v1/bulk/{name}:stop", _JOB, "Stop", when=("state", ("running", "waiting"))),
    Act("resume-job", "POST /v1/bulk/{name}:resume", _JOB, "Resume",
        when=("state", ("stopped", "stopping"))),
    Act("drain", "POST /v1/hosts/{host}:drain", _CLUSTER, "Drain a host", choices=_HOSTS),
    Act("undrain", "POST /v1/hosts/{host}:undrain", _CLUSTER, "Undrain a host", choices=_HOSTS),
    Act("weigh", "POST /v1/hosts/{host}:weight", _CLUSTER, "Weigh a host", choices=_HOSTS),
    Act("unweigh", "POST /v1/hosts/{host}:unweight", _CLUSTER, "Unweigh a host", choices=_HOSTS),
    Act("pin", "POST /v1/slots/{slot}:pin", _CLUSTER, "Pin a slot"),
    Act("unpin", "POST /v1/slots/{slot}:unpin", _CLUSTER, "Unpin a slot"),
    Act("rebalance", "POST /v1/cluster:rebalance", _CLUSTER, "Rebalance", tells=True),
    Act("pause-schedule", "POST /v1/schedules/{name}:pause", _SCHEDULE, "Pause", before=_FIRES, when=_GOES),
    Act("resume-schedule", "POST /v1/schedules/{name}:resume", _SCHEDULE, "Resume", before=_FIRES,
        when=_PAUSED),
    Act("trigger-schedule", "POST /v1/schedules/{name}:trigger", _SCHEDULE, "Run now", before=_FIRES,
        then=_TASK),
    Act("test-target", "POST /v1/targets/{name}:test", _TARGET, "Test", tells=True),
    Act("pause-target", "POST /v1/targets/{name}:pause", _TARGET, "Pause", when=_GOES),
    Act("resume-target", "POST /v1/targets/{name}:resume", _TARGET, "Resume", when=_PAUSED),
    Act("create-token", "POST /v1/tokens", _TOKENS, "Create a token", tells=True),
    Act("revoke-token", "DELETE /v1/tokens/{name}", _TOKENS, "Revoke a token", danger=True,
        choices={"name": ("GET /v1/tokens", "tokens", "name")}),
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
        if not view.may(act.http.access, topic):
            continue
        there = {**view.query, **view.path}
        there |= {name: there[of] for name, of in act.given.items()}
        asked = [one.name for one in act.fields(there, {})]
        offers.append((act, {name: value for name, value in there.items() if name in asked}))
    return offers


def generic(record: Mapping[str, Any]) -> list[Facts | Table]:
    """Return the blocks that show any answer: its values, and its lists of records as tables."""
    tables = {
        key: value
        for key, value in record.items()
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    }
    rest = {key: value for key, value in record.items() if key not in tables}
    blocks: list[Facts | Table] = [Facts(columns=_columns(rest), record=rest)] if rest else []
    for key, records in tables.items():
        blocks.append(Table(shown.title_of(key), columns=_columns(records[0]), records=records))
    return blocks


def _columns(record: Mapping[str, Any]) -> list[Column]:
    return [Column(key, shown.title_of(key)) for key in record]


# --- forms

_OUTCOMES = {
    "cancelled": ("It is cancelled; no try has started.", "good"),
    "rescheduled": ("It has the new deadline; no try has started.", "good"),
    "redriven": ("It is pending again.", "good"),
    "purged": ("It is gone.", "good"),
    "may_have_started": ("It is done, but a try may be running, or have run, before.", "warn"),
    "too_late": ("Nothing was changed: it had ended already.", "warn"),
    "expires_before": ("Left alone: it expires before its new deadline.", "warn"),
    "not_dead": ("Left alone: somebody has redriven it meanwhile.", "warn"),
    "unknown": ("There is no such task any more.", "warn"),
    "failed": ("Left alone: an error about this task. Make a job for it again.", "bad"),
}
"""What came of a task, by its name, in words."""
_FILTERS = ("topic", "biz_id", "text", "due_after", "due_before", "error")
MOST_SHOWN = 200
"""Tasks of one outcome that the page of a job shows at most."""


def _act(view: View) -> Act:
    """Return the action that is asked for. Raises Problem."""
    act = BY_ACT.get(view.path["act"])
    if act is None:
        raise Problem(NOT_FOUND, "there is no such page")
    token = view.session.token
    if token.may(act.http.access) is Access.FORBIDDEN:
        raise forbidden(token, act.http.access, "this page")
    return act


@page("do/{act}")
async def ask(view: View) -> Content:
    """The form of an action."""
    return await _form(view, _act(view), view.query)


@page("do/{act}", method="POST")
async def do(view: View) -> Content | Redirect:
    """Do what a form says, or show what it would do."""
    act, form = _act(view), view.form
    sure = form.get("sure") if act.previews else None
    try:
        where, body = act.read(form)
        if act.previews and not sure:
            return await _preview(view, act, form)
        if sure and "tasks" not in form and (await _foreseen(view, act, form))[1] != sure:
            again = Problem(IN_USE, "this has changed since it was shown: look at it again")
            return await _preview(view, act, form, again)
        answer = await _made(view, act, where, body)
    except (Problem, TocError) as exc:
        problem = exc if isinstance(exc, Problem) else problem_of(exc)
        if sure and not act.alters:
            with suppress(Problem, TocError):  # then neither can be done
                return await _preview(view, act, form, problem)
        return await _form(view, act, form, problem)
    if act.tells:
        return _result(act, form, answer)
    return Redirect(shown.path(f"/console/{act.then or act.at}", {**form, **answer}))


async def _made(view: View, act: Act, where: Mapping[str, str], body: Mapping[str, Any]) -> Any:
    """Make the call."""
    if act.http.body is None:
        return await view.ask(act.call, body, **where)
    return await view.ask(act.call, {}, body, **where)


def _title(act: Act, values: Mapping[str, str]) -> str:
    what = " ".join(values[name] for name in (*act.in_path, *act.given) if values.get(name))
    return f"{act.title}: {shown.harmless(what)}" if what else act.title


async def _form(view: View, act: Act, values: Mapping[str, str], problem: Problem | None = None) -> Content:
    """Return the page with the form, as it was filled in, and why it was refused."""
    chosen = {}
    blocks: list[Block] = [Note(text=act.about)]
    for name, (call, key, of) in act.choices.items():
        part = await view.part(shown.title_of(key), call)
        found = part.value[key] if part.value else ()
        chosen[name] = sorted({one[of] for one in found if not one.get("revoked_at")})
        blocks += part.notes
    if act.before and problem is None:
        blocks += generic(await view.ask(act.before, **{name: values.get(name, "") for name in act.in_path}))
    fields = act.fields(values, chosen)
    fields, notes = marked(fields, problem) if problem else (fields, [])
    submit = "Show what would change" if act.previews else act.title
    form = Form(fields=fields, action=f"/console/do/{act.name}", submit=submit, post=True,
                danger=act.danger and not act.previews)  # fmt: skip
    state = 200 if problem is None else problem.kind.status
    return Content(_title(act, values), [*notes, *blocks, form], status=state)


async def _foreseen(view: View, act: Act, form: Mapping[str, str]) -> tuple[Any, str]:
    """Return what an action would do, and a mark by which the same is known again. The number of tasks that
    match changes all the time: how far it may, the call decides."""
    where, body = act.read(form)
    if act.alters:
        now = await view.ask(act.before, **where)
        changes = []
        for key in [key for key, value in body.items() if now.get(key) != value]:
            before, then = (shown.shown(record[key], key).text for record in (now, body))
            changes.append({"value": shown.title_of(key), "now": before, "then": then})
        answer: Any = {"changes": changes}
    else:
        asked = {name: value for name, value in body.items() if name not in ("tasks", "confirm")}
        answer = await _made(view, act, where, {**asked, "dry_run": True})
    mark = "" if "would_change" in answer else json.dumps(answer)
    return answer, sha256(mark.encode()).hexdigest()


async def _preview(view: View, act: Act, form: Mapping[str, str], problem: Problem | None = None) -> Content:
    """Return the page with what an action would do, and the form that confirms it."""
    answer, mark = await _foreseen(view, act, form)
    sent = {name: value for name, value in form.items() if name not in ("sure", "tasks", "confirm")}
    fields = [Field(name, name, "hidden", value) for name, value in {**sent, "sure": mark}.items()]
    blocks: list[Block] = []
    count = answer.get("would_change")
    if count is None:
        blocks += generic(answer)
    else:
        topic, these = form.get("topic"), {name: value for name, value in sent.items() if name in _FILTERS}
        if act.when:
            these[act.when[0]] = str(act.when[1][0])
        text = f"{shown.number(count).text} tasks of {topic or 'all topics'} match. Look at them."
        blocks.append(Note(text=text, level="warn", href=shown.following(f"/console/{act.at}", these)))
        blocks += generic(act.read(sent)[1])
        fields.append(Field("tasks", "tasks", "hidden", str(count)))
        hint = f"Type the name of the topic, {topic}." if topic else f"Type the biz_id, {form['biz_id']}."
        fields.append(Field("confirm", "To confirm", hint=hint, required=True))
    fields, notes = marked(fields, problem) if problem else (fields, [])
    if any(answer.values()):
        blocks.append(Form(fields=fields, action=f"/console/do/{act.name}", submit=act.title, post=True,
                           danger=act.danger))  # fmt: skip
    blocks.append(Note(text="Back", href=shown.following(f"/console/do/{act.name}", sent)))
    state = 200 if problem is None else problem.kind.status
    return Content(_title(act, form), [*notes, *blocks], status=state)


def _result(act: Act, form: Mapping[str, str], answer: Mapping[str, Any]) -> Content:
    """Return what came of an action."""
    if "token" in answer:
        keep = Note(text="Keep it: it is not shown again. It is in force within a second.", level="warn")
        rest = {key: value for key, value in answer.items() if key != "token"}
        return Content(f"Access token {answer['name']}", [keep, Lines(text=answer["token"]), *generic(rest)])
    plain = ("This failed.", "bad") if answer.get("error") else ("This was done.", "quiet")
    words, level = _OUTCOMES.get(str(answer.get("outcome")), plain)
    back = shown.path(f"/console/{act.at}", {**form, **{of: form[name] for name, of in act.given.items()}})
    return Content(
        _title(act, form), [Note(text=words, level=level), *generic(answer), Note(text="Back", href=back)]
    )


# --- bulk jobs


JOBS = columns(
    "name: Job, kind, topic, state, done, tasks: Of, by, created: Begun, ended", name="/console/bulk/{name}"
)
JOB = columns(
    "kind, topic, state, done, tasks: Of, by, selected: Tasks chosen by, rate: Tasks per second, "
    "action_time: New deadline, delay: New deadline - seconds ahead, created: Begun, ended"
)
COUNTS = columns("outcome, means, tasks")
TASKS = columns("job_id: Task")
_SAID = {
    "waiting": "It waits for a gateway.",
    "running": "A gateway works on it.",
    "stopping": "It stops after its present step.",
    "stopped": "It has stopped. It can go on where it stopped.",
}


@page("bulk", Action.FIND_TASKS, menu="Bulk jobs")
async def jobs(view: View) -> Content:
    """Bulk jobs, the newest first."""
    found = (await view.ask("GET /v1/bulk"))["jobs"]
    return Content("Bulk jobs", [Table(columns=JOBS, records=found)], view.now_ms)


@page("bulk/{name}", Action.FIND_TASKS, live=True)
async def job(view: View) -> Content:
    """How far a bulk job came, what came of its tasks, and which were not simply done."""
    name = view.path["name"]
    one = await view.ask("GET /v1/bulk/{name}", name=name)
    blocks: list[Block] = []
    if one["error"]:
        blocks.append(Note(text=one["error"], level="bad"))
    elif said := _SAID.get(one["state"]):
        blocks.append(Note(text=said))
    blocks.append(Facts(columns=JOB, record=one))
    counts = [{"outcome": key, "means": _OUTCOMES[key][0], "tasks": n} for key, n in one["counts"].items()]
    blocks.append(Table("Outcomes", columns=COUNTS, records=counts, empty="None yet."))
    odd = [key for key in one["counts"] if _OUTCOMES[key][1] != "good"]
    for outcome in odd:
        query = {"outcome": outcome, "next": view.query.get(outcome, "0")}
        found = await view.ask("GET /v1/bulk/{name}/tasks", query, name=name)
        more = shown.following(view.url, view.query, **{outcome: found["next"]}) if found["next"] else ""
        tasks = found["tasks"][:MOST_SHOWN]
        less = len(found["tasks"]) > MOST_SHOWN
        about = f"{MOST_SHOWN} of them; toc bulk tasks {one['name']} shows all." if less else ""
        blocks.append(Table(shown.title_of(outcome), about, TASKS, tasks, more, "None here."))
    verb = one["kind"] if one["state"] != "done" else f"{one['kind']}, done"
    topic = "all topics" if one["topic"] == EVERYTHING else one["topic"]
    asked = f"Asked to {verb}: {shown.number(one['tasks']).text} tasks of {topic}"
    return Content(asked, blocks, view.now_ms)
