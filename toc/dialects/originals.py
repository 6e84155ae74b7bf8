"""How other queues keep their jobs in Redis, and each job as a task of its dialect.

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
    dq_queue_{topic}   ids of ready jobs

The names of buckets and queues can be configured there, so their patterns are arguments here.
"""

import struct
from base64 import b64decode
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from toc.dialects.jobs import Job
from toc.dialects.lmstfy_wire import ULID_CHARS, delay_of, made_at, task_of, template_of
from toc.dialects.youzan import MAX_TTR, PREFIX, Youzan
from toc.index.foreign import FOREVER, ForeignRedis
from toc.model.documents import parse_object
from toc.model.sharding import MAX_KEY_BYTES
from toc.model.task import NewTask, OnConflict
from toc.model.topic import Template
from toc.sdk.submission import LATEST_MS

UNREADABLE = "it cannot be read"


def instant_of(score: float) -> int:
    """Return an instant in ms, given a score in seconds: any number, of which inf is the last moment."""
    return int(max(min(score * 1000, LATEST_MS), 0))


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


# --- lmstfy


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
        for member, score in redis.scores("timer_set"):
            yield _timed(member, instant_of(score))
        for pattern in ("q/*", "d/*"):
            for key in redis.keys(pattern, "list"):
                for item in redis.items(key):
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
        due = min(max(now, one.due), LATEST_MS)
        # An entry in the timer without tries left belongs to a job whose last try is running.
        dead = one.dead or not one.tries
        expires_at = 0 if dead or ttl_ms == FOREVER else min(now + ttl_ms, LATEST_MS)
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

BUCKETS, QUEUES = "dq_bucket_*", "dq_queue_*"
SOON_MS = 1000
"""How much later than now ready jobs are due: a task of a timed topic is never due at once."""

OTHER = "a key that holds no job"
LONG = f"its id has more than {MAX_KEY_BYTES} bytes"
_FIELDS = {b"1": b"topic", b"2": b"id", b"3": b"delay", b"4": b"ttr", b"5": b"body"}


class YouzanOriginal:
    """The jobs of one delay queue. ``buckets`` and ``queues`` are patterns of keys."""

    keys = "*"

    def __init__(self, *, buckets: str = BUCKETS, queues: str = QUEUES) -> None:
        self._buckets, self._queues = buckets, queues

    def places(self, redis: ForeignRedis) -> Iterator[tuple[bytes, int]]:
        """Yield the jobs that are in a bucket, with the time (ms) until when, and ready ones, with 0."""
        for key in redis.keys(self._buckets, "zset"):
            yield from ((one, instant_of(score)) for one, score in redis.scores(key))
        for key in redis.keys(self._queues, "list"):
            yield from ((one, 0) for one in redis.items(key))

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
        due = min(max(delay * 1000, place or 0, now + SOON_MS), LATEST_MS)
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
