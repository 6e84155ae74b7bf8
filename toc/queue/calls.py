"""Many calls in one go, and what is done about those that fail.

Calls are grouped by node; each node gets its calls in one write, all nodes are written to before any is
read, and every call gets a result of its own. A window bounds what is under way on a node, so that neither
side has to buffer without bound.

    the connection broke     the call is sent once more on a new one; if it must not be executed twice it
                             becomes a ReplyLost instead. A call that was not sent is simply sent again.
    a redirection, NOSCRIPT  done, then sent again at once: it was not executed
    a state that passes      sent again after a short, jittered pause, a few times
    anything else            an IndexUnavailable that says what to do

Pauses add up to about 0.1 s: callers are loops that come again, and the results of all other slots wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from redis.exceptions import AskError, InvalidResponse, RedisError

from toc.errors import IndexUnavailable
from toc.queue.nodes import NONSENSE, Command, Node, Nodes, Wire
from toc.queue.refusals import Then, meaning_of

MAX_IDS = 500
"""Most ids in one call of a script: about a millisecond of the server's time."""

Key = TypeVar("Key")
Result = TypeVar("Result")

_WINDOW_CALLS = 256
_WINDOW_WORDS = 40_000
_ROUNDS = 16
_PAUSES_S = (0.005, 0.01, 0.02, 0.04)


class ReplyLost(IndexUnavailable):
    """The call was sent and its reply was lost: it may or may not have been executed."""


class IndexFull(IndexUnavailable):
    """Redis is at its maxmemory: nothing can be added. Everything that removes or moves still works."""


class Script:
    """A Lua file of this package."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = (Path(__file__).parent / "lua" / f"{name}.lua").read_text()
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def call(
        self, hash_slot: int, keys: Sequence[str], *words: str | bytes | int | float, again: bool = True
    ) -> Call:
        """A call of this script."""
        return Call(hash_slot, ("EVALSHA", self.sha, len(keys), *keys, *words), self, again)


@dataclass(slots=True, eq=False)
class Call:
    """One command to the server of one hash slot, and what became of it.

    ``again`` tells whether it may be executed twice. ``result`` is the reply, or an IndexUnavailable;
    ``run_id`` that of the server process which replied.
    """

    hash_slot: int
    command: Command
    script: Script | None = None
    again: bool = True
    result: Any = None
    run_id: str = ""
    asking: Node | None = None
    """where an ASK sends it, once"""
    moved: bool = False
    """it followed a MOVED before"""
    load: bool = False
    """the script must be loaded first"""
    lost: bool = False
    """it was sent once and its reply was lost"""


class Calls:
    """Runs calls over the servers of one URL."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def run(self, calls: Sequence[Call]) -> None:
        """Give every call its result. Raises nothing for a server's sake."""
        todo = list(calls)
        pauses = iter(_PAUSES_S)
        for _ in range(_ROUNDS):
            round_ = _Round(self.nodes)
            round_.run(todo)
            if round_.rediscover:
                self._rediscover()
            todo = round_.again + [call for call, node in round_.unreachable if self._moved_from(node, call)]
            if round_.after_pause and (pause := next(pauses, None)) is not None:
                todo += round_.after_pause  # without a pause left they keep their errors
                time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - spreads load, guards nothing
            if not todo:
                return
        for call in todo:
            if call.result is None:
                call.result = IndexUnavailable("the connections to Redis break again and again; try again")

    def one_each(
        self, calls: Mapping[Key, Call], read: Callable[[Any], Result]
    ) -> dict[Key, Result | IndexUnavailable]:
        """Run one call for each key; what ``read`` makes of its reply, or the error in its place."""
        self.run(list(calls.values()))
        return {key: understood(call.result, read) for key, call in calls.items()}

    def only(self, call: Call, read: Callable[[Any], Result]) -> Result:
        """Run a call of its own; what ``read`` makes of its reply. Raises IndexUnavailable."""
        self.run([call])
        result = understood(call.result, read)
        if isinstance(result, IndexUnavailable):
            raise result
        return result

    def _rediscover(self) -> None:
        # If that fails the old map stands, and its servers say what is wrong.
        with contextlib.suppress(IndexUnavailable):
            self.nodes.rediscover()

    def _moved_from(self, node: Node, call: Call) -> bool:
        return self.nodes.master(call.hash_slot) is not node


def understood(reply: Any, read: Callable[[Any], Result]) -> Result | IndexUnavailable:
    """What ``read`` makes of a reply; an IndexUnavailable if it is one, or if it makes no sense.

    The call was executed then, and its reply came damaged.
    """
    if isinstance(reply, IndexUnavailable):
        return reply
    try:
        return read(reply)
    except NONSENSE as exc:
        return ReplyLost(f"a reply of Redis makes no sense ({type(exc).__name__}); the call was executed")


