"""Fault 18: topics whose handlers take a minute flood a process; another topic stays on time."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load

from toc import NewTask, Topic

SLOW = ("test.slow0", "test.slow1", "test.slow2")
THREADS = 16
FLOOD = 40
"""More of each slow topic than there are threads."""


@pytest.mark.parametrize("turn", [pytest.param("at once", marks=pytest.mark.slow), "one after the other"])
def test_topics_with_slow_handlers_take_no_thread_that_another_topic_needs(
    build: Build, tmp_path: Path, verdict: Verdict, turn: str
) -> None:
    line = verdict(18, "three topics with slow handlers flood a process", turn)
    system = build()
    for number, topic in enumerate(SLOW):
        system.center.store.topics.create(Topic(topic, 20 + number, 8))
    system.start(processes=1, threads=THREADS, app="fault.apps.slow:center")
    released = tmp_path / "released"
    flood: set[int] = set()

    def running() -> int:
        return sum(event.event == "start" and event.job_id in flood for event in system.history())

    for number, topic in enumerate(SLOW, start=1):
        some = [NewTask(topic, n, 0.5, attribute={"until": str(released)}) for n in range(FLOOD)]
        flood.update(system.client.submit_many(some))
        if turn != "at once":
            threads = THREADS - THREADS // 4**number
            system.wait(lambda: running() >= threads, f"{topic} has its threads", 10)  # noqa: B023
    system.wait(lambda: running() >= THREADS - 2, "they have their threads", 10)
    with Load(system.client, rate=50, ahead=(0.3, 0.6), cancel=0, fail=0, topics=("test.sync",)) as trickle:
        trickle.more(100)
    system.wait(lambda: len(system.late(trickle.job_ids)) == len(trickle.job_ids), "all have started", 10)
    late, busy = system.late(trickle.job_ids), running()
    released.touch()
    line.prove(
        THREADS - 2 <= busy < len(flood),
        f"{busy} handlers of three topics held {THREADS} threads; another topic meanwhile: {late}",
    )
    line.judge(system, within=60)
    line.on_time(late, p99=200)
