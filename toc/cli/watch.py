"""toc top | slots, and how what comes due is shown: pictures of the cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import typer

from toc.cli.operations import act, acted
from toc.cli.output import console, end_if_lost, print_json, say, screen, show, show_one, table
from toc.cli.values import Json, flag, opened, option
from toc.model.clock import span
from toc.model.errors import InvalidInput
from toc.operate import cluster
from toc.operate.operation import Record

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toc.operate.top import Picture

BAR = 40
"""The longest bar."""
_COLUMNS = ("topic", "overdue", "hour", "day", "week", "later")
_DAY = 24


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
    return Group(*parts, *([table(list(map(_topic_line, topics)))] if topics else ()))


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


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    """Return a duration for people; short ones to the tenth of a millisecond."""
    return "-" if value is None else f"{value * 1000:.1f} ms" if value < 0.01 else span(value)


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
        record = acted(cluster.slots, **values)
        show(record["slots"], as_json=as_json, empty=empty)
        if record["more"]:
            say("only the first tasks of each table are counted: there may be more")
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


def show_what_if(record: Record, *, as_json: bool) -> None:
    """Print what would pile up."""
    if as_json:
        print_json(record)
        return
    show_one({key: value for key, value in record.items() if key not in ("steps", "missing")}, as_json=False)
    say("without --rate at that of all workers, whatever the topic's concurrency or run time allow;")
    say("tasks that are not submitted yet are not counted")
    say("--json has what would wait at the end of each minute, later of each hour")
    say_missing(record)


def show_due(record: Record, *, as_json: bool) -> None:
    """Print what comes due, as bars."""
    if as_json:
        print_json(record)
        return
    topics = [{key: one[key] for key in _COLUMNS} for one in record["topics"]]
    if record["others"] and any(record["others"][key] for key in _COLUMNS[1:]):
        topics.append({"topic": "(others)", **{key: record["others"][key] for key in _COLUMNS[1:]}})
    show(topics, as_json=False, empty="nothing is pending")
    total = record["total"]
    minute, hour = (datetime.fromisoformat(record[key]) for key in ("minutes_from", "hours_from"))
    hours = total["hours"]
    _bars("next hour", "%H:%M", minute, timedelta(minutes=1), total["minutes"])
    _bars("next day", "%H:%M", hour, timedelta(hours=1), hours[:_DAY])
    days = [sum(hours[first : first + _DAY]) for first in range(0, len(hours), _DAY)]
    _bars("next week, days from now", "%a %d", hour, timedelta(days=1), days)
    _remarks(record)


def _bars(title: str, form: str, start: datetime, step: timedelta, counts: Sequence[int]) -> None:
    """Print a bar for each time at which something is due."""
    most = max(counts, default=0)
    if not most:
        return
    print(f"\n{title} (UTC)")
    for place, count in enumerate(counts):
        if count:
            print(f"{start + place * step:{form}} {count:>12,} {'#' * -(-BAR * count // most)}")


def _remarks(record: Record) -> None:
    """Say how old the counts are, and what is not in them."""
    for part, age in record["ages"].items():
        if age["oldest"] is not None:
            say(f"{part} were counted at most {age['oldest']:.0f} s ago")
    for one in record["beyond"]:
        say(
            f"{one['due']:,} are due at {one['at'][11:16]}: more than the workers have started in a minute, "
            f"{record['capacity']:,}"
        )
    say_missing(record)


def say_missing(record: Record) -> None:
    """Say which tables are not, or not fully, in a record."""
    for one in record["missing"]:
        age = "" if one["age"] is None else f", counted {one['age']:.0f} s ago"
        say(f"missing: {one['table']}: {one['error']}{age}")
