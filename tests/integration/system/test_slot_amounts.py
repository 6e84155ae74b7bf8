"""The slots of rows that another program has stamped; the backlog of a topic that is resumed."""

from __future__ import annotations

import time

from harness.rows import change
from harness.system import System

from toc import TaskStatus
from toc.operate.operation import Doing
from toc.operate.operations.topics import resume

STAMPED = [
    ("test.sync", 16, "slots_raised"),
    ("test.async", 65_535, "slot_amount_not_understood"),
    ("test.async", 12, "slot_amount_not_understood"),
    ("test.async", 2048, "slot_amount_not_understood"),
    ("test.async", 0, "slot_amount_not_understood"),
    ("test.async", 2, None),
]
"""A topic of four slots, the slot_amount of a row of it, and what is logged of it."""


def test_rows_that_are_stamped_otherwise_than_their_topic_run_and_the_topic_stays_whole(
    system: System,
) -> None:
    store = system.center.store
    system.create_topics(slots=4)
    daemon = system.start(processes=1)
    before = {topic.name for topic in store.topics.list()}
    stamped: dict[int, str | None] = {}
    for topic, amount, event in STAMPED:
        for n in range(8):
            job_id = system.center.submit(topic, biz_id=n, delay=6)
            change(store, job_id, f"slot_amount={amount:d}")
            stamped[job_id] = event
    system.wait(lambda: not system.pending(stamped), "all have run", 60)
    assert {len(system.starts(job_id)) for job_id in stamped} == {1}
    amounts = {topic.name: topic.slot_amount for topic in store.topics.list()}
    assert set(amounts) == before
    assert (amounts["test.sync"], amounts["test.async"]) == (16, 4)
    for name in ("slots_raised", "slot_amount_not_understood"):
        told = {line["job_id"] for line in daemon.events(name)}
        assert told <= {job_id for job_id, event in stamped.items() if event == name}
        assert told


def test_a_backlog_is_resumed_at_the_rate_asked_for_the_oldest_first_and_then_all_is_as_ever(
    system: System,
) -> None:
    store, center = system.center.store, system.center
    system.create_topics(slots=4)
    store.topics.alter("test.async", paused=True)
    system.start(processes=2)
    job_ids = [center.submit("test.async", biz_id=n, delay=0.2 + n / 100) for n in range(150)]
    last = center.submit("test.sync", biz_id=1, delay=2.0)
    system.wait(lambda: system.row(last).status == TaskStatus.PROCESSED, "all are due", 10)
    resumed = time.time()
    resume.perform(Doing(center, "ann", resume.right), {"topic": "test.async", "rate": 50})
    fresh = center.submit("test.async", biz_id=7, delay=0.5)
    system.wait(lambda: not system.pending([*job_ids, fresh]), "all have run", 30)
    starts = [event for event in system.history() if event.event == "start" and event.job_id != last]
    assert len(starts) == 151
    seconds = starts[-1].at / 1e9 - resumed
    assert seconds > 150 / 50 * 0.7, f"{seconds:.1f} s for 150 tasks at 50 a second"
    for pid in {event.pid for event in starts}:  # each has slots of its own, and starts its oldest first
        order = [
            job_ids.index(event.job_id) for event in starts if event.pid == pid and event.job_id != fresh
        ]
        places = [sorted(order).index(number) for number in order]
        assert max(abs(place - number) for place, number in enumerate(places)) < 40, order
    many = [center.submit("test.async", biz_id=n, delay=0.2) for n in range(150)]
    system.wait(lambda: not system.pending(many), "what is due later runs at once", 10)
