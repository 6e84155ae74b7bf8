"""toc top"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from toc.cli.options import Json, flag, option
from toc.cli.output import console, print_json, say, screen, table
from toc.cli.streams import end_if_lost
from toc.cli.values import opened
from toc.model.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toc.operate.operation import Record
    from toc.operate.top import Picture


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
        view, cluster = Top(center, daemon or ()), center.settings.cluster
        view.look()
        if not (once or as_json):
            with screen() as draw:
                while True:
                    time.sleep(interval)
                    draw(_drawn(view.look(), cluster))
                    end_if_lost()
        time.sleep(interval)
        picture = view.look()
        if as_json:
            print_json(asdict(picture))
        else:
            console().print(_drawn(picture, cluster))
        if view.workers_error is not None:
            raise view.workers_error
        if picture.silent:
            say(f"no answer from {', '.join(picture.silent)}: their numbers are missing")
            raise typer.Exit(1)


def _drawn(picture: Picture, cluster: str) -> RenderableType:
    """Draw a picture: what is out of reach and late topics first, as a terminal may have no room for all
    lines."""
    from rich.console import Group
    from rich.text import Text

    rates = [topic["ended_per_second"] for topic in picture.topics if topic["ended_per_second"] is not None]
    head = Text.assemble(
        (f"toc {cluster}", "bold"),
        time.strftime("   %H:%M:%S   "),
        f"{len(picture.workers)} workers, {picture.daemons} daemons answer",
        f"   {sum(rates):,.0f} tries/s" if rates else "",
    )
    parts: list[RenderableType] = [head, *(Text(f"! {line}", style="red") for line in picture.trouble)]
    topics = sorted(picture.topics, key=_is_late, reverse=True)
    tables = list(map(_topic_line, topics)), list(map(_worker_line, picture.workers))
    return Group(*parts, *(table(lines) for lines in tables if lines))


def _is_late(topic: Record) -> bool:
    return topic["overdue"] >= 1 and not topic["paused"]


def _topic_line(topic: Record) -> Record:
    from rich.text import Text

    paused, p99 = topic["paused"], topic["lateness_p99"]
    return {
        "topic": Text(topic["topic"] + (" (paused)" if paused else ""), style="dim" if paused else ""),
        "tries/s": _rate(topic["ended_per_second"]),
        "retries/s": _rate(topic["retried_per_second"]),
        "late_p50": _seconds(topic["lateness_p50"]),
        "late_p99": Text(_seconds(p99), style="red" if (p99 or 0) >= 1 else ""),
        "handler_p99": _seconds(topic["handler_p99"]),
        "running": _count(topic["running"]),
        "waiting": _count(topic["waiting"]),
        "due": _count(topic["due"]),
        "overdue": Text(_seconds(topic["overdue"] or None), style="red" if _is_late(topic) else ""),
        "prepared": _count(topic["prepared"]),
        "scheduled": _count(topic["scheduled"]),
        "dead": Text(_count(topic["dead"]), style="yellow" if topic["dead"] else ""),
    }


def _worker_line(worker: Record) -> Record:
    notes = [note for key, note in (("drained", "drained"), ("leader", "leads")) if worker[key]]
    if worker["assigned"] not in (None, worker["owned"]):
        notes.append("slots are moving")
    if worker["tables_assigned"] != worker["tables"]:
        notes.append("tables are moving")
    shown = {key: worker[key] for key in ("worker", "host", "owned", "assigned", "tables")}
    return shown | {"": ", ".join(notes)}


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
