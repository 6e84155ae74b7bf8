"""Runs many calls at once and handles their errors.

Calls are grouped by node. Each node gets its calls in one write, all nodes are written to before any is read,
and every call gets its own result. A window limits the calls in flight on a node, and so what either side
must buffer.

A node that does not answer in time is out of reach from then on, and nobody waits for it again until it is
back. In a cluster that time is short, as calls to other nodes wait as well.

    the connection broke     the call is sent once more on a new one, or becomes a ReplyLost if it must not be
                             executed twice; a call that was not sent is simply sent again
    a redirection, NOSCRIPT  followed, or the script sent along; sent again at once, as it was not executed
    a state that passes      sent again after a short, jittered pause, a few times
    anything else            an IndexUnavailable that says what to do

Pauses add up to about 0.1 s, not more: callers are loops that retry, and the results of all other slots wait.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from toc.index.keys import SlotKeys
from toc.index.messages import MAX_IDS, shown, sort_out
from toc.index.nodes import RedisNode, RedisNodes
from toc.index.wire import NONSENSE, PARTIAL, Command, Disconnected, Refusal, Then, Wire, meaning_of
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.observe.metrics import ORPHANS

log = get_logger(__name__)

SLOTS_TOGETHER = 100
"""Slots in one call: well below a millisecond of the server's time."""
_LUA = Path(__file__).parent / "lua"
_SHARED = (_LUA / "shared.lua").read_text()

Key = TypeVar("Key")
Result = TypeVar("Result")
BySlot = dict[Slot, Result | IndexUnavailable]
"""The result of each slot, or why there is none."""
Scored = Mapping[Slot, Sequence[tuple[int, float]]]
"""By slot: job_ids, each with a score or a fencing token."""

_WINDOW_CALLS = 256
_WINDOW_WORDS = 40_000
_ATTEMPTS = 16
_PAUSES_S = (0.005, 0.01, 0.02, 0.04)


class ReplyLost(IndexUnavailable):
    """The call was sent and its reply was lost: it may or may not have been executed."""


class IndexFull(IndexUnavailable):
    """Redis is at its maxmemory: nothing can be added. Scripts that remove or move still work."""


class IndexBroken(IndexUnavailable):
    """A key of this slot cannot be used. Its type shows that toc did not write it, or our account
    has no right to it. Other slots work."""


_KINDS = {"OOM": IndexFull, "WRONGTYPE": IndexBroken, "NOPERM": IndexBroken}
"""Error codes that have an error class of their own."""


class Script:
    """A Lua file of this package. If its KEYS are those of one slot, ``keys`` are these fields of SlotKeys.

    With ``wakes``, its first argument is the slot's channel.
    """

    def __init__(self, name: str, *keys: str, wakes: bool = False) -> None:
        self.name = name
        first, rest = (_LUA / f"{name}.lua").read_text().split("\n", 1)
        self.source = f"{first}\n{_SHARED}{rest}"
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        places = [SlotKeys._fields.index(key) for key in (*keys, *(["channel"] if wakes else []))]
        # An itemgetter of one index returns no tuple. An itemgetter of a slice does.
        self._names: Callable[[SlotKeys], tuple[str, ...]] = itemgetter(
            *(places if len(places) > 1 else (slice(place, place + 1) for place in places or [0]))
        )
        self._count = len(keys)

    def of(self, keys: SlotKeys, *words: str | bytes | int | float, again: bool = True) -> Call:
        """Build a call of this script for a slot."""
        command = ("EVALSHA", self.sha, self._count, *self._names(keys), *words)
        return Call(keys.hash_slot, command, self, again)

    def of_all(self, slots: Sequence[SlotKeys]) -> Call:
        """Build a call of this script for many slots, which share a hash slot in a cluster."""
        return self.call(slots[0].hash_slot, list(chain.from_iterable(map(self._names, slots))))

    def call(self, hash_slot: int, keys: Sequence[str], *words: str | bytes | int | float) -> Call:
        """Build a call of this script for these keys."""
        return Call(hash_slot, ("EVALSHA", self.sha, len(keys), *keys, *words), self)


@dataclass(slots=True, eq=False)
class Call:
    """One command to the server of one hash slot, and its result.

    ``again``: the command may be executed twice. ``result``: the reply, or an IndexUnavailable. ``run_id``:
    that of the server process that replied.
    """

    hash_slot: int
    command: Command
    script: Script | None = None
    again: bool = True
    result: Any = None
    run_id: str = ""
    asking: RedisNode | None = None
    """The node that an ASK redirects to, for one try."""
    moved: bool = False
    """Whether it has followed a MOVED."""
    lost: bool = False
    """Whether it was sent once and its reply was lost."""


