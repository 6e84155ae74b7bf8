"""Tasks in transit to consumers, and how they ended before their entries had moved.

A consumer is told of a task first; only then does its entry move to the end of its ttr. An answer may come in
between. Its consequence for the index waits here until the move is made, because the move would put the entry
back.

Only answers to this process are held. If an ack by another gateway, or a cancel, overtakes the move, the
entry stays until ttr would have ended; then its row, which has ended, drops it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from toc.model.pull import PullLease, PullRow


class EndedLease(NamedTuple):
    """A lease that has ended, and its row as it is then; None if its task is processed."""

    lease: PullLease
    row: PullRow | None


class InTransit:
    """The ids that are being handed out. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: Counter[int] = Counter()
        """One may be in transit twice: found as an entry, and as a row without Redis."""
        self._held: dict[int, EndedLease] = {}

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._ids

    def begin(self, job_ids: Iterable[int]) -> None:
        """Their hand-outs begin."""
        with self._lock:
            self._ids.update(job_ids)

    def hold(self, ends: Iterable[EndedLease]) -> list[EndedLease]:
        """Keep those of tasks in transit. Returns the others."""
        free = []
        with self._lock:
            for end in ends:
                if end.lease.job_id in self._ids:
                    self._held[end.lease.job_id] = end
                else:
                    free.append(end)
        return free

    def take_processed(self, job_ids: Iterable[int]) -> set[int]:
        """Return those whose tasks were acked: their prepared entries are to be dropped, and nothing more is
        kept."""
        with self._lock:
            if not self._held:
                return set()
            done = {
                job_id
                for job_id in job_ids
                if self._ids[job_id] == 1 and (end := self._held.get(job_id)) is not None and end.row is None
            }
            for job_id in done:
                del self._held[job_id]
            return done

    def end(self, job_ids: Iterable[int]) -> list[EndedLease]:
        """Their entries have moved. Returns what was kept."""
        kept = []
        with self._lock:
            for job_id in job_ids:
                self._ids[job_id] -= 1
                if not self._ids[job_id]:
                    del self._ids[job_id]
                    if (end := self._held.pop(job_id, None)) is not None:
                        kept.append(end)
        return kept
