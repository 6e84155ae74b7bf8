"""toc worker | slots | workers | intents | drain | undrain | pin | unpin | weight | unweight | rebalance"""

from __future__ import annotations

import time

import typer

from toc.cli.operations import act, acted, made, plain
from toc.cli.options import Json, flag, option
from toc.cli.output import screen, show, table
from toc.cli.streams import end_if_lost
from toc.cli.values import daemon_settings, opened
from toc.model.errors import InvalidInput, NotInstalled
from toc.operate.operation import Record
from toc.operate.operations import cluster

_WORKERS = (
    *("worker", "host", "pid", "version", "protocol", "weight", "owned", "assigned", "tables", "drained"),
    *("leader", "joined", "topics", "metrics", "out_of_reach", "lost_threads"),
)
"""The columns of workers; `toc intents` shows who asked for what."""


def worker(
    app: str | None = option("MODULE:NAME", "Your TimeoutCenter: shop.deadlines:center."),
    webhooks: bool = flag("--webhooks", "Send the tasks of topics whose delivery is webhook."),
    processes: int | None = option("N", "Worker processes. Default: one per core."),
    threads: int | None = option("N", "Handlers that each process runs at once. Default 16."),
) -> None:
    """Run handlers, send webhooks, or both: the daemon of this host. SIGTERM or Ctrl-C stops it.

    Examples: toc worker --app shop.deadlines:center --processes 4
              toc worker --webhooks
    """
    if app is None and not webhooks:
        raise InvalidInput("give --app MODULE:NAME, --webhooks, or both")
    asked = {"processes": processes, "threads": threads}
    settings = daemon_settings(**{name: value for name, value in asked.items() if value is not None})
    if webhooks:
        check_webhooks()
    from toc.worker.app import NO_HANDLERS
    from toc.worker.daemon.start import run_daemon

    raise typer.Exit(run_daemon(NO_HANDLERS if app is None else app, settings, webhooks=webhooks))


def check_webhooks() -> None:
    """Raise NotInstalled unless webhooks can be sent from here."""
    try:
        import toc.webhooks.sender  # noqa: F401 - imports the HTTP client
    except ImportError as exc:
        raise NotInstalled("--webhooks needs aiohttp", "webhooks") from exc


def slots(
    topic: str | None = option("NAME", "Only this topic."),
    watch: bool = flag("--watch", "Refresh each second until Ctrl-C."),
    as_json: Json = False,
) -> None:
    """Show every slot: its owner and why, its tasks, how long the first that none has taken has been due.

    What workers have taken and cannot start is in `toc top`.
    """
    if watch and as_json:
        raise InvalidInput("give --watch or --json, not both")
    values: Record = {} if topic is None else {"topic": topic}
    empty = "no topics, so no slots"
    if not watch:
        show(acted(cluster.slots, **values)["slots"], as_json=as_json, empty=empty)
        return
    with opened() as center, screen() as draw:
        while True:
            # Those that are late come first: not all may have room.
            found = sorted(act(cluster.slots, center, **values)["slots"], key=_late, reverse=True)
            draw(table(found) if found else empty)
            end_if_lost()
            time.sleep(1)


def _late(slot: Record) -> bool:
    return (slot["overdue"] or 0) >= 1


@made(cluster.workers)
def workers(record: Record, *, as_json: bool) -> None:
    """Example: toc workers --json"""
    found = record["workers"]
    if not as_json:
        found = [{key: one[key] for key in _WORKERS if key in one} for one in found]
    empty = "no workers; start one on each host with `toc worker --app ...`"
    show(found, as_json=as_json, empty=empty)


@made(cluster.intents)
def intents(record: Record, *, as_json: bool) -> None:
    """Example: toc intents --json"""
    empty = "no drains, pins or weights: slots go where balance puts them"
    show(record["intents"], as_json=as_json, empty=empty)


drain, undrain = plain(cluster.drain), plain(cluster.undrain)
pin, unpin = plain(cluster.pin, arguments=2), plain(cluster.unpin)
weight, unweight = plain(cluster.weigh, arguments=2), plain(cluster.unweigh)


@made(cluster.rebalance)
def rebalance(record: Record, *, as_json: bool) -> None:
    """Example: toc rebalance --dry-run"""
    show(record["moves"], as_json=as_json, empty="nothing to move: all is even")
