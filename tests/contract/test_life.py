"""What happens to a task while a worker runs, with and without an index; scores, and entries that lie."""

from __future__ import annotations

import time
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from contract.conftest import KIT, RUNNING
from contract.system import Contract
from sqlalchemy import create_engine

from benchmarks.local import MariaDB
from toc import CancelOutcome, NewTask, TaskStatus

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def ms(instant: datetime) -> int:
    return (instant.replace(tzinfo=UTC) - EPOCH) // timedelta(milliseconds=1)


def submit(contract: Contract, topic: str, biz_id: int, delay: Any = 0.05, **attribute: Any) -> int:
    return contract.center.submit(topic, biz_id=biz_id, delay=delay, attribute=attribute)


def until_status(contract: Contract, job_id: int, status: int) -> None:
    contract.wait(lambda: contract.status(job_id) == status, f"{job_id} has status {status}")


def started(contract: Contract, job_id: int) -> list[dict[str, Any]]:
    return contract.wait(lambda: contract.history(job_id), f"{job_id} has started")


def gone(contract: Contract, job_id: int) -> None:
    contract.wait(lambda: not contract.scores(job_id), f"{job_id} is out of the index")


def test_a_task_fires_at_its_time_and_leaves_no_entry(each: Contract) -> None:
    for job_id in [submit(each, "c.plain", 1, 0.3 + n / 10, hello="wörld") for n in range(5)]:
        until_status(each, job_id, 2)
        gone(each, job_id)
        (start,) = each.history(job_id)
        due = ms(each.row(job_id)["action_time"])
        assert hasattr(each, "kit") or start["at"] / 1e6 >= due, "the kit has a clock of its own"
        assert (start["attempt"], start["status"], start["biz_id"], start["topic"]) == (1, 0, 1, "c.plain")
        assert start["attribute"] == {"hello": "wörld"}
        assert ms(datetime.fromisoformat(start["action_time"])) == due


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
    until_status(running, job_id, 2)
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


@pytest.mark.parametrize(("topic", "tries"), [("c.thrice", 3), ("c.once", 1), ("c.async", 2)])
def test_a_task_dies_after_exactly_n_tries(each: Contract, topic: str, tries: int) -> None:
    job_id = submit(each, topic, 4, **{"raise": "error"})
    each.wait(lambda: each.status(job_id) == 4, "it is dead")
    key = f"dead_{{{each.slot(topic, zlib.crc32(b'4') % _slots(topic))}}}"
    each.wait(lambda: list(each.scores(job_id)) == [key] * each.has_index, "buried")
    starts = each.history(job_id)
    assert [start["attempt"] for start in starts] == list(range(1, tries + 1))
    row = each.row(job_id)
    assert f"no {tries}" in row["last_error"]
    assert row["attempts"] == tries
    assert each.center.cancel(job_id) is CancelOutcome.TOO_LATE
    assert each.status(job_id) == 4


def _slots(topic: str) -> int:
    return {"c.thrice": 2, "c.async": 2}.get(topic, 1)


@pytest.mark.parametrize(
    ("how", "reason"), [("dead", "cannot ever work"), ("dead without a reason", "no reason given")]
)
def test_dead_is_dead_at_once_with_its_reason(each: Contract, how: str, reason: str) -> None:
    job_id = submit(each, "c.plain", 5, **{"raise": how})
    until_status(each, job_id, 4)
    assert each.row(job_id)["last_error"] == reason
    assert len(each.history(job_id)) == 1
    each.wait(lambda: all(key.startswith("dead_{") for key in each.scores(job_id)), "buried")


def test_redrive_runs_a_dead_task_again_with_all_its_tries(each: Contract) -> None:
    job_id = submit(each, "c.thrice", 6, **{"raise": "error", "times": 99})
    until_status(each, job_id, 4)
    before = len(each.history(job_id))
    listed = each.json("dead", "list", "--topic", "c.thrice")
    (record,) = [record for record in listed if record["job_id"] == str(job_id)]
    assert "no 3" in str(record)
    done = each.toc("dead", "redrive", str(job_id))
    assert done.returncode == 0, done.stderr
    each.wait(lambda: len(each.history(job_id)) == before + 3, "three more tries")
    until_status(each, job_id, 4)
    assert [start["attempt"] for start in each.history(job_id)] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("topic", ["c.batch", "c.batch-whole"])
