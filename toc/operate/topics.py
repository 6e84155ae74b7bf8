"""Topics: create, look at, alter, pause, resume, delete; and bring them to what code declares.

To change the delivery of a topic, or delete it, it must be paused. Every worker notices a pause within
NOTICED_SECONDS. After that nothing new is taken, and what is prepared or leased can be counted. Every write
is guarded by the version of the topic at the count, so a resume in between is never overlooked.

Delete goes in this order, and can be repeated after any interruption:

    closed      submits are refused, in every process that has read the topic table since
    counted     what is pending, held, dead: if anything is, the topic is opened again and the call refused
    retired     the biz_type, for good; then the topic's row goes; finished rows live out their retention
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from toc.model.access import Action as Right
from toc.model.catalog import NOTICED_SECONDS
from toc.model.documents import instant
from toc.model.errors import IndexUnavailable, InvalidInput, TocError, TopicExists, TopicInUse, UnknownTopic
from toc.model.task import TaskStatus
from toc.model.topic import Backoff, Delivery, Topic, TopicType, check_native, check_topic_name
from toc.operate.operation import REQUIRED, Doing, Param, Place, Record, Value, operation
from toc.operate.records import topic_record

if TYPE_CHECKING:
    from toc.model.topic import Declaration
    from toc.sdk.client import TimeoutCenter
    from toc.store.store import Store

LOOK_SECONDS = 0.5
DRAWN_FROM, DRAWN_BELOW = 10**9, 10**15
"""The range from which the biz_type of a topic is drawn that a template or code creates. Two draws seldom
clash. The biz_type of another topic, even of a deleted one, is refused."""

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


def get_topic(store: Store, name: str) -> Topic:
    """Return the topic ``name``. Raises InvalidTopic or UnknownTopic."""
    topic = store.topics.get(check_topic_name(name))
    if topic is None:
        known = ", ".join(sorted(topic.name for topic in store.topics.list()))
        raise UnknownTopic(f"there is no topic {name!r}; there are: {known or 'none yet'}", name)
    return topic


@operation("topic.list", "GET /v1/topics", Right.READ_TOPICS, "List the topics")
def list_topics(doing: Doing) -> Record:
    """List the topics."""
    topics = doing.center.store.topics.list()
    return {"topics": [topic_record(topic) for topic in topics if doing.sees(topic.name)]}


@operation("topic.show", "GET /v1/topics/{topic}", Right.READ_TOPICS, "Show a topic", NAME)
def show_topic(doing: Doing, topic: str) -> Record:
    """Show a topic with its policies, and the horizon that is in force: its own, or less where memory bounds
    it."""
    store = doing.center.store
    record, bound = topic_record(get_topic(store, topic)), store.identity.horizon()
    bounded = 0 < bound.seconds < record["horizon"]
    why = bound.why if doing.may(Right.READ_CLUSTER) else "the memory of Redis bounds it"  # it names servers
    return {
        **record,
        "horizon_in_force": bound.seconds if bounded else record["horizon"],
        "horizon_why": why if bounded else None,
        "horizon_since": instant(bound.since) if bounded else None,
    }


# --- create and alter


def drawn_type() -> int:
    """Return a biz_type that very probably no topic has had."""
    return secrets.randbelow(DRAWN_BELOW - DRAWN_FROM) + DRAWN_FROM


@operation("topic.create", "POST /v1/topics", Right.CREATE_TOPIC, "Create a topic",
           Param("name", Value.TOPIC, NAME.about, REQUIRED),
           Param("biz_type", Value.WHOLE, "Its number in the rows, unique to the topic.", REQUIRED),
           NEW_SLOTS, *POLICIES, takes="NewTopic", status=201)  # fmt: skip
def create(doing: Doing, name: str, **values: Any) -> Record:
    """Create a topic.

    toc: Example: toc topic create order.close --biz-type 1001 --slots 8 --retries 10
    """
    topic = Topic(name, **values)
    check_new(doing.center, topic, typed=False)
    doing.center.store.topics.create(topic)
    return _shown_anew(doing, topic)


@operation("topic.alter", "PATCH /v1/topics/{topic}", Right.CHANGE_TOPIC, "Change a topic",
           NAME, SLOTS, *POLICIES,
           Param("wait", Value.FLAG, "With --delivery: wait until none of its tasks is prepared or leased.",
                 typed=True), takes="TopicPolicies", place=Place.LONG)  # fmt: skip
def alter(doing: Doing, topic: str, *, wait: bool = False, **changes: Any) -> Record:
    """Change policies of a topic in use. Name and biz_type cannot change. Pending tasks keep their slots.

    Its delivery can be changed while it is paused and none of its tasks is prepared or leased. With another
    target it returns after 2.5 s, when every worker sends there.

    toc: Example: toc topic alter order.close --slots 16 --backoff-cap 5m
    """
    if wait and "delivery" not in changes:
        raise InvalidInput("--wait goes with --delivery")
    if not changes:
        raise InvalidInput(f"nothing to change on {topic!r}: name at least one policy")
    # Refuse all first: a refusal must not leave half of what was asked.
    altered, rest = get_topic(doing.center.store, topic), dict(changes)
    check_change(doing.center, altered, changes)
    if (delivery := rest.pop("delivery", None)) is not None:
        altered = _deliver(doing, topic, delivery, wait=wait)
    if rest:
        altered = doing.center.store.topics.alter(topic, **rest)
    if "target" in changes:
        time.sleep(NOTICED_SECONDS)
    return _shown_anew(doing, altered)


@operation("topic.pause", "POST /v1/topics/{topic}:pause", Right.CHANGE_TOPIC, "Pause a topic",
           NAME, settles=NOTICED_SECONDS)  # fmt: skip
def pause(doing: Doing, topic: str) -> Record:
    """Start no more tasks of a topic. New ones are still accepted; running ones finish.

    Returns after 2.5 s, when every worker knows it.
    """
    store = doing.center.store
    return topic_record(store.topics.alter(get_topic(store, topic).name, paused=True, paused_by=doing.by))


@operation("topic.resume", "POST /v1/topics/{topic}:resume", Right.CHANGE_TOPIC, "Resume a topic", NAME,
           Param("rate", Value.WHOLE, "Start at most N waiting tasks per second, cluster-wide; 0: all.", 0,
                 least=0, most=1_000_000), takes="Resume")  # fmt: skip
def resume(doing: Doing, topic: str, rate: int) -> Record:
    """Start the tasks of a paused topic again, oldest first.

    A rate limits the tasks that are due by now; those that come due meanwhile wait behind them. On a topic
    that is not paused this sets another rate, or none.
    """
    store, now = doing.center.store, doing.center.clock.now_ms()
    changes = {"resume_rate": rate, "resumed_at": now, "paused": False, "closed": False}
    return topic_record(store.topics.alter(get_topic(store, topic).name, **changes))


def _shown_anew(doing: Doing, topic: Topic) -> Record:
    """Show a topic that was changed, of which this program knows from now on."""
    with suppress(TocError):  # it is changed; this view of it may be a second old
        doing.center.catalog.refresh()
    return topic_record(topic)


# --- while nothing of it runs


class Use(NamedTuple):
    """How many tasks of a topic have not ended well. ``held``: of the pending, those leased or handed out;
    ``prepared``: entries in the PrepareQueues."""

    pending: int
    held: int
    dead: int
    prepared: int

    def __str__(self) -> str:
        held = f"{self.prepared} prepared, {self.held} leased or handed out"
        return f"{self.pending} pending ({held}), {self.dead} dead"


def use_of(center: TimeoutCenter, topic: Topic) -> Use:
    """Count a topic's tasks. Reads its pending rows; of other topics the index alone.

    Raises StoreUnavailable, and IndexUnavailable if the entries of some slot cannot be counted.
    """
    from toc.store.tasks.select import Selection

    prepared, count = prepared_of(center, topic), center.store.selections.count
    pending = Selection(TaskStatus.PENDING, biz_types=[topic.biz_type])
    held, dead = replace(pending, held=True), replace(pending, status=TaskStatus.DEAD)
    return Use(count(pending), count(held), count(dead), prepared)


def prepared_of(center: TimeoutCenter, topic: Topic) -> int:
    """Count the entries in the PrepareQueues of a topic. Raises IndexUnavailable."""
    prepared = 0
    for peek in center.queues.peek(topic.slots()).values() if center.queues.present else ():
        if isinstance(peek, IndexUnavailable):
            raise peek
        prepared += peek.prepared
    return prepared


def _deliver(doing: Doing, name: str, delivery: Delivery, *, wait: bool) -> Topic:
    """Change how the tasks of a topic are delivered.

    ``wait``: wait until none of its tasks is prepared or leased.

    Raises TopicInUse, with the counts, if it is not paused or something of it may run; UnknownTopic;
    IndexUnavailable and StoreUnavailable if it cannot be counted.
    """
    center = doing.center
    topic, version = _paused(center.store, name, "its delivery")
    if topic.delivery is delivery:
        return topic
    doing.progress("until every worker has noticed the pause")
    time.sleep(NOTICED_SECONDS)
    while True:
        if not (wait and (prepared := prepared_of(center, topic))):  # cheaper to ask than the rows
            found = use_of(center, topic)
            if not found.prepared and not found.held:
                break
            if not wait:
                raise TopicInUse(
                    f"the delivery of {name!r} was not changed, because its tasks may run: {found}; "
                    f"try again when they have ended, or add --wait"
                )
            prepared = found.prepared + found.held
        doing.progress(f"until {prepared} tasks have ended")
        time.sleep(LOOK_SECONDS)
    if not center.store.topics.deliver(name, version, delivery):
        raise TopicInUse(f"topic {name!r} was changed meanwhile, and its delivery was not; try again")
    return center.store.topics.get_with_version(name)[0]


def check_new(center: TimeoutCenter, topic: Topic, *, typed: bool) -> None:
    """Raise what creating a topic would raise now; ``typed``: also if its biz_type is taken."""
    check_native(topic.name, "name")
    if topic.target:
        center.store.targets.check_usable(topic.target, topic.name)
    topics = center.store.topics
    if typed and topic.biz_type in {*(other.biz_type for other in topics.list()), *topics.retired()}:
        raise TopicExists(f"biz_type {topic.biz_type} is, or was, that of another topic; `toc topic list`")


def check_change(center: TimeoutCenter, topic: Topic, changes: Mapping[str, Any]) -> None:
    """Raise what ``alter`` would raise now, except that tasks of a paused topic may run."""
    from toc.store.records.topics import altered

    rest = {name: value for name, value in changes.items() if name != "delivery"}
    altered(topic, rest)
    if rest.get("target"):
        center.store.targets.check_usable(rest["target"], topic.name)
    if "delivery" in changes:
        _check_paused(topic, "its delivery")


def _paused(store: Store, name: str, what: str) -> tuple[Topic, int]:
    """Return a topic and its version. Raises TopicInUse unless it is paused, and UnknownTopic."""
    topic, version = store.topics.get_with_version(name)
    _check_paused(topic, what)
    return topic, version


def _check_paused(topic: Topic, what: str) -> None:
    if not topic.paused:
        raise TopicInUse(
            f"topic {topic.name!r} is not paused: `toc topic pause {topic.name}` first, then change {what}"
        )


def _sure(doing: Doing, topic: str) -> None:
    get_topic(doing.center.store, topic)
    doing.confirm(f"delete topic {topic} for good")


@operation("topic.delete", "DELETE /v1/topics/{topic}", Right.DELETE_TOPIC, "Delete a topic",
           NAME, place=Place.LONG, check=_sure, asks=True)  # fmt: skip
def delete(doing: Doing, topic: str) -> Record:
    """Delete a paused topic without pending and dead tasks. Its biz_type is never used again.

    toc: First stop the programs that submit to it, and remove its handler from your application. Finished
    tasks are kept for the topic's retention.

    Example: toc topic delete order.close
    """
    store = doing.center.store
    one, version = _paused(store, topic, "it")
    if not one.closed:
        if not store.topics.close(topic, version):
            raise TopicInUse(f"topic {topic!r} was changed meanwhile, and not deleted; try again")
        one, version = store.topics.get_with_version(topic)
    try:
        doing.progress("until every program has noticed that it is closed")
        time.sleep(NOTICED_SECONDS)
        found = use_of(doing.center, one)  # without what is in callers' open transactions
        if any(found):
            raise TopicInUse(
                f"topic {topic!r} was not deleted: it has {found}; `toc bulk cancel --topic {topic}` and "
                f"`toc bulk purge --topic {topic}` end them"
            )
        if not store.topics.retire(one, version):
            raise TopicInUse(f"topic {topic!r} was changed meanwhile, and not deleted; try again")
    except (TocError, KeyboardInterrupt):
        with suppress(TocError):
            store.topics.alter(topic, closed=False)  # it stays, and takes tasks again
        raise
    return {"name": topic}


# --- as code declares it: each step is the operation that an operator would use, with its checks and audit


class Step(NamedTuple):
    """What becomes of one declared topic: ``refused`` tells the error that it meets, or would meet."""

    topic: str
    action: str
    """create, alter, none, or refused."""
    changes: dict[str, Any]
    was: dict[str, Any]
    refused: str = ""

    def changes_text(self) -> str:
        """Return the changes in a line."""
        return ", ".join(
            f"{name} {self.was[name]} -> {value}" if name in self.was else f"{name} {value}"
            for name, value in self.changes.items()
        )

    def record(self) -> Record:
        """Return it as JSON carries it."""
        changes = {name: {"was": self.was.get(name), "is": value} for name, value in self.changes.items()}
        return {
            "topic": self.topic, "action": self.action, "changes": changes, "refused": self.refused or None
        }  # fmt: skip


def sync_topics(
    center: TimeoutCenter, declared: Iterable[Declaration], perform: Callable[..., Record] | None
) -> list[Step]:
    """Create topics, alter what is named and differs: by ``perform``, which gets the operations with their
    values. Without it return what would be done, or refused. Nothing is deleted."""
    known = {topic.name: topic for topic in center.store.topics.list()}
    return [_synced(center, one, known.get(one.name), perform) for one in declared]


def _synced(
    center: TimeoutCenter, one: Declaration, topic: Topic | None, perform: Callable[..., Record] | None
) -> Step:
    """Bring one topic to its declaration. What is refused says why, and the others go on."""
    if topic is None:
        made = one.topic(0)
        step = Step(
            one.name, "create", {name: getattr(made, name) for name in ("slot_amount", *one.fields)}, {}
        )
    else:
        changes = one.changes(topic)
        was = {name: getattr(topic, name) for name in changes}
        step = Step(one.name, "alter" if changes else "none", changes, was)
    try:
        if topic is None:
            check_new(center, made, typed="biz_type" in step.changes)
            if perform is not None:
                perform(create, name=one.name, **{"biz_type": drawn_type(), **step.changes})
        elif step.changes:
            check_change(center, topic, step.changes)
            if perform is not None:
                perform(alter, topic=one.name, **step.changes)
    except TocError as exc:
        made_meanwhile = center.store.topics.get(one.name) if topic is None and perform is not None else None
        if made_meanwhile is not None:  # by another that syncs
            return _synced(center, one, made_meanwhile, perform)
        return step._replace(action="refused", refused=f"{type(exc).__name__}: {exc}")
    return step