class Calls:
    """Runs calls over the servers of one URL. ``keys`` returns the keys of a slot."""

    def __init__(self, nodes: RedisNodes, keys: Callable[[Slot], SlotKeys]) -> None:
        self.nodes = nodes
        self.keys = keys

    def run(self, calls: Sequence[Call]) -> None:
        """Give every call its result. Errors of servers are results; none is raised."""
        todo = list(calls)
        pauses = iter(_PAUSES_S)
        for _ in range(_ATTEMPTS):
            attempt = Attempt(self.nodes)
            attempt.run(todo)
            if attempt.rediscover:
                self.nodes.try_rediscover()
            # Where another node serves the call by now, or none is known; else the call keeps its error.
            moved = [c for c, node in attempt.unreachable if self.nodes.known(c.hash_slot) is not node]
            todo = attempt.again + moved
            if attempt.after_pause and (pause := next(pauses, None)) is not None:
                todo += attempt.after_pause  # if no pause is left, these calls keep their errors
                time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - spreads load, guards nothing
            if not todo:
                return
        for call in todo:
            if call.result is None:
                call.result = IndexUnavailable("the connections to Redis keep breaking; try again")

    def one_each(
        self, calls: Mapping[Key, Call], read: Callable[[Any], Result]
    ) -> dict[Key, Result | IndexUnavailable]:
        """Run one call per key. Returns ``read`` of each reply, or the error."""
        self.run(list(calls.values()))
        return {key: understood(call.result, read) for key, call in calls.items()}

    def only(self, call: Call, read: Callable[[Any], Result]) -> Result:
        """Run one call. Returns ``read`` of its reply. Raises IndexUnavailable."""
        self.run([call])
        result = understood(call.result, read)
        if isinstance(result, IndexUnavailable):
            raise result
        return result

    # --- calls for many slots, their results by slot

    def together(
        self,
        script: Script,
        slots: Iterable[Slot],
        read: Callable[[Call], Iterable[Result | IndexUnavailable]],
        size: int = SLOTS_TOGETHER,
    ) -> BySlot[Result]:
        """Run a script that takes the keys of many slots, in few calls. ``read`` yields each slot's result.

        In a cluster each slot has a call of its own, as the keys of a call must share a hash slot. If a call
        for many slots is refused, one of them may be the cause, so each is then asked about alone.
        """
        asked = list(slots)
        size = 1 if self.nodes.clustered else size
        parts = [asked[first : first + size] for first in range(0, len(asked), size)]
        calls = [script.of_all([self.keys(slot) for slot in part]) for part in parts]
        self.run(calls)
        found: BySlot[Result] = {}
        for part, call in zip(parts, calls, strict=True):
            answers = understood(call.result, partial(_by_slot, part, read, call))
            if not isinstance(answers, IndexUnavailable):
                found.update(answers)
            elif call.run_id and len(part) > 1:  # the server has replied
                found |= self.together(script, part, read, 1)
            else:
                found |= dict.fromkeys(part, answers)
        return found

    def entries(
        self, replies: Mapping[Slot, list[bytes] | IndexUnavailable], queue: Callable[[SlotKeys], str]
    ) -> BySlot[list[tuple[int, float]]]:
        """Return the (job_id, score) in replies, each once. Removes the strays among them from ``queue``."""
        entries: BySlot[list[tuple[int, float]]] = {}
        strays: dict[Slot, list[bytes]] = {}
        for slot, reply in replies.items():
            found = understood(reply, sort_out)
            if isinstance(found, IndexUnavailable):
                entries[slot] = found
            else:
                entries[slot] = list(dict(found[0]).items())
                strays[slot] = found[1]
        self.drop(strays, queue)
        return entries

    def drop(self, strays: Mapping[Slot, Sequence[bytes]], queue: Callable[[SlotKeys], str]) -> None:
        """Remove strays, with one alarm per slot. A reader that finds them gone logs nothing."""
        if not any(strays.values()):
            return
        met = {slot: members for slot, members in strays.items() if members}
        for slot, removed in self.remove(met, queue).items():
            if not isinstance(removed, IndexUnavailable) and removed:
                ORPHANS.of(slot.topic).add(removed)
                log.error("orphan_dropped", slot=str(slot), members=removed, member=shown(met[slot][0]))

    def remove(
        self, members: Mapping[Slot, Sequence[int | bytes]], key: Callable[[SlotKeys], str], by: str = "ZREM"
    ) -> BySlot[int]:
        """Remove members from a queue, or fields from a hash by HDEL. Returns how many were there."""
        alone = {slot: [(one,) for one in some] for slot, some in members.items()}
        return self.in_batches(alone, command(by, key), sum)

    def in_batches(
        self,
        entries: Mapping[Slot, Sequence[tuple[int | float | bytes, ...]]],
        call: Callable[..., Call],
        unite: Callable[[list[Any]], Result],
    ) -> BySlot[Result]:
        """Make calls with the words of these entries, at most MAX_IDS entries in each.

        ``unite`` combines the replies of a slot. If one of its calls failed, the slot gets that error.
        """
        calls: dict[Slot, list[Call]] = {}
        for slot, items in entries.items():
            keys = self.keys(slot)
            calls[slot] = [
                call(keys, *chain.from_iterable(items[start : start + MAX_IDS]))
                for start in range(0, len(items), MAX_IDS)
            ]
        self.run(list(chain.from_iterable(calls.values())))
        results: BySlot[Result] = {}
        for slot, parts in calls.items():
            failed = next((part.result for part in parts if isinstance(part.result, IndexUnavailable)), None)
            united = partial(_united, len(entries[slot]), unite)
            results[slot] = understood([part.result for part in parts], united) if failed is None else failed
        return results


