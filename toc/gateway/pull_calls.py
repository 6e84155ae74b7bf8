"""Calls of consumers: pull, ack, nack, extend."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Annotated, Any, NotRequired

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from toc.gateway import problems
from toc.gateway.calls import Asked, HttpCall, Model
from toc.gateway.exchange import Answer
from toc.gateway.problems import Problem
from toc.gateway.service import Service
from toc.model.access import Action
from toc.model.clock import to_ms
from toc.model.documents import biz_id, instant, whole_text
from toc.model.errors import InvalidLease, TocError
from toc.model.pull import MAX_LEASE_CHARS, MAX_TTR_SECONDS, AckOutcome, LeaseOutcome, PullLease
from toc.model.task import MAX_RETRY_SECONDS, Content
from toc.model.topic import Delivery
from toc.operate.records import STATUS, TaskKnown
from toc.pull.handed_out import HandedOut
from toc.pull.pulls import DEFAULT_TTR_SECONDS, MAX_TASKS, MAX_TOPICS, MAX_WAIT_SECONDS
from toc.store.schema import ERROR_COLUMN_CHARS
from toc.store.tasks.rows import bounded

MAX_BODY_BYTES = 8 << 20
"""Bytes of bodies in one answer, or the first body if that is longer. Further tasks go to the next pull."""
MAX_LEASES = 1000
BODY_MISSING = "its body is missing"


class Pull(Model):
    """What a consumer wants."""

    max: int = Field(1, ge=1, le=MAX_TASKS, description="Most tasks.")
    wait: float = Field(
        0.0, ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False, description="Seconds to wait for the first."
    )
    ttr: float = Field(
        DEFAULT_TTR_SECONDS, ge=1, le=MAX_TTR_SECONDS, allow_inf_nan=False,
        description="Seconds for which nobody else gets the tasks; at most the topic's max_runtime.",
    )  # fmt: skip


class PulledTask(TaskKnown):
    """A task, and its lease until ``lease_until``. ``attempt`` counts its tries from 1; ``last``: this is the
    last one. A body is in ``body`` if it is UTF-8, else in ``body_base64``."""

    attribute: dict[str, Any]
    lease: str
    attempt: int
    lease_until: str
    last: bool
    body: NotRequired[str]
    body_base64: NotRequired[str]
    content_type: NotRequired[str]


class Pulled(TypedDict):
    """The tasks that were handed out, all of one topic; empty if none came due in time."""

    tasks: list[PulledTask]


async def pull(asked: Asked) -> Answer:
    """Hand out due tasks of the first of these topics (a list with commas) that has any."""
    names, wanted, pulls = asked.path["topics"].split(","), asked.body, asked.service.pulls
    if len(names) > MAX_TOPICS:
        raise Problem(problems.INVALID, f"a pull may name {MAX_TOPICS} topics", field="topics")
    for name in names:
        if not asked.may(name):
            raise problems.unknown_topic(name)
    got = await pulls.pull(names, most=wanted.max, wait=wanted.wait, ttr=wanted.ttr)
    if not asked.service.book.in_force(asked.token):  # it may have been revoked during the wait
        pulls.release(got)
        raise Problem(problems.UNAUTHENTICATED, "the access token has expired or was revoked")
    tasks = await with_bodies(asked.service, got, "bodies")
    return Answer({"tasks": [_shown(*each) for each in tasks]}, handed=[one for one, _ in tasks])


async def with_bodies(
    service: Service, got: Sequence[HandedOut], line: str, **bounds: int
) -> list[tuple[HandedOut, Content | None]]:
    """Return tasks that were handed out with their bodies, as many as one answer holds.

    Takes back the others, uncharged: those whose bodies are out of reach or do not fit. Those whose body is
    missing end as dead. Raises Busy or StoreUnavailable, and takes back all. ``line`` and ``bounds`` are
    those of ``Service.within``.
    """
    sizes = [(one, one.row.body_length) for one in got]
    if all(length < 0 for _, length in sizes):
        return [(one, None) for one in got]
    shown: list[tuple[HandedOut, Content | None]] = []
    try:
        part = next(bounded(sizes, MAX_BODY_BYTES))
        service.hold(sum(max(length, 0) for _, length in sizes[: len(part)]))
        wanted = {one.key.job_id: one.key.version for one in part if one.row.body_length >= 0}
        found = await service.within(line, partial(service.center.store.bodies.read, wanted), **bounds)
        if not found and found.unanswered:
            raise next(iter(found.unanswered.values()))
        missing = wanted.keys() - found.keys() - found.unanswered.keys()
        if missing:
            await service.pulls.bury([one for one in part if one.key.job_id in missing], BODY_MISSING)
        contents = {**dict.fromkeys(one.key.job_id for one in part if one.row.body_length < 0), **found}
        shown = [(one, contents[one.key.job_id]) for one in part if one.key.job_id in contents]
    finally:
        with_them = {one.key.job_id for one, _ in shown}
        service.pulls.release(one for one in got if one.key.job_id not in with_them)
    return shown


def _shown(one: HandedOut, content: Content | None) -> PulledTask:
    task, row = one.task, one.row
    shown: PulledTask = {
        "job_id": str(task.job_id),
        "topic": task.topic,
        "biz_id": biz_id(task.biz_id),
        "status": STATUS[row.status],
        "action_time": instant(row.action_time),
        "attribute": task.attribute,
        "version": task.version,
        "tries": task.tries,
        "expires_at": instant(row.expires_at) if row.expires_at else None,
        "failed_tries": row.attempts - 1,
        "lease": one.lease,
        "attempt": row.attempts,
        "lease_until": instant(row.next_time),
        "last": one.last,
    }
    if content is not None:
        shown["content_type"] = content.content_type
        try:
            shown["body"] = content.data.decode()
        except UnicodeDecodeError:
            shown["body_base64"] = b64encode(content.data).decode()
    return shown


# --- leases

Lease = Annotated[str, Field(max_length=MAX_LEASE_CHARS, description="As the pull returned it.")]


class Leases(Model):
    """One lease, or many."""

    lease: Lease | None = None
    leases: list[Lease] | None = Field(None, min_length=1, max_length=MAX_LEASES)


def _whole(value: object) -> object:
    return whole_text(value) if isinstance(value, str) else value


class Nack(Leases):
    """How the tries have failed."""

    surrogates = True
    delay: float | None = Field(
        None, ge=0, le=MAX_RETRY_SECONDS, allow_inf_nan=False,
        description="Seconds until the next try; by default the topic's backoff.",
    )  # fmt: skip
    dead: bool = Field(False, description="No further try.")
    error: Annotated[str, BeforeValidator(_whole)] = Field(
        "", description=f"What went wrong: the task's last_error, cut after {ERROR_COLUMN_CHARS} characters."
    )


class Extend(Leases):
    """For how long the tasks are needed."""

    ttr: float = Field(ge=1, le=MAX_TTR_SECONDS, allow_inf_nan=False, description="Seconds from now.")


class LeaseOutcomes(TypedDict):
    """The outcome of a lease. For a list of leases: a list of outcomes, ``leases``; a lease that
    was refused has a ``problem``."""

    lease: NotRequired[str]
    outcome: NotRequired[str]
    late: NotRequired[bool]
    lease_until: NotRequired[str]
    leases: NotRequired[list[dict[str, Any]]]


async def ack(asked: Asked) -> Answer:
    """End tasks as processed, also after their leases have ended. May be repeated."""
    return await _for_each(asked, asked.service.pulls.ack, _ACKS.__getitem__)


async def nack(asked: Asked) -> Answer:
    """Give tasks back as failed. Their leases must live."""
    wanted = asked.body
    give_back = partial(asked.service.pulls.nack, delay=wanted.delay, dead=wanted.dead, error=wanted.error)
    return await _for_each(asked, give_back, _NACKS.__getitem__)


async def extend(asked: Asked) -> Answer:
    """Keep tasks for longer, in all at most the topic's max_runtime. Their leases must live."""
    return await _for_each(asked, partial(asked.service.pulls.extend, ttr=asked.body.ttr), _extended)


