"""What operators do with the schema and the index: upgrade, check, refill, switch on and off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from toc.model.access import Action as Right
from toc.model.errors import ConfigError, IndexUnavailable
from toc.operate.cluster import living_workers
from toc.operate.operation import Doing, Record, operation

if TYPE_CHECKING:
    from toc.config import Settings
    from toc.maintenance.sweep import SweepCounts
    from toc.model.topic import Topic
    from toc.sdk.client import TimeoutCenter
    from toc.store.check import ShardStatus
    from toc.store.migrate import Migrator


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
    from toc.maintenance.sweep import Sweep
    from toc.maintenance.sweeper import sweep_all
    from toc.store.tasks.scan import of_types

    if not center.store.identity.indexed():
        raise ConfigError(
            f"the tasks on {center.store.identity.place} are not indexed: their rows alone say what is due, "
            "and there is nothing to fill (`toc index on` has them indexed)"
        )
    center.catalog.refresh()
    sweep = Sweep(center.store, center.queues, center.catalog, center.clock)
    where = "" if topic is None else of_types([topic.biz_type])
    return sweep_all(sweep, center.store.tables, where=where, progress=progress)


def require_no_other(settings: Settings, statuses: Sequence[ShardStatus]) -> None:
    """Raise ConfigError if there is no task table while Redis remembers one: it was lost, or is elsewhere.

    A Redis that does not answer remembers nothing.
    """
    from toc.sdk.parts import open_queues

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


# --- whether there is an index


def _can_switch(doing: Doing, *, on: bool) -> None:
    """Raise ConfigError, UnfitServer or Unavailable if the index cannot be switched on or off now."""
    from toc.index.preflight import require_fit

    center = doing.center
    if on:
        if center.settings.redis_url is None:
            raise ConfigError("TOC_REDIS_URL is not set: set it, here and for every process, before")
        require_fit(center.queues)
    others = center.store.other_rung(center.settings.zookeeper)
    if hosts := sorted({row.member.host for row in living_workers(center)} | others.keys()):
        raise ConfigError(
            f"workers or gateways are alive on {', '.join(hosts)}: stop them, then run this again, then "
            "start them with the other settings"
        )


def _switch(doing: Doing, *, on: bool) -> Record:
    identity = doing.center.store.identity
    before = identity.indexed()
    identity.set_indexed(on)
    return {"indexed": on, "changed": before is not on}


@operation("index.on", "", Right.CHANGE_CLUSTER, "Index tasks",
           check=lambda doing: _can_switch(doing, on=True),
           target=lambda doing: doing.center.settings.cluster)  # fmt: skip
def on(doing: Doing) -> Record:
    """Have the tasks indexed in Redis. First stop workers and gateways, and set TOC_REDIS_URL for all.

    Submits go on. Workers that start then fill the index, what is due soonest first.

    toc: Example: toc index on
    """
    return _switch(doing, on=True)


@operation("index.off", "", Right.CHANGE_CLUSTER, "Index no tasks",
           check=lambda doing: _can_switch(doing, on=False),
           target=lambda doing: doing.center.settings.cluster)  # fmt: skip
def off(doing: Doing) -> Record:
    """Have workers take tasks by their rows alone. First stop workers and gateways; then unset TOC_REDIS_URL.

    Submits go on. What applications that were started with it still index is not looked at.

    toc: Example: toc index off
    """
    return _switch(doing, on=False)
