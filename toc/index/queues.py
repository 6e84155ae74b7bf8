"""The transitions of the index: one method per Lua script, for many slots at once.

    StoreQueue ──prepare──▶ PrepareQueue ──commit──▶ gone
        ▲                     │   │
        └─────rollback────────┘   └──bury──▶ DeadQueue ──redrive──▶ StoreQueue

Methods over many slots never raise because of one server: each slot gets its result, or the IndexUnavailable
of its server. If a slot's ids went in several calls and one of them failed, the slot gets the error. The
whole can then be repeated: every script is safe to repeat, except ``prepare``, which is never repeated.

Ids are ints of up to 63 bits; scores and fencing tokens are floats as in ``toc.model.scores``. A stray, a
member that cannot be an entry, is never returned: ``prepare``, ``expired`` and ``ids`` remove it, with the
alarm ``orphan_dropped``. If that fails, the next reader removes it.
"""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from math import fmod
from operator import attrgetter
from typing import Any, Literal

from toc.index import messages
from toc.index.calls import BySlot, Call, Calls, IndexBroken, Scored, Script, command, understood
from toc.index.keys import SlotKeys, hash_slot_of, owner_key, permits_key
from toc.index.nodes import RedisNodes, Timeouts
from toc.index.url import parse
from toc.index.wake import WakeListener
from toc.model.errors import IndexUnavailable
from toc.model.scores import CLAIMS
from toc.model.topic import Slot

_ADD = Script("add", "store", "prepare", wakes=True)
_PREPARE = Script("prepare", "store", "prepare")
_EXTEND = Script("extend", "prepare")
_COMMIT = Script("commit", "prepare")
_ROLLBACK = Script("rollback", "store", "prepare", wakes=True)
_BURY = Script("bury", "dead", "prepare")
_RESTORE_DEAD = Script("restore_dead", "dead", "store", "prepare")
_CANCEL = Script("cancel", "store", "prepare")
_RESCHEDULE = Script("reschedule", "store", "prepare", wakes=True)
_REDRIVE = Script("redrive", "store", "dead", "prepare", wakes=True)
_EXPIRED = Script("expired", "prepare")
_HELD = Script("held", "prepare")
_PEEK = Script("peek", "store", "prepare", "dead")
_TRIM = Script("trim", "store")
_CLAIM = Script("claim", "claims")
_REACH = Script("reach", "generation", "claims", "store", "prepare", "dead")
_OWN = Script("own")
_PERMITS = Script("permits")

_STORE_QUEUE = attrgetter("store")
_PREPARE_QUEUE = attrgetter("prepare")
_DEAD_QUEUE = attrgetter("dead")
_CLAIMS = attrgetter("claims")

TRIM_SECONDS = 1.0
"""How long one call trims: a hundred million entries would take longer than a loop may."""

LONGEST = Timeouts(connect=0.5, read=2.0)
"""A slower Redis counts as out of reach: due tasks then run from the rows."""
OWNER_LAPSE_SECONDS = 10
"""Seconds without a call of ``own`` after which an owner loses the index. The next caller of
``own`` then becomes its owner."""
OWNER_REFRESH_SECONDS = 2
"""Seconds after which a further call of ``own`` by the owner is recorded."""


