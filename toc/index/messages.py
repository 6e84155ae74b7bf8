"""What the transitions of the index take and return, in plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from toc.index.calls import MAX_IDS
from toc.index.members import first_due
from toc.model.errors import IndexUnavailable
from toc.model.scores import CLAIMS
from toc.model.topic import Slot

_SHOWN_CHARS = 200


class PrepareRequest(NamedTuple):
    """Take up to ``limit`` due ids of ``slot`` (never more than MAX_IDS at a time) under number ``claim``.

    ``retries`` is the topic's: the tries of an entry that used up none.
    """

    slot: Slot
    limit: int
    retries: int
    claim: int


class Prepared(NamedTuple):
    """What was taken, each id with its fence.

    ``next_due`` is the first score left in the StoreQueue, None when nothing there will ever be due; ``left``
    is how many stand there that are due now.
    """

    entries: list[tuple[int, float]]
    next_due: float | None
    left: int
    redis_now_ms: int


class CancelReply(NamedTuple):
    """``removed``: a StoreQueue entry stood (it is removed or moved); ``prepared``: a worker has the id."""

    removed: bool
    prepared: bool
    redis_now_ms: int

    @classmethod
    def of(cls, reply: list[int]) -> CancelReply:
        """What cancel.lua or reschedule.lua says."""
        removed, prepared, now_ms = map(int, reply)
        return cls(removed == 1, prepared == 1, now_ms)


class ExpiredRequest(NamedTuple):
    """List up to ``limit`` (and MAX_IDS) entries not kept alive for more than ``timeout_s`` seconds.

    And all those under the given claim numbers, however fresh.
    """

    slot: Slot
    timeout_s: int
    claims: Sequence[int] = ()
    limit: int = MAX_IDS


class Waiting(NamedTuple):
    """What a worker has taken of a slot and cannot start yet, once that is late.

    ``since`` is the millisecond at which the first of it was due, ``tasks`` how much of it the worker holds;
    the rest it has put back for a while. It holds for ``seconds``: so long after their worker's last word
    these entries are anybody's.
    """

    since: int
    tasks: int
    seconds: int


class Peek(NamedTuple):
    """``next_due`` is as in ``Prepared``; the counts are entries.

    ``waiting`` of the ``prepared`` have not started, though the first was due at ``waiting_since``
    (milliseconds): None unless that is late. That holds with 0, too, for what was put back for a while.
    """

    next_due: float | None
    store: int
    prepared: int
    dead: int
    waiting: int
    waiting_since: int | None
    redis_now_ms: int

    @classmethod
    def each_of(cls, reply: list[Any]) -> Iterator[Peek]:
        """What peek.lua says, slot by slot."""
        now_ms = int(reply[0])
        for at in range(1, len(reply), 5):
            first, store, prepared, dead, note = reply[at : at + 5]
            counts = int(store), int(prepared), int(dead)
            yield cls(first_due(first), *counts, *noted(note, int(prepared)), now_ms)

    @property
    def oldest(self) -> float | None:
        """When the first task that has not started is or was due, taken or not; None if there is none."""
        return _first(self.next_due, self.waiting_since)


class Depth(NamedTuple):
    """How much stands in a slot: ``due`` of the ``store`` entries are due. The rest is as in ``Peek``."""

    next_due: float | None
    store: int
    due: int
    prepared: int
    dead: int
    waiting: int
    waiting_since: int | None
    redis_now_ms: int

    @classmethod
    def of(cls, reply: list[Any]) -> Depth:
        """What depth.lua says."""
        first, store, due, prepared, dead, note, now_ms = reply
        counts = int(store), int(due), int(prepared), int(dead)
        return cls(first_due(first), *counts, *noted(note, int(prepared)), int(now_ms))

    @property
    def oldest(self) -> float | None:
        """When the first task that has not started is or was due, taken or not; None if there is none."""
        return _first(self.next_due, self.waiting_since)


class Claim(NamedTuple):
    """The ``number`` (0..4095) under which the worker takes entries, and who holds which ``others``."""

    number: int
    others: dict[int, str]

    @classmethod
    def of(cls, reply: list[Any]) -> Claim | IndexUnavailable:
        """What claim.lua says; no number is free when it says -1."""
        number, others = reply
        if number < 0:
            return IndexUnavailable(
                f"all {CLAIMS} claim numbers of this slot are held; unclaim those of dead workers"
            )
        return cls(number, holders(others))


class Generation(NamedTuple):
    """``recorded``: run_id of the server on which the slot was last rebuilt; ``serving``: of where it is now.

    A slot whose two differ must be rebuilt from the task table.
    """

    recorded: str | None
    serving: str


class Owner(NamedTuple):
    """Whose index it is: the ``identity`` of a task table, the ``name`` of its cluster, and ``seconds`` since
    its workers asked last. ``rival``: another cluster that asked ``rival_seconds`` ago, or "".
    """

    identity: str
    name: str
    seconds: int
    rival: str
    rival_seconds: int

    @classmethod
    def of(cls, reply: list[Any]) -> Owner:
        """What own.lua says."""
        identity, name, seconds, rival, rival_seconds = reply
        return cls(_text(identity), _text(name), seconds, _text(rival), rival_seconds)

    @classmethod
    def stored(cls, flat: list[bytes], now: int) -> Owner | None:
        """What the hash says at that second of Redis's clock; None where it names nobody."""
        found = dict(zip(map(_text, flat[::2]), map(_text, flat[1::2]), strict=True))

        def since(field: str) -> int:
            text = found.get(field, "")
            return max(now - int(text), 0) if text.isdecimal() else 0

        if "identity" not in found:
            return None
        name, rival = found.get("name", ""), found.get("rival", "")
        return cls(found["identity"], name, since("at"), rival, since("rival_at"))


def _text(value: bytes) -> str:
    return value.decode(errors="replace")[:_SHOWN_CHARS]


def noted(note: bytes | None, prepared: int) -> tuple[int, int | None]:
    """How many entries wait for a handler, and since when the first was due, by the note of their worker.

    0 of them: what was taken was put away again. What is no such note is none; nor is that of a worker that
    has died, where nothing is prepared any more.
    """
    words = (note or b"").split()
    if len(words) != 2 or not all(word.isdigit() and len(word) <= 18 for word in words):
        return 0, None
    since, tasks = map(int, words)
    return (0, None) if not since or (tasks and not prepared) else (min(tasks, prepared), since)


def _first(*times: float | None) -> float | None:
    return min((each for each in times if each is not None), default=None)


def holders(flat: list[bytes]) -> dict[int, str]:
    """Who holds which claim number, of a hash or a list of number, worker, ...; the counter is left out."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {int(number): worker.decode(errors="replace") for number, worker in pairs if number.isdigit()}
