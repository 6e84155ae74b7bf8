"""Keeps the horizon where the index fits its budget of memory: looks at all nodes, decides, removes.

Any worker may do it: who finds that nobody has looked lately looks, and goes on doing so; the others ask from
time to time. What it finds is the same whoever looks, so two at once do no harm. While Redis or the first
database is out of reach, the horizon stays.
"""

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from math import inf

from toc.index.messages import Peek
from toc.index.preflight import facts_of
from toc.index.queues import Queues
from toc.model.clock import Clock, RateLimit
from toc.model.due import FAR, NEAR, Counted
from toc.model.errors import IndexUnavailable, TocError
from toc.model.horizon import Budget, Choice, Node, Span, choose, spans
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.store.records.cluster import Horizon
from toc.store.store import Store

log = get_logger(__name__)

LOOK_SECONDS = 2.0
"""How often somebody looks, at most."""
SLOTS_A_SECOND = 5000
"""Slots whose entries are counted a second: some hundredths of one processor, in the process that looks."""
OTHERS_SECONDS = 10.0
"""How often the others ask whether anybody looks, about."""
COUNT_SECONDS = 60.0
"""How often the counts of what comes due are read."""
GROW_MS = 60_000
"""How long a horizon stays, at least, before a longer one: by then all has been read that it reaches anew."""


class HorizonKeeper:
    """The loop that looks."""

    def __init__(self, store: Store, queues: Queues, clock: Clock, budget: Budget) -> None:
        self._store = store
        self._queues = queues
        self._clock = clock
        self._budget = budget
        self._every = LOOK_SECONDS
        self._looks = False
        self._spans: list[Span] = []
        self._counted = -inf
        self._complains = RateLimit(clock)

    def run_once(self) -> float:
        """Look, if nobody else does. Returns the seconds until the next time."""
        try:
            # Whoever looked last goes on: it has the connections to all servers, of which counts are read.
            self._looks = self._store.identity.may_look(round(self._every * (900 if self._looks else 2500)))
            if not self._looks:
                return OTHERS_SECONDS * random.uniform(0.5, 1.5)  # noqa: S311 - spreads, guards nothing
            self.look()
        except TocError as exc:
            if self._complains():
                log.warning("horizon_not_kept", error=str(exc))
        return self._every

    def look(self) -> Choice | None:
        """Set the horizon, and remove what is too much. Returns what was chosen, if anything.

        Raises StoreUnavailable, SchemaBehind, IndexUnavailable.
        """
        now, identity = self._clock.now_ms(), self._store.identity
        topics = self._store.topics.list()
        slots = [slot for topic in topics for slot in topic.slots()]
        self._every = max(LOOK_SECONDS, len(slots) / SLOTS_A_SECOND)
        nodes = self._nodes(slots)
        if not topics or not nodes:
            return None
        if self._clock.monotonic() - self._counted >= COUNT_SECONDS:
            self._spans = spans(self._counts(), {topic.biz_type: topic.horizon for topic in topics}, now)
            self._counted = self._clock.monotonic()
        before, most = identity.horizon(), max(topic.horizon for topic in topics)
        present = min(before.seconds or most, most)

        def standing(seconds: int) -> int:
            return self._queues.standing(slots, now, now + seconds * 1000)

        choice = choose(nodes, self._spans, now, present=present, most=most, standing=standing)
        if choice is None or (choice.seconds > present and 0 <= now - before.since < GROW_MS):
            return None
        removed, seconds = 0, 0 if choice.seconds == most else choice.seconds
        if seconds != before.seconds:
            identity.set_horizon(Horizon(seconds, choice.why, now))
        if choice.remove:
            removed = self._queues.trim(slots, now + choice.seconds * 1000)
        if removed or seconds != before.seconds:
            log.info("horizon_changed", seconds=choice.seconds, why=choice.why, removed=removed)
        return choice

    def _nodes(self, slots: Iterable[Slot]) -> list[Node]:
        """Return the nodes that answer and tell their memory."""
        ahead, found = Counter[object](), []
        for slot, peek in self._queues.peek(slots).items():
            if isinstance(peek, Peek):
                ahead[self._queues.node_of(slot)] += peek.store - peek.due
        for node in self._queues.nodes.masters():
            # one that is out of reach, or whose account may not ask this, is left out
            with suppress(IndexUnavailable, AttributeError, KeyError, ValueError):
                facts = facts_of(node.ask(("INFO", "memory"))[0])
                used, most = int(facts["used_memory"]), int(facts["maxmemory"])
                found.append(Node(str(node.address), used, self._budget.on(most), ahead[node]))
        return found

    def _counts(self) -> dict[str, list[Counted]]:
        """Read what workers have counted of their tables, as far as it can be read."""
        counts: dict[str, list[Counted]] = {NEAR.name: [], FAR.name: []}
        for rows in self._store.due_counts.kept(self._store.tables).values():
            for row in rows:
                counts[row.part].append(row.counts)
        return counts
