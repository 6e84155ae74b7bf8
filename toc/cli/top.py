"""toc top"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.output import console, print_json
from toc.cli.values import Json, opened
from toc.errors import CoordinationUnavailable, InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toc.client import TimeoutCenter
    from toc.config import Settings
    from toc.coordination.operator import Operator
    from toc.top import Picture, WorkerNow


def top(
    daemon: Annotated[
        list[str] | None,
        typer.Option("--daemon", metavar="HOST:PORT", help="Read this daemon's /metrics; may be repeated."),
    ] = None,
    interval: Annotated[float, typer.Option(metavar="S", help="Seconds from one look to the next.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, for one interval, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a cluster: rates, lateness, what waits where, slots by worker, dead tasks, what is out of reach.

    Rates and lateness come from the daemons' /metrics: from --daemon, else from the port of
    TOC_METRICS_ADDRESS on every host that has workers. All else comes from Redis and ZooKeeper.
    """
    from toc.top import Top

    if not 0.1 <= interval <= 3600:
        raise InvalidInput(f"--interval must be 0.1 to 3600 seconds, not {interval:g}")
    with opened() as center:
        owners = _Owners(center)
        addresses = _addresses(center.settings, daemon)
        view = Top(center, daemons=addresses, workers=owners.read)
        try:
            view.look()
            if once or as_json:
                time.sleep(interval)
                picture = view.look()
                if as_json:
                    print_json(_record(picture))
                else:
                    console().print(_drawn(picture, center.settings.cluster))
            else:
                _watch(center, view.look, interval)
        finally:
            owners.close()


def _watch(center: TimeoutCenter, look: Callable[[], Picture], interval: float) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            live.update(_drawn(look(), center.settings.cluster), refresh=True)


def _addresses(
    settings: Settings, given: Sequence[str] | None
) -> Callable[[Sequence[WorkerNow]], Sequence[str]]:
    """Where the daemons answer: as given, else the configured port of every host; our own as configured."""
    host, _, port = (settings.metrics_address or "").rpartition(":")
    if given or not port or int(port) == 0:
        return lambda _workers: list(given or ())
    own = f"{host if host not in ('', '0.0.0.0', '[::]') else '127.0.0.1'}:{port}"  # noqa: S104 - to be replaced
    if settings.zookeeper is None:
        return lambda _workers: [own]
    return lambda workers: [
        own if name == settings.host else f"{name}:{port}" for name in sorted({w.host for w in workers})
    ]


class _Owners:
    """Who owns what: from ZooKeeper, over one session, or from the claims in Redis."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self._visit: Operator | None = None

    def read(self) -> list[WorkerNow]:
        """Raises CoordinationUnavailable, IndexUnavailable, StoreUnavailable."""
        from toc import admin
        from toc.coordination.operator import Operator
        from toc.top import WorkerNow

        center, settings = self._center, self._center.settings
        if settings.zookeeper is None:
            owned = admin.local_workers(center.store, center.queues)
            return [WorkerNow(name, name.rsplit("-", 2)[0], count) for name, count in sorted(owned.items())]
        if self._visit is None:
            visit = Operator(
                settings.zookeeper, cluster=settings.cluster, connect_timeout=settings.connect_timeout
            )
            visit.__enter__()
            self._visit = visit
        try:
            rows = self._visit.workers()
        except CoordinationUnavailable:
            self.close()  # a new session next time
            raise
        return [
            WorkerNow(row.worker_id, row.host, row.owned, row.assigned, row.drained, row.leader)
            for row in sorted(rows, key=lambda row: row.worker_id)
        ]

    def close(self) -> None:
        """End the session, if there is one."""
        visit, self._visit = self._visit, None
        if visit is not None:
            visit.__exit__(None, None, None)


def _record(picture: Picture) -> dict[str, Any]:
    return {
        "seconds": picture.seconds,
        "daemons": picture.daemons,
        "topics": [asdict(topic) for topic in picture.topics],
        "workers": [asdict(worker) for worker in picture.workers],
        "trouble": list(picture.trouble),
    }


def _drawn(picture: Picture, cluster: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rates = [topic.ended_per_second for topic in picture.topics if topic.ended_per_second is not None]
    head = Text.assemble(
        (f"toc {cluster}", "bold"),
        time.strftime("   %H:%M:%S   "),
        f"{len(picture.workers)} workers, {picture.daemons} daemons answer",
        f"   {sum(rates):,.0f} tries/s" if rates else "",
    )
    topics = Table(expand=False, pad_edge=False)
    topics.add_column("topic")
    for name in (
        "tries/s", "retries/s", "late p50", "late p99", "handler p99",
        "running", "waiting", "due", "overdue", "prepared", "scheduled", "dead",
    ):  # fmt: skip
        topics.add_column(name, justify="right")
    for topic in picture.topics:
        late = topic.overdue >= 1 and not topic.paused
        topics.add_row(
            Text(topic.topic + (" (paused)" if topic.paused else ""), style="dim" if topic.paused else ""),
            _rate(topic.ended_per_second),
            _rate(topic.retried_per_second),
            _seconds(topic.lateness_p50),
            Text(_seconds(topic.lateness_p99), style="red" if (topic.lateness_p99 or 0) >= 1 else ""),
            _seconds(topic.handler_p99),
            _count(topic.running),
            _count(topic.waiting),
            _count(topic.due),
            Text(_seconds(topic.overdue or None), style="red" if late else ""),
            _count(topic.prepared),
            _count(topic.scheduled),
            Text(_count(topic.dead), style="yellow" if topic.dead else ""),
        )
    workers = Table(expand=False, pad_edge=False)
    workers.add_column("worker")
    workers.add_column("host")
    workers.add_column("owned", justify="right")
    workers.add_column("assigned", justify="right")
    workers.add_column("")
    for worker in picture.workers:
        notes = [name for name, holds in (("drained", worker.drained), ("leads", worker.leader)) if holds]
        if worker.assigned is not None and worker.assigned != worker.owned:
            notes.append("slots are moving")
        workers.add_row(
            worker.worker, worker.host, _count(worker.owned), _count(worker.assigned), ", ".join(notes)
        )
    trouble = [Text(f"! {line}", style="red") for line in picture.trouble]
    return Group(head, *trouble, topics, workers)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    """A duration as one reads it: 0.8 ms, 120 ms, 4.2 s, 15 min."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.1f} ms" if value < 0.01 else f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:,.0f} min"
