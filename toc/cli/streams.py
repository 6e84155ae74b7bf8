"""The program's stdin, stdout and stderr, which may be full, broken or closed.

A command does its work whether or not its output can be read. It prints results last, so a stdout that fails
is reported at the end, by one line on stderr and an exit code other than 0. What stderr does not take is
dropped. Neither ends a command half-way or with a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from typing import Any

import typer

from toc.cli.output import say
from toc.sockets import is_open

PIPE_CLOSED = 128 + signal.SIGPIPE
"""The exit code in shells when the reader of the output has gone, as in ``toc dead list | head -1``."""


class _Stream(io.FileIO):
    """Writes to a descriptor and never raises: ``lost`` holds the error that a write met."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # another program made it non-blocking
                select.select([], [self], [])
        except OSError as exc:
            self.lost = exc
            return len(data)
        return written


class _Stdout(_Stream):
    """Writes nothing after the first error: output after a gap is of no use."""

    def write(self, data: Any, /) -> int:
        return super().write(data) if self.lost is None else len(data)


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
    sys.stdout = _text(_Stdout(out, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Stream(2, "w", closefd=False), sys.stderr, line_buffering=True)


def stdout_lost() -> OSError | None:
    """Return why the output so far could not be written; None if it could, or without ``prepare``."""
    if isinstance(raw := getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Stdout):
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
