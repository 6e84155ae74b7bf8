"""Calls about tasks: submit, look up, search, cancel, reschedule."""

from base64 import b64decode
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, Field, Json
from typing_extensions import TypedDict

from toc.gateway.calls import Asked, HttpCall, Instant, Model, Query, TaskBizId, forbidden, meant
from toc.gateway.exchange import Answer
from toc.gateway.problems import INVALID, NO_BODY, Problem, problem_of
from toc.model.access import Access, Action
from toc.model.errors import Busy, RequestReused, TocError
from toc.model.task import NewTask, OnConflict, Put, PutOutcome, Submission, TaskRow
from toc.model.topic import Topic
from toc.operate.late import may_be_late, why
from toc.operate.records import TaskWithWhy, task_shown
from toc.store.store import Store

R = TypeVar("R")

MAX_IN_BATCH = 1000
BATCH_BYTES = 16 << 20


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, description="Seconds from now.")]


Conflict = Annotated[
    Literal["keep", "error", "replace"],
    Field(description="If a task has the dedup_key: keep it, answer 409, or replace it."),
]
Past = Annotated[
    Literal["refuse", "run"],
    Field(description="Of a time that has passed, on a timed topic: refuse it, or run the task now."),
]
TEXT_TYPE = "text/plain; charset=utf-8"


class TaskFields(BaseModel):
    """What a request and a query may both say of a task."""

    delay: Seconds | None = None
    action_time: Annotated[Instant, Field(description="RFC 3339 with a zone.")] | None = None
    dedup_key: str | None = Field(None, description="Names the task: a repeated submit gives its job_id.")
    slot_basis: str | None = Field(None, description="Chooses the slot; by default the biz_id does.")
    tries: int = Field(0, description="How many tries; 0: the topic's; 65535: no limit.")
    expires_at: Annotated[Instant, Field(description="No try starts after it.")] | None = None
    on_conflict: Conflict = "keep"
    past: Past = "refuse"
    target: str | None = Field(None, description="The webhook target to send it to; by default its topic's.")
    url: str | None = Field(
        None, description="A URL of its own, or a path of its target; the token's role must allow it."
    )


class TaskToSubmit(TaskFields, Model):
    """A task to submit. The fields are those of the SDK's submit."""

    biz_id: TaskBizId
    attribute: dict[str, Any] | None = Field(None, description="A JSON object of at most 4,096 characters.")
    body: str | None = Field(None, description="The task's body as a text, in UTF-8.")
    body_base64: str | None = Field(None, description="The task's body as bytes, instead of body.")
    content_type: str | None = Field(None, description="Of the body.")

    def task(self, topic: str) -> NewTask:
        """Return it as the SDK takes it. Raises Problem."""
        values = dict(self.__dict__)
        encoded = values.pop("body_base64")
        if encoded is not None and self.body is not None:
            raise Problem(INVALID, "give body or body_base64, not both", field="body_base64")
        if encoded is not None:
            try:
                values["body"] = b64decode(encoded, validate=True)
            except ValueError:
                raise Problem(INVALID, "body_base64 is not base64", field="body_base64") from None
        elif self.body is not None:
            values["body"] = self.body.encode()
            values["content_type"] = TEXT_TYPE if self.content_type is None else self.content_type
        return NewTask(topic, **values)


class RawTask(TaskFields, Query):
    """The fields of a task whose body is the request's: for a request that is no JSON, or has ``raw``."""

    raw: Annotated[bool, Field(description="The request is the task's body, even if it is JSON.")] = False
    biz_id: Annotated[str, Field(description="A number if it is all digits.")] | None = None
    text: Annotated[bool, Field(description="Treat the biz_id as a text even if it is all digits.")] = False
    attribute: Annotated[Json[dict[str, Any]], Field(description="A JSON object.")] | None = None

    def task(self, topic: str, body: bytes, content_type: str | None) -> NewTask:
        """Return it as the SDK takes it. Raises Problem."""
        if self.biz_id is None:
            why = "a request that is not application/json is the task's body: give biz_id in the query"
            raise Problem(INVALID, why, field="biz_id")
        values = {**self.__dict__, "biz_id": meant(self.biz_id, text=self.text)}
        del values["raw"], values["text"]
        return NewTask(topic, body=body, content_type=content_type, **values)


