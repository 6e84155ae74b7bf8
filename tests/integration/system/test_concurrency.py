"""How many handlers run at once: by topic, and whatever waits in front of a daemon."""

from __future__ import annotations

import time

import pytest
from harness import calls
from harness.system import System

from benchmarks.local import RedisServer
from toc import NewTask, Topic


def _start(system: System, *, concurrency: int, processes: int = 1) -> None:
    for biz_type, name in enumerate(calls.TOPICS, start=1):
        system.center.store.topics.create(Topic(name, biz_type, 4, concurrency=concurrency))
    system.start(app="harness.calls:center", processes=processes, threads=8)


def test_no_more_handlers_of_a_topic_run_at_once_than_it_allows(system: System) -> None:
    _start(system, concurrency=2)
    job_ids = [
        system.center.submit(topic, biz_id=n, delay=0.3 + n / 500, attribute={"sleep": 0.1})
        for n in range(40)
        for topic in calls.TOPICS
    ]
    system.wait(lambda: not system.pending(job_ids), "all have run", 20)
    most = {topic: calls.most_at_once(system.history_directory, topic)[0] for topic in calls.TOPICS}
    assert most == dict.fromkeys(calls.TOPICS, 2)


@pytest.mark.parametrize("topic", calls.TOPICS)
def test_a_topic_that_is_limited_does_not_hold_up_another_nor_is_much_of_it_taken_ahead(
    system: System, topic: str
) -> None:
    _start(system, concurrency=1)
    for n in range(4):  # so that it is known to be slow
        job_id = system.center.submit(topic, biz_id=n, delay=0.1, attribute={"sleep": 0.5})
        system.wait(lambda: not system.pending([job_id]), "it has run", 10)  # noqa: B023
    slow = [system.center.submit(topic, biz_id=n, delay=0.1, attribute={"sleep": 600}) for n in range(40)]
    system.wait(lambda: calls.most_at_once(system.history_directory, topic)[1] == 5, "one runs", 5)
    others = [system.center.submit(other, biz_id=1, delay=0.2) for other in calls.TOPICS if other != topic]
    system.wait(lambda: not system.pending(others), "the others have run", 5)
    assert len(system.pending(slow)) == len(slow)
    slots = system.center.catalog.get(topic).slots()
    peeks = system.center.queues.peek(slots).values()
    assert 0 < sum(0 if isinstance(peek, Exception) else peek.prepared for peek in peeks) <= 30, "not all 40"
    system.daemons[0].kill()


def test_a_limit_that_is_raised_or_lifted_applies_to_what_waits_already(system: System) -> None:
    _start(system, concurrency=1)
    topics, history = ("call.thread", "call.coroutine"), system.history_directory
    for topic in topics:
        for n in range(20):
            system.center.submit(topic, biz_id=n, delay=0.1, attribute={"sleep": 600})

    def most() -> list[int]:
        return [calls.most_at_once(history, topic)[0] for topic in topics]

    system.wait(lambda: most() == [1, 1], "one of each runs", 5)
    for topic in topics:
        system.center.store.topics.alter(topic, concurrency=3)
    system.wait(lambda: most() == [3, 3], "three of each run", 6)
    for topic in topics:
        system.center.store.topics.alter(topic, concurrency=0)
    system.wait(lambda: min(most()) > 3, "more run", 6)
    system.daemons[0].kill()


def test_a_limit_that_is_lowered_below_what_runs_holds_up_no_other_topic(system: System) -> None:
    _start(system, concurrency=6)
    for n in range(20):
        system.center.submit("call.thread", biz_id=n, delay=0.1, attribute={"sleep": 600})
    history = system.history_directory
    system.wait(lambda: calls.most_at_once(history, "call.thread")[0] == 6, "all that may run do", 5)
    for n in range(20):
        system.center.submit("call.coroutine", biz_id=n, delay=0.1, attribute={"sleep": 600})
    system.wait(lambda: calls.most_at_once(history, "call.coroutine")[0] == 6, "as many of these", 5)
    system.center.store.topics.alter("call.thread", concurrency=1)
    system.center.store.topics.alter("call.coroutine", concurrency=8)
    system.wait(lambda: calls.most_at_once(history, "call.coroutine")[0] == 8, "the limits are known", 5)
    others = [system.center.submit("call.batch", biz_id=n, delay=0.2) for n in range(3)]
    system.wait(lambda: not system.pending(others), "the others have run", 5)
    system.daemons[0].kill()


def test_a_stop_gives_back_coroutines_that_wait_for_their_turn(system: System) -> None:
    _start(system, concurrency=1)
    quick = [system.center.submit("call.coroutine", biz_id=n, delay=0.1) for n in range(20)]
    system.wait(lambda: not system.pending(quick), "they are known to be quick: some may wait", 10)
    job_ids = [
        system.center.submit("call.coroutine", biz_id=n, delay=0.2, attribute={"sleep": 2}) for n in range(20)
    ]
    system.wait(lambda: calls.most_at_once(system.history_directory, "call.coroutine")[1] > 20, "one runs", 5)
    (daemon,) = system.daemons
    daemon.terminate()
    assert daemon.process.wait(60) == 0, system.logs()
    left = system.pending(job_ids)
    begun = calls.most_at_once(system.history_directory, "call.coroutine")[1] - len(quick)
    assert 0 < begun < 5, "the first, and the next on a machine that is slow to stop it"
    assert len(left) == len(job_ids) - begun
    assert all(system.center.store.read(left)[job_id].attempts == 0 for job_id in left)


def test_a_worker_whose_handlers_are_all_busy_does_not_ask_for_more(
    system: System, clean_redis: RedisServer
) -> None:
    """It is told when there is room; until then a slot that is known to be full is left alone."""
    system.create_topics(slots=1, concurrency=1)
    system.start(processes=1)
    enough = system.directory / "enough"
    tasks = [NewTask("test.sync", n, 0.5, attribute={"until": str(enough)}) for n in range(200)]
    system.center.submit_many(tasks)
    system.wait(lambda: bool(system.history()), "the first runs", 30)
    asked = []
    for _ in range(5):  # the first of them may count what was asked before it ran
        before = _scripts_run(clean_redis)
        time.sleep(0.5)
        asked.append(_scripts_run(clean_redis) - before)
    assert len(system.history()) == 1, "it runs all the time"
    enough.touch()
    assert asked[-1] < 100, asked


def _scripts_run(server: RedisServer) -> int:
    reply = server.call("INFO", "commandstats")
    lines = reply.decode().splitlines() if isinstance(reply, bytes) else str(reply).splitlines()
    return sum(
        int(line.partition("calls=")[2].partition(",")[0])
        for line in lines
        if line.startswith("cmdstat_evalsha:")
    )
