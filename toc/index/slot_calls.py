"""Makes calls for many slots at once, and combines their results by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from toc.index.calls import MAX_IDS, BySlot, Call, Calls, Script, understood
from toc.index.keys import SlotKeys
from toc.index.members import shown, sort_out
from toc.index.slot_map import RedisNodes
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.observe.metrics import ORPHANS

log = get_logger(__name__)

SLOTS_TOGETHER = 100
"""Slots in one call: well below a millisecond of the server's time."""

Result = TypeVar("Result")


def command(name: str, key: Callable[[SlotKeys], str]) -> Callable[..., Call]:
    """Return a function of a slot's keys and further words that builds a call on one of the keys."""
    return lambda keys, *words: Call(keys.hash_slot, (name, key(keys), *words))


class SlotCalls(Calls):
    """Calls for slots. ``keys`` returns the keys of a slot."""

    def __init__(self, nodes: RedisNodes, keys: Callable[[Slot], SlotKeys]) -> None:
        super().__init__(nodes)
        self.keys = keys

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
        calls = []
        for part in parts:
            keys = [self.keys(slot) for slot in part]
            calls.append(script.of_all(keys))
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
        self, members: Mapping[Slot, Sequence[int | bytes]], queue: Callable[[SlotKeys], str]
    ) -> BySlot[int]:
        """Remove members from a queue. Returns how many were there."""
        alone = {slot: [(one,) for one in some] for slot, some in members.items()}
        return self.in_batches(alone, command("ZREM", queue), sum)

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
