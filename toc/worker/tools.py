"""What all stages of a worker work with, and by which they tell those before them."""

from collections.abc import Callable
from dataclasses import dataclass

from toc.index.inbox import Inbox
from toc.index.queues import Queues
from toc.loop import Reactor, Wake
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.store.store import Store
from toc.worker.entry import Inflight
from toc.worker.late_starts import LateStarts
from toc.worker.slots import SlotBook
from toc.worker.take.feedback import EarlyEntries


@dataclass(kw_only=True, eq=False)
class Tools:
    """Servers, clock and topics; ``handlers`` by topic; the slots and the entries that this worker holds.
    ``max_crashes``: after so many in a row a task is a suspect."""

    store: Store
    queues: Queues
    catalog: TopicCatalog
    clock: Clock
    worker_id: str
    handlers: dict[str, Handler]
    max_crashes: int
    died: Callable[[int, str], None]
    """Called with the job_id and the reason once a row says that its task is dead."""
    recycle: Callable[[str], None]
    """Asks, with a reason, for a successor of this process: a handler has damaged it."""
    tell: Callable[..., None]
    """Sends the daemon a message of ``toc.worker.control``."""
    backlogged: bool = False
    """Back-pressure: whether more is due than can start at once. The poller sets it. The finisher then
    gathers more before it writes, and the sweep rests longer."""

    def __post_init__(self) -> None:
        self.book = SlotBook(self.queues, self.worker_id)
        self.inflight = Inflight()
        self.late = LateStarts(self.clock, self.catalog, self.book)
        self.wake = Reactor()
        """Ends the sleep of the poller's thread."""
        self.row_wakes = [Wake() for _ in self.store.tables_of_server()]
        """End the sleeps of those that take by rows, one for each database server."""
        self.inbox = Inbox(self.wake)
        self.early = EarlyEntries(self.wake)
