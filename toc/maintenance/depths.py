"""How many tasks each slot holds: as its queues say or, where there is no index, as the rows do."""

from collections.abc import Iterable

from toc.index.calls import BySlot
from toc.index.messages import Peek
from toc.index.queues import Queues
from toc.model.topic import Slot, Topic
from toc.store.store import Store

NOTHING = Peek(None, 0, 0, 0, 0)


def depths(
    store: Store,
    queues: Queues,
    topics: Iterable[Topic],
    slots: Iterable[Slot],
    now_ms: int,
    *,
    ahead: bool = True,
) -> BySlot[Peek]:
    """Return the counts of each slot.

    Without an index this reads the rows of all tasks that have not ended, or of those that are due if not
    ``ahead``, and raises StoreUnavailable or SchemaBehind.
    """
    if queues.present:
        return queues.peek(slots)
    names = {topic.biz_type: topic.name for topic in topics}
    found = {
        Slot(names[biz_type], number): Peek(
            tasks.first, tasks.pending - tasks.held, tasks.held, tasks.dead, now_ms, tasks.due
        )
        for (biz_type, number), tasks in store.count_by_slot(now_ms, ahead=ahead).items()
        if biz_type in names
    }
    return {slot: found.get(slot, NOTHING._replace(redis_now_ms=now_ms)) for slot in slots}
