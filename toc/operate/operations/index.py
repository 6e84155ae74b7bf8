"""Whether there is an index of the tasks in Redis, or the database alone."""

from __future__ import annotations

from toc.model.access import Action as Right
from toc.model.errors import ConfigError
from toc.operate.operation import Doing, Record, operation


def _can_switch(doing: Doing, *, on: bool) -> None:
    """Raise ConfigError, UnfitServer or Unavailable if the index cannot be switched on or off now."""
    from toc.index.preflight import require_fit
    from toc.operate.cluster import living_hosts

    center = doing.center
    if on:
        if center.settings.redis_url is None:
            raise ConfigError("TOC_REDIS_URL is not set: set it, here and for every process, before")
        require_fit(center.queues)
    if hosts := living_hosts(center):
        raise ConfigError(
            f"workers or gateways are alive on {', '.join(hosts)}: stop them, then run this again, then "
            "start them with the other settings"
        )


def _switch(doing: Doing, *, on: bool) -> Record:
    identity = doing.center.store.identity
    before = identity.indexed()
    identity.set_indexed(on)
    return {"indexed": on, "changed": before is not on}


@operation(
    "index.on", "", Right.CHANGE_CLUSTER, "Index tasks",
    check=lambda doing: _can_switch(doing, on=True),
    target=lambda doing: doing.center.settings.cluster,
)  # fmt: skip
def on(doing: Doing) -> Record:
    """Have the tasks indexed in Redis. First stop workers and gateways, and set TOC_REDIS_URL for all.

    Submits go on. Workers that start then fill the index, what is due soonest first.
    """
    return _switch(doing, on=True)


@operation(
    "index.off", "", Right.CHANGE_CLUSTER, "Index no tasks",
    check=lambda doing: _can_switch(doing, on=False),
    target=lambda doing: doing.center.settings.cluster,
)  # fmt: skip
def off(doing: Doing) -> Record:
    """Have workers take tasks by their rows alone. First stop workers and gateways; then unset TOC_REDIS_URL.

    Submits go on. What applications that were started with it still index is not looked at.
    """
    return _switch(doing, on=False)