def test_a_batch_handler_reports_per_task_or_fails_as_a_whole(each: Contract, topic: str) -> None:
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    tasks = [
        NewTask(topic, biz_id=n, action_time=due, attribute={"raise": "error"} if n % 5 == 0 else {})
        for n in range(10)
    ]
    job_ids = each.center.submit_many(tasks)
    bad = job_ids[::5]
    each.wait(lambda: all(each.status(job_id) == 4 for job_id in bad), "the bad ones are dead")
    if topic == "c.batch":
        for job_id in set(job_ids) - set(bad):
            until_status(each, job_id, 2)
            assert len(each.history(job_id)) == 1
    assert all(len(each.history(job_id)) == 2 for job_id in bad)


def test_cancel_of_a_waiting_task_holds(each: Contract) -> None:
    job_id = submit(each, "c.plain", 8, 2.5)
    assert each.center.cancel(job_id) is CancelOutcome.CANCELLED
    assert each.scores(job_id) == {}
    assert each.center.cancel(job_id) is CancelOutcome.CANCELLED
    other = submit(each, "c.plain", 9, 2.7)
    until_status(each, other, 2)
    assert each.status(job_id) == 3
    assert each.history(job_id) == []
    assert each.center.cancel(job_id) is CancelOutcome.CANCELLED
    assert each.center.cancel(other) is CancelOutcome.TOO_LATE
    assert each.status(other) == 2


@pytest.mark.parametrize("failing", [False, True])
def test_cancel_of_a_running_task_says_so_and_there_is_no_later_try(each: Contract, failing: bool) -> None:
    gate = f"cancel-{failing}"
    extra: dict[str, Any] = {"raise": "error"} if failing else {}
    job_id = submit(each, "c.thrice", 10 + failing, gate=gate, **extra)
    started(each, job_id)
    assert each.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    each.open_gate(gate)
    gone(each, job_id)
    assert each.status(job_id) == 3
    assert each.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    assert len(each.history(job_id)) == 1


def test_cancel_of_an_unknown_task_is_unknown(each: Contract) -> None:
    known = submit(each, "c.plain", 12, 3600)
    assert each.center.cancel(known + 1) is CancelOutcome.UNKNOWN
    assert each.center.cancel(2**62 + 5) is CancelOutcome.UNKNOWN
    assert each.center.get(known + 1) is None


def test_cancel_by_biz_answers_for_each_task_of_that_biz_id_on_that_topic(each: Contract) -> None:
    waiting = [submit(each, "c.plain", 13, 3600) for _ in range(3)]
    other = submit(each, "c.thrice", 13, 3600)
    done = submit(each, "c.plain", 13)
    until_status(each, done, 2)
    assert each.center.cancel_by_biz("c.plain", biz_id=13) == {
        **dict.fromkeys(waiting, CancelOutcome.CANCELLED),
        done: CancelOutcome.TOO_LATE,
    }
    assert each.status(other) == 0
    assert each.center.cancel_by_biz("c.plain", biz_id=131313) == {}


def test_reschedule_moves_a_task_both_ways_and_it_fires_at_the_new_time_only(each: Contract) -> None:
    sooner = submit(each, "c.plain", 14, 3600)
    later = submit(each, "c.plain", 15, 2.5)
    now = datetime.now(UTC)
    outcome = each.center.reschedule(later, action_time=now + timedelta(seconds=3.5))
    assert outcome.name == "RESCHEDULED"
    outcome = each.center.reschedule(sooner, action_time=now + timedelta(seconds=2))
    assert outcome.name == "RESCHEDULED"
    for job_id in (sooner, later):
        until_status(each, job_id, 2)
        (start,) = each.history(job_id)
        assert start["at"] / 1e6 >= ms(each.row(job_id)["action_time"])
        assert start["version"] == 1
        again = each.center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(seconds=9))
        assert again.name == "TOO_LATE"
    nowhere = each.center.reschedule(sooner + 1, action_time=datetime.now(UTC) + timedelta(seconds=9))
    assert nowhere.name == "UNKNOWN"


