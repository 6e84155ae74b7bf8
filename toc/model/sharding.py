"""Maps a task to its table, slot and job_id, all from one CRC32. A stored format.

    crc    = CRC32(str(biz_id))                       zlib's, over UTF-8
    table  = crc mod tables; database = table mod databases
    slot   = CRC32(slot_basis or str(biz_id)) mod slot_amount
    job_id = milliseconds since 2020-01-01 UTC << 22 | (crc & 1023) << 12 | 12 bits that make it unique

Changing any of this orphans all existing rows and index entries.
"""

from __future__ import annotations

import hashlib
import random
import re
import threading
import zlib
from typing import NamedTuple

from toc.model.clock import SET_BACK_MS, Clock
from toc.model.errors import InvalidBizId, InvalidKey
from toc.model.fork import in_each_process

MAX_TABLES = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
JOB_ID_EPOCH_MS = 1_577_836_800_000  # 2020-01-01 UTC
MAX_BIZ_ID = 2**63 - 1
MAX_KEY_BYTES = 255
"""Longest biz_key, dedup_key and slot_basis, in bytes of UTF-8 (the width of their columns)."""


def crc32(text: str) -> int:
    """Return zlib's CRC32 of the UTF-8 bytes of ``text``."""
    return zlib.crc32(text.encode())


def is_power_of_two(number: int) -> bool:
    """Whether ``number`` is 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def check_key(name: str, text: object) -> str:
    """Return ``text`` if it is a valid key: 1..255 bytes of UTF-8 without control characters.

    Raises InvalidKey.
    """
    if not isinstance(text, str):
        raise InvalidKey(f"{name} must be a str, not {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as exc:
        raise InvalidKey(f"{name} contains a lone surrogate, which UTF-8 cannot encode") from exc
    if not 1 <= size <= MAX_KEY_BYTES:
        raise InvalidKey(f"{name} has {size} bytes; 1 to {MAX_KEY_BYTES} are allowed")
    if _CONTROL.search(text):
        raise InvalidKey(f"{name} {text!r} contains control characters; remove them")
    return text


class BizId(NamedTuple):
    """A business id as stored.

    ``number`` is the biz_id column, ``key`` the text of a textual id (else None). ``crc`` decides the table
    and, by default, the slot. ``5`` and ``"5"`` share a table but are two ids.
    """

    number: int
    key: str | None
    crc: int

    @classmethod
    def of(cls, biz_id: object) -> BizId:
        """Convert an int in 0 .. 2**63-1 or a text of 1..255 bytes. Raises InvalidBizId."""
        if isinstance(biz_id, int) and not isinstance(biz_id, bool):
            if not 0 <= biz_id <= MAX_BIZ_ID:
                raise InvalidBizId("biz_id is out of range; 0 .. 2**63-1 is allowed")
            return cls(int(biz_id), None, crc32(str(int(biz_id))))
        if isinstance(biz_id, str):
            try:
                check_key("biz_id", biz_id)
            except InvalidKey as exc:
                raise InvalidBizId(str(exc)) from exc
            digest = hashlib.sha256(biz_id.encode()).digest()
            return cls(int.from_bytes(digest[:8], "big") >> 1, biz_id, crc32(biz_id))
        raise InvalidBizId(f"biz_id must be an int or a str, not {type(biz_id).__name__}")


def table_of_job(job_id: int, tables: int) -> int:
    """Return the index of the only table, out of ``tables``, that can hold ``job_id``."""
    return (job_id >> 12 & (MAX_TABLES - 1)) % tables


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether ``value`` is an int, and no bool, in low .. high."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def valid_job_id(job_id: object) -> bool:
    """Whether ``job_id`` has a possible value: an int in 1 .. 2**63-1."""
    return is_whole(job_id, 1, MAX_BIZ_ID)


def created_ms(job_id: int) -> int:
    """Return when a job_id was made (ms), by the clock of its host."""
    return (job_id >> 22) + JOB_ID_EPOCH_MS


class JobIds:
    """Generates job_ids locally. Thread-safe; restarts from another value after a fork.

    Within a process ids never repeat: a millisecond has 4096 ids, then the next millisecond is used ahead of
    time; only a clock that is set back far is followed, not to before 2020. Two processes may generate the
    same id; the primary key of its table detects that, and the second one takes a new id.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        in_each_process(self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._millisecond = 0
        self._first = 0
        self._given = 0

    def make(self, crc: int) -> int:
        """Return a new job_id for a task whose biz_id has this CRC32."""
        with self._lock:
            now = max(self._clock.now_ms() - JOB_ID_EPOCH_MS, 1)
            if now > self._millisecond or now < self._millisecond - SET_BACK_MS:
                self._millisecond = now
                self._first = random.getrandbits(12)
                self._given = 0
            elif self._given == 4096:
                self._millisecond += 1
                self._given = 0
            low = (self._first + self._given) & 4095
            self._given += 1
            return self._millisecond << 22 | (crc & (MAX_TABLES - 1)) << 12 | low

    def another(self, job_id: int) -> int:
        """Return a new job_id for the task that has this one, in the same table."""
        return self.make(job_id >> 12)
