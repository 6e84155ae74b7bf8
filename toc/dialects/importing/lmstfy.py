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
from base64 import b64decode
from collections.abc import Iterator
from typing import NamedTuple

from toc.dialects.importing.takeover import NEVER, Found, Passed, instant_of
from toc.dialects.lmstfy_tasks import task_of, template_of
from toc.dialects.lmstfy_wire import ULID_CHARS, delay_of, made_at
from toc.index.foreign import FOREVER, ForeignRedis
from toc.model.documents import parse_object
from toc.sdk.submission import LATEST_MS

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

    @property
    def raw(self) -> bytes:
        """Return it as Redis has it."""
        return self.key.encode()


class LmstfyOriginal:
    """The jobs of one pool."""

    values = "j/*"

    def places(self, redis: ForeignRedis) -> Iterator[list[Entry | Passed]]:
        """Yield the jobs that have an entry."""
        for members in redis.scores("timer_set"):
            yield [_timed(member, score) for member, score in members]
        for pattern, state in (("q/*", "ready"), ("d/*", "dead")):
            for keys in redis.keys(pattern, "list"):
                for key in keys:
                    for items in redis.items(key):
                        yield [_listed(key, item, state) for item in items]

    def stray(self, key: bytes) -> Entry | Passed:
        """Return the place of a body without an entry: its consumer took the job and ended before noting
        that."""
        parts = key.decode(errors="replace").split("/")
        if len(parts) != 4:
            return Passed("/".join(parts), UNREADABLE, lost=True)
        return Entry(parts[1], parts[2], parts[3], 1, None, "stray")

    def job(self, one: Entry, stored: bytes | None, ttl_ms: int, now: int) -> Found | Passed:
        """Return a job, or why it is none."""
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
        expires_at = 0 if dead or ttl_ms == FOREVER else min(now + ttl_ms, LATEST_MS)
        if expires_at and expires_at < due:
            return Passed(one.key, LATE)
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
        return Found(one.key, state, task, template_of(one.namespace), dead)


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
