"""Takes over the jobs in another queue's Redis. It may be interrupted and run again at any time.

    places of jobs (all) ─▶ keys of jobs (a page) ─▶ read ─▶ store, once per job ─▶ next page

A job's id in the other queue is its biz_id here, and with the dialect's dedup_key it names one task. So a job
that was taken over before, by this run or another, is found and left alone, whatever has happened to its
task.

lmstfy (its engine ``redis``) keeps:

    j/{namespace}/{queue}/{id}   the body, or JSON of body and attributes if the id has a version
    timer_set                    jobs that wait for their time or for the end of their ttr, by second
    q/{namespace}/{queue}        ready jobs, the next one at the right end
    d/{namespace}/{queue}        dead letters, the oldest at the right end

An entry consists of texts, each after its length, and numbers. Lengths and numbers have two bytes,
little-endian. In the timer: namespace, queue, tries left, id. In a list: tries left, id.

ouqiang/delay-queue (0.4) keeps, by default in database 1:

    {id}               the job in MessagePack, a map. Its keys are "1" to "5" for the topic, the id, the
                       second when it is due, the ttr and the body; in 0.3 they are the fields' names
    dq_bucket_{n}      ids of jobs that wait for their time or for the end of their ttr, by second

Other jobs are ready. The names of buckets can be configured there, so their pattern is an argument here.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from toc.dialects.jobs import Job
from toc.dialects.lmstfy_wire import ULID_CHARS, delay_of, made_at, task_of, template_of
from toc.dialects.youzan import MAX_TTR, PREFIX, Youzan
from toc.failpoint import failpoint
from toc.index.foreign import FOREVER, ForeignRedis
from toc.model.clock import from_ms
from toc.model.documents import parse_object
from toc.model.errors import DedupConflict, InvalidInput, NameTaken
from toc.model.sharding import MAX_KEY_BYTES
from toc.model.task import NewTask, OnConflict, PutOutcome, TaskStatus
from toc.model.topic import Template
from toc.model.verdict import Failure
from toc.operate.templates import ensure_topic
from toc.sdk.client import TimeoutCenter
from toc.sdk.submission import LATEST_MS

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
        """Count a job that was to be taken over."""
        if outcome is None:
            self.different += 1
            self.examples.setdefault(DIFFERENT, one.key)
        elif isinstance(outcome, Passed):
            self.pass_by(outcome)
        elif outcome is PutOutcome.NEW:
            self.imported += 1
        else:
            self.there_before += 1


@dataclass(eq=False)
class Importing:
    """One import. ``tell`` is called after every page. Topics are made in the name of ``by``."""

    center: TimeoutCenter
    redis: ForeignRedis
    original: LmstfyOriginal | YouzanOriginal
    tell: Callable[[Report], object]
    by: str
    _report: Report = field(default_factory=Report)
    _topics: set[str] = field(default_factory=set)

    def run(self, *, dry_run: bool = False) -> Report:
        """Take over all jobs; with ``dry_run`` only count them. Raises TocError; run it again then."""
        places: dict[bytes, Any] = {}
        for key, place in self.original.places(self.redis):
            if place is None:
                self._report.pass_by(Passed(repr(key), UNREADABLE, lost=True))
            else:
                places[key] = place
        seen: set[bytes] = set()
        with ThreadPoolExecutor(THREADS, "toc-import") as pool:
            for page in self.redis.keys(self.original.keys, "string"):
                new = [key for key in dict.fromkeys(page) if key not in seen]
                seen.update(new)
                for first in range(0, len(new), TOGETHER):
                    found = self._read(new[first : first + TOGETHER], places)
                    if not dry_run:
                        self._make_topics(found)
                        for one, outcome in zip(found, pool.map(self._take, found), strict=True):
                            self._report.count(one, outcome)
                    self.tell(self._report)
        return self._report

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
                self._report.pass_by(one)
                continue
            ready = one.task.action_time is None or one.task.action_time <= from_ms(now + 1000)
            self._report.found["dead" if one.dead else "ready" if ready else "delayed"] += 1
            jobs.append(one)
        return jobs

    def _make_topics(self, found: Sequence[Found]) -> None:
        for name, template in {one.task.topic: one.template for one in found}.items():
            if name not in self._topics:
                if all(one.pattern != template.pattern for one in self.center.store.templates.list()):
                    with suppress(NameTaken):
                        self.center.store.templates.create(template)
                ensure_topic(self.center, name, by=self.by)
                self._topics.add(name)

    def _take(self, one: Found) -> PutOutcome | Passed | None:
        """Take over a job, on a thread. None: a task of its id has another content."""
        task = one.task
        if one.dead:
            later = from_ms(self.center.clock.now_ms() + LATER_MS)
            task = task._replace(action_time=later, expires_at=None)
        try:
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


# --- lmstfy

LATE = "it would expire before it is due"


class Entry(NamedTuple):
    """What the entry of a job tells: ``due`` in ms."""

    tries: int
    due: int
    dead: bool


class LmstfyOriginal:
    """The jobs of one pool."""

    keys = "j/*"
    """The pattern of the keys of jobs."""

    def places(self, redis: ForeignRedis) -> Iterator[tuple[bytes, Entry | None]]:
        """Yield the keys of the jobs that have an entry, with it; with None an entry that is not
        understood."""
        for members in redis.scores("timer_set"):
            for member, score in members:
                yield _timed(member, instant_of(score))
        for pattern in ("q/*", "d/*"):
            for keys in redis.keys(pattern, "list"):
                for key in keys:
                    for items in redis.items(key):
                        for item in items:
                            yield _listed(key, item)

    def job(
        self, key: bytes, place: Entry | None, stored: bytes | None, ttl_ms: int, now: int
    ) -> Found | Passed:
        """Return the job of a key that holds ``stored`` (None: no string), or why it is none. ``place`` is
        None if it has no entry: its consumer took it and ended before noting that."""
        name = key.decode(errors="replace")
        try:
            _, namespace, queue, job_id = name.split("/")
            body, attributes = _content(job_id, stored)
        except ValueError:
            return Passed(name, UNREADABLE, lost=True)
        one = place or Entry(1, made_at(job_id) + 1000 * delay_of(job_id), dead=False)
        due = max(now, one.due)
        if due > LATEST_MS:
            return Passed(name, NEVER, lost=True)
        # An entry in the timer without tries left belongs to a job whose last try is running.
        dead = one.dead or not one.tries
        expires_at = 0 if dead or ttl_ms == FOREVER else min(now + ttl_ms, LATEST_MS)
        if expires_at and expires_at < due:
            return Passed(name, LATE)
        tries = max(one.tries, 1)
        task = task_of(
            namespace, queue, job_id, body, due=due, expires_at=expires_at, tries=tries, attributes=attributes
        )
        return Found(name, task, template_of(namespace), dead)


def _timed(member: bytes, due: int) -> tuple[bytes, Entry | None]:
    try:
        namespace, queue, tries, job_id = _parts(member, "text", "text", "number", "text")
    except struct.error:
        return member, None
    return b"/".join((b"j", namespace, queue, job_id)), Entry(tries, due, dead=False)


def _listed(key: bytes, item: bytes) -> tuple[bytes, Entry | None]:
    kind, _, queue = key.partition(b"/")
    try:
        tries, job_id = _parts(item, "number", "text")
    except struct.error:
        return item, None
    return b"/".join((b"j", queue, job_id)), Entry(tries, 0, dead=kind == b"d")


def _parts(data: bytes, *kinds: str) -> list[Any]:
    """Return the texts and numbers of an entry. Raises struct.error unless it holds these alone."""
    found: list[Any] = []
    for kind in kinds:
        (one,), data = struct.unpack_from("<H", data), data[2:]
        if kind == "text":
            (one,), data = struct.unpack_from(f"{one}s", data), data[one:]
        found.append(one)
    if data:
        raise struct.error("there is more")
    return found


def _content(job_id: str, stored: bytes | None) -> tuple[bytes, dict[str, str]]:
    """Return body and attributes. Raises ValueError."""
    if stored is None:
        raise ValueError("its key holds no string")
    if len(job_id) <= ULID_CHARS:
        return stored, {}
    payload = parse_object(stored, most=len(stored))
    body, attributes = payload.get("body"), payload.get("attributes") or {}
    if not isinstance(body, (str, type(None))) or not isinstance(attributes, dict):
        raise ValueError  # noqa: TRY004
    return b64decode(body or "", validate=True), {str(key): str(value) for key, value in attributes.items()}


# --- ouqiang/delay-queue

BUCKETS = "dq_bucket_*"
SOON_MS = 1000
"""How much later than now ready jobs are due: a task of a timed topic is never due at once."""

OTHER = "a key that holds no job"
LONG = f"its id has more than {MAX_KEY_BYTES} bytes"
_FIELDS = {b"1": b"topic", b"2": b"id", b"3": b"delay", b"4": b"ttr", b"5": b"body"}


class YouzanOriginal:
    """The jobs of one delay queue. ``buckets`` is the pattern of the keys of its buckets."""

    keys = "*"

    def __init__(self, *, buckets: str = BUCKETS) -> None:
        self._buckets = buckets

    def places(self, redis: ForeignRedis) -> Iterator[tuple[bytes, int]]:
        """Yield the jobs that are in a bucket, with the time (ms) until when."""
        for keys in redis.keys(self._buckets, "zset"):
            for key in keys:
                for members in redis.scores(key):
                    yield from ((one, instant_of(score)) for one, score in members)

    def job(
        self, key: bytes, place: int | None, stored: bytes | None, _ttl_ms: int, now: int
    ) -> Found | Passed:
        """Return a job, or why it is none."""
        name = key.decode(errors="backslashreplace")
        said = None if stored is None else _fields(key, stored)
        if said is None:
            return Passed(name, OTHER) if place is None else Passed(name, UNREADABLE, lost=True)
        job_id, topic, delay, ttr, body = said
        if len(job_id.encode()) > MAX_KEY_BYTES:
            return Passed(name, LONG, lost=True)
        due = max(delay * 1000, place or 0, now + SOON_MS)
        if due > LATEST_MS:
            return Passed(name, NEVER, lost=True)
        # The task's attribute must not depend on the time of the import: another run must make the same task.
        task = Job(job_id, topic, 0, 1000 * ttr, body, due).task(Youzan.name, PREFIX)
        return Found(name, task._replace(on_conflict=OnConflict.KEEP), Youzan.templates[0])


def _fields(key: bytes, stored: bytes) -> tuple[str, str, int, int, str] | None:
    """Return id, topic, delay, ttr and body of a job; None if this is not a job."""
    try:
        values = msgpack.unpackb(stored, raw=True, strict_map_key=False)
        said = {_FIELDS.get(name, name.lower()): value for name, value in values.items()}
        job_id, topic, body = said[b"id"].decode(), said[b"topic"].decode(), said[b"body"]
        delay, ttr, text = said[b"delay"], said[b"ttr"], body.decode(errors="replace")
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    if job_id.encode() != key or not topic or type(delay) is not int or type(ttr) is not int:
        return None
    return job_id, topic, max(delay, 0), min(max(ttr, 1), MAX_TTR), text


ORIGINALS: dict[str, Any] = {"lmstfy": LmstfyOriginal, "youzan": YouzanOriginal}
"""How other queues keep their jobs, by the name of the dialect."""