def understood(reply: Any, read: Callable[[Any], Result]) -> Result | IndexUnavailable:
    """Return ``read`` of a reply, or the IndexUnavailable that the reply is.

    A reply that cannot be parsed becomes a ReplyLost, because its call was executed.
    """
    if isinstance(reply, IndexUnavailable):
        return reply
    try:
        return read(reply)
    except NONSENSE as exc:
        return ReplyLost(f"a reply from Redis cannot be parsed ({type(exc).__name__}); the call was executed")


def _united(count: int, unite: Callable[[list[Any]], Result], parts: list[Any]) -> Result:
    """Combine the replies of several calls. A list must have one answer for each of ``count`` entries."""
    whole = unite(parts)
    if isinstance(whole, list) and len(whole) != count:
        raise ValueError("the number of answers is not the number of entries")
    return whole


def _by_slot(
    slots: Sequence[Slot], read: Callable[[Call], Iterable[Result]], call: Call, _reply: object
) -> dict[Slot, Result]:
    return dict(zip(slots, read(call), strict=True))


def command(name: str, key: Callable[[SlotKeys], str]) -> Callable[..., Call]:
    """Return a function of a slot's keys and further words that builds a call on one of the keys."""
    return lambda keys, *words: Call(keys.hash_slot, (name, key(keys), *words))


class Window:
    """Calls sent to a node in one write, and how many of their replies have been read."""

    def __init__(self, node: RedisNode, wire: Wire, calls: list[Call]) -> None:
        self.node = node
        self.wire = wire
        self._commands: list[Command] = []
        self._replies: list[Call | None] = []
        """The origin of each reply, in order; None for an ASKING."""
        self._read = 0
        for call in calls:
            if call.asking is not None:
                self._commands.append(("ASKING",))
                self._replies.append(None)
            self._commands.append(call.command)
            self._replies.append(call)

    def send(self) -> None:
        """Send the calls. Raises Disconnected; some calls may then have been executed."""
        self.wire.send(self._commands)

    def accept(self, attempt: Attempt, read: Callable[[], Any] | None = None) -> bool:
        """Accept the replies that have been received, or that ``read`` waits for. Returns whether these are
        all. Raises Disconnected."""
        wire = self.wire
        while self._read < len(self._replies):
            reply = (read or wire.received)()
            if reply is PARTIAL:
                return False
            whose = self._replies[self._read]
            self._read += 1
            if whose is not None:
                whose.run_id = wire.run_id
                if isinstance(reply, Refusal):
                    attempt.judge(self.node, whose, reply)
                else:
                    whose.result = reply
        if wire.left():  # some of the replies belong to other calls
            self._read = 0
            raise Disconnected("more replies than calls")
        return True

    @property
    def unanswered(self) -> list[Call]:
        """The calls whose replies have not been read."""
        return [whose for whose in self._replies[self._read :] if whose is not None]


