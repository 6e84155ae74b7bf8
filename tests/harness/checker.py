"""Checks the invariants of the whole system over a history of calls and handler starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from harness.system import Event
from toc import CancelOutcome, Task, TaskStatus


@dataclass
class Verdict:
    """What was wrong; empty lists mean that the invariant holds."""

    lost: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    after_cancel: list[int] = field(default_factory=list)
    unexplained: list[int] = field(default_factory=list)
    explained: list[int] = field(default_factory=list)
    """Duplicates whose first start was on a worker that was killed."""
    wrong_status: list[int] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong (explained duplicates are not)."""
        return not (self.lost or self.early or self.after_cancel or self.unexplained or self.wrong_status)


def check(
    events: Iterable[Event],
    *,
    submitted: Mapping[int, int],
    failures: Mapping[int, int],
    cancelled: Mapping[int, CancelOutcome],
    tasks: Mapping[int, Task],
    killed: Collection[int],
) -> Verdict:
    """Compare what happened with what was promised.

    ``submitted``: job_id -> action_time in ms (the last one, after reschedules). ``failures``: tries that the
    handler was told to fail. ``cancelled``: outcome of each cancel. ``tasks``: as read at the end.
    ``killed``: pids of processes that were killed with -9.
    """
    verdict = Verdict()
    starts: dict[int, list[Event]] = {}
    for event in events:
        if event.event == "start":
            starts.setdefault(event.job_id, []).append(event)
    for job_id, due in submitted.items():
        runs = starts.get(job_id, [])
        status = tasks[job_id].status
        if status is TaskStatus.PENDING:
            verdict.lost.append(job_id)
        if runs and runs[0].at < due * 1_000_000:
            verdict.early.append(job_id)
        outcome = cancelled.get(job_id)
        if outcome is CancelOutcome.CANCELLED and runs:
            verdict.after_cancel.append(job_id)
        if outcome in (CancelOutcome.CANCELLED, CancelOutcome.MAY_HAVE_STARTED):
            if status is not TaskStatus.CANCELLED:
                verdict.wrong_status.append(job_id)
            continue
        expected = failures.get(job_id, 0) + 1
        if status is TaskStatus.PROCESSED and not runs:
            verdict.wrong_status.append(job_id)
        if len(runs) > expected:
            on_killed = sum(1 for run in runs if run.pid in killed)
            (verdict.explained if len(runs) - expected <= on_killed else verdict.unexplained).append(job_id)
    verdict.unexplained += [job_id for job_id in starts if job_id not in submitted]
    return verdict


def statuses(tasks: Iterable[Task]) -> Counter[str]:
    """How many tasks ended how."""
    return Counter(task.status.name for task in tasks)
