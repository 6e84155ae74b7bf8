"""Arguments and results of the transitions of the index, in plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from toc.index.calls import MAX_IDS
from toc.index.members import first_due
from toc.model.topic import Slot

SILENT_SECONDS = 6
"""A member that has not called ``own`` for longer has ended without leaving, or is cut off: it calls every
two seconds."""
MEMBER = "member "
_SHOWN_CHARS = 200


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

    ``next_due`` is the first score left in the StoreQueue, None if nothing in it will ever be due. ``left``
    is the number of entries there that are due now.
    """

    entries: list[tuple[int, float]]
    next_due: float | None
    left: int
    redis_now_ms: int


class CancelReply(NamedTuple):
    """``removed``: there was a StoreQueue entry, now removed or moved. ``prepared``: a worker has the id."""

    removed: bool
    prepared: bool
    redis_now_ms: int

    @classmethod
    def of(cls, reply: list[int]) -> CancelReply:
        """Parse the reply of cancel.lua or reschedule.lua."""
        removed, prepared, now_ms = map(int, reply)
        return cls(removed == 1, prepared == 1, now_ms)


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

    ``due`` of the entries in ``store`` are due.
    """

    next_due: float | None
    store: int
    prepared: int
    dead: int
    redis_now_ms: int
    due: int = 0

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
