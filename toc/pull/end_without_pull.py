"""Ends pulled tasks that can have no further try: their last ttr has ended, or they have expired.

Usually the next pull that finds such a task ends it. A caller that lists dead tasks cannot wait for
a pull, so it uses this function.
"""

from __future__ import annotations

from toc.model.task import TaskStatus
from toc.model.topic import Topic
from toc.model.verdict import Unpulled, after_lapse, unpulled
from toc.observe.log import get_logger
from toc.store.store import Store

log = get_logger(__name__)

LIMIT = 100
"""Tasks of each table that one step ends."""


def end_without_pull(store: Store, topic: Topic) -> None:
    """End the rows of such tasks of a topic. Raises StoreUnavailable.

    Their entries in the index are corrected later, when a gateway takes them.
    """
    while True:
        rows = store.pulls.lapsed(topic.biz_type, topic.retries, LIMIT)
        ends = [
            after_lapse(row) for row in rows if unpulled(row, topic) in (Unpulled.LAPSED, Unpulled.EXPIRED)
        ]
        ended = store.pulls.end(ends).whole() if ends else {}
        for end in ends:
            if ended.get(end.row.job_id) and end.status == TaskStatus.DEAD:
                log.warning("task_dead", job_id=end.row.job_id, topic=topic.name, error=end.error)
        if not any(ended.values()):
            return