def test_reschedule_of_a_running_task_runs_it_again_at_the_new_time(each: Contract) -> None:
    job_id = submit(each, "c.plain", 16, gate="sixteen")
    started(each, job_id)
    due = datetime.now(UTC) + timedelta(seconds=2)
    assert each.center.reschedule(job_id, action_time=due).name == "MAY_HAVE_STARTED"
    each.open_gate("sixteen")
    until_status(each, job_id, 2)
    first, second = each.history(job_id)
    assert second["at"] / 1e6 >= ms(each.row(job_id)["action_time"])
    assert (first["version"], second["version"]) == (0, 1)
    gone(each, job_id)


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
    until_status(running, job_id, 2)
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
    until_status(running, job_id, 2)
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
    until_status(running, charged, 2)
    until_status(running, last, 2)
    assert [start["attempt"] for start in running.history(charged)] == [2]
    assert [start["attempt"] for start in running.history(last)] == [3]
    gone(running, charged)
    gone(running, last)


def test_an_instant_task_runs_at_once_and_may_lie_in_the_past(each: Contract) -> None:
    now = each.center.submit("c.now", biz_id=70)
    past = each.center.submit("c.now", biz_id=71, action_time=datetime.now(UTC) - timedelta(days=1))
    for job_id in (now, past):
        until_status(each, job_id, 2)
        assert len(each.history(job_id)) == 1


def test_get_and_find_show_how_a_task_ended(each: Contract) -> None:
    job_id = submit(each, "c.plain", 72)
    until_status(each, job_id, 2)
    task = each.center.get(job_id)
    assert task is not None
    assert task.status is TaskStatus.PROCESSED
    assert each.json("get", str(job_id))["job_id"] == str(job_id)
    assert [found["job_id"] for found in each.json("find", "--biz-id", "72")] == [str(job_id)]


def test_a_time_that_has_passed_is_refused_unless_it_shall_run(each: Contract) -> None:
    words = ("submit", "c.plain", "--biz-id", "74", "--action-time", "2020-01-01T00:00:00Z")
    assert each.toc(*words).returncode != 0
    job_id = int(each.json(*words, "--past", "run")["job_id"])
    until_status(each, job_id, 2)
    assert len(each.history(job_id)) == 1


@pytest.mark.parametrize("each", RUNNING, indirect=True)
def test_what_runs_is_shown_with_its_worker(each: Contract) -> None:
    def shown() -> list[dict[str, Any]]:
        running = each.json("running", "--topic", "c.plain")
        return [one for one in running if one["job_id"] == str(job_id)]

    job_id = submit(each, "c.plain", 73, gate="shown")
    (one,) = each.wait(shown, "it is shown")
    assert one["owner"]
    each.open_gate("shown")
    until_status(each, job_id, 2)
    assert shown() == []


def _forge(contract: Contract, key: str, member: int | str, score: float = 1.0) -> None:
    """An index entry as nobody in the system would write it; the waker is told as the add script would."""
    contract.redis.zadd(key, {str(member): score})
    contract.redis.publish(f"wake_{{{key}}}", f"{score:.17g}")


def test_no_task_starts_once_toc_topic_pause_has_returned(each: Contract) -> None:
    assert each.toc("topic", "pause", "c.plain").returncode == 0
    try:
        job_id = each.center.submit("c.plain", biz_id=1, delay=0.01)
        later = each.center.submit("c.async", biz_id=1, delay=0.5)
        each.wait_status(later, 2)
        assert (each.status(job_id), each.history(job_id)) == (0, [])
    finally:
        assert each.toc("topic", "resume", "c.plain").returncode == 0
    each.wait_status(job_id, 2)


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
    until_status(running, job_id, 2)
    assert running.row(job_id)["attempts"] == 0


@pytest.mark.parametrize("each", [*RUNNING, KIT], indirect=True)
def test_rows_of_the_callers_transaction_are_indexed_and_run_once_it_has_committed(
    each: Contract, mariadb: MariaDB
) -> None:
    engine = create_engine(mariadb.url)
    try:
        with engine.begin() as connection:
            now = each.center.submit("c.now", biz_id=1, connection=connection)
            soon = each.center.submit("c.plain", biz_id=1, delay=1.8, connection=connection)
        for job_id in (now, soon):
            (start,) = started(each, job_id)
            assert start["at"] / 1e6 >= ms(each.row(job_id)["action_time"])
    finally:
        engine.dispose()