class TasksToSubmit(Model):
    """Tasks to submit. All are checked before any is stored; then each has an outcome of its own."""

    tasks: list[TaskToSubmit] = Field(min_length=1, max_length=MAX_IN_BATCH)


class Submitted(TypedDict):
    """A stored task. ``outcome``, for on_conflict=replace: new, replaced, or may_have_started."""

    job_id: str
    outcome: NotRequired[str]


class Outcomes(TypedDict):
    """The outcomes of a batch, in the order of its tasks: a job_id, or a problem."""

    tasks: list[dict[str, Any]]


def _check_url_allowed(asked: Asked, tasks: Iterable[TaskToSubmit | NewTask]) -> None:
    """Raise Problem (403) if a task names a URL and no role of the token allows that."""
    if any(task.url is not None for task in tasks) and not asked.token.roles & Action.SUBMIT_URL.roles:
        raise forbidden(asked.token, Action.SUBMIT_URL, "a url of the task's own", field="url")


async def submit(asked: Asked) -> Answer:
    """Store one task.

    A request that is no JSON is its body, with the fields in the query. With an Idempotency-Key the request
    may be repeated: for a day it gets the first answer.
    """
    topic = asked.topic
    query: RawTask = asked.query
    if asked.raw is not None:
        task = query.task(topic, asked.raw, asked.content_type)
    elif query.model_fields_set and query.model_dump(exclude_defaults=True):
        raise Problem(INVALID, "fields are in the query only if the request is the task's body", field="raw")
    else:
        task = asked.body.task(topic)
    _check_url_allowed(asked, [task])
    batcher = asked.service.batcher
    one = await asked.service.checked(
        topic, asked.token.name, lambda at: batcher.checked(task, request=asked.request, topic=at)
    )
    put = one if isinstance(one, Put) else await batcher.store(one)
    return Answer(_shown(task, put), 201 if put.outcome in (PutOutcome.NEW, PutOutcome.KEPT) else 200)


def _shown(task: NewTask, put: Put | TocError) -> Submitted | dict[str, Any]:
    """Show what came of a submit."""
    if not isinstance(put, Put):
        return {"problem": problem_of(put).body()}
    if task.on_conflict != OnConflict.REPLACE:
        return {"job_id": str(put.job_id)}
    return {"job_id": str(put.job_id), "outcome": put.outcome.value}


async def submit_batch(asked: Asked) -> Answer:
    """Store many tasks, each for itself. With an Idempotency-Key the request may be repeated: for a day each
    task that was stored gets its first answer."""
    topic, batcher = asked.topic, asked.service.batcher
    _check_url_allowed(asked, asked.body.tasks)
    found = await asked.service.checked(topic, asked.token.name, partial(_checked_batch, asked))
    if asked.request is not None:
        await batcher.claim(asked.request)
    stored = iter(await batcher.store_each([one for _, one in found if isinstance(one, Submission)]))
    outcomes = [(task, one if isinstance(one, Put) else next(stored)) for task, one in found]
    return Answer({"tasks": [_shown(*each) for each in outcomes]})


async def _checked_batch(asked: Asked, topic: Topic) -> list[tuple[NewTask, Submission | Put]]:
    """Return the tasks of a batch with what ``Batcher.checked`` returns for each. Raises Problem."""
    found = []
    for index, one in enumerate(asked.body.tasks):
        try:
            task = one.task(topic.name)
            part = None if asked.request is None else asked.request.part_of(index)
            found.append((task, await asked.service.batcher.checked(task, request=part, topic=topic)))
        except (TocError, Problem) as exc:
            problem = exc if isinstance(exc, Problem) else problem_of(exc)
            if not isinstance(exc, RequestReused):
                field = problem.more.get("field")
                problem.more["field"] = f"tasks.{index}" + (f".{field}" if field else "")
            raise problem from exc
    return found


async def _at_task(asked: Asked, row: TaskRow, do: Callable[[Store], R]) -> R:
    """Run what asks the server that holds a task."""
    store = asked.service.center.store
    return await asked.service.at_server(store.server_of(row.job_id), partial(do, store))


