"""What commands print: a table for people, or JSON for programs. Results on stdout, all else on stderr."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from toc.model import wire

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


Thing = TypeVar("Thing")

TELL_SECONDS = 5.0
"""Seconds between two lines that tell how far a command has come, where there is no terminal."""
_STEERING = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
"""What steers a terminal: control characters, except those of tabs and lines."""
_NEW_LINE = "\r\x1b[K"
"""Begins the present line of a terminal anew."""
_SENTENCE = 24
"""The least width of a column of sentences, unless the terminal is too narrow."""


def say(text: str) -> None:
    """Print a remark on stderr for the person who watches."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout, in the form of ``toc.model.wire``."""
    print(_json(value))


def _json(value: Any) -> str:
    # Letters that the encoding lacks are escaped as JSON does it; the stream's own way is not JSON.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(wire.plain(value), ensure_ascii=not encoding.lower().startswith("utf"), indent=2)


def print_job_id(job_id: int | str, *, as_json: bool) -> None:
    """Print the job_id of a task that was submitted."""
    if as_json:
        print_json({"job_id": job_id})
    else:
        print(job_id)


def console() -> Console:
    """Return the console for tables: stdout, as wide as the terminal, or wide enough for a pipe."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200)


@contextmanager
def screen() -> Iterator[tuple[Console, Callable[[RenderableType], None]]]:
    """Yield a console and a function that draws a picture on it.

    On a terminal each picture replaces the one before; elsewhere it is printed below it.
    """
    from rich.live import Live

    to = console()
    if not to.is_terminal:
        yield to, to.print
        return
    with Live(console=to, auto_refresh=False, screen=True) as live:
        yield to, lambda picture: live.update(picture, refresh=True)


@contextmanager
def progress_line(what: str, *, lines: bool = False) -> Iterator[Callable[[float | None, str], None]]:
    """Tell on stderr how far the block has come: on a terminal in one line, which begins with ``what`` and is
    gone at the end; elsewhere not at all, or with ``lines`` every few seconds.

    Yields a function that takes the part done (0 to 1, None if nobody knows) and a new text.
    """
    terminal, told = sys.stderr.isatty(), time.monotonic()

    def tell(part: float | None, text: str) -> None:
        nonlocal told
        if terminal:
            done = "" if part is None else f"{part:4.0%} "
            line = f"{done}{text}"[: shutil.get_terminal_size().columns - 1]
            print(f"{_NEW_LINE}{line}", end="", file=sys.stderr, flush=True)
        elif lines and time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            say(text)

    if what:
        tell(0.0, what)
    try:
        yield tell
    finally:
        if terminal:
            print(_NEW_LINE, end="", file=sys.stderr, flush=True)


def show(
    records: Sequence[Mapping[str, Any]], *, as_json: bool, empty: str, spare: Sequence[str] = ()
) -> None:
    """Print records with the same keys: a JSON array, or a table whose columns are the keys.

    Without records it prints ``empty`` instead of a table. A narrow terminal drops the ``spare`` columns, the
    first of them first.
    """
    if as_json:
        print_json(list(records))
    elif not records:
        say(empty)
    else:
        to = console()
        drawn, left_out = table(records, to.width, spare)
        to.print(drawn)
        if left_out:
            names = ", ".join(name.replace("_", " ") for name in left_out)
            say(f"left out because this terminal is narrow: {names}; use a wider one or --json")


def table(
    records: Sequence[Mapping[str, Any]],
    width: int,
    spare: Sequence[str] = (),
    *,
    words: Collection[str] | None = None,
    cut: str | None = None,
) -> tuple[Table, Sequence[str]]:
    """Return records with the same keys as a table, and the ``spare`` columns dropped to fit into ``width``.

    Before it drops a column, it drops lines and gaps, and breaks titles. Columns of numbers are
    right-aligned: all except ``words``, by default those with nothing but numbers. A value may be a styled
    Text. ``cut`` is a column of sentences that are shortened with an ellipsis, so that each record takes one
    line.
    """
    from rich.cells import cell_len
    from rich.table import Table

    texts = {key: [str(_shown(record[key])) for record in records] for key in records[0]}
    ways = [(gap, _SENTENCE, spare[:count]) for count in range(len(spare) + 1) for gap in (2, 1)]
    for gap, sentence, left_out in [(3, _SENTENCE, spare[:0]), *ways, (1, _SENTENCE // 2, spare)]:
        keys = [key for key in texts if key not in left_out]
        room = {
            key: max(
                _least_width(text, sentence, whole=key != cut)
                for text in [_title(key, narrow=gap == 1), *texts[key]]
            )
            for key in keys
        }
        between = gap * len(keys) + (1 if gap == 3 else -gap)  # lines are drawn at both ends, gaps are not
        left = width - sum(room.values()) - between
        fits = left >= 0
        if fits:
            break
    if words is None:
        numeric = {
            key for key in keys if {type(each[key]) for each in records} - {type(None)} <= {int, float, bool}
        }
    else:
        numeric = set(keys) - set(words)
    if fits and cut in room:
        room[cut] = min(room[cut] + left, max(map(cell_len, [_title(cut), *texts[cut]])))
    drawn = Table() if gap == 3 else Table(box=None, pad_edge=False, collapse_padding=gap == 1)
    for key in keys:
        # If all columns fit, only sentences share the space left, and no id is broken.
        fixed = key == cut or (fits and all(cell_len(text) <= room[key] for text in texts[key]))
        drawn.add_column(
            _title(key),
            justify="right" if key in numeric else "left",
            width=room[key] if fixed else None,
            # "fold": what has no room continues on the next line, and nothing is cut off
            overflow="ellipsis" if key == cut else "fold",
            no_wrap=key == cut,
        )
    for record in records:
        drawn.add_row(*(_shown(record[key]) for key in keys))
    return drawn, left_out


def _title(key: str, *, narrow: bool = False) -> str:
    """Return a column's title; if ``narrow``, its longest word, since the title may take two lines."""
    words = key.split("_")
    return max(words, key=len) if narrow else " ".join(words)


