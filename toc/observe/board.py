"""The memory in which a process keeps its numbers, the board, and the series in it.

A process writes each number where it happens, into a piece of memory. The daemon makes the board of each
worker process and reads it at a scrape. So no number is lost with a process, not even by SIGKILL; no file is
left behind; and a scrape waits for no process.

    bytes 0-7   how many bytes are used, these included
    then        one series after the other, which never move or go:
                u32 length of the key, u32 number of cells, the key padded to 8 bytes, the cells (float64)

A key is a JSON array: the metric's name, then the values of its labels. The cells are one number; or, for a
histogram, the number of values in each bucket, those beyond the last bound, and the sum. To change the cells
of a metric, rename it: a daemon may read the boards of processes that run a later version.

Each call on a series takes its lock, so calls are made per batch: once per round trip, never per task.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

BOARD_BYTES = 4 << 20
"""Room for the series of some three thousand topics. Pages that are not used take no memory."""

Key = tuple[str, ...]
"""The metric's name, then the values of its labels."""
Values = dict[Key, list[float]]
"""The cells of many series."""

_USED = struct.Struct("=Q")
_HEAD = struct.Struct("=II")


class MetricKind(StrEnum):
    """How the numbers of a metric change, and how those of several processes are combined."""

    COUNTER = "counter"
    """Grows. Combined as the sum over all processes, ended ones included."""
    HISTOGRAM = "histogram"
    """Counts values by bucket, and grows. Combined as the sum over all processes, ended ones included."""
    GAUGE = "gauge"
    """Goes up and down. Combined as the sum over the living processes."""
    HIGHEST = "highest"
    """Goes up and down. Combined as the maximum over the living processes."""


@dataclass(frozen=True)
class Metric:
    """The declaration of one metric. ``buckets`` are the upper bounds of a histogram, without infinity."""

    name: str
    help: str
    kind: MetricKind
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()

    @property
    def cells(self) -> int:
        """How many numbers one of its series has."""
        return len(self.buckets) + 2 if self.kind is MetricKind.HISTOGRAM else 1


class SharedMetrics:
    """A piece of memory that holds series. ``memory`` is all zeros, or written by another process."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._bytes = memoryview(memory)
        self._lock = threading.RLock()
        self._found: list[tuple[Key, memoryview[float]]] = []
        self._read_to = _USED.size

    def place(self, key: Key, cells: int) -> memoryview[float]:
        """Add a series; return the memory of its numbers: doubles, 0 at first. Raises MemoryError if full."""
        text = json.dumps(key, ensure_ascii=False).encode("utf-8", "replace")
        with self._lock:
            start = _USED.unpack_from(self._memory)[0] or _USED.size
            first = start + _HEAD.size + len(text) + -len(text) % 8
            end = first + 8 * cells
            if end > len(self._memory):
                raise MemoryError
            _HEAD.pack_into(self._memory, start, len(text), cells)
            self._bytes[start + _HEAD.size : start + _HEAD.size + len(text)] = text
            _USED.pack_into(self._memory, 0, end)  # last: a reader sees the series whole or not at all
        return self._bytes[first:end].cast("d")

    def read(self) -> dict[Key, Sequence[float]]:
        """Return the present numbers of every series. Only one thread may call it."""
        end = _USED.unpack_from(self._memory)[0]
        while self._read_to < end:
            length, cells = _HEAD.unpack_from(self._memory, self._read_to)
            start = self._read_to + _HEAD.size
            key = tuple(json.loads(bytes(self._bytes[start : start + length])))
            first = start + length + -length % 8
            self._read_to = first + 8 * cells
            self._found.append((key, self._bytes[first : self._read_to].cast("d")))
        return {key: cells.tolist() for key, cells in self._found}


@dataclass(eq=False, slots=True)
class _Series:
    """A series of this process, with its numbers."""

    _metric: Metric
    _cells: memoryview[float]
    _lock: threading.RLock = field(default_factory=threading.RLock)


class Count(_Series):
    """A series that grows."""

    def add(self, amount: float = 1) -> None:
        """Add ``amount``."""
        with self._lock:
            self._cells[0] += amount


class Level(_Series):
    """A series that goes up and down."""

    def set(self, value: float) -> None:
        """Set the present value."""
        self._cells[0] = value


class Distribution(_Series):
    """A series of a histogram."""

    def observe(self, values: Iterable[float]) -> None:
        """Add these measured values."""
        cells, buckets = self._cells, self._metric.buckets
        with self._lock:
            for value in values:
                cells[bisect_left(buckets, value)] += 1
                # The sum must never shrink, or it looks like a restart: two clocks may be out of order.
                if value > 0:
                    cells[-1] += value


Series = TypeVar("Series", Count, Level, Distribution)


class Family(Generic[Series]):
    """All series of one metric in this process, by the values of its labels."""

    def __init__(self, metric: Metric, make: type[Series]) -> None:
        self.metric = metric
        self._make: type[Series] = make
        self._series: dict[Key, Series] = {}

    def of(self, *labels: str) -> Series:
        """Return the series with these label values. Not at import: the board is not known by then."""
        series = self._series.get(labels)
        if series is None:
            with _lock:
                series = self._series.get(labels)
                if series is None:
                    series = self._series[labels] = self._make(self.metric, self._cells(labels))
        return series

    def _cells(self, labels: Key) -> memoryview[float]:
        try:
            return own_board().place((self.metric.name, *labels), self.metric.cells)
        except MemoryError:
            from toc.observe.log import get_logger  # imported here: the log counts its dropped lines here

            log = get_logger(__name__)
            log.warning("metrics_full", metric=self.metric.name)
            return memoryview(bytearray(8 * self.metric.cells)).cast("d")  # a number that nobody reads


_lock = threading.RLock()
_board: SharedMetrics | None = None


def write_to(board: SharedMetrics) -> None:
    """Write this process's numbers to ``board``. Raises RuntimeError if anything was counted before."""
    global _board
    with _lock:
        if _board is not None:  # the first count has already made a board
            raise RuntimeError("write_to must be called before anything is counted")
        _board = board


def own_board() -> SharedMetrics:
    """Return the board to which this process writes."""
    global _board
    with _lock:
        if _board is None:
            _board = SharedMetrics(bytearray(BOARD_BYTES))
        return _board
