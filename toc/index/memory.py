"""How much memory the Redis nodes use, and how many entries of what is due later are on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from toc.index.messages import Peek
from toc.index.preflight import facts_of
from toc.index.queues import Queues
from toc.model.errors import IndexUnavailable
from toc.model.horizon import Budget, Node
from toc.model.topic import Slot


def look_at_nodes(queues: Queues, slots: Iterable[Slot], budget: Budget) -> list[Node]:
    """Return the nodes that tell their memory. Raises IndexUnavailable if they are unknown."""
    ahead: Counter[object] = Counter()
    for slot, peek in queues.peek(slots).items():
        if isinstance(peek, Peek):
            ahead[queues.node_of(slot)] += peek.store - peek.due
    found = []
    for node in queues.nodes.masters():
        try:
            (info,) = node.ask(("INFO", "memory"))
        except IndexUnavailable:
            continue
        facts = facts_of(info) if isinstance(info, bytes) else {}  # its account may not ask this
        used, most = (facts.get(name, "") for name in ("used_memory", "maxmemory"))
        if used.isdecimal() and most.isdecimal():
            found.append(Node(str(node.address), int(used), budget.on(int(most)), ahead[node]))
    return found
