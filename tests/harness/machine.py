"""What the machine takes of the time that a test bounds, measured while the test is under way.

Some bounds on time are the point of a test. Where the test runs alone (``make faults``, ``pytest -n 0``)
they are what toc promises, and a few milliseconds. On a machine that is shared all processes are late, also
one that does next to nothing: several times what that one loses is added to the bound. Where tests run beside
each other, that is most of a second at the least: what starts or ends beside a test (a server, a dozen
processes) may meet the test alone. So what has a bound with that slack must take seconds when it is broken.
"""

from __future__ import annotations

import os
import subprocess
import sys

HOPS = 10
"""Wake-ups of processes and threads from a task's due time to its start, and to its end in row and index."""
MARGIN = 3
"""A test makes more such journeys than the probe, with heavier processes: they are so many times as late."""
BESIDE_OTHERS = 0.75
"""Seconds that are allowed at the least where tests run beside each other. Four tests and two loops that did
nothing else on two processors made tasks 0.13 s late and calls 0.26 s."""

# A journey is what a task makes: wake-ups in a row, each with the work that a worker does then, and a write
# that is to be durable. Lost is what is neither its pauses nor its work.
PROBE = f"""
import os, select, tempfile, time
HOPS, PAUSE, WORK = {HOPS}, 0.02, 0.0002
lost, began, used = [], time.monotonic(), time.process_time()
with tempfile.TemporaryFile(buffering=0) as disk:
    while True:
        for _ in range(HOPS):
            time.sleep(PAUSE)
            enough = time.process_time() + WORK
            while time.process_time() < enough:
                pass
        disk.seek(0)
        disk.write(bytes(4096))
        os.fsync(disk.fileno())
        now, all_used = time.monotonic(), time.process_time()
        lost.append(max(now - began - HOPS * PAUSE - (all_used - used), 0.0))
        began, used = now, all_used
        if select.select([0], [], [], 0)[0]:
            if not os.read(0, 1):
                break
            lost.sort()
            print(lost[len(lost) // 2], lost[-1], flush=True)
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
        self._least = BESIDE_OTHERS if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 else 0.0

    @property
    def slack(self) -> float:
        """Seconds that the machine may cost the worst of many, of which each takes ``HOPS`` wake-ups."""
        return max(MARGIN * self._lost()[1], self._least)

    @property
    def slack_ms(self) -> float:
        """``slack`` in milliseconds."""
        return 1000 * self.slack

    @property
    def slack_of_half(self) -> float:
        """Seconds that it may cost half of them: for medians, which no moment of trouble moves."""
        return MARGIN * self._lost()[0]

    def _lost(self) -> tuple[float, float]:
        """Seconds that the probe's journeys have lost so far: half of them at most, and the worst."""
        assert self._probe.stdin is not None
        assert self._probe.stdout is not None
        self._probe.stdin.write("\n")
        self._probe.stdin.flush()
        half, worst = map(float, self._probe.stdout.readline().split())
        return half, worst

    def close(self) -> None:
        """End the probe."""
        self._probe.communicate()
