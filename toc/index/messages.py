"""Arguments and results of the transitions of the index, in plain values; entries and strays among members.

Another program can write anything into a queue: a member that is no job_id, a score that no task can have.
toc could never settle such a stray, so no worker may get it. It is sorted out here, and its reader removes
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from toc.model.sharding import MAX_BIZ_ID
from toc.model.topic import Slot

MAX_IDS = 500
"""Most ids in one script call: about a millisecond of the server's time."""

SILENT_SECONDS = 6
"""A member that has not called ``own`` for longer has ended without leaving, or is cut off: it calls every
two seconds."""
MEMBER = "member "
_MAX_SCORE = 2.0**53
"""Larger whole numbers are not exact in a float64, so no fencing token would match."""
_MAX_DUE_MS = 2.0**43
"""The year 2248: no task can be due this late."""
_SHOWN_CHARS = 200
_MEMBER_CHARS = 40


class PrepareRequest(NamedTuple):
    """Take up to ``limit`` due ids of ``slot`` (at most MAX_IDS) under the claim number ``claim``.

    ``retries`` is the topic's: the tries left of an entry that has used up none. Nothing is taken that came
    due after ``latest`` (ms).
    """

    slot: Slot
    limit: int
    retries: int
    claim: int
    latest: int = 2**62


class Prepared(NamedTuple):
    """The ids taken, each with its fencing token.

    ``next_due`` is when (ms) the first entry left in the StoreQueue is due, None if none ever will be.
    ``left`` is the number of entries there that are due now.
    """

    entries: list[tuple[int, float]]
    next_due: int | None
    left: int
    redis_now_ms: int


class CancelReply(NamedTuple):
    """``prepared``: a worker has the id."""

    prepared: bool
    redis_now_ms: int

    @classmethod
    def of(cls, reply: list[int]) -> CancelReply:
        """Parse the reply of cancel.lua or reschedule.lua."""
        prepared, now_ms = map(int, reply)
        return cls(prepared == 1, now_ms)


class ExpiredRequest(NamedTuple):
    """List up to ``limit`` (at most MAX_IDS) entries that were not kept alive for over ``timeout_s`` seconds.

    Leaves out the ``skip`` oldest of them. All entries under the given claim numbers are listed too, whatever
    their age.
    """

    slot: Slot
    timeout_s: int
    claims: Sequence[int] = ()
    limit: int = MAX_IDS
    skip: int = 0


class Peek(NamedTuple):
    """The state of a slot. ``next_due`` is as in ``Prepared``. The counts are entries.

    ``due`` of the entries in ``store`` are due. ``more``: without an index, there may be more than these.
    """

    next_due: int | None
    store: int
    prepared: int
    dead: int
    redis_now_ms: int
    due: int = 0
    more: bool = False

    @classmethod
    def each_of(cls, reply: list[Any]) -> Iterator[Peek]:
        """Parse the reply of peek.lua, slot by slot."""
        now_ms = int(reply[0])
        for at in range(1, len(reply), 5):
            first, *counts = reply[at : at + 5]
            store, prepared, dead, due = map(int, counts)
            yield cls(first_due(first), store, prepared, dead, now_ms, due)


class Claim(NamedTuple):
    """The ``number`` (0..4095) under which the worker takes entries; ``others`` maps numbers to workers."""

    number: int
    others: dict[int, str]

    @classmethod
    def of(cls, reply: list[Any]) -> Claim:
        """Parse the reply of claim.lua."""
        number, others = reply
        return cls(number, holders(others))


class Generation(NamedTuple):
    """The run_id of the server on which a slot was last rebuilt, and that of the server that serves it now.

    If they differ, the slot must be rebuilt from the task table.
    """

    recorded: str | None
    serving: str


class Owner(NamedTuple):
    """The owner of the index: the ``identity`` of a task table, the ``name`` of its cluster, and
    ``seconds`` since its workers last called ``own``. ``members``: its workers that did not leave, each with
    the seconds since it called ``own``; after an hour they are forgotten."""

    identity: str
    name: str
    seconds: int
    members: Mapping[str, int]

    @property
    def alive(self) -> frozenset[str]:
        """The members that call ``own`` as they should."""
        return frozenset(member for member, seconds in self.members.items() if seconds <= SILENT_SECONDS)

    @classmethod
    def of(cls, reply: list[Any]) -> Owner:
        """Parse the reply of own.lua."""
        identity, name, seconds, members = reply
        ages = dict(zip(map(_text, members[::2]), members[1::2], strict=True))
        return cls(_text(identity), _text(name), seconds, ages)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")[:_SHOWN_CHARS]


def holders(flat: list[bytes]) -> dict[int, str]:
    """Parse a flat hash or list of claim numbers and workers, with or without the counter."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {
        int(number): worker.decode(errors="replace")
        for number, worker in pairs
        if number.isdigit() and len(number) < 5
    }


class PermitRequest(NamedTuple):
    """What a process asks for of a webhook target's limits: the ARGV of permits.lua."""

    holder: str
    limit: int
    held: int
    wanted: int
    life_ms: int
    rate: float = 0.0
    burst: float = 0.0
    asked: int = 0


class Permits(NamedTuple):
    """The share of a webhook target's limits that Redis granted to the process.

    ``granted``: how many requests may be in flight. ``begin``: how many may begin now.
    ``pause_ms``: how long until the next one may begin. ``holders``: how many processes send to
    that target.
    """

    granted: int
    begin: int
    pause_ms: int
    holders: int

    @classmethod
    def of(cls, reply: list[int]) -> Permits:
        """Parse the reply of permits.lua."""
        return cls(*map(int, reply))


def sort_out(flat: list[bytes]) -> tuple[list[tuple[int, float]], list[bytes]]:
    """Split a list of member, score, member, score, ... into entries and the members that are strays.

    A job_id has one spelling, without sign or leading zero. Scripts get the number and would not find another
    spelling.
    """
    entries, strays = [], []
    for member, text in zip(flat[::2], flat[1::2], strict=True):
        score = float(text)
        if (
            member.isdigit()  # of bytes, so it is ASCII and not empty
            and len(member) <= 19
            and member[0] != 48  # "0"
            and (job_id := int(member)) <= MAX_BIZ_ID
            and 0 <= score < _MAX_SCORE
        ):
            entries.append((job_id, score))
        else:
            strays.append(member)
    return entries, strays


def first_due(score: bytes | None) -> int | None:
    """Return when a StoreQueue is next due (ms) by its first score; None if it is empty or never due.

    A time before 1970 counts as the first millisecond of it.
    """
    due = inf if score is None else float(score)
    return int(max(due, 1.0)) if due < _MAX_DUE_MS else None


def shown(member: bytes) -> str:
    """Return a member for a log line: printable, and truncated."""
    return ascii(member[:_MEMBER_CHARS].decode("ascii", "backslashreplace"))[1:-1][:_MEMBER_CHARS]
