"""A worker that starts what it is given, also if it is running it."""

from __future__ import annotations

from harness.app import center

from toc.worker.stages.entry import Entry, Held, Inflight

__all__ = ["center"]


def _hold(self: Inflight, entry: Entry) -> Held:
    self._entries[entry.job_id] = entry
    return Held.NEW


Inflight.hold = _hold  # type: ignore[method-assign]
