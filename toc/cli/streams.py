"""The program's stdin, stdout and stderr, which may be full, broken or closed.

A command does what it is asked to do whether or not anybody can read what it says. Results are printed
last, so a stdout that fails is told at the end: by one line on stderr and an exit code that is not 0. What
stderr does not take is left out. Neither ends a command half-way, and neither ends in a traceback.
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

PIPE_CLOSED = 128 + signal.SIGPIPE
"""What a shell shows of a program whose reader has gone away, as in ``toc dead list | head -1``."""


class _Stream(io.FileIO):
    """Writes to a descriptor and never raises: ``lost`` is why something could not be written."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # another program has made it non-blocking
                select.select([], [self], [])
        except OSError as exc:
            self.lost = exc
            return len(data)
        return written


class _Stdout(_Stream):
    """Ends with the first error: what comes after a gap is no use."""

    def write(self, data: Any, /) -> int:
        return super().write(data) if self.lost is None else len(data)


def prepare() -> None:
    """Replace ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` by such as never raise an OSError."""
    closed = [descriptor for descriptor in range(3) if not _is_open(descriptor)]
    for _ in closed:  # each gets the lowest free number, so that no connection and no file does
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the program runs
    # Nothing can be written to what was opened for reading, as nothing can to what is closed.
    out = os.open(os.devnull, os.O_RDONLY) if 1 in closed else 1
    sys.stdout = _text(_Stdout(out, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Stream(2, "w", closefd=False), sys.stderr, line_buffering=True)


def stdout_lost() -> OSError | None:
    """Why what was printed so far could not be written; None if it could, or ``prepare`` was not called."""
    if isinstance(raw := getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Stdout):
        sys.stdout.flush()
        return raw.lost
    return None


def end_if_lost() -> None:
    """For a command that goes on until Ctrl-C: end it, by typer.Exit, if nobody can see what it shows."""
    if (lost := stdout_lost()) is not None:
        raise typer.Exit(PIPE_CLOSED if lost.errno == errno.EPIPE else 1)


def finish(code: int) -> int:
    """The exit code of a command that ended with ``code``, now that it has printed everything.

    A reader that went away has seen enough, and nothing is said.
    """
    lost = stdout_lost()
    if lost is None:
        return code
    if lost.errno == errno.EPIPE:
        return code or PIPE_CLOSED
    done = "; what was asked is done" if code == 0 else ""
    say(f"error: stdout cannot be written: {lost.strerror}{done}")
    return code or 1


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _text(raw: _Stream, old: Any, *, line_buffering: bool = False) -> io.TextIOWrapper:
    """``raw`` as a text file with the encoding of ``old``, which is None where it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(old, "encoding", "utf-8"),
        errors="backslashreplace",  # what a terminal has no letter for is no reason to fail
        line_buffering=line_buffering or raw.isatty(),
    )
