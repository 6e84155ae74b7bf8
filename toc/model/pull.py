"""Nouns of pull consumers: the row as a hand-out reads it, the lease, and the outcome of an answer to it."""

import hmac
import re
import struct
from binascii import a2b_base64, b2a_base64
from enum import Enum
from typing import NamedTuple, Self

from toc.model.errors import InvalidLease, shown
from toc.model.task import Body, Task, TaskStatus, task_of

_FORMAT = struct.Struct(">BQIQH16s")
_EDITION = 1
_SEAL_BYTES = 15
_TEXT = re.compile(r"[A-Za-z0-9_-]{72}")
"""Base64 of 54 bytes: without padding, and with no bit left over, so each lease has one text."""
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")
NONCE_BYTES = 16
MAX_LEASE_CHARS = 80
MAX_TTR_SECONDS = 7 * 86_400
LEASE_ENDED = "its lease ended"
"""last_error of a try that ended with its ttr."""


class PullLease(NamedTuple):
    """One hand-out of a task. Its text is opaque to consumers.

    A stored format: consumers keep these texts over upgrades, so a change needs another edition. ``slot`` is
    the number of the task's slot, which never changes. The text ends with a seal, an HMAC under the secret of
    the task table: only what was handed out is a lease.
    """

    job_id: int
    version: int
    biz_type: int
    slot: int
    nonce: bytes

    def text(self, secret: bytes) -> str:
        """Encode it, safe in URLs."""
        packed = _FORMAT.pack(_EDITION, *self)
        return b2a_base64(packed + _seal(packed, secret), newline=False).translate(_TO_URL).decode()

    @classmethod
    def parse(cls, text: object, secret: bytes) -> Self:
        """Decode a text from a consumer. Raises InvalidLease, also for one that was never handed out."""
        if isinstance(text, str) and _TEXT.fullmatch(text):
            data = a2b_base64(text.encode().translate(_FROM_URL))
            packed, seal = data[: _FORMAT.size], data[_FORMAT.size :]
            if hmac.compare_digest(seal, _seal(packed, secret)):
                edition, *parts = _FORMAT.unpack(packed)
                if edition == _EDITION:
                    return cls._make(parts)
        raise InvalidLease(f"{shown(text)} is not a lease: give it as it was received")


def _seal(packed: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, packed, "sha256")[:_SEAL_BYTES]


class PullRow(NamedTuple):
    """The columns that a hand-out needs. Instants are ms, by the clock of the task's server.

    ``expires_at`` is 0 if the task never expires, ``body_length`` -1 without a body, ``nonce`` empty
    unless the task is handed out, ``now`` the server's time of the read. ``begun`` is 1 if the row has
    a last error, so that a try has begun even if it charged nothing. ``tries`` 0 means the topic's.
    ``began`` is when it was handed out, or 0.
    """

    job_id: int
    biz_id: int
    biz_type: int
    status: int
    action_time: int
    next_time: int
    version: int
    attempts: int
    crashes: int
    slot_crc: int
    slot_amount: int
    tries: int
    expires_at: int
    begun: int
    body_length: int
    began: int
    now: int
    nonce: bytes
    biz_key: str | None
    dedup_key: str | None
    attribute: str

    @property
    def living(self) -> bool:
        """Whether a consumer has it now."""
        return self.status == TaskStatus.PENDING and self.nonce != b"" and self.next_time > self.now

    def to_task(self, topic: str, body: Body | None) -> Task:
        """Return the Task of the try that was handed out. Raises UnreadableTask."""
        return task_of(self, TaskStatus.PENDING, topic, body, attempt=max(self.attempts, 1))


class AckOutcome(Enum):
    """What came of an ack. The first three are successes."""

    ACKED = "acked"
    """The task is processed by it."""
    LATE = "late"
    """The task is processed by it, although its lease had ended: work that was done was done."""
    ALREADY = "already"
    """It was processed before, by this lease or another of the same version."""
    CANCELLED = "cancelled"
    """It was cancelled, or it expired."""
    DEAD = "dead"
    """It is dead."""
    REPLACED = "replaced"
    """It has a new deadline, or was replaced or redriven: another version is pending."""
    NOT_HANDED_OUT = "not handed out"
    """It is pending and not handed out: the hand-out was taken back before it was answered."""
    UNKNOWN = "unknown"
    """There is no such task."""

    @property
    def ok(self) -> bool:
        """Whether the task is processed."""
        return self in (AckOutcome.ACKED, AckOutcome.LATE, AckOutcome.ALREADY)


class LeaseOutcome(Enum):
    """What came of a nack or an extend."""

    DONE = "done"
    DEAD = "dead"
    """The task is dead: the nack was for its last try, or asked to make the task dead."""
    GONE = "gone"
    """The lease is no longer valid: its ttr has ended, or its task has ended or changed."""
