"""How far ahead the index reaches, so that what is pending up to then fits a budget of memory. All is pure.

The horizon is one of STEPS, each a quarter more than the one before. The bytes that the servers say are in
use are the truth: once they exceed the budget, the horizon becomes the largest step up to which the entries
that stand in the index leave room. The counts of what comes due (toc.model.due) say ahead of time what will
not fit, such as a burst that the horizon is about to reach, and how much further it may reach.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from toc.model.due import FAR, HOURS, MINUTES, NEAR, Counted, spread, total

LEAST = 45
"""The shortest horizon, in seconds. With it, what is due within half a minute is always indexed."""
STEPS = [round(LEAST * 1.25**number) for number in range(74)]
"""In seconds, up to ten years."""
ENTRY_BYTES = 140
"""What an entry takes, at most. If it takes less, the horizon comes to its right value in more steps."""
AIM = 0.9
"""The part of the budget that is left full when entries are removed, and that a longer horizon may fill."""
LEAD_MS = 5000
"""What the horizon reaches within this time counts as reached: until then everybody knows a shorter one."""
KNOWN = 1.25
"""The counts are too old to grow by if the index holds so many times what they know of."""
FEW = 1000
"""Entries that may be unknown to the counts in any case."""
NO_BOUND = 1 << 60
"""The bytes of a node without a bound."""

Need = Callable[[int], float]
"""Returns how many entries a horizon (s) needs."""

_BYTES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FORM = re.compile(r"([0-9]{1,15})\s*(%|[KMGT]iB)")
BUDGET_FORM = "a percentage of maxmemory such as 60%, or bytes such as 4GiB"


class Budget(NamedTuple):
    """How much of its memory each Redis node may use: a percentage of its maxmemory, or bytes if not 0."""

    percent: int
    bytes: int = 0

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Read ``60%`` or ``4GiB``. None if it is neither, or no amount that makes sense."""
        if not (found := _FORM.fullmatch(text.strip())) or not (number := int(found[1])):
            return None
        if found[2] != "%":
            return cls(100, number * _BYTES[found[2]])
        return cls(number) if number <= 100 else None

    def on(self, maxmemory: int) -> int:
        """Return the bytes on a node with this maxmemory (0: it has none): at most all that it has."""
        most = maxmemory or NO_BOUND
        return max(1, min(most, self.bytes or most) * self.percent // 100)


class Node(NamedTuple):
    """A Redis node: bytes in use, those of its budget, and its entries that are due later."""

    name: str
    used: int
    budget: int
    ahead: int

    def room(self, part: float) -> float:
        """How many entries that are due later fit in a part of the budget, beside all else that is there."""
        return (part * self.budget - self.used) / ENTRY_BYTES + self.ahead


def room(nodes: Sequence[Node], part: float = 1.0) -> float:
    """Return how many entries of all nodes fit if they spread as they do now: the fullest node decides."""
    every = sum(node.ahead for node in nodes) + len(nodes)
    return min(node.room(part) * every / (node.ahead + 1) for node in nodes)


class Span(NamedTuple):
    """So many tasks (``due``) come due from ``begin`` to ``end`` (ms), of topics whose own horizon is ``own``
    ms."""

    begin: int
    end: int
    own: int
    due: int


def spans(counts: Mapping[str, Sequence[Counted]], own: Mapping[int, int], now_ms: int) -> list[Span]:
    """Return what comes due, in spans that do not overlap.

    ``counts`` are those of all tables, by the name of the part; ``own``: the topics' own horizons (s) by
    biz_type.
    """
    minutes = total(NEAR, counts[NEAR.name], now_ms, MINUTES)
    hours = total(FAR, counts[FAR.name], now_ms, HOURS)
    found = []
    for biz_type in minutes.keys() | hours.keys():
        reaches = own.get(biz_type, max(own.values(), default=0)) * 1000
        near, far = minutes.get(biz_type, [0] * (MINUTES + 1)), hours.get(biz_type, [0] * (HOURS + 1))
        told = spread(now_ms, near[1:], far[1:])
        later = told[-1][1], told[-1][1] + FAR.length, far[0]
        found += [Span(begin, end, reaches, due) for begin, end, due in (*told, later) if due]
    return found


def pending(spans: Iterable[Span], now_ms: int, seconds: float) -> float:
    """Return how many tasks come due within a horizon.

    Those of a span are taken to come evenly within its first minute: of an hour, all may be due at once.
    """
    found, until = 0.0, now_ms + LEAD_MS + seconds * 1000
    for begin, end, own, due in spans:
        since = max(begin, now_ms)
        left, reached = end - since, min(until, now_ms + LEAD_MS + own) - since
        if left > 0 and reached > 0:
            found += due * left / (end - begin) * min(reached / min(left, NEAR.length), 1.0)
    return found


def steps(most: int) -> list[int]:
    """Return the horizons (s) that are possible if no topic has a longer one than ``most``."""
    return [*(step for step in STEPS if step < most), most]


def reach(need: Need, fits: float, most: int) -> int:
    """Return the longest horizon (s) that needs no more than fits, or else the shortest.

    ``need`` returns the entries that a horizon needs. It is asked about few of them.
    """
    possible = steps(most)
    return possible[max(bisect_right(possible, fits, key=need) - 1, 0)]


class Choice(NamedTuple):
    """Another horizon (s), or the same; why; and whether entries beyond it are to be removed."""

    seconds: int
    why: str
    remove: bool = False


def choose(
    nodes: Sequence[Node], spans: Sequence[Span], now_ms: int, *, present: int, most: int, standing: Need
) -> Choice | None:
    """Return what becomes of the ``present`` horizon (s); None: nothing.

    ``most``: the longest horizon of a topic. ``standing`` counts the entries that stand in the index within a
    horizon.
    """

    def due(seconds: int) -> float:
        return pending(spans, now_ms, seconds)

    fullest = max(nodes, key=lambda node: node.used / node.budget)
    what = f"{fullest.name} uses {100 * fullest.used / fullest.budget:.0f} % of its budget"
    if fullest.used > fullest.budget:
        fitting = reach(standing, room(nodes, AIM), most) if present > LEAST else present
        return Choice(min(fitting, present), what, remove=True)
    if due(present) > room(nodes) and present > LEAST:
        what = f"what is due within {present} s does not fit; {what}"
        return Choice(min(reach(due, room(nodes), most), present), what)
    known = KNOWN * due(most) + FEW >= sum(node.ahead for node in nodes)
    longer = reach(due, room(nodes, AIM), most)
    return Choice(longer, what) if known and longer > present else None
