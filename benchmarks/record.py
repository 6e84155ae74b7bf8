"""The handler of every peer: it records when it started. Also the reader of the record.

A start is sixteen bytes at the end of a file per process: the task's number and the nanoseconds since 1970,
both unsigned and little-endian. Each is one write call, so that it survives a kill -9 right after it.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

START = struct.Struct("<QQ")
DIES = 1 << 52
"""A number with this bit: its first handler kills its own process. (JavaScript counts exactly up to 2^53.)"""
STARTS_DIRECTORY = "BENCH_STARTS"

_file = -1


def started(number: int) -> None:
    """Record that the handler of task ``number`` starts now."""
    now = time.time_ns()
    os.write(_file if _file >= 0 else _open(), START.pack(number, now))
    if number & DIES:
        _die_once(number)


def read(directory: Path) -> Iterator[tuple[int, int]]:
    """Yield every (number, nanoseconds) of the directory."""
    for path in directory.iterdir():
        data = path.read_bytes()
        yield from START.iter_unpack(data[: len(data) - len(data) % START.size])


def count(directory: Path) -> int:
    """Return how many starts the directory holds: cheap enough to call during a measurement."""
    return sum(path.stat().st_size for path in directory.iterdir()) // START.size


def _open() -> int:
    global _file  # one file per process, opened at its first start
    path = Path(os.environ[STARTS_DIRECTORY]) / str(os.getpid())
    _file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    return _file


def _forget() -> None:
    global _file
    _file = -1


def _die_once(number: int) -> None:
    marker = Path(os.environ[STARTS_DIRECTORY]).parent / f"died-{number}"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


os.register_at_fork(after_in_child=_forget)
