"""What a running worker makes of scores, of entries that lie, and of rows that others have changed."""

from __future__ import annotations

import time
import zlib

import pytest
from contract.system import Contract
from contract.test_life import gone, ms, started, submit

from toc import CancelOutcome


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
    task = running.center.get(job_id)
    assert task is not None
    assert task.attempt == 2
    assert running.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    assert running.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    assert running.scores(job_id) == {}


@pytest.mark.parametrize("status", [2, 3])
def test_an_entry_whose_row_has_ended_is_dropped(running: Contract, status: int) -> None:
    job_id = submit(running, "c.plain", 20 + status, 3600)
    (key,) = running.scores(job_id)
    running.query(f"UPDATE {running.table(job_id)} SET status = {status} WHERE job_id = %s", job_id)
    _forge(running, key, job_id)
    gone(running, job_id)
    assert running.history(job_id) == []
    assert running.status(job_id) == status


def test_an_entry_whose_row_is_dead_goes_to_the_dead_queue(running: Contract) -> None:
    job_id = submit(running, "c.plain", 24, 3600)
    (key,) = running.scores(job_id)
    running.query(f"UPDATE {running.table(job_id)} SET status = 4 WHERE job_id = %s", job_id)
    _forge(running, key, job_id)
    running.wait(lambda: list(running.scores(job_id)) == [f"dead_{{{key}}}"], "buried")
    assert running.history(job_id) == []
    assert running.status(job_id) == 4


def test_an_entry_too_early_is_put_back_at_its_time_and_charged_nothing(running: Contract) -> None:
    job_id = submit(running, "c.plain", 25, 3600)
    ((key, score),) = running.scores(job_id).items()
    for forged in (1.0, 1000.5, time.time() * 1000 - 5 + 3 / 32):
        _forge(running, key, job_id, forged)
        running.wait(lambda: running.scores(job_id) == {key: score}, f"put back from {forged}")
    assert running.history(job_id) == []
    row = running.row(job_id)
    assert (row["attempts"], row["status"]) == (0, 0)


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


def test_an_entry_that_vanished_is_brought_back_by_the_sweep(running: Contract) -> None:
    job_id = submit(running, "c.plain", 50, 3600)
    (key,) = running.scores(job_id)
    assert running.redis.zrem(key, str(job_id)) == 1
    # Due soon only now: what the sweep has seen in the index it takes to stand there for a few seconds.
    soon = "UTC_TIMESTAMP(3) + INTERVAL 1500000 MICROSECOND"
    running.query(
        f"UPDATE {running.table(job_id)} SET action_time = {soon}, next_time = {soon} WHERE job_id = %s",
        job_id,
    )
    running.wait_status(job_id, 2)
    (start,) = running.history(job_id)
    assert start["at"] / 1e6 >= ms(running.row(job_id)["action_time"])


def test_a_timed_out_entry_of_nobody_is_rolled_back_and_charged_but_never_the_last_try(
    running: Contract,
) -> None:
    charged = submit(running, "c.silent", 60, 3600)
    last = submit(running, "c.silent", 61, 3600)
    for job_id, attempts in ((charged, 0), (last, 2)):
        running.redis.zrem("c.silent_0", str(job_id))
        # The entry stands, for 3 s, before the row is due: else the sweep might index it as one not tried.
        fence = (3 - attempts) + 4095 / 4096
        running.redis.zadd("prepare_{c.silent_0}", {str(job_id): int(time.time()) * 1000 + fence})
        running.query(
            f"UPDATE {running.table(job_id)} SET attempts = {attempts}, action_time = UTC_TIMESTAMP(3), "
            f"next_time = UTC_TIMESTAMP(3) WHERE job_id = %s",
            job_id,
        )
    running.wait_status(charged, 2)
    running.wait_status(last, 2)
    assert [start["attempt"] for start in running.history(charged)] == [2]
    assert [start["attempt"] for start in running.history(last)] == [3]
    gone(running, charged)
    gone(running, last)


def test_a_long_handler_is_kept_alive_under_one_fence_and_runs_once(running: Contract) -> None:
    job_id = submit(running, "c.silent", 1, gate="long")
    key = "prepare_{c.silent_0}"
    first = running.wait(lambda: running.redis.zscore(key, str(job_id)), "it is prepared")
    assert first is not None

    def later() -> float:
        score = running.redis.zscore(key, str(job_id))
        assert score is not None, "it fell out of the PrepareQueue"
        return score if score - first >= 5000 else 0.0

    assert running.wait(later, "it was kept alive past its timeout of 3 s") % 1000 == first % 1000
    assert len(running.history(job_id)) == 1
    running.open_gate("long")
    running.wait_status(job_id, 2)
    assert running.row(job_id)["attempts"] == 0
