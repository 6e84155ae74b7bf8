"""Changes of up to a thousand tasks at once; and bulk jobs, which make them step by step, in gateways or by
the command that made one.

To do it twice is harmless: a task that is cancelled, rescheduled, redriven or purged twice has the same
outcome. A step does the next STEP tasks, then writes their outcomes and how far the job came, in one
transaction. After a kill -9 another process repeats one step at most, once the lease of the dead one has
ended.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from toc.failpoint import failpoint
from toc.model import documents, errors
from toc.model.bulk import PART, STORED, BulkJob, BulkKind, BulkOutcome, BulkState
from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.errors import IndexUnavailable, InvalidInput, TocError
from toc.model.task import CancelOutcome, TaskStatus
from toc.model.topic import Slot
from toc.model.verdict import entry_score
from toc.observe.log import get_logger, redact, stack
from toc.operate import audit
from toc.sdk.changes import Changes
from toc.sdk.client import TimeoutCenter
from toc.store.records.bulk import LEASE_MS
from toc.store.servers.server import Locked, Refused
from toc.store.store import Store
from toc.store.tasks.select import Selection

log = get_logger(__name__)

STEP = 100
"""Most tasks that one step does."""
STEPS_PER_SECOND = 5
"""Into how many steps a second's tasks are split, where fewer than STEP would come together."""
LOOK_SECONDS = 1.0
"""How often a process looks for jobs that nobody works on."""
RETRY_SECONDS = 2.0
"""How long a job waits for a server that is away, or once for a row that is locked, before it tries again."""
MAX_TASKS = 2_000_000
"""Most tasks of one job: what their numbers take of memory and of the first database stays small."""
MOST_RUNNING = 20
"""Most jobs of one maker that run at once: a process does a step of each in turn, so many would hold up those
of others."""
MOST_SEEN = 1000
"""How many of the latest jobs a list looks at."""
_WAITS: dict[type[Exception], str] = {
    Locked: "another transaction has locked a row",
    Refused: "a database server refuses it; its log says why",
    errors.SchemaBehind: "a table is missing, or older: toc db check",
    errors.StoreUnavailable: "a database server is out of reach",
    errors.Unavailable: "a server or table does not answer",
}
"""What a job waits for, or why a task failed, the first that fits. It names no server: whoever may see the
job may know of none."""
GROWTH, LEAST_GROWTH = 0.1, 10
"""By which share, or how many, tasks may have become more since whoever confirms has seen their number."""


# --- to some tasks at once: all in one transaction per server


