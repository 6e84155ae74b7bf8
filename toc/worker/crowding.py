"""Crowded processes: handlers compute so much that the other threads hardly get the interpreter.

A thread that wants the interpreter waits for the threads before it, each of which keeps it for the switch
interval (0.5 ms) or for its longest call into C (``json.loads``, ``sum``, ``sorted``, ``re``). Starting a
task takes ten such waits or more, one after the other. Eight threads of Python code make the other threads of
their process a tenth of a second late; with C calls of 70 ms it is 2 to 14 s. A shorter interval does not
help then, nor does priority: the system's scheduler does not know which threads wait for the interpreter.

So the process tells its daemon, which moves its slots to the other processes of the host until it
is no longer crowded. No task is charged a try. If several processes are crowded, the cause is the
load, which needs all of them. A process that hardly uses a processor is not crowded: it or its
machine is paused.

The thread that looks does nothing else, so it also notices when the process stood still.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from statistics import median

LOOK_SECONDS = 0.25
"""How long a thread sleeps. The look measures how much later than that it runs again."""
LOOKS = 5
"""How many looks decide. They take a little more than a second, in a crowded process 2 to 4 s."""
STILL_SECONDS = 1.0
"""A process in which a look comes later than this was stopped, perhaps with its daemon. Its slots may have
other owners, which the daemon learns in the next moments."""
CROWDED_SECONDS = 0.1
"""A process is crowded if the median of its looks is this late. For comparison: with eight threads
of Python code, on a machine where twenty programs wait for each core, the median is 0.006."""
OVER_SECONDS = 5.0
"""How long a process must not be crowded until it counts as free."""
LOAD_SECONDS = 60.0
"""For this long after several processes of a host were crowded at once, the load counts as the cause."""


class Crowding:
    """Measures how long threads of this process wait for the interpreter, and tells when that changes.

    Calls ``stood_still`` after the process stood still.
    """

    def __init__(
        self,
        tell: Callable[[bool], None],
        stood_still: Callable[[], None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._tell = tell
        self._stood_still = stood_still
        self._monotonic = monotonic
        self._processor = processor
        self._looks: deque[tuple[float, float, float]] = deque(maxlen=LOOKS)
        """For each look: when it ended, how much too late that was, and the processor time used by then."""
        self._asleep = monotonic()
        self._looked = float("inf")
        """When the last look began. A stop at any moment is between two of these times."""
        self._last = float("-inf")
        """When the process was last found crowded."""
        self._reported = False

    def look(self) -> float:
        """Measure the time since this last returned. Returns the seconds to sleep until the next call."""
        now = self._monotonic()
        if now - self._looked > LOOK_SECONDS + STILL_SECONDS:  # [rule: stood-still]
            self._stood_still()
        self._looked = now
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
    """Decides which process gives its slots to the others: a crowded one, if the others are not
    crowded."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._load_until = float("-inf")
        """Until when the load counts as the cause."""

    def of(self, crowded: Collection[str], serving: Collection[str]) -> str | None:
        """Return the worker_id of the process to relieve now, if any, given the crowded and the
        serving processes."""
        now = self._monotonic()
        if len(crowded) > 1:
            self._load_until = now + LOAD_SECONDS
        if not crowded or now < self._load_until or set(serving) <= set(crowded):
            return None
        return next(iter(crowded))
