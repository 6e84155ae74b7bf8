"""How many tasks each slot holds: as its queues say or, where there is no index, as the rows do."""

from collections.abc import Iterable
from contextlib import suppress

from toc.index.calls import BySlot
from toc.index.messages import Peek
from toc.index.queues import Queues
from toc.model.errors import IndexUnavailable, SchemaBehind, StoreUnavailable
from toc.model.topic import Slot, Topic
from toc.store.store import Store


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

    Without an index this reads rows: of the first tasks of each table that have not ended, due or not, or of
    all that are due if not ``ahead``, as daemons ask, whose settings are known to be right. If a table does
    not answer, that is the result of each slot: any may have tasks there.
    """
    indexed = queues.present
    if indexed and ahead:
        with suppress(StoreUnavailable, SchemaBehind):  # while that is away Redis may answer
            indexed = store.identity.indexed()
    if indexed:
        return queues.peek(slots)
    try:
        counts, more = store.count_by_slot(now_ms, ahead=ahead)
    except (StoreUnavailable, SchemaBehind) as exc:
        return dict.fromkeys(slots, IndexUnavailable(str(exc)))
    names = {topic.biz_type: topic.name for topic in topics}
    found = {
        Slot(names[biz_type], number): Peek(
            tasks.first, tasks.pending - tasks.held, tasks.held, tasks.dead, now_ms, tasks.due, more
        )
        for (biz_type, number), tasks in counts.items()
        if biz_type in names
    }
    return {slot: found.get(slot, Peek(None, 0, 0, 0, now_ms, 0, more)) for slot in slots}
