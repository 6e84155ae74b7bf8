"""What may be done to a topic only while nothing of it runs: change its delivery, delete it.

Both need a paused topic. Every worker notices a pause within NOTICED_SECONDS. After that nothing new is
taken, and what is prepared or leased can be counted. Every write is guarded by the version of the topic at
the count, so a resume in between is never overlooked.

Delete goes in this order, and can be repeated after any interruption:

    closed      submits are refused, in every process that has read the topic table since
    counted     what is pending, held, dead: if anything is, the topic is opened again and the call refused
    retired     the biz_type, for good; then the topic's row goes; finished rows live out their retention
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from toc.model.catalog import NOTICED_SECONDS
from toc.model.errors import IndexUnavailable, TocError, TopicExists, TopicInUse
from toc.model.task import TaskStatus
from toc.model.topic import Delivery, Topic, check_native
from toc.operate import admin
from toc.sdk.client import TimeoutCenter
from toc.store.records.topics import altered
from toc.store.store import Store
from toc.store.tasks.select import Selection

LOOK_SECONDS = 0.5

Progress = Callable[[str], None]
"""Called with a text that says what the function waits for."""


class Use(NamedTuple):
    """How many tasks of a topic have not ended well. ``held``: of the pending, those leased or handed out;
    ``prepared``: entries in the PrepareQueues."""

    pending: int
    held: int
    dead: int
    prepared: int

    def __str__(self) -> str:
        return (
            f"{self.pending} pending ({self.prepared} prepared, {self.held} leased or handed out), "
            f"{self.dead} dead"
        )


def use_of(center: TimeoutCenter, topic: Topic) -> Use:
    """Count a topic's tasks. Reads all pending and dead rows.

    Raises StoreUnavailable, and IndexUnavailable if the entries of some slot cannot be counted.
    """
    prepared, count = prepared_of(center, topic), center.store.selections.count
    pending = Selection(TaskStatus.PENDING, biz_types=[topic.biz_type])
    return Use(
        count(pending),
        count(replace(pending, held=True)),
        count(replace(pending, status=TaskStatus.DEAD)),
        prepared,
    )


def prepared_of(center: TimeoutCenter, topic: Topic) -> int:
    """Count the entries in the PrepareQueues of a topic. Raises IndexUnavailable."""
    prepared = 0
    for peek in center.queues.peek(topic.slots()).values() if center.queues.present else ():
        if isinstance(peek, IndexUnavailable):
            raise peek
        prepared += peek.prepared
    return prepared


def change_delivery(
    center: TimeoutCenter,
    name: str,
    delivery: Delivery,
    *,
    wait: bool = False,
    progress: Progress = lambda _text: None,
) -> Topic:
    """Change how the tasks of a topic are delivered.

    ``wait``: wait until none of its tasks is prepared or leased.

    Raises TopicInUse, with the counts, if it is not paused or something of it may run; UnknownTopic;
    IndexUnavailable and StoreUnavailable if it cannot be counted.
    """
    topic, version = _paused(center.store, name, "its delivery")
    if topic.delivery is delivery:
        return topic
    progress("until every worker has noticed the pause")
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
        progress(f"until {prepared} tasks have ended")
        time.sleep(LOOK_SECONDS)
    if not center.store.topics.deliver(name, version, delivery):
        raise TopicInUse(f"topic {name!r} was changed meanwhile, and its delivery was not; try again")
    return center.store.topics.get_with_version(name)[0]


def alter_topic(
    center: TimeoutCenter, name: str, changes: Mapping[str, Any], *, wait: bool, progress: Progress
) -> Topic:
    """Change fields of a topic, its delivery as ``change_delivery`` does, and return it.

    Raises InvalidTopic, UnknownTopic, UnknownTarget, InvalidInput or TopicInUse.
    """
    rest = dict(changes)
    delivery = rest.pop("delivery", None)
    if delivery is None:
        return admin.alter_topic(center.store, name, rest)
    # Refuse the rest first: a refusal must not leave half of what was asked.
    check_change(center, admin.get_topic(center.store, name), changes)
    topic = change_delivery(center, name, delivery, wait=wait, progress=progress)
    return admin.alter_topic(center.store, name, rest) if rest else topic


def check_new(center: TimeoutCenter, topic: Topic, *, typed: bool) -> None:
    """Raise what creating a topic would raise now; ``typed``: its biz_type is wanted, not to be drawn."""
    check_native(topic.name, "name")
    if topic.target:
        center.store.targets.check_usable(topic.target, topic.name)
    taken = {other.biz_type for other in center.store.topics.list()} | set(center.store.topics.retired())
    if typed and topic.biz_type in taken:
        raise TopicExists(f"biz_type {topic.biz_type} is, or was, that of another topic; `toc topic list`")


def check_change(center: TimeoutCenter, topic: Topic, changes: Mapping[str, Any]) -> None:
    """Raise what ``alter_topic`` would raise now, except that tasks of a paused topic may run."""
    rest = {name: value for name, value in changes.items() if name != "delivery"}
    altered(topic, rest)
    if rest.get("target"):
        center.store.targets.check_usable(rest["target"], topic.name)
    if "delivery" in changes:
        _check_paused(topic, "its delivery")


def delete_topic(center: TimeoutCenter, name: str, *, progress: Progress = lambda _text: None) -> None:
    """Delete a paused topic; its biz_type is never used again.

    Refused while it has pending or dead tasks. It does not see tasks of callers' transactions that are still
    open (``connection=``). Finished rows stay until the topic's retention is over, and a few small keys in
    Redis. Raises TopicInUse, with the counts, UnknownTopic, StoreUnavailable and IndexUnavailable.
    """
    store = center.store
    topic, version = _paused(store, name, "it")
    if not topic.closed:
        if not store.topics.close(name, version):
            raise TopicInUse(f"topic {name!r} was changed meanwhile, and not deleted; try again")
        topic, version = store.topics.get_with_version(name)
    try:
        progress("until every program has noticed that it is closed")
        time.sleep(NOTICED_SECONDS)
        found = use_of(center, topic)
        if any(found):
            raise TopicInUse(
                f"topic {name!r} was not deleted: it has {found}; `toc cancel --topic {name} --all` and "
                f"`toc dead purge --topic {name} --all` end them"
            )
        if not store.topics.retire(topic, version):
            raise TopicInUse(f"topic {name!r} was changed meanwhile, and not deleted; try again")
    except (TocError, KeyboardInterrupt):
        with suppress(TocError):
            store.topics.alter(name, closed=False)  # it stays, and takes tasks again
        raise


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
