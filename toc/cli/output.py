"""What commands print: a table for people, or JSON for programs. Results on stdout, all else on stderr.

stdin, stdout and stderr may be full, broken or closed. A command does its work whether or not its output can
be read. It prints results last, so a stdout that fails is reported at the end, by one line on stderr and an
exit code other than 0. What stderr does not take is dropped. Neither ends a command half-way or with a
traceback.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from toc.sockets import is_open

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


TELL_SECONDS = 5.0
"""Seconds between two lines that tell how far a command has come, where there is no terminal."""
_STEERING = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
"""What steers a terminal: control characters, except those of tabs and lines."""
_NEW_LINE = "\r\x1b[K"
"""Begins the present line of a terminal anew."""
_SENTENCE = 12
"""The least width of a column of sentences, unless the terminal is too narrow."""
_NUMBER = re.compile(r"[-+\d]")
"""How what is a number begins, or stands for one that is not known."""


def say(text: str) -> None:
    """Print a remark on stderr for the person who watches."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on stdout, whose values are in the form of ``toc.model.documents``."""
    # Letters that the encoding lacks are escaped as JSON does it; the stream's own way is not JSON.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(json.dumps(value, ensure_ascii=not encoding.lower().startswith("utf"), indent=2))


def print_job_id(job_id: int | str, *, as_json: bool) -> None:
    """Print the job_id of a task that was submitted."""
    if as_json:
        print_json({"job_id": str(job_id)})
    else:
        print(job_id)


def console() -> Console:
    """Return the console for tables: stdout, as wide as the terminal, or wide enough for a pipe."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=200)


@contextmanager
def screen() -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that draws a picture.

    On a terminal each picture replaces the one before; elsewhere it is printed below it.
    """
    from rich.live import Live

    to = console()
    if not to.is_terminal:
        yield to.print
        return
    with Live(console=to, auto_refresh=False, screen=True) as live:
        yield lambda picture: live.update(picture, refresh=True)


@contextmanager
def progress_line(what: str) -> Iterator[Callable[[float | None, str], None]]:
    """Tell on stderr how far the block has come: on a terminal in one line, which begins with ``what`` and is
    gone at the end; elsewhere every few seconds.

    Yields a function that takes the part done (0 to 1, None if nobody knows) and a new text.
    """
    terminal, told = sys.stderr.isatty(), time.monotonic()

    def tell(part: float | None, text: str) -> None:
        nonlocal told
        if terminal:
            done = "" if part is None else f"{part:4.0%} "
            line = f"{done}{text}"[: shutil.get_terminal_size().columns - 1]
            print(f"{_NEW_LINE}{line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            say(text)

    if what:
        tell(0.0, what)
    try:
        yield tell
    finally:
        if terminal:
            print(_NEW_LINE, end="", file=sys.stderr, flush=True)


def show(records: Sequence[Mapping[str, Any]], *, as_json: bool, empty: str) -> None:
    """Print records with the same keys: a JSON array, or a table whose columns are the keys.

    Without records it prints ``empty`` instead of a table. A terminal that is too narrow breaks its lines.
    """
    if as_json:
        print_json(list(records))
    elif not records:
        say(empty)
    else:
        from rich.console import Console
        from rich.measure import Measurement

        drawn, wide = table(records), Console(width=10_000)
        least = Measurement.get(wide, wide.options, drawn).minimum
        Console(width=max(console().width, least)).print(drawn)


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return records with the same keys as a table: no id is torn apart, and no column of sentences is
    narrower than _SENTENCE. Numbers are right-aligned."""
    from rich.table import Table

    rows = [{key: _shown(value) for key, value in record.items()} for record in records]
    drawn = Table(box=None, pad_edge=False)
    for key in rows[0]:
        cells = [row[key] for row in rows]
        longest = max(cell.cell_len for cell in cells)
        drawn.add_column(
            key.replace("_", " "),
            justify="right" if all(_NUMBER.match(cell.plain) for cell in cells) else "left",
            no_wrap=not any(" " in cell.plain for cell in cells),
            min_width=min(_SENTENCE, longest),
            overflow="fold",
        )
    for row in rows:
        drawn.add_row(*row.values())
    return drawn


def _shown(value: Any) -> Text:
    from rich.text import Text

    return value if isinstance(value, Text) else Text(_cell(value))


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


# --- streams that fail

PIPE_CLOSED = 128 + signal.SIGPIPE
"""The exit code in shells when the reader of the output has gone, as in ``toc dead list | head -1``."""


class _Stream(io.FileIO):
    """Writes to a descriptor and never raises: ``lost`` holds the error that a write met, after which nothing
    is written: output after a gap is of no use."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.lost is not None:
            return len(data)
        try:
            while (written := super().write(data)) is None:  # another program made it non-blocking
                select.select([], [self], [])
        except OSError as exc:
            self.lost = exc
            return len(data)
        return written


def prepare() -> None:
    """Replace ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` by streams that never raise an OSError."""
    closed = [descriptor for descriptor in range(3) if not is_open(descriptor)]
    # Open the null device for each closed stream: it gets the lowest free number. Otherwise a
    # connection or another file would get that number, and the program would print into it.
    for _ in closed:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the program runs
    # A closed stdout is replaced by a file that can only be read: writing fails, as it would on a
    # closed file.
    out = os.open(os.devnull, os.O_RDONLY) if 1 in closed else 1
    sys.stdout = _text(_Stream(out, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Stream(2, "w", closefd=False), sys.stderr, line_buffering=True)


def stdout_lost() -> OSError | None:
    """Return why the output so far could not be written; None if it could, or without ``prepare``."""
    if isinstance(raw := getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Stream):
        sys.stdout.flush()
        return raw.lost
    return None


def end_if_lost() -> None:
    """End a command that runs until Ctrl-C, by typer.Exit, if nobody can see its output."""
    if (lost := stdout_lost()) is not None:
        raise typer.Exit(PIPE_CLOSED if lost.errno == errno.EPIPE else 1)


def finish(code: int) -> int:
    """Return the exit code of a command that ended with ``code`` and has printed everything.

    If the reader has gone, it has seen enough, and nothing is reported.
    """
    lost = stdout_lost()
    if lost is None:
        return code
    if lost.errno == errno.EPIPE:
        return code or PIPE_CLOSED
    done = "; the command itself succeeded" if code == 0 else ""
    say(f"error: stdout cannot be written: {lost.strerror}{done}")
    return code or 1


def _text(raw: _Stream, old: Any, *, line_buffering: bool = False) -> io.TextIOWrapper:
    """Return ``raw`` as a text file with the encoding of ``old``, which is None where it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(old, "encoding", "utf-8"),
        errors="backslashreplace",  # a letter that the terminal lacks is no reason to fail
        line_buffering=line_buffering or raw.isatty(),
    )
