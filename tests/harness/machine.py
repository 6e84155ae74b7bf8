"""What the machine takes of the time that a fault test bounds, measured while the test is under way.

A test asserts how fast something was only in a run that measures (``--measure``, as ``make faults`` has it).
There the bounds are what toc promises, and a few milliseconds. All processes of a machine that is shared are
late, also one that does next to nothing: several times what that one loses is added.
"""

import os
import subprocess
import sys
from math import inf

HOPS = 10
"""Wake-ups of processes and threads from a task's due time to its start, and to its end in row and index."""
MARGIN = 3
"""A test makes more such journeys than the probe, with heavier processes: they are so many times as late."""
BESIDE_OTHERS = 0.75
"""Seconds that are allowed at the least where tests run beside each other: what starts or ends beside a test
may meet the test alone."""

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
            print(max(lost), flush=True)
"""


class Machine:
    """A process that measures what the machine takes, from when this is made until it is asked.

    ``measures``: whether this run asserts how fast something was; else there is no such process.
    """

    def __init__(self, *, measures: bool) -> None:
        self._least = BESIDE_OTHERS if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 else 0.0
        self._probe: subprocess.Popen[str] | None = None
        if measures:
            self._probe = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", PROBE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    @property
    def slack(self) -> float:
        """Seconds that the machine may cost the worst of many, of which each takes ``HOPS`` wake-ups.

        Infinite in a run that does not measure.
        """
        if not self._probe:
            return inf
        assert self._probe.stdin is not None
        assert self._probe.stdout is not None
        self._probe.stdin.write("\n")
        self._probe.stdin.flush()
        return max(MARGIN * float(self._probe.stdout.readline()), self._least)

    def close(self) -> None:
        """End the probe."""
        if self._probe:
            self._probe.communicate()
