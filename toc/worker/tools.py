"""What all stages of a worker work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.store.store import Store
from toc.worker.entry import Inflight
from toc.worker.late_starts import LateStarts
from toc.worker.slots import SlotBook


@dataclass(frozen=True, eq=False)
class Tools:
    """Servers, clock and topics; ``handlers`` by topic; the slots and the entries that this worker holds.
    ``max_crashes``: after so many in a row a task is a suspect."""

    store: Store
    queues: Queues
    catalog: TopicCatalog
    clock: Clock
    handlers: dict[str, Handler]
    book: SlotBook
    inflight: Inflight
    late: LateStarts
    max_crashes: int
    died: Callable[[int, str], None]
    """Called with the job_id and the reason once a row says that its task is dead."""
