"""Fault 26: one failure in a batch: only that one is retried."""

from __future__ import annotations

from collections import Counter

from fault.conftest import Build, Verdict

from toc import NewTask


def test_of_five_hundred_in_batches_only_the_one_that_failed_runs_again(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(26, "one failure in a batch", "1 of 500")
    system = build()
    system.start(processes=1)
    tasks = [NewTask("test.batch", n, 1.0, attribute={"fail": 1} if n == 250 else None) for n in range(500)]
    job_ids = system.client.submit_many(tasks)
    line.judge(system, within=5)
    events = system.history()
    failed = [event.job_id for event in events if event.outcome == "raise"]
    line.prove(failed == [job_ids[250]], "one of 500 failed")
    tries = Counter(event.job_id for event in events if event.event == "start")
    assert tries.pop(job_ids[250]) == 2
    assert set(tries.values()) == {1}
