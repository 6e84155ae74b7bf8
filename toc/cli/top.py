"""toc top"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from toc.cli.options import Json, flag, option
from toc.cli.output import and_more, console, most_urgent, print_json, say, screen, table
from toc.cli.streams import end_if_lost
from toc.cli.values import address, opened
from toc.model.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from toc.operate.top import Picture, TopicNow, WorkerNow


def top(
    daemon: list[str] | None = option("HOST:PORT", "Read this daemon's /metrics; may be repeated."),
    interval: float = option("S", "Seconds between two measurements.", default=2.0),
    once: bool = flag("--once", "Measure one interval, print it, and exit."),
    as_json: Json = False,
) -> None:
    """Watch a cluster: rates, lateness, slots, dead tasks, servers out of reach.

    Rates and lateness come from the daemons' /metrics: those of --daemon, else those that the daemons
    announce in ZooKeeper (TOC_METRICS_ADDRESS). All else comes from Redis and ZooKeeper.

    With --once or --json it exits with 4 if the workers could not be read, with 1 if a daemon did not answer.
    """
    from toc.operate.top import Top

    if not 0.1 <= interval <= 3600:
        raise InvalidInput(f"--interval must be 0.1 to 3600 seconds, not {interval:g}")
    with opened() as center:
        view, cluster = Top(center, [address(each) for each in daemon or ()]), center.settings.cluster
        view.look()
        if not (once or as_json):
            with screen() as (to, draw):
                while True:
                    time.sleep(interval)
                    draw(_drawn(view.look(), cluster, to, cut=to.is_terminal))
                    end_if_lost()
        time.sleep(interval)
        picture = view.look()
        if as_json:
            print_json(asdict(picture))
        else:
            to = console()
            to.print(_drawn(picture, cluster, to))
        if view.workers_error is not None:
            raise view.workers_error
        if picture.silent:
            say(f"no answer from {', '.join(picture.silent)}: their numbers are missing")
            raise typer.Exit(1)


def _drawn(picture: Picture, cluster: str, screen: Console, *, cut: bool = False) -> RenderableType:
    """Draw a picture no wider than ``screen``, and with ``cut`` no higher either."""
    from rich.console import Group
    from rich.text import Text

    rates = [topic.ended_per_second for topic in picture.topics if topic.ended_per_second is not None]
    head = Text.assemble(
        (f"toc {cluster}", "bold"),
        time.strftime("   %H:%M:%S   "),
        f"{len(picture.workers)} workers, {picture.daemons} daemons answer",
        f"   {sum(rates):,.0f} tries/s" if rates else "",
    )
    trouble = [Text(f"! {line}", style="red") for line in picture.trouble]
    topics, workers = picture.topics, picture.workers
    if cut:
        rows = screen.height - 14 - sum(len(line.wrap(screen, screen.width)) for line in trouble)
        topics = most_urgent(topics, max(rows // 2, rows - len(workers)), _urgency)
        workers = most_urgent(workers, rows - len(topics), lambda each: each.assigned != each.owned)
    parts: list[RenderableType] = [head, *trouble]
    for lines, spare, words, more in (
        ([_topic_line(each) for each in topics], _TOPIC_SPARE, ("topic",), len(picture.topics) - len(topics)),
        (
            [_worker_line(each) for each in workers],
            (),
            ("worker", "host", ""),
            len(picture.workers) - len(workers),
        ),
    ):
        if lines:
            parts.append(table(lines, screen.width, spare, words=words)[0])
        if more:
            parts.append(and_more(more, f"{words[0]}s"))
    return Group(*parts)


_TOPIC_SPARE = ("handler_p99", "prepared", "retries/s", "late_p50", "running", "waiting")


def _urgency(topic: TopicNow) -> tuple[float, float]:
    return (0.0 if topic.paused else topic.overdue, topic.ended_per_second or 0.0)


def _topic_line(topic: TopicNow) -> dict[str, Any]:
    from rich.text import Text

    late = topic.overdue >= 1 and not topic.paused
    return {
        "topic": Text(
            topic.topic + (" (paused)" if topic.paused else ""), style="dim" if topic.paused else ""
        ),
        "tries/s": _rate(topic.ended_per_second),
        "retries/s": _rate(topic.retried_per_second),
        "late_p50": _seconds(topic.lateness_p50),
        "late_p99": Text(_seconds(topic.lateness_p99), style="red" if (topic.lateness_p99 or 0) >= 1 else ""),
        "handler_p99": _seconds(topic.handler_p99),
        "running": _count(topic.running),
        "waiting": _count(topic.waiting),
        "due": _count(topic.due),
        "overdue": Text(_seconds(topic.overdue or None), style="red" if late else ""),
        "prepared": _count(topic.prepared),
        "scheduled": _count(topic.scheduled),
        "dead": Text(_count(topic.dead), style="yellow" if topic.dead else ""),
    }


def _worker_line(worker: WorkerNow) -> dict[str, Any]:
    notes = [name for name, holds in (("drained", worker.drained), ("leads", worker.leader)) if holds]
    if worker.assigned is not None and worker.assigned != worker.owned:
        notes.append("slots are moving")
    if worker.tables_assigned != worker.tables:
        notes.append("tables are moving")
    return {
        "worker": worker.worker,
        "host": worker.host,
        "owned": _count(worker.owned),
        "assigned": _count(worker.assigned),
        "tables": _count(worker.tables),
        "": ", ".join(notes),
    }


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    """Return a duration for people: 0.8 ms, 120 ms, 4.2 s, 15 min."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.1f} ms" if value < 0.01 else f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:,.0f} min"
