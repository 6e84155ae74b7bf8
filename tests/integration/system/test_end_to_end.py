"""The main job on real servers: submit, fire, retry, die, cancel; workers are killed and stopped."""

from __future__ import annotations

import json
import os
import random
import signal
from datetime import UTC, datetime, timedelta

from harness.system import System, buried

from toc import CancelOutcome, NewTask, RescheduleOutcome, TaskStatus
from toc.model.scores import store_score
from toc.model.topic import Backoff


def test_all_invariants_hold_while_one_worker_is_killed_and_one_daemon_is_stopped(cluster: System) -> None:
    cluster.create_topics(backoff_base=0.2, prepare_timeout=3)
    first = cluster.start("host-a", processes=2)
    second = cluster.start("host-b", processes=2)
    client, dice = cluster.client, random.Random(7)
    topics = ("test.sync", "test.async", "test.batch")
    tasks = [
        NewTask(
            topics[biz_id % 3],
            biz_id,
            # those that are cancelled and moved first are not due before that, however slow the machine
            timedelta(seconds=dice.uniform(6, 14) + (300 if biz_id < 300 else 0)),
            attribute={"fail": dice.choice((0, 0, 0, 0, 1, 2)), "sleep": dice.choice((0, 0, 0.005, 0.02))},
        )
        for biz_id in range(1600)
    ]
    job_ids = client.submit_many(tasks[:1200]) + [
        client.submit(task.topic, biz_id=task.biz_id, delay=task.delay, attribute=task.attribute)
        for task in tasks[1200:]
    ]
    for job_id in job_ids[:200]:
        assert client.cancel(job_id) is CancelOutcome.CANCELLED
    for job_id in job_ids[200:300]:
        later = datetime.now(UTC) + timedelta(seconds=dice.uniform(6, 12))
        assert client.reschedule(job_id, action_time=later) is RescheduleOutcome.RESCHEDULED
    cluster.wait(lambda: len(cluster.history()) > 600, "a good part has run", 20)
    victim = first.workers()[0]
    with cluster.recorder.fault("kill", pids=[victim]):
        os.kill(victim, signal.SIGKILL)
    cluster.wait(lambda: len(cluster.history()) > 1400, "more has run", 20)
    with cluster.recorder.fault("stop"):
        second.terminate()
        for job_id in job_ids[300:400]:
            client.cancel(job_id)
        cluster.wait(lambda: not cluster.pending(job_ids), "everything has ended", 40)
        assert second.process.wait(60) == 0, cluster.logs()
    verdict = cluster.verdict()
    assert verdict.clean, verdict
    assert verdict.counts["acknowledged"] == 1600
    assert verdict.counts["processed"] > 1200
    assert set(verdict.duplicates) <= {"kill"}, verdict  # each of them was in flight in the killed process


def test_a_task_that_fails_sixteen_times_is_dead_and_a_redrive_runs_it_again(system: System) -> None:
    system.create_topics(backoff=Backoff.IMMEDIATE)
    daemon = system.start(env={"TOC_LOG_LEVEL": "debug"})
    center = system.center
    job_id = center.submit("test.doomed", biz_id=42, delay=0.1)
    system.wait(lambda: system.row(job_id).status == TaskStatus.DEAD, "the task is dead", 20)
    assert [event.attempt for event in system.starts(job_id)] == list(range(1, 17))
    row = center.store.get(job_id)
    assert row is not None
    assert row.attempts == 16
    assert row.last_error == "RuntimeError: attempt 16 fails as always"
    told = [json.loads(line) for line in daemon.log.read_text().splitlines() if f'"job_id": {job_id}' in line]
    tries = [event for event in told if event["event"] in ("try_failed", "task_dead")]
    assert [(event["attempts"], event["error"]) for event in tries] == [
        (n, "RuntimeError") for n in range(1, 17)
    ]
    assert not [event for event in tries if "fails as always" in str(event)], "what an error says may be data"
    raised = [event for event in told if event["event"] == "handler_raised"]
    assert "harness/app.py" in raised[-1]["stack"], "for who debugs, where it came from"
    assert "attempt 16" not in str(raised), "nor there what it says"
    slot = center.catalog.get("test.doomed").slot(row.slot_crc)
    system.wait(lambda: job_id in buried(center, [slot]), "it is in the DeadQueue", 5)
    assert center.cancel(job_id) is CancelOutcome.TOO_LATE

    rows = center.store.redrive([job_id], center.clock.now_ms())
    center.queues.redrive({slot: [(row.job_id, store_score(row.next_time, 16, 0)) for row in rows]})
    system.wait(lambda: len(system.starts(job_id)) == 32, "it ran sixteen times more", 20)
    system.wait(lambda: system.row(job_id).status == TaskStatus.DEAD, "it is dead again", 5)
