"""Takes over the jobs in another queue's Redis. It may be interrupted and run again at any time.

    places of jobs (all) ─▶ keys of jobs (a page) ─▶ read ─▶ store, once per job ─▶ next page

A job's id in the other queue is its biz_id here, and with the dialect's dedup_key it names one task. So a job
that was taken over before, by this run or another, is found and left alone, whatever has happened to its
task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from toc.failpoint import failpoint
from toc.index.foreign import ForeignRedis
from toc.model.clock import from_ms
from toc.model.errors import DedupConflict, InvalidInput, NameTaken
from toc.model.task import NewTask, PutOutcome, TaskStatus
from toc.model.topic import Template
from toc.model.verdict import Failure
from toc.operate.templates import ensure_topic
from toc.sdk.client import TimeoutCenter, put_of_dialect

TOGETHER = 100
"""How many jobs are read at once."""
THREADS = 16
"""How many are stored at once."""
LATER_MS = 86_400_000
"""How much later than now a dead letter is due until it is marked as dead: nobody may get it before that."""
BURIED = "it was a dead letter when it was imported"
NEVER = "it is never due"
UNREADABLE = "it cannot be read"
DIFFERENT = "a task of its id has another content"


def instant_of(score: float) -> int:
    """Return an instant in ms, given a score in seconds: any number, also an infinite one."""
    return int(max(min(score, 2.0**40), 0.0) * 1000)


class Found(NamedTuple):
    """A job of the other queue with its ``key`` there. ``dead``: a dead letter. ``template`` makes the topic
    of its task."""

    key: str
    task: NewTask
    template: Template
    dead: bool = False


class Passed(NamedTuple):
    """Something that is not taken over, and why. ``lost``: it may be a job."""

    key: str
    why: str
    lost: bool = False


class Original(Protocol):
    """How another queue keeps its jobs."""

    keys: str
    """The pattern of the keys of jobs."""

    def places(self, redis: ForeignRedis) -> Iterable[tuple[bytes, Any]]:
        """Yield the keys of jobs with what else is known of them; with None an entry that is not
        understood."""

    def job(self, key: bytes, place: Any, stored: bytes | None, ttl_ms: int, now: int, /) -> Found | Passed:
        """Return the job of a key that holds ``stored`` (None: no string). ``place`` is None if it has
        none."""


@dataclass
class Report:
    """How far an import has come.

    ``found`` counts jobs by state. ``imported`` counts new tasks, ``there_before`` jobs that were tasks
    before, ``different`` jobs whose id belongs to a task with another content, which was left as it is. By
    reason: ``refused`` counts what may be jobs and could not be taken over, ``passed_by`` keys without a job.
    """

    found: Counter[str] = field(default_factory=Counter)
    imported: int = 0
    there_before: int = 0
    different: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    passed_by: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason why something was not taken over, the key of one example."""

    @property
    def complete(self) -> bool:
        """Whether all jobs are tasks."""
        return not (self.different or self.refused)

    def pass_by(self, one: Passed) -> None:
        """Count something that is not taken over."""
        (self.refused if one.lost else self.passed_by)[one.why] += 1
        self.examples.setdefault(one.why, one.key)


class Importing:
    """One import. ``tell`` is called after every page."""

    def __init__(
        self,
        center: TimeoutCenter,
        redis: ForeignRedis,
        original: Original,
        tell: Callable[[Report], object],
        *,
        by: str,
    ) -> None:
        self._report = Report()
        self._center = center
        self._redis = redis
        self._original = original
        self._tell = tell
        self._by = by
        self._topics: set[str] = set()

    def run(self, *, dry_run: bool = False) -> Report:
        """Take over all jobs; with ``dry_run`` only count them. Raises TocError; run it again then."""
        places: dict[bytes, Any] = {}
        for key, place in self._original.places(self._redis):
            if place is None:
                self._report.pass_by(Passed(repr(key), UNREADABLE, lost=True))
            else:
                places[key] = place
        seen: set[bytes] = set()
        with ThreadPoolExecutor(THREADS, "toc-import") as pool:
            for page in self._redis.keys(self._original.keys, "string"):
                new = [key for key in dict.fromkeys(page) if key not in seen]
                seen.update(new)
                for first in range(0, len(new), TOGETHER):
                    found = self._read(new[first : first + TOGETHER], places)
                    if not dry_run:
                        self._make_topics(found)
                        for count in pool.map(self._take, found):
                            count()
                    self._tell(self._report)
        return self._report

    # --- inside

    def _read(self, keys: Sequence[bytes], places: dict[bytes, Any]) -> list[Found]:
        """Return the jobs of these keys, counted. Never writes."""
        now = self._center.clock.now_ms()
        jobs: list[Found] = []
        for key, value in zip(keys, self._redis.values(keys), strict=True):
            if value is None:  # it has gone meanwhile
                continue
            one = self._original.job(key, places.get(key), *value, now)
            if isinstance(one, Passed):
                self._report.pass_by(one)
                continue
            due = one.task.action_time
            waits = due is not None and due > from_ms(now + 1000)
            self._report.found["dead" if one.dead else "delayed" if waits else "ready"] += 1
            jobs.append(one)
        return jobs

    def _make_topics(self, found: Sequence[Found]) -> None:
        for name, template in {one.task.topic: one.template for one in found}.items():
            if name not in self._topics:
                if all(one.pattern != template.pattern for one in self._center.store.templates.list()):
                    with suppress(NameTaken):
                        self._center.store.templates.create(template)
                ensure_topic(self._center, name, by=self._by)
                self._topics.add(name)

    def _take(self, one: Found) -> Callable[[], None]:
        """Take over a job, on a thread. Returns what counts it."""
        task = one.task
        if one.dead:
            later = from_ms(self._center.clock.now_ms() + LATER_MS)
            task = task._replace(action_time=later, expires_at=None)
        try:
            put = put_of_dialect(self._center, task)
        except DedupConflict:
            return partial(self._differs, one)
        except InvalidInput as exc:
            return partial(self._report.pass_by, Passed(one.key, type(exc).__name__, lost=True))
        failpoint("import.stored")
        if one.dead:
            self._bury(put.job_id)
        return partial(self._taken, new=put.outcome is PutOutcome.NEW)

    def _taken(self, *, new: bool) -> None:
        self._report.imported += new
        self._report.there_before += not new

    def _differs(self, one: Found) -> None:
        self._report.different += 1
        self._report.examples.setdefault(DIFFERENT, one.key)

    def _bury(self, job_id: int) -> None:
        """Mark the task of a dead letter as dead, unless something has happened to it since."""
        row = self._center.store.get(job_id)
        untouched = TaskStatus.PENDING, 0, 0, 0
        if row is not None and (row.status, row.version, row.attempts, row.crashes) == untouched:
            self._center.store.die([Failure(job_id, 0, 0, 0, 1, 0, row.next_time, BURIED)]).whole()
