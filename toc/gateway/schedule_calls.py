"""Calls about schedules. A schedule is seen by the tokens that may make the call on its topic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from toc.gateway.calls import Answer, Asked, HttpCall, Instant, Model, Query
from toc.gateway.problems import NOT_READY, UNKNOWN, Problem, unknown_topic
from toc.model.access import Action
from toc.model.clock import to_ms
from toc.model.errors import InvalidSchedule
from toc.model.schedule import (
    Definition,
    Dst,
    Missed,
    Overlap,
    check_instant,
    check_schedule_name,
    preview,
)
from toc.model.sharding import BizId
from toc.model.topic import NAME
from toc.operate.records import fire_record, schedule_record
from toc.sdk.schedules import BACKFILL_RATE, LEAST_BACKFILL_RATE, Schedule, Schedules, define

P = ParamSpec("P")
R = TypeVar("R")

MOST_ON_PAGE = 1000
MOST_FIRES = 1000

Moment = Annotated[Instant, AfterValidator(check_instant), Field(description="RFC 3339 with a zone.")]
Count = Annotated[int, Field(ge=1, le=MOST_FIRES, description="How many.")]


TOPIC = "The topic of its tasks."


def _choice(text: str) -> Any:
    return Field(None, strict=False, description=text)


class When(Model):
    """When a schedule fires."""

    cron: str | None = Field(None, description="Five fields, or six with seconds first.")
    zone: str | None = Field(None, description="Of cron, such as Europe/Berlin. Default UTC.")
    every: float | None = Field(None, description="A period instead of cron.")
    anchor: Instant | None = Field(None, description="When every begins. Default 1970, UTC.")
    dst: Dst | None = _choice("A fixed time that the clock leaves out. Default cron.")
    jitter: float | None = Field(None, description="Delay by a part of these seconds, chosen by the name.")


class AlteredSchedule(When):
    """What to change of a schedule. A cron expression replaces a period, and the other way round."""

    topic: str | None = Field(None, description=TOPIC)
    missed: Missed | None = _choice("What runs after a stop longer than window. Default latest.")
    window: float | None = Field(
        None, description="After a stop of at most this long, all run. Default a day."
    )
    overlap: Overlap | None = _choice("What to do if the one before has not ended. Default skip.")
    attribute: dict[str, Any] | None = Field(None, description="The data of each task for its handler.")


class NewSchedule(AlteredSchedule):
    """A schedule to create, with cron or every. Durations are seconds."""

    name: str = Field(description="Such as report.nightly; it is the biz_id of its tasks.")
    topic: str = Field(description=TOPIC)
    paused: bool = Field(False, description="Begin only when it is resumed.")


class DefinitionToPreview(When):
    """When a schedule would fire that is not stored."""

    name: str = Field("preview", description="The name that chooses the part of jitter.")
    count: Count = 20
    after: Moment | None = None


class WhichFires(Query):
    """Which fires to show."""

    count: Count = 20
    after: Annotated[Moment, Field(description="Begin after this time. Default now.")] | None = None


class Range(Model):
    """Which occurrences of the past to run."""

    start: Moment = Field(alias="from", description="The first nominal time, RFC 3339 with a zone.")
    end: Moment = Field(alias="to", description="The last nominal time.")
    rate: float = Field(
        BACKFILL_RATE, ge=LEAST_BACKFILL_RATE, allow_inf_nan=False, description="Start this many per second."
    )
    dry_run: bool = Field(False, description="Only count.")


class Which(Query):
    """Which schedules to list."""

    after: str = Field("", max_length=128, description="Begin after this name: the next of the page before.")
    limit: Annotated[int, Field(ge=1, le=MOST_ON_PAGE)] = 100


class SchedulePage(TypedDict):
    """Schedules by name. Those that the token may not see are left out, so a page may be empty although more
    follow: while ``next`` is not null, ask on with it as ``after``."""

    schedules: list[dict[str, Any]]
    next: str | None


class Fires(TypedDict):
    """The next times: ``nominal`` with the offset of the zone, ``due`` in UTC."""

    fires: list[dict[str, Any]]


class Triggered(TypedDict):
    """The task that was submitted."""

    job_id: str


class Backfilled(TypedDict):
    """Counts: ``occurrences`` of the range; ``present`` have a task; ``submitted`` had none. Of these,
    ``may_have_run`` are so old that their tasks may have run and been purged: they run again."""

    occurrences: int
    present: int
    submitted: int
    may_have_run: int
    dry_run: bool


async def list_schedules(asked: Asked) -> Answer:
    """List the schedules that the token may see, by name, a page at a time."""
    query: Which = asked.query
    found = await asked.service.at_all(_schedules(asked).list, after=query.after, limit=query.limit)
    shown = [schedule_record(one) for one in found if asked.may(one.definition.topic)]
    return Answer({"schedules": shown, "next": found[-1].name if len(found) == query.limit else None})


async def show_schedule(asked: Asked) -> Answer:
    """Show a schedule: what it does, what it has done, and what was missed."""
    return Answer(schedule_record(await _found(asked)))


async def create(asked: Asked) -> Answer:
    """Create a schedule."""
    values = asked.body.given()
    name, topic, paused = values.pop("name"), values.pop("topic"), values.pop("paused")
    if not asked.may(topic):
        raise unknown_topic(topic)
    # Before the audit, whose rows are small.
    await _at_server_of(asked, name, define, name, topic=topic, **values)
    async with asked.audit("schedule.create", name, {"topic": topic, "paused": paused, **values}):
        do = partial(_schedules(asked).create, topic=topic, paused=paused, **values)
        made = await _at_server_of(asked, name, do, name)
    return Answer(schedule_record(made), 201)


async def alter(asked: Asked) -> Answer:
    """Change a schedule. Its next occurrence is replaced if it has not started."""
    values = asked.body.given()
    schedule = await _found(asked)
    if "topic" in values and not asked.may(values["topic"]):
        raise unknown_topic(values["topic"])
    await _at_server_of(asked, schedule.name, schedule.definition.changed, **values)
    return await _changed(asked, "alter", values)


async def pause(asked: Asked) -> Answer:
    """Start no more occurrences. Those that fall into the pause are not made up for."""
    await _found(asked)
    return await _changed(asked, "pause", {})


async def resume(asked: Asked) -> Answer:
    """Continue a paused schedule from now."""
    await _found(asked)
    return await _changed(asked, "resume", {})


async def delete(asked: Asked) -> Answer:
    """Delete a schedule and cancel its next occurrence. Running tasks continue."""
    name = asked.path["name"]
    try:
        await _found(asked)
    except Problem as exc:
        if exc.kind is not NOT_READY:
            raise
    async with asked.audit("schedule.delete", name, {}):
        deleted = await _at_server_of(asked, name, _schedules(asked).delete, name)
    if not deleted:
        raise _no_schedule()
    return Answer({"name": name, "deleted": True})


async def trigger(asked: Asked) -> Answer:
    """Run a task of the schedule now, paused or not. Changes nothing else."""
    name = (await _found(asked)).name
    async with asked.audit("schedule.trigger", name, {}) as result:
        job_id = await _at_server_of(asked, name, _schedules(asked).trigger, name)
        result["job_id"] = str(job_id)
    return Answer({"job_id": str(job_id)})


async def backfill(asked: Asked) -> Answer:
    """Run the occurrences of the past that have no task, one after the other. It can be repeated."""
    body: Range = asked.body
    name = (await _found(asked)).name
    do = partial(_schedules(asked).backfill, name, body.start, body.end, rate=body.rate, dry_run=body.dry_run)
    if body.dry_run:
        counts = await asked.service.at_length(do)
    else:
        details = {"from": body.start, "to": body.end, "rate": body.rate}
        async with asked.audit("schedule.backfill", name, details) as result:
            counts = await asked.service.at_length(do)
            result |= counts._asdict()
    return Answer({**counts._asdict(), "dry_run": body.dry_run})


async def preview_stored(asked: Asked) -> Answer:
    """Show the next times at which a schedule fires, paused or not, with the offsets of its zone."""
    definition = (await _found(asked)).definition
    return await _fires(asked, lambda: definition, asked.query)


async def preview_given(asked: Asked) -> Answer:
    """Show the next times at which a schedule would fire. Stores nothing."""
    values = asked.body.given()
    del values["count"]
    values.pop("after", None)
    return await _fires(asked, partial(define, topic="preview", **values), asked.body)


async def _fires(
    asked: Asked, make: Callable[[], Definition], which: WhichFires | DefinitionToPreview
) -> Answer:
    after = to_ms(which.after or datetime.now(UTC))

    def find() -> Sequence[dict[str, Any]]:
        return [fire_record(fire) for fire in preview(make(), after, which.count)]

    return Answer({"fires": await asked.service.at_length(find)})


async def _changed(asked: Asked, what: str, values: dict[str, Any]) -> Answer:
    name = asked.path["name"]
    do: Callable[..., Schedule] = getattr(_schedules(asked), what)
    async with asked.audit(f"schedule.{what}", name, values):
        schedule = await _at_server_of(asked, name, do, name, **values)
    return Answer(schedule_record(schedule))


async def _found(asked: Asked) -> Schedule:
    """The schedule that the path names. Raises Problem (404) if the token may not see it."""
    name = asked.path["name"]
    if not NAME.fullmatch(name):
        raise _no_schedule()
    try:
        schedule = await _at_server_of(asked, name, _schedules(asked).get, name)
    except InvalidSchedule as exc:  # this version does not understand its row, nor knows its topic
        if asked.token.everywhere:
            raise Problem(NOT_READY, str(exc)) from None
        raise _no_schedule() from None
    if schedule is None or not asked.may(schedule.definition.topic):
        raise _no_schedule()
    return schedule


async def _at_server_of(asked: Asked, name: str, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run what asks the server of a schedule, which is that of its tasks."""
    server = asked.service.center.store.server_of_biz(BizId.of(check_schedule_name(name)))
    return await asked.service.at_server(server, do, *args, **kwargs)


