"""A worker that starts what it is given, also if it is running it."""

from harness.app import center

from toc.worker.entry import Entry, Held, Inflight

__all__ = ["center"]


_right = Inflight.hold


def _hold(self: Inflight, entry: Entry) -> Held:
    self.drop(filter(None, [self.get(entry.job_id)]))
    return _right(self, entry)


Inflight.hold = _hold  # type: ignore[method-assign]