class Queues:
    """The index behind one URL. Thread-safe; after a fork the child opens its own connections.

    Connects on first use. Its time-outs are at most LONGEST. Raises ConfigError for an unusable URL.
    """

    present = True
    """Whether there is an index."""

    def __init__(self, url: str, *, namespace: str | None = None, timeouts: Timeouts = LONGEST) -> None:
        self.namespace = namespace
        self.nodes = RedisNodes(parse(url), Timeouts(*map(min, timeouts, LONGEST)))
        self._keys: dict[Slot, SlotKeys] = {}
        self._calls = Calls(self.nodes, self.keys)

    def keys(self, slot: Slot) -> SlotKeys:
        """Return the names of the slot's keys."""
        keys = self._keys.get(slot)
        if keys is None:
            keys = self._keys[slot] = SlotKeys.of(slot, self.namespace)
        return keys

    def close(self) -> None:
        """Close idle connections."""
        self.nodes.close()

    # --- transitions -------------------------------------------------------------------------------------

    def add(self, entries: Scored) -> BySlot[int]:
        """Put (job_id, score) into the StoreQueues, or move them earlier, never later.

        Leaves prepared ids alone. Returns how many were added or became earlier. IndexFull when Redis is at
        its maxmemory.
        """
        return self._calls.in_batches(entries, _ADD.of, sum)

    def prepare(self, requests: Sequence[messages.PrepareRequest]) -> BySlot[messages.Prepared]:
        """Take due entries by the Redis clock, one request per slot.

        A request is sent at most once. After a ReplyLost, entries may be prepared under the claim
        number although no worker holds them; ``expired`` lists them. After any other IndexUnavailable
        nothing was taken. See ``toc.index.takes`` for a thread that waits for no node.
        """
        calls = {request.slot: self.prepare_call(request) for request in requests}
        self.run(list(calls.values()))
        prepared, strays = self.prepared_by(calls)
        self.drop_strays(strays)
        return prepared

    def prepare_call(self, request: messages.PrepareRequest) -> Call:
        """Build the call for a request, which must not be made twice."""
        slot, limit, retries, claim, latest = request
        return _PREPARE.of(self.keys(slot), min(limit, messages.MAX_IDS), retries, claim, latest, again=False)

    def run(self, calls: Sequence[Call]) -> None:
        """Make calls, and give each its result."""
        self._calls.run(calls)

    def prepared_by(
        self, calls: Mapping[Slot, Call]
    ) -> tuple[BySlot[messages.Prepared], Mapping[Slot, list[bytes]]]:
        """Return what calls that were made have taken, and the strays among it, which are to be dropped."""
        prepared: BySlot[messages.Prepared] = {}
        strays: dict[Slot, list[bytes]] = {}
        for slot, call in calls.items():
            reply = understood(call.result, _taken)
            if isinstance(reply, IndexUnavailable):
                prepared[slot] = reply
            else:
                prepared[slot], found = reply
                if found:
                    strays[slot] = found
        return prepared, strays

    def drop_strays(self, strays: Mapping[Slot, list[bytes]]) -> None:
        """Remove strays that ``prepare`` has moved to the PrepareQueues."""
        self._calls.drop(strays, _PREPARE_QUEUE)

    def extend(self, entries: Scored) -> BySlot[list[bool]]:
        """Keep (job_id, fencing token) alive. False if the token no longer matches."""
        return self._calls.in_batches(entries, _EXTEND.of, _flags)

    def commit(self, entries: Scored) -> BySlot[list[bool]]:
        """Remove finished (job_id, fencing token) from the PrepareQueues.

        A token is score mod 1000 or the whole score. A heartbeat changes the score, so after it
        only the first of these matches. False if the token no longer matches, or if the entry was
        removed by a first send whose reply was lost.
        """
        return self._calls.in_batches(entries, _COMMIT.of, _flags)

    def rollback(self, entries: Mapping[Slot, Sequence[tuple[int, float, float]]]) -> BySlot[list[bool]]:
        """Move (job_id, fencing token, StoreQueue score) back to the StoreQueues. False as in ``commit``."""
        return self._calls.in_batches(entries, _ROLLBACK.of, _flags)

    def bury(self, entries: Mapping[Slot, Sequence[tuple[int, float, int]]]) -> BySlot[list[bool]]:
        """Move (job_id, fencing token, millisecond of death) to the DeadQueues. False as in ``commit``."""
        return self._calls.in_batches(entries, _BURY.of, _flags)

    def restore_dead(self, entries: Mapping[Slot, Sequence[tuple[int, int]]]) -> BySlot[int]:
        """Put (job_id, millisecond of death) of dead tasks back into the DeadQueues, and remove them from the
        StoreQueues.

        Leaves prepared ids alone. Returns how many were missing in the DeadQueues.
        """
        return self._calls.in_batches(entries, _RESTORE_DEAD.of, sum)

    def redrive(self, entries: Scored) -> BySlot[int]:
        """Move (job_id, StoreQueue score) from the DeadQueues to the StoreQueues. Returns how many were in
        the DeadQueues."""
        return self._calls.in_batches(entries, _REDRIVE.of, sum)

    def cancel(self, slots: Mapping[int, Slot]) -> dict[int, messages.CancelReply | IndexUnavailable]:
        """Remove ids, each mapped to its slot, from their StoreQueues."""
        calls = {job_id: _CANCEL.of(self.keys(slot), job_id) for job_id, slot in slots.items()}
        return self._calls.one_each(calls, messages.CancelReply.of)

    def reschedule(self, slot: Slot, job_id: int, score: float) -> messages.CancelReply:
        """Move one id to another score in the StoreQueue, or add it, unless it is prepared.

        Raises IndexUnavailable.
        """
        return self._calls.only(_RESCHEDULE.of(self.keys(slot), job_id, score), messages.CancelReply.of)

    def forget(self, entries: Mapping[Slot, Sequence[int]]) -> BySlot[int]:
        """Remove ids of tasks that have ended from the StoreQueues. Returns how many were there."""
        return self._calls.remove(entries, _STORE_QUEUE)

    def trim(self, slots: Iterable[Slot], after_ms: int) -> int:
        """Remove what is due after an instant from the StoreQueues, farthest first; never what is due within
        30 s. Returns how many were there. Servers that do not answer keep theirs, and what is left after
        TRIM_SECONDS stays."""
        left, removed, until = list(slots), 0, time.monotonic() + TRIM_SECONDS
        while left and (not removed or time.monotonic() < until):
            calls = {slot: _TRIM.of(self.keys(slot), after_ms, messages.MAX_IDS) for slot in left}
            found = self._calls.one_each(calls, int)
            counts = {slot: n for slot, n in found.items() if not isinstance(n, IndexUnavailable)}
            removed += sum(counts.values())
            left = [slot for slot, count in counts.items() if count == messages.MAX_IDS]
        return removed

    def purge_dead(self, entries: Mapping[Slot, Sequence[int]]) -> BySlot[int]:
        """Remove ids from the DeadQueues for good. Returns how many were there."""
        return self._calls.remove(entries, _DEAD_QUEUE)

    # --- looking -----------------------------------------------------------------------------------------

    def expired(self, requests: Sequence[messages.ExpiredRequest]) -> BySlot[list[tuple[int, float]]]:
        """Return (job_id, PrepareQueue score) of the entries that the requests ask for. Moves none.

        Entries that were kept alive in the future, before the server's clock was set back, become as if they
        had been kept alive now: at most 50 per slot and call.
        """
        calls = {
            slot: _EXPIRED.of(self.keys(slot), timeout_s, min(limit, messages.MAX_IDS), skip)
            for slot, timeout_s, _, limit, skip in requests
        }
        listed: BySlot[list[bytes]] = self._calls.one_each(calls, list)
        self._add_held(listed, {request.slot: request.claims for request in requests if request.claims})
        return self._calls.entries(listed, _PREPARE_QUEUE)

    def _add_held(self, listed: BySlot[list[bytes]], claims: Mapping[Slot, Sequence[int]]) -> None:
        """Add the entries under these claim numbers to ``listed``, page by page, until each slot is done."""
        cursors = dict.fromkeys(claims, b"0")
        while cursors:
            calls = {
                slot: _HELD.of(self.keys(slot), cursor, *claims[slot]) for slot, cursor in cursors.items()
            }
            cursors = {}
            for slot, page in self._calls.one_each(calls, _page).items():
                found = listed[slot]
                if isinstance(found, IndexUnavailable):
                    continue
                if isinstance(page, IndexUnavailable):
                    listed[slot] = page
                    continue
                cursor, held = page
                found += held
                if cursor != b"0":
                    cursors[slot] = cursor

    def peek(self, slots: Iterable[Slot]) -> BySlot[messages.Peek]:
        """Return when each slot is next due, how many entries it has, and how many are due."""
        return self._calls.together(_PEEK, slots, lambda call: messages.Peek.each_of(call.result))

    def standing(self, slots: Iterable[Slot], after_ms: int, until_ms: int) -> int:
        """Return how many entries of the StoreQueues are due after an instant and until another, on servers
        that answer."""
        read = command("ZCOUNT", _STORE_QUEUE)
        calls = {slot: read(self.keys(slot), f"({after_ms}", until_ms) for slot in slots}
        counts = self._calls.one_each(calls, int).values()
        return sum(count for count in counts if not isinstance(count, IndexUnavailable))

    def clocks(self) -> dict[str, float | IndexUnavailable]:
        """Return, per server address, its clock minus this machine's in seconds, or the error.

        Raises IndexUnavailable if the servers are unknown.
        """
        clocks: dict[str, float | IndexUnavailable] = {}
        for node in self.nodes.masters():
            try:
                clocks[str(node.address)] = node.clock()
            except IndexUnavailable as exc:
                clocks[str(node.address)] = exc
        return clocks

    def ids(
        self, queue: Literal["prepare", "dead"], ranks: Mapping[Slot, int], limit: int
    ) -> BySlot[list[int]]:
        """Return up to ``limit`` ids of each PrepareQueue or DeadQueue from the given rank on: the first are
        those that were kept alive, or died, the longest ago."""
        queues = attrgetter(queue)
        read = command("ZRANGE", queues)
        calls = {
            slot: read(self.keys(slot), rank, rank + limit - 1, "WITHSCORES") for slot, rank in ranks.items()
        }
        pages = self._calls.entries(self._calls.one_each(calls, list), queues)
        return {
            slot: page if isinstance(page, IndexUnavailable) else [job_id for job_id, _ in page]
            for slot, page in pages.items()
        }

    # --- claims and generations of a slot -------------------------------------------------------------------

    def claim(self, slots: Iterable[Slot], worker_id: str) -> BySlot[messages.Claim]:
        """Draw the worker's claim number for each slot; a number that it holds already stays.

        ``worker_id`` must differ from those of all processes that ever lived.
        """
        calls = {}
        for slot in slots:
            start = random.randrange(CLAIMS)  # noqa: S311 - spreads, guards nothing
            calls[slot] = _CLAIM.of(self.keys(slot), worker_id, start)
        return self._calls.one_each(calls, messages.Claim.of)

    def claims(self, slots: Iterable[Slot]) -> BySlot[dict[int, str]]:
        """Return the claim numbers of each slot and their workers, including dead workers not yet cleared."""
        read = command("HGETALL", _CLAIMS)
        calls = {slot: read(self.keys(slot)) for slot in slots}
        return self._calls.one_each(calls, messages.holders)

    def unclaim(self, numbers: Mapping[Slot, Sequence[int]]) -> BySlot[int]:
        """Release claim numbers. Returns how many were held."""
        return self._calls.remove(numbers, _CLAIMS, "HDEL")

    def generations(self, slots: Iterable[Slot]) -> BySlot[messages.Generation]:
        """Return on which server each slot was last rebuilt, and which one serves it now.

        An answer also means that the transitions work for the slot, and that Redis is not at its maxmemory
        (IndexFull): it would refuse this script for the same reasons. A slot with keys that toc did not write
        gets an IndexBroken, which names them.
        """
        return self._calls.together(
            _REACH, slots, lambda call: (_generation(found, call.run_id) for found in call.result)
        )

    def set_generations(self, rebuilt: Mapping[Slot, str]) -> BySlot[bool]:
        """Record rebuilt slots, each with the run_id that its server had *before* the rebuild began.

        If the server was replaced meanwhile, the slot is thus rebuilt once more.
        """
        write = command("SET", attrgetter("generation"))
        calls = {slot: write(self.keys(slot), run_id) for slot, run_id in rebuilt.items()}
        return self._calls.one_each(calls, bool)

    # --- the owner of the index -----------------------------------------------------------------------------

    def own(self, identity: str, name: str, member: str = "", *, leaves: bool = False) -> messages.Owner:
        """Claim the index for a task table, as the worker ``member`` of it. Returns its owner.

        With ``leaves`` the worker is no member any more. Raises IndexUnavailable.
        """
        key = owner_key(self.namespace)
        field = member and messages.MEMBER + member
        words = (identity, name, OWNER_LAPSE_SECONDS, OWNER_REFRESH_SECONDS, field, int(leaves))
        return self._calls.only(_OWN.call(hash_slot_of(key), (key,), *words), messages.Owner.of)

    def owner(self) -> messages.Owner | None:
        """Return the owner of the index, or None. Raises IndexUnavailable."""
        found = self.own("", "")
        return found if found.identity else None

    def permits(
        self, asked: Mapping[str, messages.PermitRequest]
    ) -> dict[str, messages.Permits | IndexUnavailable]:
        """Ask for shares of the limits of webhook targets, by name. Errors of servers are results."""
        calls = {}
        for name, request in asked.items():
            key = permits_key(name, self.namespace)
            calls[name] = _PERMITS.call(hash_slot_of(key), (key,), *request)
        return self._calls.one_each(calls, messages.Permits.of)

    def refuse(self, why: str | None) -> None:
        """Make every call fail with this reason, without sending it. None allows calls again."""
        self.nodes.refusal = why

    # -------------------------------------------------------------------------------------------------------

    def node_of(self, slot: Slot) -> object:
        """Return a token of the slot's server, as far as known: the same for slots that share one."""
        return self.nodes.known(self.keys(slot).hash_slot)

    def listener(self) -> WakeListener:
        """Create a subscription to wake-ups, with a connection of its own."""
        return WakeListener(self.nodes, self.keys)


