"""toc due, toc lateness"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from math import log2

from toc.cli.operations import made
from toc.cli.output import print_json, say, show
from toc.operate.operation import Record
from toc.operate.operations import due as operations

BAR = 40
"""The longest bar."""
_COLUMNS = ("topic", "overdue", "hour", "day", "week", "later")
_DAY = 24
_SHADES = " .:-=+*#%@"
"""A cell of the heat map: nothing, then ever more. Each is twice the one before, or more."""


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


@made(operations.lateness)
def lateness(record: Record, *, as_json: bool) -> None:
    """Of a heat map each column is a minute, each row a lateness, and a denser sign more starts.

    Examples: toc lateness
              toc lateness order.close --json
    """
    if as_json:
        print_json(record)
        return
    show(record["topics"], as_json=False, empty="nothing was started in the last hour")
    total = record["total"]
    most = max(map(max, total["lateness"]))
    if most:
        start = datetime.fromisoformat(record["minutes_from"])
        print(f"\nstarts by lateness, {start:%H:%M} to {start + timedelta(hours=1):%H:%M} (UTC)")
        names = [f"{bound:g} s" for bound in record["bounds"]]
        names.append(f"> {names[-1]}")
        seen = [number for number, row in enumerate(zip(*total["lateness"], strict=True)) if any(row)]
        for bucket in range(seen[-1], seen[0] - 1, -1):
            cells = "".join(_shade(minute[bucket], most) for minute in total["lateness"])
            print(f"{names[bucket]:>8} |{cells}|")
        print(f"at most {max(total['starts']):,} starts in a minute")
    for one in record["members"] or ():
        say(f"{one['member']} wrote its numbers {one['age']:.0f} s ago")


def _shade(count: int, most: int) -> str:
    steps = len(_SHADES) - 1
    return _SHADES[max(1, steps - int(log2(most / count))) if count else 0]


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
    for one in record["beyond"]:
        say(
            f"{one['due']:,} are due at {one['at'][11:16]}: more than the workers have started in a minute, "
            f"{record['capacity']:,}"
        )
    for one in record["missing"]:
        age = "" if one["age"] is None else f", counted {one['age']:.0f} s ago"
        say(f"missing: {one['table']}: {one['error']}{age}")


def _list(texts: Iterable[str]) -> str:
    return ", ".join(texts)
