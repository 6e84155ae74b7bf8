"""How late this machine lets processes run while a test is under way.

Some bounds on time are the point of a test. They hold where nothing else runs. On a shared machine all
processes are late, also one that only sleeps and wakes up: what that one loses is added to the bound.
"""

from __future__ import annotations

import subprocess
import sys

HOPS = 10
"""Wake-ups of processes and threads from a task's due time to its start, and to its end in row and index."""

PROBE = """
import select, sys, time
lost = [0.0]
began, used = time.monotonic(), time.process_time()
while True:
    asked = select.select([0], [], [], 0.02)[0]
    sum(range(2000))
    now, all_used = time.monotonic(), time.process_time()
    lost.append(max(now - began - 0.02 - (all_used - used), 0.0))
    began, used = now, all_used
    if not asked:
        continue
    if not sys.stdin.readline():
        break
    else:
        lost.sort()
        print(lost[len(lost) * 99 // 100], lost[-1], flush=True)
"""


class Machine:
    """A process that measures what the machine takes, from when this is made until it is asked."""

    def __init__(self) -> None:
        self._probe = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROBE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._probe.pid

    @property
    def slack(self) -> float:
        """Seconds by which something that takes ``HOPS`` wake-ups may be late through no fault of its own.

        One of them may meet the longest halt of the machine, the others its usual ones.
        """
        assert self._probe.stdin is not None
        assert self._probe.stdout is not None
        self._probe.stdin.write("\n")
        self._probe.stdin.flush()
        usual, longest = map(float, self._probe.stdout.readline().split())
        return longest + HOPS * usual

    @property
    def slack_ms(self) -> float:
        """``slack`` in milliseconds."""
        return 1000 * self.slack

    def close(self) -> None:
        """End the probe."""
        self._probe.communicate()