def _taken(reply: list[Any]) -> tuple[messages.Prepared, list[bytes]]:
    """Parse the reply of prepare.lua: what was taken, and the members that are strays."""
    flat, first, left, now_ms = reply
    entries, strays = messages.sort_out(flat)
    taken = [(job_id, fmod(score, 1000.0)) for job_id, score in entries]
    return messages.Prepared(taken, messages.first_due(first), int(left), int(now_ms)), strays


def _page(reply: list[Any]) -> tuple[bytes, list[bytes]]:
    """Parse the reply of held.lua: the next cursor, and the entries."""
    cursor, held = reply
    return bytes(cursor), list(held)


def _generation(found: bytes | list[bytes] | None, serving: str) -> messages.Generation | IndexBroken:
    if isinstance(found, list):
        names = " and ".join(key.decode(errors="replace") for key in found)
        return IndexBroken(
            f"{names}: not of the type that toc writes, so another program wrote it; move or delete it"
        )
    return messages.Generation(None if found is None else str(found, "ascii", "replace"), serving)


def _flags(parts: list[list[int]]) -> list[bool]:
    return [flag == 1 for part in parts for flag in part]


class NoIndex(Queues):
    """The index of a cluster without one: the rows alone say what is due. Connects to nothing.

    What would change an index does nothing; what would look at one answers that there is none.
    """

    present = False

    def __init__(self) -> None:
        super().__init__("redis://none")
        self.refuse("TOC_REDIS_URL is not set")

    def _nothing(self, entries: Mapping[Slot, Any]) -> BySlot[int]:
        return dict.fromkeys(entries, 0)

    add = restore_dead = redrive = forget = purge_dead = _nothing
