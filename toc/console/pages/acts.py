"""Forms that change something, and bulk jobs.

A form is asked for, sent, if it can be shown what it would do, shown and confirmed, and only then done. What
is refused stands at its field, with what was typed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any

from toc.console.acts import BY_ACT, Act, generic
from toc.console.pages.tasks import of_biz_id
from toc.console.shown import (
    Block,
    Content,
    Facts,
    Field,
    Form,
    Lines,
    Note,
    Table,
    columns,
    following,
    harmless,
    number,
    path,
    shown,
    title_of,
)
from toc.console.view import Redirect, View, page
from toc.gateway.calls import forbidden
from toc.gateway.problems import IN_USE, NOT_FOUND, Problem, problem_of
from toc.model.access import Access, Action
from toc.model.errors import TocError

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
    "failed": ("Left alone: an error about this task.", "bad"),
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
    if act.then:
        return Redirect(path(f"/console/{act.then}", {**form, **answer}))
    return _result(act, form, answer)


async def _made(view: View, act: Act, where: Mapping[str, str], body: Mapping[str, Any]) -> Any:
    """Make the call."""
    if act.http.body is None:
        return await view.ask(act.call, body, **where)
    return await view.ask(act.call, {}, body, **where)


def _title(act: Act, values: Mapping[str, str]) -> str:
    what = " ".join(values[name] for name in (*act.in_path, *act.given) if values.get(name))
    return f"{act.title}: {harmless(what)}" if what else act.title


async def _form(view: View, act: Act, values: Mapping[str, str], problem: Problem | None = None) -> Content:
    """Return the page with the form, as it was filled in, and why it was refused."""
    chosen = {}
    blocks: list[Block] = [Note(text=act.about)]
    for name, (call, key, of) in act.choices.items():
        part = await view.part(title_of(key), call)
        found = part.value[key] if part.value else ()
        chosen[name] = sorted({one[of] for one in found if not one.get("revoked_at")})
        blocks += part.notes
    if act.before and problem is None:
        blocks += generic(await view.ask(act.before, **{name: values.get(name, "") for name in act.in_path}))
    fields = act.fields(values, chosen)
    fields, notes = _marked(fields, problem)
    submit = "Show what would change" if act.previews else act.title
    form = Form(fields=fields, action=f"/console/do/{act.name}", submit=submit, post=True,
                danger=act.danger and not act.previews)  # fmt: skip
    state = 200 if problem is None else problem.kind.status
    return Content(_title(act, values), [*notes, *blocks, form], status=state)


def _marked(fields: list[Field], problem: Problem | None) -> tuple[list[Field], list[Block]]:
    """Return fields with an error at the one that it is about, or else a note of it."""
    if problem is None:
        return fields, []
    at = str(problem.more.get("field", "")).partition(".")[0]
    marked = [one._replace(error=problem.detail) if one.name == at else one for one in fields]
    there = any(one.error and one.kind != "hidden" for one in marked)
    return marked, [] if there else [Note(text=f"{problem.kind.title}: {problem.detail}.", level="bad")]


async def _foreseen(view: View, act: Act, form: Mapping[str, str]) -> tuple[Any, str]:
    """Return what an action would do, and a mark by which the same is known again. The number of tasks that
    match changes all the time: how far it may, the call decides."""
    where, body = act.read(form)
    if act.alters:
        now = await view.ask(act.before, **where)
        answer: Any = {
            "changes": [
                {"value": title_of(key), "now": shown(now[key], key).text, "then": shown(value, key).text}
                for key, value in body.items()
                if now.get(key) != value
            ]
        }
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
        topic, these = form["topic"], {name: value for name, value in sent.items() if name in _FILTERS}
        text = f"{number(count).text} tasks of {topic} match. Look at them."
        blocks.append(Note(text=text, level="warn", href=following(f"/console/{act.at}", these)))
        blocks += generic(act.read(sent)[1])
        fields.append(Field("tasks", "tasks", "hidden", str(count)))
        hint = f"Type the name of the topic, {topic}."
        fields.append(Field("confirm", "To confirm", hint=hint, required=True))
    fields, notes = _marked(fields, problem)
    if any(answer.values()):
        blocks.append(Form(fields=fields, action=f"/console/do/{act.name}", submit=act.title, post=True,
                           danger=act.danger))  # fmt: skip
    blocks.append(Note(text="Back", href=following(f"/console/do/{act.name}", sent)))
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
    back = path(f"/console/{act.at}", {**form, **{of: form[name] for name, of in act.given.items()}})
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
    chosen = one["selected"]
    if "biz_id" in chosen:  # which may have tasks of other topics
        chosen = chosen, of_biz_id(chosen["biz_id"])
    blocks.append(Facts(columns=JOB, record={**one, "selected": chosen}))
    counts = [{"outcome": key, "means": _OUTCOMES[key][0], "tasks": n} for key, n in one["counts"].items()]
    blocks.append(Table("Outcomes", columns=COUNTS, records=counts, empty="None yet."))
    odd = [key for key in one["counts"] if _OUTCOMES[key][1] != "good"]
    for outcome in odd:
        query = {"outcome": outcome, "next": view.query.get(outcome, "0")}
        found = await view.ask("GET /v1/bulk/{name}/tasks", query, name=name)
        more = following(view.url, view.query, **{outcome: found["next"]}) if found["next"] else ""
        tasks = found["tasks"][:MOST_SHOWN]
        less = len(found["tasks"]) > MOST_SHOWN
        about = f"{MOST_SHOWN} of them; toc bulk tasks {one['name']} shows all." if less else ""
        blocks.append(Table(title_of(outcome), about, TASKS, tasks, more, "None here."))
    verb = one["kind"] if one["state"] != "done" else f"{one['kind']}, done"
    asked = f"Asked to {verb}: {number(one['tasks']).text} tasks of {one['topic']}"
    return Content(asked, blocks, view.now_ms)
