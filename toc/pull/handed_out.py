"""A task on its way to a consumer: what is to be handed out, and what the consumer gets."""

from collections.abc import Callable
from typing import NamedTuple

from toc.model.pull import PullLease, PullRow
from toc.model.task import Task
from toc.model.topic import Slot, Topic

TtrOf = Callable[[PullRow], int]
"""Tells for how long (ms) a task is handed out."""
NO_FENCE = -1.0
"""The fence of a due row that was found without Redis."""


class Candidate(NamedTuple):
    """An entry that this process has prepared, or a due row (``fence`` NO_FENCE). ``taken``: ms by Redis."""

    job_id: int
    slot: Slot
    fence: float
    topic: Topic
    taken: int


class HandedOut(NamedTuple):
    """A task as a consumer gets it.

    ``row`` is its row as it was handed out: nobody else gets the task until its next_time. ``key`` is the
    lease as this package uses it, whose text ``secret`` seals. ``last``: the end of this lease leaves the
    task dead. ``task.body`` is read from the task table when it is asked for, which blocks.
    """

    task: Task
    row: PullRow
    key: PullLease
    last: bool
    secret: bytes

    @property
    def lease(self) -> str:
        """What ack, nack and extend take."""
        return self.key.text(self.secret)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the tasks of an answer: the longest due first."""
        return self.row.action_time, self.row.job_id
