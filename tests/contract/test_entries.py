"""What a running worker makes of scores, entries that lie and rows that others have changed:
each costs itself."""

import time
import zlib
from collections.abc import Iterator

import pytest
from contract.system import Contract
from contract.test_life import gone, ms, started, submit
from harness.rows import known

from toc import CancelOutcome

# What a running worker makes of scores, of entries that lie, and of rows that others have changed.


def _forge(contract: Contract, key: str, member: int | str, score: float = 1.0) -> None:
    """An index entry as nobody in the system would write it; the waker is told as the add script would."""
    contract.redis.zadd(key, {str(member): score})
    contract.redis.publish(f"wake_{{{key}}}", f"{score:.17g}")


def test_the_prepare_score_names_second_tries_and_claim_while_a_handler_runs(running: Contract) -> None:
    before = int(time.time())
    job_id = submit(running, "c.plain", 2, gate="two")
    started(running, job_id)
    slot = f"c.plain_{zlib.crc32(b'2') % 4}"
    scores = running.scores(job_id)
    assert list(scores) == [f"prepare_{{{slot}}}"]
    score = scores[f"prepare_{{{slot}}}"]
    seconds, fence = divmod(score, 1000)
    remaining, claim = int(fence), (fence % 1) * 4096
    assert before <= seconds <= time.time()
    assert remaining == 16
    assert claim == int(claim)
    assert running.status(job_id) == 0
    running.open_gate("two")
    running.wait_status(job_id, 2)
    gone(running, job_id)


def test_a_failed_try_puts_the_entry_at_its_next_time_plus_remaining_over_32(running: Contract) -> None:
    before = time.time() * 1000
    job_id = submit(running, "c.plain", 3, **{"raise": "retry", "after": 900})
    slot = f"c.plain_{zlib.crc32(b'3') % 4}"
    running.wait(lambda: running.row(job_id)["attempts"] == 1, "failed once")
    running.wait(lambda: list(running.scores(job_id)) == [slot], "given back")
    row = running.row(job_id)
    assert running.scores(job_id)[slot] == ms(row["next_time"]) + 15 / 32
    assert before <= ms(row["next_time"]) - 900_000 <= time.time() * 1000
    assert "900" in row["last_error"] or "retry" in row["last_error"].lower()
    assert known(running.center.get(job_id)).attempt == 2
    assert running.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    assert running.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    assert running.scores(job_id) == {}


def test_an_action_time_that_was_moved_in_the_table_itself_is_kept(running: Contract) -> None:
    """By whomever: the row decides, whatever its next_time and the index say."""
    job_id = submit(running, "c.plain", 27, 0.5)
    later = "action_time = action_time + INTERVAL 2000000 MICROSECOND"
    running.query(f"UPDATE {running.table(job_id)} SET {later} WHERE job_id = %s", job_id)
    running.wait_status(job_id, 2)
    (start,) = running.history(job_id)
    assert start["at"] / 1e6 >= ms(running.row(job_id)["action_time"])


def test_an_orphan_is_removed_reported_and_never_run(running: Contract) -> None:
    known = submit(running, "c.plain", 26, 3600)
    (key,) = running.scores(known)
    orphan = known ^ 1
    _forge(running, key, orphan)
    gone(running, orphan)
    assert running.history(orphan) == []
    running.wait(lambda: str(orphan) in running.log(), "the log tells of it")


def test_a_long_handler_is_kept_alive_under_one_fence_and_runs_once(running: Contract) -> None:
    job_id = submit(running, "c.silent", 1, gate="long")
    key = "prepare_{c.silent_0}"
    first = known(running.wait(lambda: running.redis.zscore(key, str(job_id)), "it is prepared"))

    def later() -> float:
        score = running.redis.zscore(key, str(job_id))
        assert score is not None, "it fell out of the PrepareQueue"
        return score if score - first >= 5000 else 0.0

    assert running.wait(later, "it was kept alive past its timeout of 3 s") % 1000 == first % 1000
    assert len(running.history(job_id)) == 1
    running.open_gate("long")
    running.wait_status(job_id, 2)
    assert running.row(job_id)["attempts"] == 0


# One bad task, entry or row costs itself, not its neighbours nor the process that met it.


@pytest.fixture
def poisoned(running: Contract) -> Iterator[Contract]:
    """The running system; what a test left goes, so that the next one starts well."""
    neighbour = submit(running, "c.plain", 1)
    running.wait(lambda: running.status(neighbour) == 2, "it works before")
    yield running
    for n in range(8):
        running.query(f"DELETE FROM `{running.prefix}{n % 2}`.`timeout_task_{n:04d}`")


def _spoiled(contract: Contract, topic: str, biz_id: int, column: str, value: object) -> int:
    """A task whose row is spoiled while it is far ahead, so before anybody reads it, and due then."""
    job_id = submit(contract, topic, biz_id, 3600)
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
        neighbour = submit(contract, topic, 2)
        contract.wait_status(neighbour, 2)
        pids |= {start["pid"] for start in contract.history(neighbour)}
    assert contract.daemons[0].poll() is None
    assert len(pids) == 1, "a process died of it"


@pytest.mark.parametrize("how", ["exit", "interrupt"])
@pytest.mark.parametrize("topic", ["c.plain", "c.async", "c.batch"])
def test_whatever_a_handler_raises_is_a_failed_try(poisoned: Contract, topic: str, how: str) -> None:
    job_id = submit(poisoned, topic, 700, **{"raise": how, "times": 1})
    poisoned.wait(lambda: poisoned.row(job_id)["attempts"] >= 1, f"the try that raised {how} is charged")
    assert poisoned.row(job_id)["last_error"]
    assert poisoned.row(job_id)["crashes"] == 0
    _neighbours_run_in_the_same_process(poisoned)


@pytest.mark.parametrize(("column", "value"), [("status", 1), ("biz_type", 9999)])
def test_a_row_of_an_unknown_status_or_topic_harms_no_neighbour(
    poisoned: Contract, column: str, value: int
) -> None:
    job_id = _spoiled(poisoned, "c.plain", 30, column, value)
    poisoned.wait_status(submit(poisoned, "c.plain", 30, 0.5), 2)  # the same slot, due after it
    if column == "status":
        assert poisoned.history(job_id) == []
    _neighbours_run_in_the_same_process(poisoned)
