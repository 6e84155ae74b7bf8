"""What ouqiang/delay-queue (0.4) keeps in its Redis, by default in database 1.

    {id}               the job in MessagePack, a map. Its keys are "1" to "5" for the topic, the id, the
                       second when it is due, the ttr and the body; in 0.3 they are the fields' names
    dq_bucket_{n}      ids of jobs that wait for their time or for the end of their ttr, by second

Other jobs are ready. The names of buckets can be configured there, so their pattern is an argument here.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgpack  # type: ignore[import-untyped]

from toc.dialects.importing.takeover import NEVER, UNREADABLE, Found, Passed, instant_of
from toc.dialects.jobs import Job
from toc.dialects.youzan import MAX_TTR, PREFIX, Youzan
from toc.index.foreign import ForeignRedis
from toc.model.sharding import MAX_KEY_BYTES
from toc.model.task import OnConflict
from toc.sdk.submission import LATEST_MS

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
