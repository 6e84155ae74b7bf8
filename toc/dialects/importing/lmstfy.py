"""What an lmstfy server (its engine ``redis``) keeps in its Redis.

    j/{namespace}/{queue}/{id}   the body, or JSON of body and attributes if the id has a version
    timer_set                    jobs that wait for their time or for the end of their ttr, by second
    q/{namespace}/{queue}        ready jobs, the next one at the right end
    d/{namespace}/{queue}        dead letters, the oldest at the right end

An entry consists of texts, each after its length, and numbers. Lengths and numbers have two bytes,
little-endian. In the timer: namespace, queue, tries left, id. In a list: tries left, id.
"""

from __future__ import annotations

import struct
import time
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from toc.dialects.importing.takeover import NEVER, Found, Passed, instant_of, paged
from toc.dialects.lmstfy_tasks import task_of, template_of
from toc.dialects.lmstfy_wire import ULID_CHARS, delay_of, made_at
from toc.index.foreign import FOREVER, ForeignRedis
from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.template import Template
from toc.sdk.submission import LATEST_MS

VALUES = 100
"""How many bodies are read at once."""
SETTLE_SECONDS = 0.2
"""How long to wait for the entry of a job, whose body is written first."""

EXPIRED = "it has expired, or was deleted"
UNREADABLE = "its entry or its body cannot be read"
LATE = "it would expire before it is due"


class Entry(NamedTuple):
    """The place of a job. ``due`` is in ms; None: now."""

    namespace: str
    queue: str
    job_id: str
    tries: int
    due: int | None
    state: str

    @property
    def key(self) -> str:
        """Return the key of its body."""
        return f"j/{self.namespace}/{self.queue}/{self.job_id}"


class LmstfyOriginal:
    """The jobs of one pool."""

    def __init__(self, redis: ForeignRedis, clock: Clock) -> None:
        self._redis = redis
        self._clock = clock
        self._namespaces: set[str] = set()
        self._new: list[str] = []

    def templates(self) -> Iterable[Template]:
        """Return the templates of namespaces that were found since the last call."""
        new, self._new = self._new, []
        return [template_of(namespace) for namespace in new]

    def read(self, known: Mapping[str, int]) -> Iterator[list[Found | Passed]]:
        """Yield all jobs, first those with an entry."""
        yield from self._placed(known)
        strays = {
            key.decode(errors="replace")
            for page in self._redis.keys("j/*", "string")
            for key in page
            if key.decode(errors="replace") not in known
        }
        if not strays:
            return
        time.sleep(SETTLE_SECONDS)
        yield from self._placed(known)  # again: an entry may have been written or moved meanwhile
        for part in paged(sorted(strays - known.keys()), VALUES):
            yield self._jobs([_stray(key) for key in part])

    def _placed(self, known: Mapping[str, int]) -> Iterator[list[Found | Passed]]:
        for page in self._entries():
            for part in paged(
                [one for one in page if isinstance(one, Passed) or one.key not in known], VALUES
            ):
                yield self._jobs(part)

    def _entries(self) -> Iterator[list[Entry | Passed]]:
        for members in self._redis.scores("timer_set"):
            yield [_timed(member, score) for member, score in members]
        for pattern, state in (("q/*", "ready"), ("d/*", "dead")):
            for keys in self._redis.keys(pattern, "list"):
                for key in keys:
                    for items in self._redis.items(key):
                        yield [_listed(key, item, state) for item in items]

    def _jobs(self, entries: Iterable[Entry | Passed]) -> list[Found | Passed]:
        placed = [one for one in entries if isinstance(one, Entry)]
        jobs: list[Found | Passed] = [one for one in entries if isinstance(one, Passed)]
        values = self._redis.values([one.key.encode() for one in placed])
        now = self._clock.now_ms()
        for one, value in zip(placed, values, strict=True):
            jobs.append(Passed(one.key, EXPIRED) if value is None else self._job(one, *value, now))
        return jobs

    def _job(self, one: Entry, stored: bytes | None, ttl: int, now: int) -> Found | Passed:
        try:
            body, attributes = _content(one.job_id, stored)
        except ValueError:
            return Passed(one.key, UNREADABLE, lost=True)
        born = (made_at(one.job_id) or 0) + 1000 * (delay_of(one.job_id) or 0)
        due = max(now, born if one.due is None and one.state == "stray" else one.due or now)
        if due > LATEST_MS:
            return Passed(one.key, NEVER, lost=True)
        # An entry in the timer without tries left belongs to a job whose last try is running.
        dead = one.state == "dead" or not one.tries
        expires_at = 0 if dead or ttl == FOREVER else min(now + ttl, LATEST_MS)
        if expires_at and expires_at < due:
            return Passed(one.key, LATE)
        if one.namespace not in self._namespaces:
            self._namespaces.add(one.namespace)
            self._new.append(one.namespace)
        state = one.state
        if state == "timed":
            state = "last try running" if dead else "running" if born <= now - 1000 else "delayed"
        task = task_of(
            one.namespace,
            one.queue,
            one.job_id,
            body,
            due=due,
            expires_at=expires_at,
            tries=max(one.tries, 1),
            attributes=attributes,
        )
        return Found(one.key, state, task, dead)


def _timed(member: bytes, score: float) -> Entry | Passed:
    try:
        namespace, at = _text(member, 0)
        queue, at = _text(member, at)
        (tries,) = struct.unpack_from("<H", member, at)
        job_id, at = _text(member, at + 2)
    except (ValueError, struct.error):
        return Passed(repr(member), UNREADABLE, lost=True)
    if at != len(member):
        return Passed(repr(member), UNREADABLE, lost=True)
    return Entry(namespace, queue, job_id, tries, instant_of(score), "timed")


def _listed(key: bytes, item: bytes, state: str) -> Entry | Passed:
    try:
        _, namespace, queue = key.decode().split("/")
        (tries,) = struct.unpack_from("<H", item)
        job_id, at = _text(item, 2)
    except (ValueError, struct.error):
        return Passed(repr((key, item)), UNREADABLE, lost=True)
    if at != len(item):
        return Passed(repr((key, item)), UNREADABLE, lost=True)
    return Entry(namespace, queue, job_id, tries, None, state)


def _stray(key: str) -> Entry | Passed:
    """Return the place of a body without an entry: its consumer took the job and ended before noting that."""
    parts = key.split("/")
    if len(parts) != 4:
        return Passed(key, UNREADABLE, lost=True)
    return Entry(parts[1], parts[2], parts[3], 1, None, "stray")


def _text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<H", data, at)
    end = at + 2 + length
    if end > len(data):
        raise ValueError
    return data[at + 2 : end].decode(), end


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