async def body(asked: Asked) -> Answer:
    """Download the body of a task, with the content type that it was given."""
    row, _ = await asked.row()
    if row.body_length is None:
        raise Problem(NO_BODY, "the task has no body")
    asked.service.hold(row.body_length)
    content = await _at_task(asked, row, lambda store: store.body_of(row))
    return Answer(content.data, media_type=content.content_type, headers=_DOWNLOAD)


_DOWNLOAD = {"content-disposition": "attachment", "content-security-policy": "default-src 'none'; sandbox"}
"""Whatever the bytes are, a browser neither shows nor runs them."""


async def get(asked: Asked) -> Answer:
    """Show one task, and of one that started late, or has not started, why.

    ``late`` is null if it is not, or if nobody knows.
    """
    row, topic = await asked.row()
    shown: TaskWithWhy = {**task_shown(row, topic, values=asked.may(topic, Action.READ_VALUES)), "late": None}
    center = asked.service.center
    if may_be_late(row, center.clock.now_ms()):
        servers = asked.token.may(Action.READ_CLUSTER) is Access.ALLOWED
        known = center.catalog.known_type(row.biz_type)
        with suppress(Busy):
            explain = partial(why, center, row, known, servers=servers)
            shown["late"] = await asked.service.within("late", explain)
    return Answer(shown)


async def history(asked: Asked) -> Answer:
    """Show the failed tries of a task."""
    row, _ = await asked.row()
    tries = await _at_task(asked, row, lambda store: store.history(row.job_id))
    return Answer({"tries": [one.shown() for one in tries]})


# --- change


class NewDeadline(Model):
    """A new deadline, a delay or an action_time; a task that expires before it needs a later expires_at."""

    delay: Seconds | None = None
    action_time: Annotated[Instant, Field(description="RFC 3339 with a zone.")] | None = None
    expires_at: Annotated[Instant, Field(description="RFC 3339 with a zone.")] | None = None


class Changed(TypedDict):
    """What came of a change, as in the SDK: cancelled or rescheduled, may_have_started, too_late, unknown."""

    job_id: str
    outcome: str


async def cancel(asked: Asked) -> Answer:
    """Cancel a pending task."""
    return await _change(asked, asked.service.center.cancel)


async def _change(asked: Asked, do: Callable[[int], Enum]) -> Answer:
    row, _ = await asked.row(outcome="unknown")
    outcome = await _at_task(asked, row, lambda _: do(row.job_id))
    return Answer({"job_id": str(row.job_id), "outcome": outcome.value})


async def reschedule(asked: Asked) -> Answer:
    """Give a pending task another deadline."""
    body: NewDeadline = asked.body
    if (body.delay is None) == (body.action_time is None):
        raise Problem(INVALID, "give a delay or an action_time", field="action_time")
    new = {"action_time": body.action_time, "delay": body.delay, "expires_at": body.expires_at}
    return await _change(asked, partial(asked.service.center.reschedule, **new))


CALLS = (
    HttpCall(
        "POST", "/v1/topics/{topic}/tasks", Action.SUBMIT, submit, "Submit a task",
        query=RawTask, body=TaskToSubmit, gives=Submitted, status=201, takes_raw=True, named=True,
    ),
    HttpCall(
        "POST", "/v1/topics/{topic}/tasks:batch", Action.SUBMIT, submit_batch, "Submit up to 1,000 tasks",
        body=TasksToSubmit, gives=Outcomes, most_bytes=BATCH_BYTES, most_values=64 * MAX_IN_BATCH,
        named=True,
    ),
    HttpCall("GET", "/v1/tasks/{job_id}", Action.GET_TASK, get, "Look at a task", gives=TaskWithWhy),
    HttpCall("GET", "/v1/tasks/{job_id}/body", Action.GET_BODY, body, "Download a task's body", gives=bytes),
    HttpCall("GET", "/v1/tasks/{job_id}/history", Action.GET_TASK, history, "See why a task failed"),
    HttpCall("DELETE", "/v1/tasks/{job_id}", Action.CANCEL, cancel, "Cancel a task", gives=Changed),
    HttpCall(
        "PATCH", "/v1/tasks/{job_id}", Action.RESCHEDULE, reschedule, "Give a task another deadline",
        body=NewDeadline, gives=Changed,
    ),
)  # fmt: skip