def _least_width(text: str, sentence: int, *, whole: bool) -> int:
    """Return the least width of a text: that of its longest word, and ``sentence`` if it is that long.

    A text that may be cut (not ``whole``) needs half a sentence's width at most.
    """
    from rich.cells import cell_len

    if not whole:
        return min(cell_len(text), _SENTENCE // 2)
    return max([min(cell_len(text), sentence), *map(cell_len, text.split())])


def _shown(value: Any) -> Text:
    from rich.text import Text

    return value if isinstance(value, Text) else Text(_cell(value))


def most_urgent(things: Sequence[Thing], room: int, urgency: Callable[[Thing], Any]) -> list[Thing]:
    """Return the things that fit into ``room`` (at least 3), in their order: the most urgent ones."""
    kept = sorted(range(len(things)), key=lambda n: urgency(things[n]), reverse=True)[: max(room, 3)]
    return [things[n] for n in sorted(kept)]


def and_more(count: int, what: str) -> str:
    """Return the line that counts the rows for which there was no room."""
    return f"and {count} more {what}, none more urgent" if count > 0 else ""


def ago(milliseconds: float, now_ms: float) -> str:
    """Return how far an instant is past or ahead, for people: ``12 s ago``, ``in 3 min``."""
    seconds = (now_ms - milliseconds) / 1000
    size = abs(seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if size >= 2 * length:
            text = f"{size / length:.0f} {unit}"
            break
    else:
        text = f"{size:.0f} s"
    return f"{text} ago" if seconds >= 0 else f"in {text}"


def show_one(record: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one record: a JSON object, or a line per key."""
    if as_json:
        print_json(dict(record))
        return
    width = max(len(key) for key in record)
    for key, value in record.items():
        lines = [_cell(each) for each in value] if isinstance(value, list) else [_cell(value)]
        for number, line in enumerate(lines or ["-"]):
            print(f"{'' if number else key.replace('_', ' '):<{width}}  {line}")


def _cell(value: Any) -> str:
    if value is None or value in ("", []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
    # Errors and reasons are texts of others, and the terminal is an operator's.
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", text)


def print_bytes(data: bytes) -> None:
    """Print bytes on stdout as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
