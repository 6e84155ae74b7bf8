"""Scores of the sorted sets. A stored format: changing it loses tries.

    StoreQueue      due_ms                     a task that used up no try
                    due_ms + remaining/32      after a rollback
    PrepareQueue    seconds*1000 + remaining + claim/4096
    DeadQueue       millisecond of death

remaining = max(1, N - attempts), where N is the topic's tries. Unless the task has a number of tries of its
own, these are the tries left. ``remaining`` only distinguishes a try from the next one. The row decides which
try is the last. Past N it stays 1: from then on a crash of a worker may be charged twice.

All are exact in a float64: due_ms needs 41 bits and remaining/32 five; seconds*1000 + remaining needs 41 and
claim/4096 twelve, which fills the 53 bits of the mantissa until 2**41 ms, September 2039. After that the
lowest bit of a claim number is lost, and numbers must be drawn mod 2048.
"""

from math import floor, fmod
from typing import NamedTuple

CLAIMS = 4096
"""Claim numbers are 0 .. CLAIMS - 1."""


class PrepareScore(NamedTuple):
    """Parts of a PrepareQueue score. ``seconds`` is when the entry was taken or last kept alive."""

    seconds: int
    remaining: int
    claim: int


def store_score(due_ms: int, remaining: int, attempts: int) -> float:
    """Return the StoreQueue score of a task that is due at ``due_ms``.

    ``attempts`` is the number of tries used up. While it is 0, the score is the bare due time and stands for
    the topic's tries. Otherwise it carries ``remaining`` (1..31).
    """
    if attempts == 0:
        return float(due_ms)
    if not 1 <= remaining <= 31:
        raise ValueError(f"remaining must be 1 to 31, not {remaining}")
    return due_ms + remaining / 32


def unread_score(fence: float, due: int, retries: int) -> float:
    """Return the StoreQueue score of an entry whose row was not read: its tries are those of its fence."""
    remaining = max(int(fence), 1)
    return store_score(due, remaining, retries - remaining)


def due_ms(score: float) -> int:
    """Return the due time (ms) in a StoreQueue score."""
    return floor(score)


def fence(remaining: int, claim: int) -> float:
    """Return the fencing token of a PrepareQueue score: the score without its seconds, which
    identifies the owner and the try."""
    return remaining + claim / CLAIMS


def fence_of(score: float) -> float:
    """Return the fencing token in a PrepareQueue score."""
    return fmod(score, 1000.0)


def split(score: float) -> PrepareScore:
    """Split a PrepareQueue score into its parts."""
    own = fence_of(score)
    remaining = floor(own)
    return PrepareScore(int(score - own) // 1000, remaining, round((own - remaining) * CLAIMS))
