"""toc due, toc lateness"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from toc.cli.operations import acted, made
from toc.cli.options import Json, option
from toc.cli.output import print_json, say, show, show_one
from toc.cli.values import number
from toc.model.clock import parse_duration
from toc.model.errors import InvalidInput
from toc.operate.operation import Record
from toc.operate.operations import due as operations

BAR = 40
"""The longest bar."""
_COLUMNS = ("topic", "overdue", "hour", "day", "week", "later")
_DAY = 24


def due(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic.")] = None,
    what_if: str | None = option("TIME", "Show what would pile up in a pause of 2h, 30m, 1d from now on."),
    rate: str | None = option("N", "With --what-if: tasks a second that are started afterwards."),
    as_json: Json = False,
) -> None:
    """Show how many tasks come due in each minute of the next hour and each hour of the next week.

    Examples: toc due
              toc due order.close --what-if 2h --rate 50
    """
    values: dict[str, Any] = {} if topic is None else {"topic": topic}
    if what_if is None:
        if rate is not None:
            raise InvalidInput("--rate goes with --what-if")
        record = acted(operations.show, **values)
    else:
        if rate is not None:
            values["rate"] = number(rate, "--rate", 0.001, 1e6)
        record = acted(operations.what_if, pause=parse_duration(what_if), **values)
    if as_json:
        print_json(record)
    elif what_if is None:
        _show_due(record)
    else:
        show_one(
            {key: value for key, value in record.items() if key not in ("steps", "missing")}, as_json=False
        )
        say("--json has what would wait at the end of each minute, later of each hour")
        _missing(record)


def _show_due(record: Record) -> None:
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


@made(operations.lateness)
def lateness(record: Record, *, as_json: bool) -> None:
    """The console draws how late the starts of each minute were; --json has the numbers.

    Examples: toc lateness
              toc lateness order.close --json
    """
    if as_json:
        print_json(record)
        return
    show(record["topics"], as_json=False, empty="nothing was started in the last hour")
    for one in record["members"] or ():
        say(f"{one['member']} wrote its numbers {one['age']:.0f} s ago")


def _bars(title: str, form: str, start: datetime, step: timedelta, counts: Sequence[int]) -> None:
    """Print a bar for each time at which something is due."""
    most = max(counts, default=0)
    if not most:
        return
    print(f"\n{title} (UTC)")
    for place, count in enumerate(counts):
        if count:
            print(f"{start + place * step:{form}} {count:>12,} {_bar(count, most)}")


def _bar(count: int, most: int) -> str:
    return "#" * -(-BAR * count // max(most, 1))


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
    _missing(record)


def _missing(record: Record) -> None:
    for one in record["missing"]:
        age = "" if one["age"] is None else f", counted {one['age']:.0f} s ago"
        say(f"missing: {one['table']}: {one['error']}{age}")
