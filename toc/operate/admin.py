"""What operators do with topics, dead tasks, slots and the schema. Store and queues are passed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toc.config import Settings
from toc.coordination.coordinator import SlotRow
from toc.index.messages import Peek
from toc.maintenance.depths import depths
from toc.maintenance.passes import sweep_all
from toc.maintenance.sweep import Sweep, SweepCounts
from toc.model.errors import (
    ConfigError,
    IndexUnavailable,
    InvalidInput,
    UnknownTask,
    UnknownTopic,
)
from toc.model.task import TaskRow
from toc.model.topic import Slot, Topic, check_native, check_topic_name
from toc.operate.cluster import slot_owners
from toc.sdk.client import TimeoutCenter
from toc.sdk.parts import open_queues
from toc.sdk.submission import check_job_id
from toc.store.check import ShardStatus
from toc.store.store import Store
from toc.store.tasks.scan import of_type

if TYPE_CHECKING:
    from toc.store.migrate import Migrator


# --- topics -------------------------------------------------------------------------------------------------


def get_topic(store: Store, name: str) -> Topic:
    """Return the topic ``name``. Raises InvalidTopic or UnknownTopic."""
    topic = store.topics.get(check_topic_name(name))
    if topic is None:
        known = ", ".join(sorted(topic.name for topic in store.topics.list()))
        raise UnknownTopic(f"there is no topic {name!r}; there are: {known or 'none yet'}", name)
    return topic


def create_topic(
    center: TimeoutCenter, name: str, *, biz_type: int, slot_amount: int, **policies: Any
) -> Topic:
    """Create a topic; ``policies`` are fields of Topic.

    Raises InvalidTopic, TopicExists, UnknownTarget.
    """
    check_native(name, "name")
    topic = Topic(name, biz_type, slot_amount, **policies)
    if topic.target:
        center.store.targets.check_usable(topic.target, name)
    center.store.topics.create(topic)
    return topic


def alter_topic(store: Store, name: str, changes: Mapping[str, Any]) -> Topic:
    """Change fields of a topic and return it. Raises InvalidTopic, UnknownTopic, UnknownTarget or
    InvalidInput."""
    if not changes:
        raise InvalidInput(f"nothing to change on {name!r}: name at least one policy")
    if changes.get("target"):
        store.targets.check_usable(changes["target"], name)
    return store.topics.alter(name, **changes)


# --- a task ------------------------------------------------------------------------------------------


def get_row(store: Store, job_id: int) -> TaskRow:
    """Return a task's row, with the columns that only operators need. Raises InvalidInput or UnknownTask."""
    store.check_layout()
    row = store.get(check_job_id(job_id))
    if row is None:
        raise UnknownTask(
            f"there is no task {job_id}; finished ones are purged after their topic's retention"
        )
    return row


# --- the index ----------------------------------------------------------------------------------------------


def refill(
    center: TimeoutCenter,
    *,
    topic: Topic | None = None,
    progress: Callable[[float, SweepCounts], None] = lambda _part, _counts: None,
) -> SweepCounts:
    """Index every row that belongs in the index, of one topic or of all, at full speed, soonest first.

    ``progress`` gets the part done (0 to 1) and the counts so far. If some tables do not answer, it goes
    through all others, then raises StoreUnavailable or SchemaBehind. Raises ConfigError if there is no index.
    """
    if not center.store.identity.indexed():
        raise ConfigError(
            f"the tasks on {center.store.identity.place} are not indexed: their rows alone say what is due, "
            "and there is nothing to fill (`toc index on` has them indexed)"
        )
    center.catalog.refresh()
    sweep = Sweep(center.store, center.queues, center.catalog, center.clock)
    where = "" if topic is None else of_type(topic.biz_type)
    return sweep_all(sweep, center.store.tables, where=where, progress=progress)


# --- slots ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as operators see it.

    ``ownership`` says who owns it and why; None if nobody has heard of it yet. ``queues`` holds its counts,
    or the IndexUnavailable that says why there are none.
    """

    slot: Slot
    ownership: SlotRow | None
    queues: Peek | IndexUnavailable

    @property
    def overdue_ms(self) -> int | None:
        """For how many ms, by Redis' clock, the earliest task that none has taken has been due; None if
        unknown."""
        if isinstance(self.queues, IndexUnavailable) or self.queues.next_due is None:
            return None
        return max(0, self.queues.redis_now_ms - int(self.queues.next_due))


def slot_views(center: TimeoutCenter, topic: str | None = None) -> list[SlotView]:
    """Return every slot of all topics, or of ``topic``. Raises UnknownTopic, StoreUnavailable or
    CoordinationUnavailable."""
    store = center.store
    topics = [get_topic(store, topic)] if topic is not None else store.topics.list()
    by_slot = {Slot(row.topic, row.number): row for row in slot_owners(center)}
    slots = sorted(slot for each in topics for slot in each.slots())
    peeks = depths(store, center.queues, topics, slots, center.clock.now_ms())
    return [SlotView(slot, by_slot.get(slot), peek) for slot, peek in peeks.items()]


# --- schema -----------------------------------------------------------------------------------------------


def require_no_other(settings: Settings, statuses: Sequence[ShardStatus]) -> None:
    """Raise ConfigError if there is no task table while Redis remembers one: it was lost, or is elsewhere.

    A Redis that does not answer remembers nothing.
    """
    if settings.redis_url is None or not all(status.absent for status in statuses):
        return
    queues = open_queues(settings)
    try:
        owner = queues.owner()
    except IndexUnavailable:
        return
    finally:
        queues.close()
    if owner is not None:
        raise ConfigError(
            f"there is no task table on {statuses[0].server}, but this Redis and namespace belong to "
            f"{owner.name}: is this the right server? Restore what is lost, or run `toc db upgrade --new`, "
            "which makes a new and empty one"
        )


def migrator(settings: Settings) -> Migrator:
    """Return the object that upgrades and checks every shard of these settings. Raises ConfigError."""
    from toc.store.migrate import Migrator  # imported here, because alembic is slow to import

    return Migrator(
        settings.need_database_urls(),
        databases=settings.databases,
        tables=settings.tables,
        prefix=settings.database_prefix,
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.read_timeout,
        write_timeout=settings.write_timeout,
    )
