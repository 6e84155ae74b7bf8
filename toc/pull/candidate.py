"""What is to be handed out: a prepared entry, or a due row."""

from __future__ import annotations

from typing import NamedTuple

from toc.model.topic import Slot, Topic

NO_FENCE = -1.0
"""The fence of a due row that was found without Redis."""


class Candidate(NamedTuple):
    """An entry that this process has prepared, or a due row (``fence`` NO_FENCE). ``taken``: ms by Redis."""

    job_id: int
    slot: Slot
    fence: float
    topic: Topic
    taken: int
