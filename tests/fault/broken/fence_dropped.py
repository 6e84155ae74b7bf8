"""Scripts that move an entry of the PrepareQueue whoever has it by now.

What the fence keeps from being run again is kept from it by two other things as well, which this build lacks
too: the lease on the row, and that a worker does not start what it is running.
"""

import re

from harness.app import center
from harness.scripts import SCRIPTS, rewrite

from toc.model.task import TryRow
from toc.store.servers.server import DatabaseServer
from toc.store.tasks.leases import Leases
from toc.worker.entry import Entry, Held, Inflight

__all__ = ["center"]

_FENCE = re.compile(
    r" and (tonumber\(scores\[n\]\) % 1000 == fence|\(score % 1000 == fence or score == fence\)) then"
)

for name in ("extend", "commit", "rollback", "bury"):
    source, found = _FENCE.subn(" then", SCRIPTS[name].source)
    assert found == 1, name
    rewrite(SCRIPTS[name], source)


def _judged(self: Leases, server: DatabaseServer, rows: list[TryRow]) -> list[TryRow]:  # noqa: ARG001
    return [row._replace(lease=0) for row in rows]


Leases.judged = _judged  # type: ignore[method-assign]


_right = Inflight.hold


def _hold(self: Inflight, entry: Entry) -> Held:
    self.drop(filter(None, [self.get(entry.job_id)]))
    return _right(self, entry)


Inflight.hold = _hold  # type: ignore[method-assign]
