"""One bad task, entry or row costs itself, not its neighbours nor the process that met it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from contract.system import Contract


@pytest.fixture
def poisoned(running: Contract) -> Iterator[Contract]:
    """The running system; what a test left in the index goes, so that the next one starts well."""
    neighbour = _submit(running, "c.plain", 1)
    running.wait(lambda: running.status(neighbour) == 2, "it works before")
    yield running
    running.redis.flushall()
    for n in range(8):
        running.query(f"DELETE FROM `{running.prefix}{n % 2}`.`timeout_task_{n:04d}`")


def _submit(contract: Contract, topic: str, biz_id: int, delay: Any = 0.05, **attribute: Any) -> int:
    return contract.center.submit(topic, biz_id=biz_id, delay=delay, attribute=attribute)


def _spoiled(contract: Contract, topic: str, biz_id: int, column: str, value: object) -> int:
    """A task whose row is spoiled while it is far ahead, so before anybody reads it, and due then."""
    job_id = _submit(contract, topic, biz_id, 3600)
    (key,) = contract.scores(job_id)
    contract.query(
        f"UPDATE {contract.table(job_id)} SET {column} = %s, action_time = UTC_TIMESTAMP(3), "
        f"next_time = UTC_TIMESTAMP(3) WHERE job_id = %s",
        value,
        job_id,
    )
    now = int(time.time() * 1000)
    contract.redis.zadd(key, {str(job_id): now})
    contract.redis.publish(f"wake_{{{key}}}", str(now))
    return job_id


def _neighbours_run_in_the_same_process(contract: Contract) -> None:
    pids = {contract.history()[-1]["pid"]}
    for topic in ("c.plain", "c.once", "c.async", "c.batch"):
        neighbour = _submit(contract, topic, 2)
        contract.wait_status(neighbour, 2)
        pids |= {start["pid"] for start in contract.history(neighbour)}
    assert contract.daemons[0].poll() is None
    assert len(pids) == 1, "a process died of it"


@pytest.mark.parametrize(
    ("topic", "how"),
    [
        *(("c.plain", how) for how in ("unspeakable", "nul", "not-a-timedelta", "retry-forever-away")),
        *((topic, how) for topic in ("c.plain", "c.async", "c.batch") for how in ("exit", "interrupt")),
    ],
)
def test_whatever_a_handler_raises_is_a_failed_try(poisoned: Contract, topic: str, how: str) -> None:
    job_id = _submit(poisoned, topic, 700, **{"raise": how, "times": 1})
    poisoned.wait(lambda: poisoned.row(job_id)["attempts"] >= 1, f"the try that raised {how} is charged")
    assert poisoned.row(job_id)["last_error"]
    assert poisoned.row(job_id)["crashes"] == 0
    _neighbours_run_in_the_same_process(poisoned)


@pytest.mark.parametrize(
    ("key", "member"),
    [("c.once_0", "not-a-number"), ("prepare_{c.once_0}", "9" * 23), ("dead_{c.once_0}", "")],
)
def test_a_member_that_is_no_job_id_harms_nobody(poisoned: Contract, key: str, member: str) -> None:
    if key.startswith("prepare_"):
        poisoned.redis.zadd(key, {member: 1_600_000_000_001.0})
    else:
        poisoned.redis.zadd(key, {member: 5.0})
    poisoned.redis.publish("wake_{c.once_0}", "5")
    _neighbours_run_in_the_same_process(poisoned)
    if not key.startswith("dead_"):
        poisoned.wait(
            lambda: (
                poisoned.redis.zscore("c.once_0", member) is None
                and poisoned.redis.zscore("prepare_{c.once_0}", member) is None
            ),
            "it is removed",
        )
    _neighbours_run_in_the_same_process(poisoned)


@pytest.mark.parametrize("broken", ["{oops", "[]", "null", ""])
def test_a_row_whose_attribute_is_broken_harms_no_neighbour(poisoned: Contract, broken: str) -> None:
    job_id = _spoiled(poisoned, "c.thrice", 29, "attribute", broken)
    poisoned.wait(lambda: not poisoned.scores(job_id) or poisoned.row(job_id)["attempts"] > 0, "it was tried")
    _neighbours_run_in_the_same_process(poisoned)


def test_a_row_of_a_status_that_nobody_knows_harms_no_neighbour(poisoned: Contract) -> None:
    job_id = _spoiled(poisoned, "c.plain", 30, "status", 1)
    poisoned.wait_status(_submit(poisoned, "c.plain", 30, 0.5), 2)  # the same slot, due after it
    assert poisoned.history(job_id) == []
    _neighbours_run_in_the_same_process(poisoned)


def test_a_row_of_a_biz_type_without_topic_harms_no_neighbour(poisoned: Contract) -> None:
    _spoiled(poisoned, "c.plain", 31, "biz_type", 9999)
    poisoned.wait_status(_submit(poisoned, "c.plain", 31, 0.5), 2)  # the same slot, due after it
    _neighbours_run_in_the_same_process(poisoned)


def test_a_key_of_the_wrong_type_harms_only_its_slot(poisoned: Contract) -> None:
    poisoned.redis.delete("c.once_0")
    poisoned.redis.set("c.once_0", "a string")
    poisoned.redis.publish("wake_{c.once_0}", "5")
    for topic in ("c.plain", "c.batch"):
        neighbour = _submit(poisoned, topic, 3)
        poisoned.wait_status(neighbour, 2)
    promised = _submit(poisoned, "c.once", 4)
    poisoned.redis.delete("c.once_0")
    poisoned.wait(lambda: poisoned.status(promised) == 2, "the sweep brings it in")
