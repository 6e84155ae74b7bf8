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

from toc.dialects.importing.takeover import NEVER, UNREADABLE, Found, Passed, instant_of
from toc.dialects.lmstfy_tasks import task_of, template_of
from toc.dialects.lmstfy_wire import ULID_CHARS, delay_of, made_at
from toc.index.foreign import FOREVER, ForeignRedis
from toc.model.documents import parse_object
from toc.sdk.submission import LATEST_MS

LATE = "it would expire before it is due"


class Entry(NamedTuple):
    """What the entry of a job tells: ``due`` in ms."""

    tries: int
    due: int
    dead: bool


class LmstfyOriginal:
    """The jobs of one pool."""

    keys = "j/*"

    def places(self, redis: ForeignRedis) -> Iterator[tuple[bytes, Entry | None]]:
        """Yield the keys of the jobs that have an entry."""
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
        """Return a job, or why it is none. Where one has no entry, its consumer took it and ended before
        noting that."""
        name = key.decode(errors="replace")
        try:
            _, namespace, queue, job_id = name.split("/")
            body, attributes = _content(job_id, stored)
        except ValueError:
            return Passed(name, UNREADABLE, lost=True)
        born = (made_at(job_id) or 0) + 1000 * (delay_of(job_id) or 0)
        one = Entry(1, born, dead=False) if place is None else place
        due = max(now, one.due)
        if due > LATEST_MS:
            return Passed(name, NEVER, lost=True)
        # An entry in the timer without tries left belongs to a job whose last try is running.
        dead = one.dead or not one.tries
        expires_at = 0 if dead or ttl_ms == FOREVER else min(now + ttl_ms, LATEST_MS)
        if expires_at and expires_at < due:
            return Passed(name, LATE)
        task = task_of(
            namespace,
            queue,
            job_id,
            body,
            due=due,
            expires_at=expires_at,
            tries=max(one.tries, 1),
            attributes=attributes,
        )
        return Found(name, task, template_of(namespace), dead)


def _timed(member: bytes, due: int) -> tuple[bytes, Entry | None]:
    try:
        namespace, at = _text(member, 0)
        queue, at = _text(member, at)
        (tries,) = struct.unpack_from("<H", member, at)
        job_id, at = _text(member, at + 2)
    except struct.error:
        return member, None
    key = b"/".join((b"j", namespace, queue, job_id))
    return (key, Entry(tries, due, dead=False)) if at == len(member) else (member, None)


def _listed(key: bytes, item: bytes) -> tuple[bytes, Entry | None]:
    kind, _, queue = key.partition(b"/")
    try:
        (tries,) = struct.unpack_from("<H", item)
        job_id, at = _text(item, 2)
    except struct.error:
        return item, None
    entry = Entry(tries, 0, dead=kind == b"d")
    return (b"/".join((b"j", queue, job_id)), entry) if at == len(item) else (item, None)


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    """Return a text, and where it ends. Raises struct.error."""
    (length,) = struct.unpack_from("<H", data, at)
    (text,) = struct.unpack_from(f"{length}s", data, at + 2)
    return text, at + 2 + length


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
