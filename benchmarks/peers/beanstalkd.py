"""beanstalkd: delays are whole seconds; a worker reserves, runs, deletes."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version

import greenstalk

from benchmarks.peer import NS, Peer
from benchmarks.record import started

HOST, PORT = os.environ["BENCH_BEANSTALKD"].split(":")


class Beanstalkd(Peer):
    def __init__(self) -> None:
        self._client = greenstalk.Client((HOST, int(PORT)))

    def version(self) -> str:
        return f"beanstalkd {self._client.stats()['version']}, greenstalk {version('greenstalk')}"

    def commands(self, processes: int) -> list[list[str]]:
        return [[sys.executable, "-m", "benchmarks.peers.beanstalkd"] for _ in range(processes)]

    def submit(self, number: int, due: int) -> None:
        delay = -(-(due - time.time_ns()) // NS)
        self._client.put(str(number), delay=max(delay, 0))

    def pending(self) -> int:
        stats = self._client.stats()
        return sum(int(stats[f"current-jobs-{state}"]) for state in ("delayed", "ready", "reserved"))

    def close(self) -> None:
        self._client.close()


def work() -> None:
    """Run for ever: reserve, record the start, delete."""
    with greenstalk.Client((HOST, int(PORT))) as client:
        while True:
            job = client.reserve()
            started(int(job.body))
            client.delete(job)


PEER = Beanstalkd

if __name__ == "__main__":
    work()