def _schedules(asked: Asked) -> Schedules:
    return asked.service.center.schedules


def _no_schedule() -> Problem:
    return Problem(UNKNOWN, "there is no such schedule")


_ONE = "/v1/schedules/{name}"
CALLS = (
    HttpCall(
        "GET", "/v1/schedules", Action.READ_SCHEDULES, list_schedules, "List the schedules",
        query=Which, gives=SchedulePage,
    ),
    HttpCall(
        "POST", "/v1/schedules", Action.CHANGE_SCHEDULE, create, "Create a schedule",
        body=NewSchedule, status=201,
    ),
    HttpCall(
        "POST", "/v1/schedules:preview", Action.READ_SCHEDULES, preview_given,
        "See when a schedule would fire", body=DefinitionToPreview, gives=Fires,
    ),
    HttpCall("GET", _ONE, Action.READ_SCHEDULES, show_schedule, "Show a schedule"),
    HttpCall("PATCH", _ONE, Action.CHANGE_SCHEDULE, alter, "Change a schedule", body=AlteredSchedule),
    HttpCall("DELETE", _ONE, Action.CHANGE_SCHEDULE, delete, "Delete a schedule"),
    HttpCall(
        "GET", f"{_ONE}:preview", Action.READ_SCHEDULES, preview_stored, "See when a schedule fires",
        query=WhichFires, gives=Fires,
    ),
    HttpCall("POST", f"{_ONE}:pause", Action.RUN_SCHEDULE, pause, "Pause a schedule"),
    HttpCall("POST", f"{_ONE}:resume", Action.RUN_SCHEDULE, resume, "Resume a schedule"),
    HttpCall("POST", f"{_ONE}:trigger", Action.RUN_SCHEDULE, trigger, "Run a schedule now", gives=Triggered),
    HttpCall(
        "POST", f"{_ONE}:backfill", Action.RUN_SCHEDULE, backfill, "Run a schedule for the past",
        body=Range, gives=Backfilled,
    ),
)  # fmt: skip
