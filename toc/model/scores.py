"""What the scores of the sorted sets mean. A stored format: changing it loses tries.

    StoreQueue      due_ms                     a task that used up no try
                    due_ms + remaining/32      after a rollback; remaining = tries left, 1..31
    PrepareQueue    seconds*1000 + remaining + claim/4096
    DeadQueue       millisecond of death

Each is exact in a float64: due_ms needs 41 bits and remaining/32 five; seconds*1000 + remaining needs 41 and
claim/4096 twelve, which fills the 53 bits of the mantissa until 2**41 ms, September 2039. From then on the
lowest bit of a claim is lost, and numbers must be drawn mod 2048.
"""

from __future__ import annotations

from math import floor, fmod
from typing import NamedTuple

CLAIMS = 4096
"""Claim numbers are 0 .. CLAIMS - 1."""


class PrepareScore(NamedTuple):
    """The parts of a PrepareQueue score. ``seconds`` is when the entry was taken or last kept alive."""

    seconds: int
    remaining: int
    claim: int


def store_score(due_ms: int, remaining: int, attempts: int) -> float:
    """The StoreQueue score of a task that is due at ``due_ms``.

    ``attempts`` are the tries used up. While it is 0 the score is the whole due time, and the entry has all
    its tries; otherwise ``remaining`` (1..31) tries are left.
    """
    if attempts == 0:
        return float(due_ms)
    if not 1 <= remaining <= 31:
        raise ValueError(f"remaining must be 1 to 31, not {remaining}: a task without tries left is dead")
    return due_ms + remaining / 32


def due_ms(score: float) -> int:
    """The due time in a StoreQueue score."""
    return floor(score)


def fence(remaining: int, claim: int) -> float:
    """What stands in a PrepareQueue score beside the seconds: who holds the entry, on which try."""
    return remaining + claim / CLAIMS


def fence_of(score: float) -> float:
    """The fence in a PrepareQueue score."""
    return fmod(score, 1000.0)


def split(score: float) -> PrepareScore:
    """The parts of a PrepareQueue score."""
    own = fence_of(score)
    remaining = floor(own)
    return PrepareScore(int(score - own) // 1000, remaining, round((own - remaining) * CLAIMS))