def redrive(
    center: TimeoutCenter, job_ids: Sequence[int], *, tries: int | None = None, expires_at: int = 0,
    died_by: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Make dead tasks pending again, due now, with all their tries. Skips tasks that are not dead, and those
    that died after ``died_by`` (ms).

    ``tries``: how many they have from now on. They expire at ``expires_at`` (ms), by default never. Writes
    the rows first, then the index. Counts ``redriven``; ``not_indexed_yet``: those of them that wait for
    the sweep, because Redis is out of reach; and ``left``: those whose tables do not answer.
    """
    topics = {topic.biz_type: topic for topic in center.store.topics.list()}
    now = center.clock.now_ms()
    rows = center.store.redrive(job_ids, now, tries=tries, expires_at=expires_at, died_by=died_by)
    entries: dict[Slot, list[tuple[int, float]]] = {}
    later = 0
    for row in rows.values():
        topic = topics.get(row.biz_type)
        if topic is None:
            later += 1  # its topic was removed: no worker consumes its slot
            continue
        entry = row.job_id, entry_score(topic, row.next_time, 0)
        entries.setdefault(topic.slot(row.slot_crc, row.slot_amount), []).append(entry)
    for slot, reply in center.queues.redrive(entries).items():
        if isinstance(reply, IndexUnavailable):
            later += len(entries[slot])
    return {"redriven": len(rows), "not_indexed_yet": later, "left": len(rows.unanswered)}


def purge_dead(center: TimeoutCenter, job_ids: Sequence[int]) -> dict[str, int]:
    """Delete dead tasks for good. Counts ``purged``, and ``left``: those whose Redis server or table does not
    answer.

    Removes the DeadQueue entry first: without its row it could not be found. If this stops in between, the
    sweep adds the entry again. One that a sweep adds which read the row just before goes with a later one.
    Leaves a task alone that was redriven meanwhile.
    """
    topics = {topic.biz_type: topic for topic in center.store.topics.list()}
    rows = [row for row in center.store.read(job_ids).values() if row.status == TaskStatus.DEAD]
    sizes = {row.job_id: -1 if row.body_length is None else row.body_length for row in rows}
    entries: dict[Slot, list[int]] = {}
    for row in rows:
        topic = topics.get(row.biz_type)
        if topic is not None:  # else its topic was removed, and the sweep knows no slot for it either
            entries.setdefault(topic.slot(row.slot_crc, row.slot_amount), []).append(row.job_id)
    for slot, removed in center.queues.purge_dead(entries).items():
        if isinstance(removed, IndexUnavailable):
            for job_id in entries[slot]:
                del sizes[job_id]
    deleted = center.store.delete_ended(sizes, [TaskStatus.DEAD])
    return {"purged": sum(deleted.results), "left": len(rows) - len(sizes) + len(deleted.failed)}


def cancel(center: TimeoutCenter, job_ids: Sequence[int]) -> dict[int, CancelOutcome]:
    """Cancel tasks, in one transaction per server. Returns the outcome of each."""
    return Changes(center).cancel(job_ids)


# --- jobs


def make_job(center: TimeoutCenter, job: BulkJob, wanted: Selection, *, seen: int) -> BulkJob:
    """Choose the tasks of a job, write it down, and return it with their number.

    ``seen``: how many whoever confirms has seen. Raises InvalidInput if they are many more by now, or none,
    and Busy.
    """
    store = center.store
    check_room(center, job.by)
    _check_number(store.selections.count(wanted), seen)  # before all are read
    job_ids = store.selections.ids(wanted)
    _check_number(len(job_ids), seen)
    made = replace(job, tasks=len(job_ids))
    told = {"bulk": job.name, "tasks": made.tasks, "rate": job.rate, **job.details}
    change = _change(store, job)
    change.intend(**told)
    try:
        return store.bulk.add(made, job_ids)
    except BaseException as exc:
        change.conclude({"outcome": audit.FAILED, "error": redact(str(exc))[: audit.MAX_ERROR]}, {})
        raise


def stop_job(center: TimeoutCenter, name: str) -> BulkJob:
    """Stop a job if it runs, and return it. Raises UnknownBulk."""
    stopped = center.store.bulk.move(name, BulkState.RUNNING, BulkState.STOPPED)
    job = center.store.bulk.get(name)
    if stopped:  # who works on it, unless it was killed, says later how far it came
        _conclude(center.store, job, audit.INTERRUPTED)
    return job


def check_room(center: TimeoutCenter, by: str) -> None:
    """Raise Busy if too many jobs of one maker run."""
    jobs = center.store.bulk.list(MOST_SEEN)
    if sum(one.by == by and one.state is BulkState.RUNNING for one in jobs) >= MOST_RUNNING:
        raise errors.Busy(f"{MOST_RUNNING} bulk jobs of {by} run: wait for one, or stop it")


def _check_number(tasks: int, seen: int) -> None:
    if not tasks:
        raise InvalidInput("no task matches: there is nothing to do")
    if tasks > MAX_TASKS:
        raise InvalidInput(f"{tasks} tasks match; a job has at most {MAX_TASKS}: give due_before, for a part")
    if tasks > seen + max(LEAST_GROWTH, int(seen * GROWTH)):
        raise InvalidInput(
            f"{tasks} tasks match by now, not {seen}: look at them again, and confirm this number", "tasks"
        )


def _change(store: Store, job: BulkJob) -> audit.Change:
    return audit.Change(store, job.name, job.by, f"tasks.{job.kind}", job.topic)


def _conclude(store: Store, job: BulkJob, outcome: str) -> None:
    """Write into the audit what came of a job so far; if it goes on, it is written again."""
    _change(store, job).conclude({"outcome": outcome}, {"bulk": job.name, "tasks": job.done, **job.counts})


# --- what one step does


_Found = Mapping[int, str | Exception]
"""What came of tasks, or why they failed; nothing of those that are not there."""


def _cancel(center: TimeoutCenter, job_ids: Sequence[int], _job: BulkJob) -> _Found:
    return {job_id: outcome.value for job_id, outcome in cancel(center, job_ids).items()}


def _reschedule(center: TimeoutCenter, job_ids: Sequence[int], job: BulkJob) -> _Found:
    [job_id] = job_ids  # each is a transaction of its own, which may wait
    given = map(job.details.get, ("action_time", "expires_at"))
    due, expiry = (None if text is None else documents.parse_instant(text) for text in given)
    delay = job.details.get("delay")
    try:
        return {job_id: center.reschedule(job_id, action_time=due, delay=delay, expires_at=expiry).value}
    except errors.InvalidExpiry:
        if expiry is not None:
            raise
        return {job_id: BulkOutcome.EXPIRES_BEFORE}


def _redrive(center: TimeoutCenter, job_ids: Sequence[int], job: BulkJob) -> _Found:
    died_by = job.created + 2 * MAX_CLOCK_SKEW_MS  # by the clocks of two hosts
    if redrive(center, job_ids, died_by=died_by)["left"]:
        raise errors.Unavailable("some tables do not answer")
    again = TocError("it has died since the job was made")
    rows = center.store.read(job_ids).values()
    return {row.job_id: again if row.status == TaskStatus.DEAD else BulkOutcome.REDRIVEN for row in rows}


def _purge(center: TimeoutCenter, job_ids: Sequence[int], _job: BulkJob) -> _Found:
    if purge_dead(center, job_ids)["left"]:
        raise errors.Unavailable("some cannot be deleted")
    found: dict[int, str] = dict.fromkeys(job_ids, BulkOutcome.PURGED)
    return found | dict.fromkeys(center.store.read(job_ids), BulkOutcome.NOT_DEAD)


_DO: Mapping[BulkKind, Callable[[TimeoutCenter, Sequence[int], BulkJob], _Found]] = {
    BulkKind.CANCEL: _cancel,
    BulkKind.RESCHEDULE: _reschedule,
    BulkKind.REDRIVE: _redrive,
    BulkKind.PURGE: _purge,
}


@dataclass(slots=True)
class _Held:
    """A job that this process has claimed. Seconds are monotonic."""

    job: BulkJob
    next_at: float = 0.0
    keep_at: float = 0.0
    """When its lease is renewed, if no step does so before."""
    failed: str = ""
    """The last error about one of its tasks."""
    again: frozenset[int] = frozenset()
    """Tasks whose rows others had locked at the last step."""


class BulkRunner:
    """Does the jobs of a system, as a gateway's process, or ``only`` one, as the command that has made it.
    Call ``run_once`` on a thread of its own, again after the seconds that it returns."""

    def __init__(self, center: TimeoutCenter, only: str | None = None) -> None:
        self._center = center
        self._only = only
        self._table = center.store.bulk
        self._clock = center.clock
        self._owner = secrets.randbits(63)
        self._held: dict[str, _Held] = {}
        self._look_at = 0.0
        self._away = False

    def run_once(self) -> float:
        """Do a step of each job whose turn it is. Returns the seconds until the next call."""
        now = self._clock.monotonic()
        try:
            if now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                for name in self._table.claim(self._owner, self._only):
                    with suppress(errors.UnknownBulk):  # it is damaged
                        self._held[name] = _Held(self._table.get(name))
            for held in list(self._held.values()):
                if now >= held.next_at:
                    try:
                        self._step(held, now)
                    except TocError:
                        raise
                    except Exception as exc:  # its row is damaged; it harms no other
                        self._save(held, error=_failure(held.job, exc), state=BulkState.STOPPED)
                elif now >= held.keep_at:
                    self._save(held)
            self._away = False
        except TocError as exc:  # the first database is away, and with it what is known of jobs
            if not self._away:
                self._away = True
                log.warning("bulk_jobs_not_read", error=str(exc))
            self._held.clear()  # their leases end, and somebody claims them again
            return RETRY_SECONDS
        turns = [min(held.next_at, held.keep_at) for held in self._held.values()]
        return max(0.0, min([self._look_at, *turns]) - self._clock.monotonic())

    def close(self) -> None:
        """Let others go on with the jobs at once, as far as the first database answers: else they wait until
        the leases end. Call it when ``run_once`` is not called any more."""
        with suppress(TocError):
            for name in list(self._held):
                self._table.let_go(name, self._owner)

    def _step(self, held: _Held, now: float) -> None:
        job = held.job
        size = max(1, min(STEP, int(job.rate / STEPS_PER_SECOND)))
        number, offset = divmod(job.done, PART)
        part = self._table.part(job.name, number)
        chunk = part.job_ids[offset : offset + size]
        # The first that waits for a server that hangs marks it. Later ones fail at once, and jobs whose tasks
        # are elsewhere go on.
        trouble = self._center.store.unwritable(chunk)
        locked = frozenset(job_id for job_id, error in trouble.items() if isinstance(error, Locked))
        # A row may be locked for a moment by whoever ends its task: two goes. If all are, a table is.
        twice = frozenset() if len(trouble) == len(chunk) > 1 else locked & held.again
        found: dict[int, str | Exception] = {job_id: trouble.pop(job_id) for job_id in twice}
        held.again = locked
        able = list(takewhile(lambda one: one not in trouble, chunk))
        waits: Exception | None = trouble[chunk[len(able)]] if len(able) < len(chunk) else None
        try:
            self._do(held, [one for one in able if one not in found], found)
        except (errors.Unavailable, errors.SchemaBehind) as exc:
            waits = exc
        outcomes = []
        for job_id in takewhile(found.__contains__, chunk):
            outcome = found[job_id]
            if isinstance(outcome, Exception):
                held.failed = f"task {job_id}: {_failure(job, outcome)}"
                outcome = BulkOutcome.FAILED
            outcomes.append(BulkOutcome(outcome))
        failpoint("bulk.step-done")
        counts = Counter(job.counts) + Counter(outcome.value for outcome in outcomes)
        held.job = job = replace(job, done=job.done + len(outcomes), counts=counts)
        written = part.outcomes[:offset] + bytes(map(STORED.index, outcomes))
        ended = BulkState.DONE if job.done >= job.tasks or not chunk else None
        if ended:
            if job.done < job.tasks:  # a part is missing, or shorter than it was
                held.failed = f"{job.tasks - job.done} of its tasks are not known any more"
            _conclude(self._center.store, job, audit.DONE)
        held.next_at = now + len(outcomes) / job.rate
        told = held.failed
        if waits is not None:
            held.next_at = self._clock.monotonic() + RETRY_SECONDS
            told = f"it waits: {_trouble(waits)}"
        self._save(held, error=told, part=(number, written), state=ended)

    def _do(self, held: _Held, job_ids: Sequence[int], found: dict[int, str | Exception]) -> None:
        """Do some tasks, and write into ``found`` what came of them. Raises Unavailable, SchemaBehind.

        First renews the lease: whoever was silent for longer than that must undo nothing that came after.
        """
        job, many = held.job, len(job_ids) > 1
        if self._clock.monotonic() >= held.keep_at:
            if self._table.save(job, self._owner) is None:
                raise errors.Busy("another process has the job")
            held.keep_at = self._clock.monotonic() + LEASE_MS / 3000
        try:
            if job_ids and not (many and job.kind is BulkKind.RESCHEDULE):
                done = _DO[job.kind](self._center, job_ids, job)
                found |= {job_id: done.get(job_id, BulkOutcome.UNKNOWN) for job_id in job_ids}
                return
        except Exception as exc:
            if not many:
                if isinstance(exc, (errors.Unavailable, errors.SchemaBehind)):
                    raise
                found[job_ids[0]] = exc
                return
        # If one of them has failed, the others must not suffer from it.
        for one in job_ids:
            self._do(held, [one], found)

    def _save(
        self, held: _Held, *, error: str | None = None, part: tuple[int, bytes] | None = None,
        state: BulkState | None = None,
    ) -> None:  # fmt: skip
        job = held.job
        held.keep_at = self._clock.monotonic() + LEASE_MS / 3000
        found = self._table.save(job, self._owner, error=error, part=part, state=state)
        if found is not BulkState.RUNNING:  # it has ended, or an operator or another process has it
            self._held.pop(job.name, None)
            if found is BulkState.STOPPED:
                self._table.let_go(job.name, self._owner)
                _conclude(self._center.store, job, audit.INTERRUPTED)


def work_off(center: TimeoutCenter, job: BulkJob, progress: Callable[[str], None]) -> Mapping[str, int]:
    """Work on a job, beside gateways, until it has ended. Returns how many of its tasks had which outcome.

    An exception from outside, such as Ctrl-C, stops the job; a note of it says how far the job came. Raises
    TocError if somebody has stopped it.
    """
    runner = BulkRunner(center, job.name)
    try:
        while job.state is BulkState.RUNNING:
            progress(f"{_done(job)}{job.error and '; '}{job.error}")
            time.sleep(runner.run_once())
            try:
                job = center.store.bulk.get(job.name)
            except errors.Unavailable:
                job = replace(job, error="it waits: the first database is out of reach")
    except BaseException as exc:
        runner.close()
        with suppress(TocError):
            job = stop_job(center, job.name)
        stopped = f"toc bulk resume {job.name} lets a gateway go on"
        if job.state is BulkState.RUNNING:
            stopped = f"a gateway may go on, as it could not be stopped: toc bulk stop {job.name}"
        exc.add_note(f"{_done(job)}; {stopped}")
        raise
    runner.close()
    if job.state is BulkState.STOPPED:
        raise TocError(f"{_done(job)}; it was stopped{job.error and ': '}{job.error}")
    return job.counts


def _done(job: BulkJob) -> str:
    return f"bulk job {job.name}: {job.done} of {job.tasks} tasks are done"


def _failure(job: BulkJob, error: Exception) -> str:
    """Say why a task failed."""
    if isinstance(error, tuple(_WAITS)):
        return f"{_trouble(error)}; another job tries it again"
    if isinstance(error, TocError):
        return redact(str(error))
    log.error("bulk_task_failed", bulk=job.name, stack=stack(error))
    return "the gateway failed; its log tells more"


def _trouble(error: Exception) -> str:
    return next(text for kind, text in _WAITS.items() if isinstance(error, kind))
