"""Reads the due rows of pulled topics, as if Redis were not there: the row alone decides."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain
from typing import NamedTuple

from toc.model.topic import Topic
from toc.pull.handed_out import NO_FENCE, Candidate
from toc.sdk.client import TimeoutCenter
from toc.store.servers.shards import Answers
from toc.store.tasks.scan import DueRow, Position, of_types

ROWS_SECONDS = 0.25
"""How often due rows are read while Redis does not answer, or where there is no index."""
ROWS_PAGE = 100
ROWS_ON_SECONDS = 0.05
"""Pause before reading on where a table has more due rows than a page; least time between two reads."""

Page = tuple[Answers[list[DueRow]], set[int]]
"""Due rows of tables, and the job_ids of those that others have locked."""


class Found(NamedTuple):
    """What one read has found: of each topic with due rows, those that nobody has locked."""

    due: Mapping[str, list[Candidate]]
    whole: bool
    """Whether each due row of each table was read, also what is locked."""
    seconds: float
    """Until the next read."""


class DueRows:
    """One call reads a page of each table. The next reads on, so that no topic waits forever behind the rows
    of others, and begins anew at the end. What comes due before the next is read at its time. Leaves out rows
    that others have locked. A server that hangs is waited for once; others are read meanwhile."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._store, self._clock = center.store, center.clock
        self._servers = self._store.tables_of_server()
        self._asked: dict[int, Future[Page]] = {}
        """The servers that have not answered yet."""
        self._read_at = float("-inf")
        """When rows were last read (monotonic)."""
        self._places: dict[int, Position] = {}
        """Tables that have more due rows than were read, with the place from which to read on."""

    def read(self, topics: Iterable[Topic]) -> Found:
        """Read what is due of these topics; nothing if that was done a moment ago."""
        began = self._clock.monotonic()
        if began < self._read_at + ROWS_ON_SECONDS:
            return Found({}, False, self._read_at + ROWS_ON_SECONDS - began)
        self._read_at = began
        by_type, whole = {topic.biz_type: topic for topic in topics}, not self._places
        now = self._clock.now_ms()
        if not by_type:
            return Found({}, whole, ROWS_SECONDS)
        ahead = now + int(1000 * ROWS_SECONDS)
        # What only the sweep can end would be taken first, again and again.
        retries = {biz_type: topic.retries for biz_type, topic in by_type.items()}
        where = of_types(by_type) + self._store.pulls.open(retries)
        new: list[Future[Page]] = []
        for server, tables in enumerate(self._servers):
            if server not in self._asked:
                starts = {table: self._places.get(table, Position(0)) for table in tables}
                page = partial(self._page, starts, ahead, where)
                new.append(self._asked.setdefault(server, self._store.soon(page)))
        wait(new, ROWS_SECONDS if len(self._servers) > 1 else None)
        answers = [self._asked.pop(server).result() for server, one in [*self._asked.items()] if one.done()]
        pages = {table: page for answer, _ in answers for table, page in answer.items()}
        locked = {job_id for _, some in answers for job_id in some}
        self._places = {
            table: page[-1].position
            for table, page in pages.items()
            if len(page) == ROWS_PAGE and page[-1].next_time <= now
        }
        whole = whole and not self._places and len(new) == len(answers) == len(self._servers)
        whole = whole and not any(answer.unanswered for answer, _ in answers)
        due: dict[str, list[Candidate]] = {}
        rows = (row for row in chain.from_iterable(pages.values()) if row.biz_type in by_type)
        for row in sorted(rows, key=lambda row: row.next_time):
            if row.next_time > now:
                following = max(row.next_time / 1000 - self._clock.time(), 0.0)
                break
            topic = by_type[row.biz_type]
            entries = due.setdefault(topic.name, [])
            if row.job_id not in locked:
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.append(Candidate(row.job_id, slot, NO_FENCE, topic, now))
        else:
            following = ROWS_SECONDS
        return Found(due, whole, ROWS_ON_SECONDS if self._places else following)

    def _page(self, starts: Mapping[int, Position], until: int, where: str) -> Page:
        pages = self._store.scans.page(starts, until, ROWS_PAGE, where=where)
        return pages, self._store.locked((row.job_id for page in pages.values() for row in page), lately=True)
