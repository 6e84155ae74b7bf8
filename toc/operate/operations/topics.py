"""Topics: create, look at, alter, pause, resume, delete."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from typing_extensions import TypedDict

from toc.model.access import Action as Right
from toc.model.catalog import NOTICED_SECONDS
from toc.model.documents import instant
from toc.model.errors import InvalidInput, TocError
from toc.model.topic import Backoff, Delivery, Topic, TopicType
from toc.operate.operation import REQUIRED, Doing, Param, Place, Record, Value, operation
from toc.operate.records import topic_record

NAME = Param("topic", Value.TOPIC, "Such as order.close: letters, digits, '.', '_', '-'.", REQUIRED)
PARTITIONS = "Partitions: a power of two, 1 to 1024."
SLOTS = Param("slot_amount", Value.WHOLE, PARTITIONS, option="--slots")
NEW_SLOTS = Param("slot_amount", Value.WHOLE, PARTITIONS, REQUIRED, option="--slots")
POLICIES = (
    Param("topic_type", TopicType,
          "timed: deadlines lie ahead (the default). instant: tasks may be due at once.", option="--type"),
    Param("retries", Value.WHOLE, "Total tries, 1 to 31. Default 16."),
    Param("backoff", Backoff, "How long a failed task waits. Default exponential."),
    Param("backoff_base", Value.SECONDS, "First wait, doubled each try. Default 1s."),
    Param("backoff_cap", Value.SECONDS, "Longest wait. Default 10m."),
    Param("prepare_timeout", Value.WHOLE_SECONDS, "A worker silent this long loses its tasks. Default 30s."),
    Param("max_runtime", Value.WHOLE_SECONDS, "A try that runs longer fails. Default 1h."),
    Param("horizon", Value.WHOLE_SECONDS, "Later tasks wait in MySQL only. Default 1d."),
    Param("retention", Value.WHOLE_SECONDS, "How long finished rows are kept. Default 3d."),
    Param("expires_in", Value.WHOLE_SECONDS,
          "A task without an expiry expires so long after its time. Default 0: never."),
    Param("concurrency", Value.WHOLE,
          "Handlers that each worker process runs at once. Default 0: as many as it has threads."),
    Param("delivery", Delivery,
          "Who starts its tasks: handler (default); pull: consumers at a gateway; webhook: receivers."),
    Param("target", Value.TEXT, "Where a webhook topic sends its tasks; '' for nowhere.", metavar="NAME"),
)  # fmt: skip
"""The policies of topics, by the names of Topic's fields."""


class Topics(TypedDict):
    """Topics by name."""

    topics: list[dict[str, Any]]


@operation("topic.list", "GET /v1/topics", Right.READ_TOPICS, "List the topics", gives=Topics)
def list_topics(doing: Doing) -> Record:
    """List the topics."""
    topics = doing.center.store.topics.list()
    return {"topics": [topic_record(topic) for topic in topics if doing.sees(topic.name)]}


@operation("topic.show", "GET /v1/topics/{topic}", Right.READ_TOPICS, "Show a topic", NAME)
def show_topic(doing: Doing, topic: str) -> Record:
    """Show a topic with its policies, and the horizon that is in force: its own, or less where memory bounds
    it."""
    from toc.operate import admin

    store = doing.center.store
    record, bound = topic_record(admin.get_topic(store, topic)), store.identity.horizon()
    bounded = 0 < bound.seconds < record["horizon"]
    return {
        **record,
        "horizon_in_force": bound.seconds if bounded else record["horizon"],
        "horizon_why": bound.why if bounded else None,
        "horizon_since": instant(bound.since) if bounded else None,
    }


@operation(
    "topic.create", "POST /v1/topics", Right.CREATE_TOPIC, "Create a topic",
    Param("name", Value.TOPIC, NAME.about, REQUIRED),
    Param("biz_type", Value.WHOLE, "Its number in the rows, unique to the topic.", REQUIRED),
    NEW_SLOTS, *POLICIES, takes="NewTopic", status=201,
)  # fmt: skip
def create(doing: Doing, name: str, **values: Any) -> Record:
    """Create a topic."""
    from toc.operate import admin

    return _shown_anew(doing, admin.create_topic(doing.center, name, **values))


@operation(
    "topic.alter", "PATCH /v1/topics/{topic}", Right.CHANGE_TOPIC, "Change a topic",
    NAME, SLOTS, *POLICIES,
    Param("wait", Value.FLAG, "With --delivery: wait until none of its tasks is prepared or leased.",
          typed=True),
    takes="TopicPolicies", place=Place.LONG,
)  # fmt: skip
def alter(doing: Doing, topic: str, *, wait: bool = False, **changes: Any) -> Record:
    """Change policies of a topic in use. Name and biz_type cannot change. Pending tasks keep their slots.

    Its delivery can be changed while it is paused and none of its tasks is prepared or leased.
    """
    from toc.operate import topics

    if wait and "delivery" not in changes:
        raise InvalidInput("--wait goes with --delivery")
    altered = topics.alter_topic(doing.center, topic, changes, wait=wait, progress=doing.progress)
    return _shown_anew(doing, altered)


@operation(
    "topic.pause", "POST /v1/topics/{topic}:pause", Right.CHANGE_TOPIC, "Pause a topic",
    NAME, settles=NOTICED_SECONDS,
)  # fmt: skip
def pause(doing: Doing, topic: str) -> Record:
    """Start no more tasks of a topic. New ones are still accepted; running ones finish.

    Returns after 2.5 s, when every worker knows it.
    """
    from toc.operate import admin

    return topic_record(admin.alter_topic(doing.center.store, topic, {"paused": True}))


@operation(
    "topic.resume", "POST /v1/topics/{topic}:resume", Right.CHANGE_TOPIC, "Resume a topic",
    NAME,
    Param("rate", Value.WHOLE, "Start at most N waiting tasks per second, cluster-wide; 0: all.", 0,
          least=0, most=1_000_000),
    takes="Resume",
)  # fmt: skip
def resume(doing: Doing, topic: str, rate: int) -> Record:
    """Start the tasks of a paused topic again, oldest first.

    A rate limits the tasks that are due by now; those that come due meanwhile wait behind them. On a topic
    that is not paused this sets another rate, or none.
    """
    from toc.operate import admin

    center = doing.center
    changes = {"resume_rate": rate, "resumed_at": center.clock.now_ms(), "paused": False, "closed": False}
    return topic_record(admin.alter_topic(center.store, topic, changes))


def _sure(doing: Doing, topic: str) -> None:
    from toc.operate import admin

    admin.get_topic(doing.center.store, topic)
    doing.confirm(f"delete topic {topic} for good")


@operation(
    "topic.delete", "DELETE /v1/topics/{topic}", Right.DELETE_TOPIC, "Delete a topic",
    NAME, place=Place.LONG, check=_sure, asks=True,
)  # fmt: skip
def delete(doing: Doing, topic: str) -> Record:
    """Delete a paused topic without pending and dead tasks. Its biz_type is never used again."""
    from toc.operate import topics

    topics.delete_topic(doing.center, topic, progress=doing.progress)
    return {"name": topic}


def _shown_anew(doing: Doing, topic: Topic) -> Record:
    """Show a topic that was changed, of which this program knows from now on."""
    with suppress(TocError):  # it is changed; this view of it may be a second old
        doing.center.catalog.refresh()
    return topic_record(topic)
