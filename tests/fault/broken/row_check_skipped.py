"""A worker that runs whatever the index says is due, whatever the row says."""

from harness.app import center

from toc.model.task import TaskStatus
from toc.worker.check import Checker
from toc.worker.entry import Entry

__all__ = ["center"]


def check(self: Checker, entries: list[Entry]) -> None:
    rows = self.tools.store.read_tries([entry.job_id for entry in entries])
    for entry in entries:
        row = rows.get(entry.job_id)
        if row is not None:
            entry.row = row._replace(status=TaskStatus.PENDING, next_time=0)
    self.dispatcher.put([entry for entry in entries if entry.job_id in rows])


Checker.put = check  # type: ignore[method-assign]
