"""Takes over the jobs in another queue's Redis. It may be interrupted and run again at any time.

    read (a page) ─▶ store, once per job ─▶ read back ─▶ ... ─▶ look for all of them once more

A job's id in the other queue is its biz_id here, and with the dialect's dedup_key it names one task. So a job
that was taken over before, by this run or another, is found and left alone, whatever has happened to its
task.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from toc.failpoint import failpoint
from toc.index.foreign import ForeignRedis
from toc.model.clock import from_ms
from toc.model.errors import DedupConflict, InvalidInput, NameTaken
from toc.model.task import NewTask, TaskRow, TaskStatus
from toc.model.template import Template
from toc.model.verdict import Failure
from toc.operate.templates import ensure_topic
from toc.sdk.client import TimeoutCenter, submit_of_dialect

T = TypeVar("T")

BATCH = 500
CHECKED_TOGETHER = 1000
LATER_MS = 86_400_000
"""How much later than now a dead letter is due until it is marked as dead: nobody may get it before that."""
BURIED = "it was a dead letter when it was imported"
NEVER = "it is never due"
GONE = "it has expired, or was deleted"
VALUES = 100
"""How many jobs are read at once."""
SETTLE_SECONDS = 0.2
"""How long to wait for the place of a job, which the other queue writes after the job itself."""


def instant_of(score: float) -> int:
    """Return an instant in ms, given a score in seconds: any number, also an infinite one."""
    return int(max(min(score, 2.0**40), 0.0) * 1000)


def paged(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in order, at most ``size`` at once."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


class Found(NamedTuple):
    """A job of the other queue: ``key`` and ``state`` there, and whether it is a dead letter (``dead``).

    ``template`` makes the topic of its task.
    """

    key: str
    state: str
    task: NewTask
    template: Template
    dead: bool = False


class Passed(NamedTuple):
    """Something that is not taken over, and why. ``lost``: it may be a job."""

    key: str
    why: str
    lost: bool = False


class Original(Protocol):
    """How another queue keeps its jobs. A place is where one stands: it has the job's ``key``, that key as
    Redis has it (``raw``), and a ``state``; or it is Passed."""

    values: str
    """The pattern of the keys of jobs."""

    def places(self, redis: ForeignRedis) -> Iterable[list[Any]]:
        """Yield the places of jobs, in pages."""

    def stray(self, key: bytes) -> Any:
        """Return the place of a job that has none."""

    def job(self, place: Any, stored: bytes | None, ttl_ms: int, now: int) -> Found | Passed:
        """Return the job of a place, given what its key holds (None: no string)."""


@dataclass
class Report:
    """How far an import has come.

    ``found`` counts jobs by state, ``passed`` entries without a job by reason, ``refused`` jobs that could
    not be taken over by reason. ``imported`` counts new tasks, ``there`` jobs that were tasks before,
    ``different`` jobs whose id belongs to a task with another content, which was left as it is. ``checked``
    counts jobs that were looked for once more at the end, ``missing`` those of them that are not tasks.
    """

    found: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    imported: int = 0
    there: int = 0
    different: int = 0
    checked: int = 0
    missing: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason why something was not taken over, the key of one example."""

    @property
    def complete(self) -> bool:
        """Whether all jobs are tasks."""
        return not (self.missing or self.different or self.refused)

    def pass_by(self, one: Passed) -> None:
        """Count something that is not taken over."""
        (self.refused if one.lost else self.passed)[one.why] += 1
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
        self.report = Report()
        self._center = center
        self._redis = redis
        self._original = original
        self._tell = tell
        self._by = by
        self._began = center.clock.now_ms()
        self._taken: dict[str, int] = {}
        """Job_ids by key."""
        self._passed: set[str] = set()
        self._templates: set[str] = set()

    def survey(self) -> Report:
        """Count what would be taken over, and write nothing. Raises IndexUnavailable."""
        for found in self._pages():
            self._taken.update((one.key, 0) for one in found)
            self._tell(self.report)
        return self.report

    def run(self) -> Report:
        """Take over all jobs and check them. Raises TocError; run it again then."""
        for found in self._pages():
            for template in {one.template.pattern: one.template for one in found}.values():
                self._make_template(template)
            for part in paged(found, BATCH):
                self._take(part)
            self._tell(self.report)
        self._check()
        return self.report

    # --- inside

    def _pages(self) -> Iterator[list[Found]]:
        """Yield what is new in each page."""
        for page in self._read():
            found: dict[str, Found] = {}
            for one in page:
                if isinstance(one, Passed):
                    if one.key not in self._passed:
                        self._passed.add(one.key)
                        self.report.pass_by(one)
                elif one.key not in self._taken and one.key not in self._passed:
                    found.setdefault(one.key, one)
            self.report.found.update(one.state for one in found.values())
            yield list(found.values())

    def _read(self) -> Iterator[list[Found | Passed]]:
        """Yield all jobs, first those that have a place."""
        yield from self._placed()
        strays = {key for page in self._redis.keys(self._original.values, "string") for key in page}
        places = [self._original.stray(key) for key in sorted(strays)]
        if any(one.key not in self._taken for one in places):
            time.sleep(SETTLE_SECONDS)
            yield from self._placed()  # again: a place may have been written or changed meanwhile
            yield from self._jobs(places)

    def _placed(self) -> Iterator[list[Found | Passed]]:
        for page in self._original.places(self._redis):
            yield from self._jobs(page)

    def _jobs(self, places: Sequence[Any]) -> Iterator[list[Found | Passed]]:
        """Yield the jobs of places, perhaps again those that were taken over meanwhile. Never writes."""
        for part in paged([one for one in places if one.key not in self._taken], VALUES):
            there = [one for one in part if not isinstance(one, Passed)]
            jobs: list[Found | Passed] = [one for one in part if isinstance(one, Passed)]
            values = self._redis.values([one.raw for one in there])
            now = self._center.clock.now_ms()
            for one, value in zip(there, values, strict=True):
                gone = Passed(f"{one.state} {one.key}", GONE)
                jobs.append(gone if value is None else self._original.job(one, *value, now))
            yield jobs

    def _make_template(self, template: Template) -> None:
        if template.pattern not in self._templates:
            self._templates |= {one.pattern for one in self._center.store.templates.list()}
        if template.pattern not in self._templates:
            with suppress(NameTaken):
                self._center.store.templates.create(template)
            self._templates.add(template.pattern)

    def _take(self, found: Sequence[Found]) -> None:
        for name in {one.task.topic for one in found}:
            ensure_topic(self._center, name, by=self._by)
        later = self._center.clock.now_ms() + LATER_MS
        tasks = [_postponed(one.task, later) if one.dead else one.task for one in found]
        job_ids = self._submit(found, tasks)
        failpoint("import.stored")
        rows = self._center.store.read([job_id for job_id in job_ids if job_id is not None])
        self._bury(
            rows[job_id]
            for one, job_id in zip(found, job_ids, strict=True)
            if one.dead and job_id is not None and job_id in rows
        )
        for one, job_id in zip(found, job_ids, strict=True):
            if job_id is None:
                continue
            self._taken[one.key] = job_id
            row = rows.get(job_id)
            if row is not None and row.gmt_create >= self._began:
                self.report.imported += 1
            else:
                self.report.there += 1

    def _submit(self, found: Sequence[Found], tasks: Sequence[NewTask]) -> list[int | None]:
        """Return the job_ids; None for what cannot be taken over, which is counted."""
        try:
            return list(submit_of_dialect(self._center, tasks))
        except (DedupConflict, InvalidInput):
            pass
        job_ids: list[int | None] = []
        for one, task in zip(found, tasks, strict=True):
            job_id: int | None = None
            try:
                job_id = submit_of_dialect(self._center, [task])[0]
            except DedupConflict:
                self._differs(one)
            except InvalidInput as exc:
                self._passed.add(one.key)
                self.report.pass_by(Passed(one.key, type(exc).__name__, lost=True))
            job_ids.append(job_id)
        return job_ids

    def _differs(self, one: Found) -> None:
        self._passed.add(one.key)
        self.report.different += 1
        self.report.examples.setdefault("a task of its id has another content", one.key)

    def _bury(self, rows: Iterable[TaskRow]) -> None:
        """Mark the tasks of dead letters as dead, unless something has happened to them since."""
        failures = [
            Failure(row.job_id, 0, 0, 0, 1, 0, row.next_time, BURIED)
            for row in rows
            if (row.status, row.version, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0, 0)
        ]
        if failures:
            self._center.store.die(failures).whole()

    def _check(self) -> None:
        """Look for every job that was taken over once more."""
        for part in paged(list(self._taken.values()), CHECKED_TOGETHER):
            rows = self._center.store.read(part)
            self.report.checked += len(part)
            self.report.missing += sum(job_id not in rows for job_id in part)
            self._tell(self.report)


def _postponed(task: NewTask, later: int) -> NewTask:
    return task._replace(action_time=from_ms(later), delay=None, expires_at=None)
