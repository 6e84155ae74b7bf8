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


class Waiting(NamedTuple):
    """The entries that a worker has taken of a slot and cannot start yet, once they are late.

    ``since`` is when the first was due (ms). The worker holds ``tasks`` of them; it has put back the rest for
    a while. The note expires after ``seconds``, the time without a heartbeat after which any worker may take
    these entries.
    """

    since: int
    tasks: int
    seconds: int


class Peek(NamedTuple):
    """The state of a slot. ``next_due`` is as in ``Prepared``. The counts are entries.

    ``waiting`` of the ``prepared`` entries are late and have not started. The first was due at
    ``waiting_since`` (ms), None if nothing is late; ``waiting`` is 0 if all were put back for a while.
    ``due`` of the entries in ``store`` are due, if they were counted, else 0.
    """

    next_due: float | None
    store: int
    prepared: int
    dead: int
    waiting: int
    waiting_since: int | None
    redis_now_ms: int
    due: int = 0

    @classmethod
    def each_of(cls, reply: list[Any]) -> Iterator[Peek]:
        """Parse the reply of peek.lua, slot by slot."""
        now_ms = int(reply[0])
        for at in range(1, len(reply), 5):
            first, store, prepared, dead, note = reply[at : at + 5]
            counts = int(store), int(prepared), int(dead)
            yield cls(first_due(first), *counts, *noted(note, int(prepared)), now_ms)

    @classmethod
    def counted(cls, reply: list[Any]) -> Peek:
        """Parse the reply of depth.lua, which counts what is due."""
        first, store, due, prepared, dead, note, now_ms = reply
        counts = int(store), int(prepared), int(dead)
        return cls(first_due(first), *counts, *noted(note, int(prepared)), int(now_ms), int(due))

    @property
    def oldest(self) -> float | None:
        """Return when the oldest task that has not started is or was due, taken or not; None without one."""
        return min((at for at in (self.next_due, self.waiting_since) if at is not None), default=None)


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
    ``seconds`` since its workers last called ``own``. ``rival``: another cluster, which called
    ``own`` ``rival_seconds`` ago, or "". ``members``: its workers that did not leave, each with the
    seconds since it called ``own``; after an hour they are forgotten."""

    identity: str
    name: str
    seconds: int
    rival: str
    rival_seconds: int
    members: Mapping[str, int]

    @property
    def alive(self) -> frozenset[str]:
        """The members that call ``own`` as they should."""
        return frozenset(member for member, seconds in self.members.items() if seconds <= SILENT_SECONDS)

    @classmethod
    def of(cls, reply: list[Any]) -> Owner:
        """Parse the reply of own.lua."""
        identity, name, seconds, rival, rival_seconds, members = reply
        ages = dict(zip(map(_text, members[::2]), members[1::2], strict=True))
        return cls(_text(identity), _text(name), seconds, _text(rival), rival_seconds, ages)

    @classmethod
    def stored(cls, flat: list[bytes], now: int) -> Owner | None:
        """Parse the stored hash; ``now`` is in seconds of Redis's clock. None if it names no owner."""
        found = dict(zip(map(_text, flat[::2]), map(_text, flat[1::2]), strict=True))

        def since(field: str) -> int:
            text = found.get(field, "")
            return max(now - int(text), 0) if text.isdecimal() else 0

        if "identity" not in found:
            return None
        name, rival = found.get("name", ""), found.get("rival", "")
        members = {field.removeprefix(MEMBER): since(field) for field in found if field.startswith(MEMBER)}
        return cls(found["identity"], name, since("at"), rival, since("rival_at"), members)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")[:_SHOWN_CHARS]


def noted(note: bytes | None, prepared: int) -> tuple[int, int | None]:
    """Parse a worker's note: how many entries wait for a handler, and when the first was due (ms).

    The number is 0 if the entries were put back. A malformed note counts as none, and so does one of a worker
    that has died if nothing is prepared any more.
    """
    words = (note or b"").split()
    if len(words) != 2 or not all(word.isdigit() and len(word) <= 18 for word in words):
        return 0, None
    since, tasks = map(int, words)
    return (0, None) if not since or (tasks and not prepared) else (min(tasks, prepared), since)


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
    era: int = 0
    opened: int = 0
    left_ms: int = 0
    probe: int = 0


class Permits(NamedTuple):
    """The share of a webhook target's limits that Redis granted to the process.

    ``granted``: how many requests may be in flight. ``begin``: how many may begin now.
    ``pause_ms``: how long until the next one may begin. ``holders``: how many processes send to
    that target. The rest is the state of its breaker, as in permits.lua.
    """

    granted: int
    begin: int
    pause_ms: int
    holders: int
    era: int = 0
    opened: int = 0
    left_ms: int = 0
    probe: int = 0

    @classmethod
    def of(cls, reply: list[int]) -> Permits:
        """Parse the reply of permits.lua."""
        return cls(*map(int, reply))