class _Round:
    """One pass over the calls that have no final result yet.

    ``again`` are those to be sent again at once, ``after_pause`` those that need a pause before that, with
    the error that stands if there is none; ``unreachable`` are those whose node could not be reached.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.again: list[Call] = []
        self.after_pause: list[Call] = []
        self.unreachable: list[tuple[Call, Node]] = []
        self.rediscover = False

    def run(self, calls: list[Call]) -> None:
        waiting = self._by_node(calls)
        wires: dict[Node, Wire] = {}
        try:
            while waiting:
                sent = []
                for node in list(waiting):
                    if node not in wires and not self._reach(node, wires, waiting):
                        continue
                    window = _cut_window(waiting, node)
                    if self._send(node, wires[node], window):
                        sent.append((node, window))
                    else:
                        node.drop(wires.pop(node))
                        self.again += waiting.pop(node, [])
                for node, window in sent:
                    if not self._read(node, wires[node], window):
                        node.drop(wires.pop(node))
                        self.again += waiting.pop(node, [])
        except BaseException:
            for wire in wires.values():  # replies may be left in them
                wire.close()
            raise
        for node, wire in wires.items():
            node.give(wire)

    def _by_node(self, calls: list[Call]) -> dict[Node, list[Call]]:
        waiting: dict[Node, list[Call]] = {}
        try:
            for call in calls:
                node = call.asking or self._nodes.master(call.hash_slot)
                waiting.setdefault(node, []).append(call)
        except IndexUnavailable as exc:  # nobody tells who serves what
            for call in calls:
                call.result = exc
            return {}
        return waiting

    def _reach(self, node: Node, wires: dict[Node, Wire], waiting: dict[Node, list[Call]]) -> bool:
        try:
            wires[node] = node.take()
        except IndexUnavailable as exc:
            self.rediscover = True
            for call in waiting.pop(node):
                call.result, call.asking = exc, None
                self.unreachable.append((call, node))
            return False
        return True

    def _send(self, node: Node, wire: Wire, window: list[Call]) -> bool:
        commands: list[Command] = [("SCRIPT", "LOAD", script.source) for script in _to_load(window)]
        for call in window:
            if call.asking is not None:
                commands.append(("ASKING",))
            commands.append(call.command)
        try:
            wire.send(commands)
        except RedisError as exc:
            self._lost(node, window, exc)
            return False
        return True

    def _read(self, node: Node, wire: Wire, window: list[Call]) -> bool:
        done = 0
        try:
            loads: dict[Script | None, Any] = {script: wire.read() for script in _to_load(window)}
            for call in window:
                if call.asking is not None:
                    wire.read()
                reply = wire.read()
                done += 1
                call.run_id = wire.run_id
                if isinstance(reply, RedisError):
                    loaded = loads.get(call.script)
                    self._judge(node, call, loaded if isinstance(loaded, RedisError) else reply)
                else:
                    call.result = reply
            if wire.left():  # so some of them were other calls'
                done = 0
                raise InvalidResponse("more replies than calls")
        except RedisError as exc:
            self._lost(node, window[done:], exc)
            return False
        return True

    def _lost(self, node: Node, calls: list[Call], exc: RedisError) -> None:
        text = f"the connection to Redis at {node.address} broke before its reply ({type(exc).__name__})"
        for call in calls:
            call.asking = None
            if call.again and not call.lost:
                call.lost = True
                call.result = IndexUnavailable(f"{text}; try again")
                self.again.append(call)
            else:
                call.result = ReplyLost(f"{text}; it is not known whether the call was executed")

    def _judge(self, node: Node, call: Call, error: RedisError) -> None:
        """Apply the error table to what ``node`` replied to ``call``. The call was not executed."""
        code, then, advice = meaning_of(error)
        name = call.script.name if call.script else str(call.command[0])
        kind = IndexFull if code == "OOM" else IndexUnavailable
        call.result = kind(
            f"Redis at {node.address} refused {name} ({code}): {advice or f'it said: {error}'}"
        )
        call.asking = None
        if then is Then.LOAD_SCRIPT:
            call.load = True
        elif then is Then.FOLLOW_MOVED and isinstance(error, AskError):
            self._nodes.moved(call.hash_slot, self._nodes.redirected(error, node))
            if call.moved:  # the nodes do not agree yet
                then = Then.PAUSE
            call.moved = True
        elif then is Then.FOLLOW_ASK and isinstance(error, AskError):
            call.asking = self._nodes.redirected(error, node)
        self.rediscover |= then is Then.REDISCOVER
        if then in (Then.PAUSE, Then.REDISCOVER):
            self.after_pause.append(call)
        elif then is not Then.GIVE_UP:
            self.again.append(call)


def _cut_window(waiting: dict[Node, list[Call]], node: Node) -> list[Call]:
    """Take from the calls that wait for ``node`` as many as may be under way at once."""
    queue = waiting.pop(node)
    words = 0
    for count, call in enumerate(queue):
        words += len(call.command)
        if count == _WINDOW_CALLS or (count and words > _WINDOW_WORDS):
            waiting[node] = queue[count:]
            return queue[:count]
    return queue


def _to_load(window: list[Call]) -> list[Script]:
    """The scripts that must be loaded before the calls of this window are sent, each once."""
    return list(dict.fromkeys(call.script for call in window if call.load and call.script))
