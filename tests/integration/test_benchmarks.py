"""What a task costs, in calls of Python: fewer is allowed, more is not."""

from __future__ import annotations

import pytest

from benchmarks import calls


def test_a_task_costs_no_more_calls_of_python_than_it_did() -> None:
    for _ in range(5):  # beside other work rounds are smaller, and a task costs more of them
        counted, tasks = calls.measure(seconds=2)
        by_thread = calls.per_task(counted, tasks)
        assert all(count > 10 for count in by_thread.values()), f"every thread counts: {by_thread}"
        if sum(by_thread.values()) <= calls.MOST:
            return
    pytest.fail(f"see python -m benchmarks.calls --functions 80: {by_thread}")