_ACKS: dict[AckOutcome, dict[str, Any]] = {
    outcome: {"outcome": outcome.value.replace(" ", "_"), "late": outcome is AckOutcome.LATE}
    for outcome in AckOutcome
}
_NACKS: dict[LeaseOutcome, dict[str, Any]] = {
    outcome: {"outcome": {LeaseOutcome.DONE: "nacked", LeaseOutcome.DEAD: "buried"}.get(outcome, "gone")}
    for outcome in LeaseOutcome
}
_REFUSED = {
    "cancelled": "the task was cancelled, or has expired",
    "dead": "the task is dead",
    "replaced": "the task has another version: a new deadline, a replacement or a redrive",
    "not_handed_out": "nobody has the task: its hand-out was taken back before it was answered",
    "gone": "the lease has ended: its ttr is over, or its task has ended or changed",
    "unknown": "there is no such task",
}
"""Outcomes that are refusals, and what they mean."""


def _extended(until: datetime | LeaseOutcome) -> dict[str, Any]:
    if isinstance(until, LeaseOutcome):
        return {"outcome": "gone"}
    return {"outcome": "extended", "lease_until": instant(to_ms(until))}


async def _for_each(
    asked: Asked,
    do: Callable[[Iterable[PullLease]], Awaitable[Sequence[Any]]],
    told: Callable[[Any], dict[str, Any]],
) -> Answer:
    """Do it for those leases that the token may use, and answer for all in order. Raises Problem."""
    body: Leases = asked.body
    if (body.lease is None) == (body.leases is None):
        raise Problem(problems.INVALID, "give a lease, or a list of leases", field="lease")
    leases = body.leases or [body.lease or ""]
    own, untold = await _visible(asked, leases)
    results = untold | dict(zip(own, await do(own.values()) if own else (), strict=True))
    answers = [_answer(lease, results.get(lease), told) for lease in leases]
    if body.leases is None:
        if isinstance(answers[0], Problem):
            raise answers[0]
        return Answer(answers[0])

    def listed(lease: str, one: dict[str, Any] | Problem) -> dict[str, Any]:
        if isinstance(one, Problem):
            return {"lease": lease, "outcome": one.more["outcome"], "problem": one.body()}
        return one

    return Answer({"leases": list(map(listed, leases, answers))})


