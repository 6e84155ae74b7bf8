"""Fault 18: a burst, a hot biz_id and a slow topic at once; other topics stay on time, memory bounded."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from fault.conftest import Build, Verdict
from fault.kit.doors import memory
from fault.kit.load import Load
from fault.kit.table import overdue
from harness.system import DaemonProcess, System

from toc import NewTask
from toc.index.messages import Peek
from toc.model.topic import Slot, Topic
from toc.worker.settle.finish import MAX_UNWRITTEN
from toc.worker.take.agenda import MAX_UNSTARTED, ROUND_LIMIT

MEGABYTE = 1 << 20
AWAY_MS = 1500
"""By which tasks may be late whose only database server seemed to be away."""
PROCESSES = 2
SLOTS = 16
BOUND = PROCESSES * (MAX_UNSTARTED + ROUND_LIMIT + MAX_UNWRITTEN)
"""What may be taken of a topic at most: what has not started, what is done and not written yet, and what a
round adds."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "slow", "seconds"), [(6_000, 90, 7), pytest.param(100_000, 300, 30, marks=pytest.mark.slow)]
)
def test_a_burst_of_one_topic_leaves_the_others_on_time_and_memory_bounded(
    build: Build, verdict: Verdict, count: int, slow: int, seconds: float
) -> None:
    line = verdict(18, "burst, hot biz_id, slow topic", f"{count:,} due in one second")
    system = build(slots=SLOTS)
    system.center.store.topics.create(Topic("test.other", 9, SLOTS))
    daemon = system.start(processes=PROCESSES, app="fault.apps.more:center")
    client = system.client
    for ahead in (seconds, 8 * seconds):  # those of the first may be due before all are stored
        due = datetime.now(UTC) + timedelta(seconds=ahead)
        for first in range(0, count, 10_000):
            client.submit_many(
                [
                    NewTask("test.batch", biz_id(n), action_time=due + timedelta(milliseconds=n % 1000))
                    for n in range(first, min(first + 10_000, count))
                ]
            )
        client.submit_many(
            [NewTask("test.sync", n, action_time=due, attribute={"sleep": 0.2}) for n in range(slow)]
        )
        spare = (due - datetime.now(UTC)).total_seconds()
        if spare > 0:
            break
    line.prove(spare > 0, f"all of them stored {spare:.0f} s ahead")
    with Watch(system, daemon) as watch:
        time.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds() - 1.5))
        watch.mark()
        others = ("test.async", "test.other")
        with Load(client, rate=40, ahead=(0.5, 1.0), cancel=0, fail=0, topics=others) as trickle:
            # Not the history: to read it takes time.
            over = due.timestamp() + 1
            system.wait(lambda: time.time() > over and not overdue(system, 0), "the burst is over", 120)
            begun = due.timestamp()
            system.wait(lambda: len(system.late(trickle.job_ids, since=begun)) >= 20, "others have run", 60)
            ended = time.time()
        judged = line.judge(system, within=120)
    late = system.late(trickle.job_ids, since=due.timestamp(), before=ended)
    line.prove(
        judged.counts["processed"] >= count + slow and watch.prepared and len(late) >= 20,
        f"{count:,} done, {count // 20:,} of them of one biz_id, at most {watch.prepared:,} taken at once; "
        f"two other topics meanwhile: {late}; memory +{watch.growth // MEGABYTE} MB a process at most",
    )
    assert watch.prepared <= BOUND
    assert watch.growth < 60 * MEGABYTE
    # A crowded machine may keep the server from answering for 50 ms: then it counts as away for a moment, and
    # what was put away comes back once it answers. Half of the tasks never meet that.
    away = AWAY_MS if line.slack and '"database_away"' in daemon.told() else 0.0
    line.on_time(late, p50=500, p99=1000 + away)


def biz_id(number: int) -> int:
    """Every twentieth task is of one biz_id: all of these share a slot and a table."""
    return 7 if number % 20 == 0 else number


class Watch:
    """What the processes of a daemon occupy, and how much of the burst they have taken, at most."""

    def __init__(self, system: System, daemon: DaemonProcess) -> None:
        self._queues = system.center.queues
        self._slots = [Slot("test.batch", number) for number in range(SLOTS)]
        self._pids = [daemon.process.pid, *daemon.workers()]
        self._base: dict[int, int] = {}
        self.growth = 0
        """Bytes that a process grew by after ``mark``."""
        self.prepared = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch")

    def mark(self) -> None:
        self._base = {pid: memory(pid) for pid in self._pids}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for pid, base in self._base.items():
                self.growth = max(self.growth, memory(pid) - base)
            peeks = self._queues.peek(self._slots).values()
            taken = sum(peek.prepared for peek in peeks if isinstance(peek, Peek))
            self.prepared = max(self.prepared, taken)
