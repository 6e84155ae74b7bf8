"""Former slots: after slot_amount was lowered, the surplus slots are given up once nothing needs them.

Rows keep the slot_amount with which they were stamped, so the topic's former slots are still consumed and
swept. They are given up when their queues are empty and no pending row is stamped with more than the current
amount. The worker that sweeps table 0 checks that; the topic table publishes the result.

After that, a submit that had read the topic earlier may still write such a row, or an operator may
redrive an old dead task. The sweep and the redrive then make the workers consume these slots again.
So a slot that is given up too early delays a task for a moment, but no task is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable, SchemaBehind, StoreUnavailable
from toc.model.topic import Topic
from toc.observe.log import get_logger
from toc.store.store import Store

log = get_logger(__name__)

HOLD_SECONDS = 3.0
"""How long former slots are kept at least. Submitters read the topic every other second."""
LOOK_SECONDS = 1.0
TABLES = 4
"""Tables that one step checks."""
REST = 9
"""The rest after a step, as a multiple of its time."""


@dataclass(eq=False)
class FormerSlots:
    """The loop that gives up former slots. Idle unless this worker sweeps table 0 and a topic has
    former slots.

    ``tables`` returns the tables of this worker.
    """

    store: Store
    queues: Queues
    catalog: TopicCatalog
    clock: Clock
    tables: Callable[[], Collection[int]]

    def __post_init__(self) -> None:
        self._passes: dict[tuple[str, int, int], _Pass] = {}

    def run_once(self) -> float:
        """One step for each topic that is being narrowed. Returns the seconds until the next."""
        began = self.clock.monotonic()
        topics = [topic for topic in self.catalog.known().values() if topic.former_slots]
        if not topics or 0 not in self.tables():
            self._passes.clear()
            return LOOK_SECONDS
        passes = {(topic.name, topic.slot_amount, topic.former_slots): topic for topic in topics}
        self._passes = {key: self._passes.get(key) or _Pass(began, self.store.tables) for key in passes}
        going_on = False
        for key, topic in passes.items():
            try:
                going_on = self._step(topic, self._passes[key]) or going_on
            except (StoreUnavailable, SchemaBehind) as exc:
                log.warning("slots_not_given_up", topic=topic.name, error=str(exc))
        took = self.clock.monotonic() - began
        return took * REST if going_on else max(took * REST, LOOK_SECONDS)

    def _step(self, topic: Topic, made: _Pass) -> bool:
        """Look for a use of the former slots. Returns whether the next step should follow soon."""
        if self.clock.monotonic() - made.began < HOLD_SECONDS:
            return False
        if made.left is made.order:
            for peek in self.queues.peek(topic.slots()[topic.slot_amount :]).values():
                if isinstance(peek, IndexUnavailable) or peek.store or peek.prepared:
                    return False
        part, rest = made.left[:TABLES], made.left[TABLES:]
        found = self.store.stamped_above(part, topic.biz_type, topic.slot_amount)
        if found:  # start with that table: while it has such a row, nothing else is read
            made.order = sorted(made.order, key=lambda table: table not in found)
        made.left = made.order if found or not rest else rest
        if found or rest:
            return not found
        if self.store.topics.stop_consuming(topic):
            log.info("slots_given_up", topic=topic.name, slots=topic.slot_amount, former=topic.former_slots)
        return False


class _Pass:
    """The tables in the order in which they are read, and those of them that are left."""

    def __init__(self, began: float, tables: Sequence[int]) -> None:
        self.began = began
        self.order = self.left = tables
