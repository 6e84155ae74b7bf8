"""Calls about topics: list, show, create, alter, pause, resume."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any, get_type_hints

from pydantic import Field, create_model
from typing_extensions import TypedDict

from toc.gateway.calls import Answer, Asked, HttpCall, Model, Query
from toc.gateway.problems import INVALID, UNKNOWN_TOPIC, Problem
from toc.model.access import Action
from toc.model.catalog import NOTICED_SECONDS
from toc.model.errors import TocError
from toc.model.template import POLICIES
from toc.model.topic import Topic
from toc.operate import admin
from toc.operate.records import topic_record
from toc.operate.topics import change_delivery, delete_topic

_HINTS = get_type_hints(Topic)
_POLICIES: dict[str, Any] = {
    name: (Annotated[_HINTS[name] | None, Field(strict=False)], None) for name in sorted(POLICIES)
}
"""What a request may set. Topic checks the values."""

TopicPolicies = create_model("TopicPolicies", __base__=Model, __doc__="Policies to change.", **_POLICIES)
NewTopic = create_model(
    "NewTopic",
    __base__=Model,
    __doc__="A topic to create; policies that are left out have their defaults. Durations are seconds.",
    **(_POLICIES | {"name": (str, ...), "biz_type": (int, ...), "slot_amount": (int, ...)}),
)


class Resume(Model):
    """How to start again."""

    rate: int = Field(
        0, ge=0, le=1_000_000, description="Start at most this many waiting tasks per second; 0: all."
    )


class Delete(Query):
    """How to delete."""

    purge: bool = Field(False, description="Cancel its pending tasks and delete the dead ones first.")


class Topics(TypedDict):
    """Topics by name."""

    topics: list[dict[str, Any]]


async def list_topics(asked: Asked) -> Answer:
    """List the topics that the token may see."""
    topics = await asked.service.at_topics(asked.service.center.store.topics.list)
    return Answer({"topics": [topic_record(one) for one in topics if asked.may(one.name)]})


async def show_topic(asked: Asked) -> Answer:
    """Show a topic with its policies."""
    found = await asked.service.at_topics(admin.get_topic, asked.service.center.store, asked.topic)
    return Answer(topic_record(found))


async def create(asked: Asked) -> Answer:
    """Create a topic."""
    values = asked.body.given()
    name = values.pop("name")
    if not asked.may(name):
        raise Problem(UNKNOWN_TOPIC, "the name is outside the patterns of this access token")
    async with asked.audit("topic.create", name, values):
        topic = await asked.service.at_topics(admin.create_topic, asked.service.center, name, **values)
    return await _shown_anew(asked, topic, 201)


async def alter(asked: Asked) -> Answer:
    """Change policies of a topic. Its delivery changes alone, while it is paused and nothing of it runs."""
    changes = asked.body.given()
    center, name = asked.service.center, asked.topic
    delivery = changes.pop("delivery", None)
    if delivery is not None and changes:
        raise Problem(INVALID, "change the delivery in a request of its own", field="delivery")
    async with asked.audit("topic.alter", name, asked.body.given()):
        if delivery is not None:
            topic = await asked.service.at_length(change_delivery, center, name, delivery)
        else:
            topic = await asked.service.at_topics(admin.alter_topic, center.store, name, changes)
    return await _shown_anew(asked, topic)


async def _shown_anew(asked: Asked, topic: Topic, status: int = 200) -> Answer:
    with suppress(TocError):  # it is made; this view of it may be a second old
        await asked.service.batcher.read_topics()
    return Answer(topic_record(topic), status)


async def delete(asked: Asked) -> Answer:
    """Delete a paused topic; its biz_type is never used again. Refused while it has pending or dead tasks."""
    center, name = asked.service.center, asked.topic
    async with asked.audit("topic.delete", name, {"purge": asked.query.purge}) as result:
        found = await asked.service.at_length(delete_topic, center, name, purge=asked.query.purge)
        result.update(pending_cancelled=found.rows.pending, dead_deleted=found.rows.dead)
    return Answer({"name": name, "cancelled": found.rows.pending, "purged": found.rows.dead})


async def pause(asked: Asked) -> Answer:
    """Start no more tasks of a topic. Answers after 2.5 s, when that is in force everywhere."""
    async with asked.audit("topic.pause", asked.topic, {}):
        topic = await asked.service.at_topics(
            admin.alter_topic, asked.service.center.store, asked.topic, {"paused": True}
        )
    await asyncio.sleep(NOTICED_SECONDS)  # what the answer says must be true
    return Answer(topic_record(topic))


async def resume(asked: Asked) -> Answer:
    """Start the tasks of a paused topic again."""
    center = asked.service.center
    async with asked.audit("topic.resume", asked.topic, {"rate": asked.body.rate}):
        topic = await asked.service.at_topics(
            admin.resume_topic, center.store, asked.topic, rate=asked.body.rate, now_ms=center.clock.now_ms()
        )
    return Answer(topic_record(topic))


CALLS = (
    HttpCall("GET", "/v1/topics", Action.READ_TOPICS, list_topics, "List the topics", gives=Topics),
    HttpCall("POST", "/v1/topics", Action.CREATE_TOPIC, create, "Create a topic", body=NewTopic, status=201),
    HttpCall("GET", "/v1/topics/{topic}", Action.READ_TOPICS, show_topic, "Show a topic"),
    HttpCall("PATCH", "/v1/topics/{topic}", Action.CHANGE_TOPIC, alter, "Change a topic", body=TopicPolicies),
    HttpCall("DELETE", "/v1/topics/{topic}", Action.DELETE_TOPIC, delete, "Delete a topic", query=Delete),
    HttpCall("POST", "/v1/topics/{topic}:pause", Action.CHANGE_TOPIC, pause, "Pause a topic"),
    HttpCall("POST", "/v1/topics/{topic}:resume", Action.CHANGE_TOPIC, resume, "Resume a topic", body=Resume),
)  # fmt: skip
