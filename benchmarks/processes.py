"""What processes use, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> list[int]:
    """Return the living ones of a process and its descendants."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        try:
            threads = list(Path(f"/proc/{one}/task").iterdir())
            found.append(one)
            for thread in threads:
                todo += map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time in seconds that these processes have used so far."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def peak(pids: Iterable[int]) -> int:
    """Return the sum of the peak memory of these processes, in bytes."""
    found = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return found


def resident(pids: Iterable[int]) -> int:
    """Return the memory that these processes hold, in bytes; shared pages count in each."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * _PAGE


def proportional(pids: Iterable[int]) -> int:
    """Return the memory that these processes hold, in bytes; of a shared page each has its part."""
    found = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += 1024 * int(rollup.partition("\nPss:")[2].split()[0])
    return found


def sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of the sockets that the process has open."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")


def connections(pids: Iterable[int], port: int) -> int:
    """Return how many TCP connections these processes have to a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    there = {row[9] for row in rows if row[3] == "01" and int(row[2].partition(":")[2], 16) == port}
    return sum(inode in there for pid in pids for inode in sockets(pid))