class Attempt:
    """One attempt at the calls that have no final result yet.

    ``again``: calls to send again at once. ``after_pause``: calls to send again after a pause, with the error
    they keep if there is no pause. ``unreachable``: calls whose node could not be reached.
    """

    def __init__(self, nodes: RedisNodes) -> None:
        self._nodes = nodes
        self.again: list[Call] = []
        self.after_pause: list[Call] = []
        self.unreachable: list[tuple[Call, RedisNode]] = []
        self.rediscover = False
        self._replicas: set[RedisNode] = set()
        """Nodes that refused as replicas do. After a switchover an address leads to another server, and the
        old master keeps its connections."""
        self._waiting: dict[RedisNode, list[Call]] = {}
        """By node, the calls that have not been sent."""
        self._wires: dict[RedisNode, Wire] = {}

    def run(self, calls: list[Call]) -> None:
        """Send calls and read their replies."""
        self._waiting = waiting = self._by_node(calls)
        self._wires = wires = {}
        try:
            while waiting:
                sent = []
                for node in list(waiting):
                    try:
                        if node not in wires:
                            wires[node] = node.take()
                    except IndexUnavailable as exc:
                        self.rediscover = True
                        for call in waiting.pop(node):
                            call.result, call.asking = exc, None
                            self.unreachable.append((call, node))
                        continue
                    window = Window(node, wires[node], _cut_window(waiting, node))
                    try:
                        window.send()
                        sent.append(window)
                    except Disconnected as exc:
                        self._leave(window, exc)
                for window in sent:
                    try:
                        window.accept(self, window.wire.read)
                    except Disconnected as exc:
                        self._leave(window, exc)
        except BaseException:
            for wire in wires.values():  # there may be unread replies in them
                wire.close()
            raise
        for node, wire in wires.items():
            node.give(wire)
        for node in self._replicas:
            node.renew()  # the next call connects anew

    def _by_node(self, calls: list[Call]) -> dict[RedisNode, list[Call]]:
        waiting: dict[RedisNode, list[Call]] = {}
        try:
            for call in calls:
                node = call.asking or self._nodes.master(call.hash_slot)
                waiting.setdefault(node, []).append(call)
        except IndexUnavailable as exc:  # the map is unknown, or calls are refused
            for call in calls:
                call.result = exc
            return {}
        return waiting

    def _leave(self, window: Window, exc: Disconnected) -> None:
        """Give up a connection that broke; the calls that have not been sent go over another."""
        self.broke(window, exc)
        del self._wires[window.node]
        self.again += self._waiting.pop(window.node, [])

    def broke(self, window: Window, exc: Disconnected) -> None:
        """Give up a connection that broke, and the calls that must not be executed twice."""
        node = window.node
        window.node.drop(window.wire)
        node.lost(exc)
        text = f"the connection to Redis at {node.address} broke before its reply ({type(exc).__name__})"
        for call in window.unanswered:
            call.asking = None
            if call.again and not call.lost:
                call.lost = True
                call.result = IndexUnavailable(f"{text}; try again")
                self.again.append(call)
            else:
                call.result = ReplyLost(f"{text}; the call may or may not have been executed")

    def judge(self, node: RedisNode, call: Call, error: Refusal) -> None:
        """Apply the error table to the error of ``node`` for ``call``. The call was not executed."""
        code, (then, advice) = error.code, meaning_of(error)
        name = call.script.name if call.script else str(call.command[0])
        kind = _KINDS.get(code, IndexUnavailable)
        call.result = kind(
            f"Redis at {node.address} refused {name} ({code}): {advice or f'it said: {error}'}"
        )
        call.asking = None
        if then is Then.SEND_SCRIPT and call.script is not None:  # the server keeps what it gets so
            call.command = ("EVAL", call.script.source, *call.command[2:])
        elif then is Then.FOLLOW_MOVED:
            self._nodes.moved(call.hash_slot, self._nodes.redirected(error, node))
            if call.moved:  # twice: the nodes do not agree yet
                then = Then.PAUSE
            call.moved = True
        elif then is Then.FOLLOW_ASK:
            call.asking = self._nodes.redirected(error, node)
        self.rediscover |= then is Then.REDISCOVER
        if code in ("READONLY", "MASTERDOWN"):
            self._replicas.add(node)
        if then in (Then.PAUSE, Then.REDISCOVER):
            self.after_pause.append(call)
        elif then is not Then.GIVE_UP:
            self.again.append(call)


def _cut_window(waiting: dict[RedisNode, list[Call]], node: RedisNode) -> list[Call]:
    """Take from the calls that wait for ``node`` as many as may be in flight at once."""
    queue = waiting.pop(node)
    words = 0
    for count, call in enumerate(queue):
        words += len(call.command)
        if count == _WINDOW_CALLS or (count and words > _WINDOW_WORDS):
            waiting[node] = queue[count:]
            return queue[:count]
    return queue
