"""A bulk job: one change of many tasks of a topic, which gateways make step by step, and go on with after a
kill.

Its tasks are chosen once, when it is made: what is submitted later, or matches later, is not touched. The job
knows what came of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from toc.model.access import Action as Right

PART = 500
"""How many tasks of a job one row holds."""
KEPT_MS = 30 * 86_400_000
"""How long (ms) a job that is done or stopped is kept."""


class BulkKind(StrEnum):
    """What a job does to each of its tasks."""

    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    REDRIVE = "redrive"
    PURGE = "purge"

    @property
    def right(self) -> Right:
        """What whoever makes, stops or resumes such a job must be allowed to do on its topic."""
        return Right(self.value)

    @property
    def status(self) -> str:
        """The status of the tasks that it is for."""
        return "pending" if self in (BulkKind.CANCEL, BulkKind.RESCHEDULE) else "dead"


class BulkState(StrEnum):
    """What becomes of a job. Only ``stopped`` can be resumed."""

    RUNNING = "running"
    STOPPED = "stopped"
    """By an operator, or by an error that trying again does not mend."""
    DONE = "done"


class BulkOutcome(StrEnum):
    """What came of one task."""

    CANCELLED = "cancelled"
    """It is cancelled, and no try has started."""
    RESCHEDULED = "rescheduled"
    MAY_HAVE_STARTED = "may_have_started"
    """It is cancelled or rescheduled, but a try may have started before."""
    TOO_LATE = "too_late"
    """It had ended before its turn came."""
    EXPIRES_BEFORE = "expires_before"
    """Left alone: it expires before its new deadline."""
    REDRIVEN = "redriven"
    """It is not dead any more: by this job, or by somebody else meanwhile."""
    PURGED = "purged"
    """It is gone: by this job, or by somebody else meanwhile."""
    NOT_DEAD = "not_dead"
    """Left alone: somebody has redriven it meanwhile."""
    UNKNOWN = "unknown"
    """Its row was gone before its turn came."""
    FAILED = "failed"
    """Left alone: an error about this task, or others lock its row or table. ``error`` of the job is the
    last such."""


STORED = tuple(BulkOutcome)
"""The outcomes by the byte that stands for each in a row. A stored format: add members at the end only."""


@dataclass(frozen=True, slots=True)
class BulkJob:
    """A bulk job. Instants are ms. ``details`` are JSON: ``selected``, how its tasks were chosen, and what a
    reschedule needs. ``rate``: at most so many tasks a second."""

    name: str
    kind: BulkKind
    topic: str
    details: Mapping[str, Any]
    by: str
    rate: float
    tasks: int
    state: BulkState = BulkState.RUNNING
    done: int = 0
    """How many of its tasks have an outcome."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many have which."""
    error: str = ""
    """Why it waits or has stopped."""
    held: bool = False
    """Whether a process works on it."""
    created: int = 0
    ended: int | None = None
