"""Crowded processes: handlers compute so much that the other threads hardly get the interpreter.

A thread gets the interpreter again after the threads that wait before it, each of which keeps it for the
switch interval (0.5 ms) or for its longest call into C (``json.loads``, ``sum``, ``sorted``, ``re``). To
start a task takes ten such waits and more, one after the other. Eight threads of Python code make the others
of their process a tenth of a second late; with calls of 70 ms it is 2 to 14 s. A shorter interval changes
nothing then, nor does priority: the system's scheduler does not know who waits for the interpreter.

So the process tells its daemon, which gives its slots to the other processes of the host, and back when it is
over. Its running tries go on, and nobody is charged. This is for one process that one task crowds. If several
are crowded it is the load, which needs all of them: then all serve. A process that does not use a processor
is not crowded: it or its machine is paused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from statistics import median

LOOK_SECONDS = 0.25
"""How often a thread goes to sleep to see how much later it runs again."""
LOOKS = 5
"""So many looks decide: a bit more than a second, in a crowded process 2 to 4 s."""
CROWDED_SECONDS = 0.1
"""So much later, by the median of the looks, is crowded. Eight threads of Python code are at 0.006, with
twenty programs waiting for each core."""
OVER_SECONDS = 5.0
"""How long a process must not be crowded until it counts as free."""
LOAD_SECONDS = 60.0
"""So long after several processes of a host were crowded at once it is the load that crowds each of them."""


class Crowding:
    """Measures how long threads of this process wait for the interpreter, and tells when that changes."""

    def __init__(
        self,
        tell: Callable[[bool], None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._tell = tell
        self._monotonic = monotonic
        self._processor = processor
        self._looks: deque[tuple[float, float, float]] = deque(maxlen=LOOKS)
        """When each ended, how long it waited, and the processor time used by then."""
        self._asleep = monotonic()
        self._last = float("-inf")
        """When it was last found crowded."""
        self._reported = False

    def look(self) -> float:
        """Take the time since this last returned. Returns the seconds to sleep until the next call."""
        now = self._monotonic()
        self._looks.append((now, now - self._asleep - LOOK_SECONDS, self._processor()))
        if self._crowded():
            self._last = now
        crowded = now - self._last < OVER_SECONDS
        if crowded != self._reported:
            self._reported = crowded
            self._tell(crowded)
        self._asleep = self._monotonic()
        return LOOK_SECONDS

    def _crowded(self) -> bool:
        if len(self._looks) < LOOKS or median(waited for _, waited, _ in self._looks) < CROWDED_SECONDS:
            return False
        (began, _, used), (ended, _, all_used) = self._looks[0], self._looks[-1]
        return all_used - used > (ended - began) / 2


class Relief:
    """Which process gives its slots to the others: one that is crowded alone."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._load_until = float("-inf")
        """Until when it is the load that crowds processes."""

    def of(self, crowded: Collection[str], serving: Collection[str]) -> str | None:
        """The process to relieve now, by the worker_ids of those that are crowded and of those that serve."""
        now = self._monotonic()
        if len(crowded) > 1:
            self._load_until = now + LOAD_SECONDS
        if not crowded or now < self._load_until or set(serving) <= set(crowded):
            return None
        return next(iter(crowded))
