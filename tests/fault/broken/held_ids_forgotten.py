"""A worker that starts what it is given, also if it is running it."""

from __future__ import annotations

from collections.abc import Iterable

from harness.app import center

from toc.worker.entry import Entry
from toc.worker.poll import Poller
from toc.worker.slots import OwnedSlot

__all__ = ["center"]

_right = Poller._hold


def _hold(self: Poller, owned: OwnedSlot, entries: Iterable[tuple[int, float]], taken: int) -> list[Entry]:
    entries = list(entries)
    held = [self._inflight.get(job_id) for job_id, _ in entries]
    self._inflight.discard(entry for entry in held if entry is not None)
    return _right(self, owned, entries, taken)


Poller._hold = _hold  # type: ignore[method-assign]
