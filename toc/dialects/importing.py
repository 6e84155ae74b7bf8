"""Takes over the jobs in another queue's Redis. It may be interrupted and run again at any time.

    places of jobs (all) ─▶ keys of jobs (a page) ─▶ read ─▶ store, once per job ─▶ next page

A job's id in the other queue is its biz_id here, and with the dialect's dedup_key it names one task. So a job
that was taken over before, by this run or another, is found and left alone, whatever has happened to its
task.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from toc.dialects.originals import UNREADABLE, Found, LmstfyOriginal, Passed, YouzanOriginal
from toc.failpoint import failpoint
from toc.index.foreign import ForeignRedis
from toc.model.clock import from_ms
from toc.model.errors import DedupConflict, InvalidInput, NameTaken
from toc.model.task import PutOutcome, TaskStatus
from toc.model.topic import Topic, best_of
from toc.model.verdict import Failure
from toc.operate.templates import check_room, ensure_topic
from toc.sdk.client import TimeoutCenter

TOGETHER = 100
"""How many jobs are read at once."""
THREADS = 16
"""How many are stored at once."""
LATER_MS = 86_400_000
"""How much later than now a dead letter is due until it is marked as dead: nobody may get it before that."""
BURIED = "it was a dead letter when it was imported"
DIFFERENT = "a task of its id has another content"


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

    def count(self, one: Found, outcome: PutOutcome | Passed | None) -> None:
        """Count a job that was to be taken over. None: a task of its id has another content."""
        self.imported += outcome is PutOutcome.NEW
        self.there_before += outcome is PutOutcome.KEPT
        if outcome is None:
            self.different += 1
            self.examples.setdefault(DIFFERENT, one.key)
        elif isinstance(outcome, Passed):
            self.pass_by(outcome)


@dataclass(eq=False)
class Importing:
    """One import; with ``dry_run`` it writes nothing, and tells what would be refused. ``tell`` is called
    after every page. Topics are made in the name of ``by``."""

    center: TimeoutCenter
    redis: ForeignRedis
    original: LmstfyOriginal | YouzanOriginal
    tell: Callable[[], object]
    by: str
    dry_run: bool = False
    report: Report = field(default_factory=Report)
    _topics: dict[str, Topic] = field(default_factory=dict)
    """Those of a dry run, also those that it would have made."""

    def run(self) -> None:
        """Take over all jobs. Raises TocError; run it again then."""
        places: dict[bytes, Any] = {}
        for key, place in self.original.places(self.redis):
            if place is None:
                self.report.pass_by(Passed(repr(key), UNREADABLE, lost=True))
            else:
                places[key] = place
        seen: set[bytes] = set()
        with ThreadPoolExecutor(THREADS, "toc-import") as pool:
            # What has a place may be of another type.
            keys = chain(self.redis.keys(self.original.keys, "string"), places)
            while page := list(islice(keys, TOGETHER)):
                new = [key for key in dict.fromkeys(page) if key not in seen]
                seen.update(new)
                found = self._read(new, places)
                self._make_topics(found)
                for one, outcome in zip(found, pool.map(self._take, found), strict=True):
                    if not self.dry_run or outcome is not PutOutcome.NEW:
                        self.report.count(one, outcome)
                self.tell()

    # --- inside

    def _read(self, keys: Sequence[bytes], places: dict[bytes, Any]) -> list[Found]:
        """Return the jobs of these keys, counted. Never writes."""
        now = self.center.clock.now_ms()
        jobs: list[Found] = []
        for key, value in zip(keys, self.redis.values(keys), strict=True):
            if value is None:  # it has gone meanwhile
                continue
            one = self.original.job(key, places.get(key), *value, now)
            if isinstance(one, Passed):
                self.report.pass_by(one)
                continue
            ready = one.task.action_time is None or one.task.action_time <= from_ms(now + 1000)
            self.report.found["dead" if one.dead else "ready" if ready else "delayed"] += 1
            jobs.append(one)
        return jobs

    def _make_topics(self, found: Sequence[Found]) -> None:
        for name, template in {one.task.topic: one.template for one in found}.items():
            if self.dry_run and name not in self._topics:
                known = self.center.catalog.refresh()
                there = {one.pattern: one for one in (template, *self.center.store.templates.list())}
                best = best_of(there.values(), name)
                if name not in known:
                    check_room(best, name, {*known, *self._topics})
                self._topics[name] = known.get(name) or best.topic(name, 0)
            elif not self.dry_run and name not in self.center.catalog.known():
                with suppress(NameTaken):
                    self.center.store.templates.create(template)
                ensure_topic(self.center, name, by=self.by)

    def _take(self, one: Found) -> PutOutcome | Passed | None:
        """Take over a job, or see whether that could be done, on a thread. None: a task of its id has another
        content."""
        task = one.task
        if one.dead:
            later = from_ms(self.center.clock.now_ms() + LATER_MS)
            task = task._replace(action_time=later, expires_at=None)
        try:
            if self.dry_run:
                made = self.center._intake.submission(task, self._topics.__getitem__)
                kept = self.center.store.kept(made)
                return PutOutcome.NEW if kept is None else kept.outcome
            put = self.center.put(task)
        except DedupConflict:
            return None
        except InvalidInput as exc:
            return Passed(one.key, type(exc).__name__, lost=True)
        failpoint("import.stored")
        if one.dead:
            self._bury(put.job_id)
        return put.outcome

    def _bury(self, job_id: int) -> None:
        """Mark the task of a dead letter as dead, unless something has happened to it since."""
        row = self.center.store.get(job_id)
        untouched = TaskStatus.PENDING, 0, 0, 0
        if row is not None and (row.status, row.version, row.attempts, row.crashes) == untouched:
            self.center.store.die([Failure(job_id, 0, 0, 0, 1, 0, row.next_time, BURIED)]).whole()
