"""What ouqiang/delay-queue (0.4) keeps in its Redis, by default in database 1.

    {id}               the job in MessagePack, a map. Its keys are "1" to "5" for the topic, the id, the
                       second when it is due, the ttr and the body; in 0.3 they are the fields' names
    dq_bucket_{n}      ids of jobs that wait for their time or for the end of their ttr, by second
    dq_queue_{topic}   ids of ready jobs, the next one at the left end

The names of buckets and queues can be configured there, so their patterns are arguments here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toc.dialects.importing import msgpack
from toc.dialects.importing.takeover import NEVER, Found, Passed, instant_of, paged
from toc.dialects.jobs import Job
from toc.dialects.youzan import MAX_TTR, PREFIX, Youzan
from toc.index.foreign import ForeignRedis
from toc.model.clock import Clock
from toc.model.sharding import MAX_KEY_BYTES
from toc.model.task import OnConflict
from toc.model.template import Template
from toc.sdk.submission import LATEST_MS

BUCKETS, QUEUES = "dq_bucket_*", "dq_queue_*"
VALUES = 100
SETTLE_SECONDS = 0.2
SOON_MS = 1000
"""How much later than now ready jobs are due: a task of a timed topic is never due at once."""

DELETED = "its job was deleted"
OTHER = "a key that holds no job"
UNREADABLE = "an id in a bucket or queue, whose job cannot be read"
LONG = f"its id has more than {MAX_KEY_BYTES} bytes"
_FIELDS = {"1": "topic", "2": "id", "3": "delay", "4": "ttr", "5": "body"}


class YouzanOriginal:
    """The jobs of one delay queue. ``buckets`` and ``queues`` are patterns of keys."""

    def __init__(
        self, redis: ForeignRedis, clock: Clock, *, buckets: str = BUCKETS, queues: str = QUEUES
    ) -> None:
        self._redis = redis
        self._clock = clock
        self._patterns = buckets, queues

    def templates(self) -> Iterable[Template]:
        """Return the dialect's templates."""
        return Youzan.templates

    def read(self, known: Mapping[str, int]) -> Iterator[list[Found | Passed]]:
        """Yield all jobs, first those that are in a bucket or ready."""
        yield from self._placed(known)
        strays: set[bytes] = set()
        for keys in self._redis.keys("*", "string"):
            for page in paged([key for key in keys if _text(key) not in known], VALUES):
                for one in self._jobs([(key, None, "stray") for key in page]):
                    if isinstance(one, Found):
                        strays.add(one.key.encode())
                    else:
                        yield [one]
        if not strays:
            return
        time.sleep(SETTLE_SECONDS)
        yield from self._placed(known)  # again: a place may have been written or changed meanwhile
        for page in paged(sorted(key for key in strays if _text(key) not in known), VALUES):
            yield self._jobs([(key, None, "stray") for key in page])

    def _placed(self, known: Mapping[str, int]) -> Iterator[list[Found | Passed]]:
        buckets, queues = self._patterns
        for keys in self._redis.keys(buckets, "zset"):
            for key in keys:
                for members in self._redis.scores(key):
                    new = [(one, score) for one, score in members if _text(one) not in known]
                    for page in paged(new, VALUES):
                        yield self._jobs([(one, instant_of(score), "waiting") for one, score in page])
        for keys in self._redis.keys(queues, "list"):
            for key in keys:
                for items in self._redis.items(key):
                    for part in paged([one for one in items if _text(one) not in known], VALUES):
                        yield self._jobs([(one, None, "ready") for one in part])

    def _jobs(self, places: list[tuple[bytes, int | None, str]]) -> list[Found | Passed]:
        values = self._redis.values([key for key, _, _ in places])
        now = self._clock.now_ms()
        jobs: list[Found | Passed] = []
        for (key, at, state), value in zip(places, values, strict=True):
            if value is None:
                jobs.append(Passed(f"{state} {_text(key)}", DELETED))
            else:
                jobs.append(self._job(key, value[0], at, state, now))
        return jobs

    def _job(self, key: bytes, stored: bytes | None, at: int | None, state: str, now: int) -> Found | Passed:
        said = None if stored is None else _fields(key, stored)
        if said is None and state == "stray":
            return Passed(_text(key), OTHER)
        if said is None:
            return Passed(_text(key), UNREADABLE, lost=True)
        job_id, topic, delay, ttr, body = said
        if len(job_id.encode()) > MAX_KEY_BYTES:
            return Passed(_text(key), LONG, lost=True)
        due = delay * 1000
        if state == "waiting":
            due = max(due, at or 0)
            state = "delayed" if delay * 1000 > now else "reserved"
        elif state == "stray":
            due = max(due, now + 1000 * ttr)  # its consumer has it, or ended before it recorded that
            state = "reserved"
        due = max(due, now + SOON_MS)
        if due > LATEST_MS:
            return Passed(_text(key), NEVER, lost=True)
        # The task's attribute must not depend on the time of the import: another run must make the same task.
        task = Job(job_id, topic, 0, 1000 * ttr, body, due).task(Youzan.name, PREFIX)
        return Found(_text(key), state, task._replace(on_conflict=OnConflict.KEEP))


def _fields(key: bytes, stored: bytes) -> tuple[str, str, int, int, str] | None:
    """Return id, topic, delay, ttr and body of a job; None if this is not a job."""
    try:
        values: Any = msgpack.unpack(stored)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    said = {_FIELDS.get(name, name.lower()): value for name, value in values.items() if isinstance(name, str)}
    job_id, topic, body = said.get("id"), said.get("topic"), said.get("body")
    delay, ttr = said.get("delay"), said.get("ttr")
    if not isinstance(job_id, str) or job_id.encode() != key or not isinstance(topic, str) or not topic:
        return None
    if isinstance(body, bytes):
        body = body.decode(errors="replace")
    if not isinstance(body, str) or type(delay) is not int or type(ttr) is not int:
        return None
    return job_id, topic, max(delay, 0), min(max(ttr, 1), MAX_TTR), body


def _text(key: bytes) -> str:
    return key.decode(errors="backslashreplace")
