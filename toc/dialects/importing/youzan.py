"""What ouqiang/delay-queue (0.4) keeps in its Redis, by default in database 1.

    {id}               the job in MessagePack, a map. Its keys are "1" to "5" for the topic, the id, the
                       second when it is due, the ttr and the body; in 0.3 they are the fields' names
    dq_bucket_{n}      ids of jobs that wait for their time or for the end of their ttr, by second
    dq_queue_{topic}   ids of ready jobs, the next one at the left end

The names of buckets and queues can be configured there, so their patterns are arguments here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgpack  # type: ignore[import-untyped]

from toc.dialects.importing.takeover import NEVER, Found, Passed, instant_of
from toc.dialects.jobs import Job
from toc.dialects.youzan import MAX_TTR, PREFIX, Youzan
from toc.index.foreign import ForeignRedis
from toc.model.sharding import MAX_KEY_BYTES
from toc.model.task import OnConflict
from toc.sdk.submission import LATEST_MS

BUCKETS, QUEUES = "dq_bucket_*", "dq_queue_*"
SOON_MS = 1000
"""How much later than now ready jobs are due: a task of a timed topic is never due at once."""

OTHER = "a key that holds no job"
UNREADABLE = "an id in a bucket or queue, whose job cannot be read"
LONG = f"its id has more than {MAX_KEY_BYTES} bytes"
_FIELDS = {b"1": b"topic", b"2": b"id", b"3": b"delay", b"4": b"ttr", b"5": b"body"}


class Place(NamedTuple):
    """A key of a job, and where it stands: until when (ms) in a bucket."""

    raw: bytes
    at: int | None
    state: str

    @property
    def key(self) -> str:
        """Return the key as a text."""
        return self.raw.decode(errors="backslashreplace")


class YouzanOriginal:
    """The jobs of one delay queue. ``buckets`` and ``queues`` are patterns of keys."""

    values = "*"

    def __init__(self, *, buckets: str = BUCKETS, queues: str = QUEUES) -> None:
        self._buckets = buckets
        self._queues = queues

    def places(self, redis: ForeignRedis) -> Iterator[list[Place]]:
        """Yield the jobs that are in a bucket or ready."""
        for keys in redis.keys(self._buckets, "zset"):
            for key in keys:
                for members in redis.scores(key):
                    yield [Place(one, instant_of(score), "waiting") for one, score in members]
        for keys in redis.keys(self._queues, "list"):
            for key in keys:
                for items in redis.items(key):
                    yield [Place(one, None, "ready") for one in items]

    def stray(self, key: bytes) -> Place:
        """Return the place of a job that has none: its consumer has it, or ended before it recorded that."""
        return Place(key, None, "stray")

    def job(self, place: Place, stored: bytes | None, ttl_ms: int, now: int) -> Found | Passed:  # noqa: ARG002 - its signature
        """Return a job, or why it is none."""
        said = None if stored is None else _fields(place.raw, stored)
        state = place.state
        if said is None and state == "stray":
            return Passed(place.key, OTHER)
        if said is None:
            return Passed(place.key, UNREADABLE, lost=True)
        job_id, topic, delay, ttr, body = said
        if len(job_id.encode()) > MAX_KEY_BYTES:
            return Passed(place.key, LONG, lost=True)
        due = delay * 1000
        if state == "waiting":
            due = max(due, place.at or 0)
            state = "delayed" if delay * 1000 > now else "reserved"
        elif state == "stray":
            due = max(due, now + 1000 * ttr)
            state = "reserved"
        due = max(due, now + SOON_MS)
        if due > LATEST_MS:
            return Passed(place.key, NEVER, lost=True)
        # The task's attribute must not depend on the time of the import: another run must make the same task.
        task = Job(job_id, topic, 0, 1000 * ttr, body, due).task(Youzan.name, PREFIX)
        return Found(place.key, state, task._replace(on_conflict=OnConflict.KEEP), Youzan.templates[0])


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
