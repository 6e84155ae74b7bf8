"""Calls about the receivers of webhooks. Secrets are in the answers to create and rotate, and in no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import Field
from typing_extensions import TypedDict

from toc.gateway.calls import Answer, Asked, HttpCall, Model
from toc.model.access import Access, Action
from toc.model.target import MOST_PREVIOUS_SECONDS, PREVIOUS_SECONDS, Target
from toc.operate.audit import target_changed
from toc.operate.records import target_record
from toc.store.records.target_book import NOTICED_SECONDS

_SECONDS = "Seconds for a whole request."
_CONCURRENCY = "Requests in flight, over all workers."
_RATE = "Requests per second, over all workers; null: no limit."
_DEAD_ON = "Which of the answers 400, 404 and 422 make a task dead."
_TOPICS = "Patterns of the topics that may use it."
_HEADERS = "Go with every request. Encrypted, and never shown."


class NewTarget(Model):
    """A receiver of webhooks to register."""

    name: str
    url: str = Field(description="https on port 443, unless the operator allows more.")
    timeout: float = Field(15.0, description=_SECONDS)
    concurrency: int = Field(50, description=_CONCURRENCY)
    rate: float | None = Field(None, description=_RATE)
    dead_on: list[int] = Field(default_factory=list, description=_DEAD_ON)
    topics: list[str] | None = Field(None, description=f"{_TOPICS} Default: those of the token.")
    headers: dict[str, str] = Field(default_factory=dict, description=_HEADERS)


class AlteredTarget(Model):
    """What to change of a target. ``headers`` replace all that it had."""

    url: str | None = None
    timeout: float | None = Field(None, description=_SECONDS)
    concurrency: int | None = Field(None, description=_CONCURRENCY)
    rate: float | None = Field(None, description=_RATE)
    dead_on: list[int] | None = Field(None, description=_DEAD_ON)
    topics: list[str] | None = Field(None, description=_TOPICS)
    headers: dict[str, str] | None = Field(None, description=_HEADERS)


class Rotation(Model):
    """How to rotate."""

    keep: float = Field(
        PREVIOUS_SECONDS,
        ge=0,
        le=MOST_PREVIOUS_SECONDS,
        allow_inf_nan=False,
        description="For how many seconds the former secret also signs.",
    )


class Pause(Model):
    """Why it is paused."""

    why: str = Field("", max_length=255)


class Targets(TypedDict):
    """Targets by name."""

    targets: list[dict[str, Any]]


async def list_targets(asked: Asked) -> Answer:
    """List the targets."""
    found = await asked.service.at_topics(asked.service.center.targets.list)
    return Answer({"targets": [_record(asked, one) for one in found]})


async def show_target(asked: Asked) -> Answer:
    """Show a target."""
    found = await asked.service.at_topics(asked.service.center.store.targets.get, asked.path["name"])
    return Answer(_record(asked, found))


async def create(asked: Asked) -> Answer:
    """Register a target, and show its signing secret, this once."""
    values = {name: getattr(asked.body, name) for name in asked.body.model_fields_set}
    if values.get("topics") is None:
        values.pop("topics", None)
    make = partial(asked.service.center.targets.create, **{"topics": asked.token.topics, **values})
    del values["name"]
    async with asked.audit("target.create", asked.body.name, target_changed(values)):
        made = await asked.service.at_topics(make)
    return Answer(target_record(made.target) | {"secret": made.secret}, 201)


async def alter(asked: Asked) -> Answer:
    """Change a target. Answers when every sender knows it."""
    given = asked.body.model_fields_set
    values = {
        name: value
        for name, value in asked.body.__dict__.items()
        if value is not None or (name == "rate" and name in given)
    }
    return await _changed(asked, "alter", partial(asked.service.center.targets.alter, wait=False), values)


async def rotate(asked: Asked) -> Answer:
    """Give a target a new signing secret, and show it, this once, when every sender uses it."""
    name, keep = asked.path["name"], asked.body.keep
    async with asked.audit("target.rotate", name, {"keep": keep}):
        rotate = partial(asked.service.center.targets.rotate, name, keep=keep, wait=False)
        made = await asked.service.at_topics(rotate)
    await asyncio.sleep(NOTICED_SECONDS)
    return Answer(target_record(made.target) | {"secret": made.secret})


async def send_test(asked: Asked) -> Answer:
    """Send a target a signed request that belongs to no task, and show the answer."""
    name = asked.path["name"]
    async with asked.audit("target.test", name, {}) as result:
        answer = await asked.service.at_target(asked.service.center.targets.test, name)
        result["status"] = answer.status
    return Answer(answer._asdict())


async def pause(asked: Asked) -> Answer:
    """Send nothing more to a target; its tasks wait. Answers when every sender knows it."""
    do = partial(asked.service.center.targets.pause, by=asked.token.name, wait=False)
    return await _changed(asked, "pause", do, {"why": asked.body.why})


async def resume(asked: Asked) -> Answer:
    """Send to a paused target again."""
    return await _changed(asked, "resume", asked.service.center.targets.resume, {})


async def delete(asked: Asked) -> Answer:
    """Delete a target and its secret; its tasks wait until there is one of that name again."""
    name = asked.path["name"]
    async with asked.audit("target.delete", name, {}):
        await asked.service.at_topics(asked.service.center.targets.delete, name, wait=False)
    await asyncio.sleep(NOTICED_SECONDS)
    return Answer({"name": name})


def _record(asked: Asked, target: Target) -> dict[str, Any]:
    """Return a target as the token may see it: who may only read does not see the query of its URL."""
    return target_record(target, whole_url=asked.token.may(Action.RUN_TARGET) is Access.ALLOWED)


async def _changed(asked: Asked, what: str, do: Callable[..., Target], values: dict[str, Any]) -> Answer:
    name = asked.path["name"]
    async with asked.audit(f"target.{what}", name, target_changed(values)):
        target = await asked.service.at_topics(partial(do, name, **values))
    if what != "resume":
        await asyncio.sleep(NOTICED_SECONDS)  # what the answer says must be true
    return Answer(target_record(target))


CALLS = (
    HttpCall("GET", "/v1/targets", Action.READ_TARGETS, list_targets, "List webhook targets", gives=Targets),
    HttpCall(
        "POST", "/v1/targets", Action.CHANGE_TARGET, create, "Register a webhook target",
        body=NewTarget, status=201,
    ),
    HttpCall("GET", "/v1/targets/{name}", Action.READ_TARGETS, show_target, "Show a webhook target"),
    HttpCall(
        "PATCH", "/v1/targets/{name}", Action.CHANGE_TARGET, alter, "Change a webhook target",
        body=AlteredTarget,
    ),
    HttpCall("DELETE", "/v1/targets/{name}", Action.CHANGE_TARGET, delete, "Delete a webhook target"),
    HttpCall(
        "POST", "/v1/targets/{name}:rotate", Action.CHANGE_TARGET, rotate, "Give a target a new secret",
        body=Rotation,
    ),
    HttpCall("POST", "/v1/targets/{name}:test", Action.RUN_TARGET, send_test, "Send a webhook target a test"),
    HttpCall(
        "POST", "/v1/targets/{name}:pause", Action.RUN_TARGET, pause, "Pause a webhook target", body=Pause
    ),
    HttpCall("POST", "/v1/targets/{name}:resume", Action.RUN_TARGET, resume, "Resume a webhook target"),
)  # fmt: skip
