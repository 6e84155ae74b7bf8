"""toc due"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from toc.cli.operations import made
from toc.cli.output import print_json, say, show
from toc.operate.operation import Record
from toc.operate.operations import due as operations

BAR = 40
"""The longest bar."""
_COLUMNS = ("topic", "overdue", "hour", "day", "week", "later")
_DAY = 24


@made(operations.show)
def due(record: Record, *, as_json: bool) -> None:
    """Examples: toc due
    toc due order.close --json
    """
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
    for number, count in enumerate(counts):
        if count:
            print(f"{start + number * step:{form}} {count:>10,} {'#' * -(-BAR * count // most)}")


def _remarks(record: Record) -> None:
    """Say how old the counts are, and what is not in them."""
    ages = {part: age["oldest"] for part, age in record["ages"].items() if age["oldest"] is not None}
    if ages:
        say(f"counted at most {_list(f'{age:.0f} s ago ({part})' for part, age in ages.items())}")
    for one in record["missing"]:
        age = "" if one["age"] is None else f", counted {one['age']:.0f} s ago"
        say(f"missing: {one['table']}: {one['error']}{age}")


def _list(texts: Iterable[str]) -> str:
    return ", ".join(texts)