async def _visible(asked: Asked, texts: Iterable[str]) -> tuple[dict[str, PullLease], dict[str, Any]]:
    """Return by their texts the leases of pulled topics that the token may use; and with the error those for
    which this cannot be decided now."""
    topic_of = asked.service.center.catalog.known_type
    leases: dict[str, PullLease] = {}
    for text in texts:
        with suppress(InvalidLease):
            leases[text] = asked.service.pulls.parse(text)
    error = await asked.service.read_through(leases.values())
    own: dict[str, PullLease] = {}
    untold: dict[str, Any] = {}
    for text, lease in leases.items():
        topic = topic_of(lease.biz_type)
        if topic is None:
            untold[text] = error
        elif asked.may(topic.name) and topic.delivery is Delivery.PULL:
            own[text] = lease
    return own, untold


def _answer(lease: str, result: Any, told: Callable[[Any], dict[str, Any]]) -> dict[str, Any] | Problem:
    if result is None:
        return Problem(problems.UNKNOWN_LEASE, "there is no such lease", outcome="unknown")
    if isinstance(result, TocError):
        problem = problems.problem_of(result)
        problem.more["outcome"] = "failed"
        return problem
    found = told(result)
    outcome = found["outcome"]
    if outcome in _REFUSED:
        kind = problems.UNKNOWN_LEASE if outcome == "unknown" else problems.LEASE_ENDED
        return Problem(kind, _REFUSED[outcome], outcome=outcome)
    return {"lease": lease, **found}


CALLS = (
    HttpCall(
        "POST", "/v1/topics/{topics}:pull", Action.PULL, pull, "Pull due tasks",
        body=Pull, gives=Pulled, waits=True,
    ),
    HttpCall("POST", "/v1/leases:ack", Action.END_LEASE, ack, "End tasks", body=Leases, gives=LeaseOutcomes),
    HttpCall(
        "POST", "/v1/leases:nack", Action.END_LEASE, nack, "Give tasks back",
        body=Nack, gives=LeaseOutcomes,
    ),
    HttpCall(
        "POST", "/v1/leases:extend", Action.END_LEASE, extend, "Keep tasks for longer",
        body=Extend, gives=LeaseOutcomes,
    ),
)  # fmt: skip
