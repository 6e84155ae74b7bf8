"""Ends tasks whose last ttr has ended, or which have expired, where no consumer asks for more.

A pull does so with what it finds due. Who shows dead tasks wants them to be dead at once, without a pull.
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
    """End them on their rows. Their entries follow when they are taken. Raises StoreUnavailable."""
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
