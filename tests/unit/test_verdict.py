"""The decisions of the protocol, case by case: what a row says of its task, what a try makes of a row."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.raised import Raised, raised
from toc.model.task import Dead, Retry, TaskStatus, TryRow
from toc.model.topic import Backoff, Topic
from toc.model.verdict import (
    CRASHED,
    MAX_CRASHES,
    Check,
    Failure,
    Outcome,
    Place,
    after_crash,
    after_failure,
    belongs,
    beyond_horizon,
    check,
    entry_score,
    is_suspect,
)

NOW = 1_800_000_000_000
TOPIC = Topic("order.close", 7, 8, retries=4, backoff=Backoff.IMMEDIATE, horizon=60)
LIMIT = 3

PENDING, PROCESSED = TaskStatus.PENDING, TaskStatus.PROCESSED
CANCELLED, DEAD = TaskStatus.CANCELLED, TaskStatus.DEAD


def row(**changed: Any) -> TryRow:
    """A pending task that is due."""
    plain = TryRow(1, 42, 7, int(PENDING), NOW, NOW, 0, 0, 0, 0, None, "{}")
    return plain._replace(**changed)


@pytest.mark.parametrize(
    ("status", "place"),
    [
        (PENDING, Place.STORE_QUEUE),
        (PROCESSED, Place.NOWHERE),
        (CANCELLED, Place.NOWHERE),
        (DEAD, Place.DEAD_QUEUE),
    ],
)
def test_the_status_says_where_the_entry_belongs(status: TaskStatus, place: Place) -> None:
    assert belongs(row(status=int(status))) is place


def test_a_task_without_a_row_has_no_entry() -> None:
    assert belongs(None) is Place.NOWHERE


SKEW = MAX_CLOCK_SKEW_MS


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({}, Check.START),
        ({"next_time": NOW - 3_600_000}, Check.START),
        ({"next_time": NOW + 1}, Check.SOON),
        ({"next_time": NOW + SKEW}, Check.SOON),
        ({"next_time": NOW + SKEW + 1}, Check.ELSEWHERE),  # it was rescheduled, or the entry was too early
        ({"next_time": NOW + SKEW + 5}, Check.ELSEWHERE),
        ({"lease": 5000}, Check.LEASED),
        ({"lease": -1}, Check.LEASED),
        ({"lease": 5000, "next_time": NOW + SKEW}, Check.LEASED),
        ({"lease": 5000, "next_time": NOW + SKEW + 1}, Check.ELSEWHERE),
        ({"status": int(PROCESSED)}, Check.ELSEWHERE),
        ({"status": int(CANCELLED), "lease": 5000}, Check.ELSEWHERE),
        ({"status": int(DEAD)}, Check.ELSEWHERE),
    ],
)
def test_an_entry_starts_only_when_its_row_is_pending_due_and_not_leased(
    changed: dict[str, object], what: Check
) -> None:
    assert check(row(**changed), now=NOW, taken=NOW) is what


def test_a_row_that_redis_calls_due_and_this_machine_does_not_tells_of_a_clock() -> None:
    ahead = NOW + SKEW + 1
    assert check(row(next_time=ahead), now=NOW, taken=ahead) is Check.CLOCK_BEHIND
    assert check(row(next_time=ahead), now=NOW, taken=ahead - 1) is Check.ELSEWHERE


@pytest.mark.parametrize(
    ("attempts", "score"),
    [(0, NOW), (1, NOW + 3 / 32), (3, NOW + 1 / 32), (4, NOW + 1 / 32), (60, NOW + 1 / 32)],
)
def test_the_score_carries_the_tries_left_once_one_was_used(attempts: int, score: float) -> None:
    assert entry_score(TOPIC, NOW, attempts) == score


@pytest.mark.parametrize(("ahead", "waits"), [(-1, False), (60_000, False), (60_001, True)])
def test_beyond_the_horizon_a_task_waits_in_its_row(ahead: int, waits: bool) -> None:
    assert beyond_horizon(TOPIC, NOW + ahead, NOW) is waits


# --- a try that failed


def change(before: TryRow, failure: Failure | None) -> dict[str, object]:
    """What a failure changes; that it is guarded by what the row said is checked beside."""
    assert failure is not None
    assert failure[:4] == (before.job_id, before.version, before.attempts, before.crashes)
    return {
        "attempts": failure.new_attempts,
        "crashes": failure.new_crashes,
        "next_time": failure.next_time,
        "error": failure.error,
    }


def failed(before: TryRow, error: Raised | BaseException) -> Outcome:
    return after_failure(before, TOPIC, error if isinstance(error, Raised) else raised(error), NOW)


def test_a_failed_try_is_used_up_and_ends_the_row_of_crashes() -> None:
    before = row(crashes=2)
    failure, dead = failed(before, ValueError("no luck"))
    assert not dead
    assert change(before, failure) == {
        "attempts": 1,
        "crashes": 0,
        "next_time": NOW,
        "error": "ValueError: no luck",
    }


def test_the_last_try_that_fails_leaves_a_dead_task() -> None:
    before = row(attempts=3)
    failure, dead = failed(before, ValueError())
    assert dead
    assert change(before, failure)["attempts"] == 4


@pytest.mark.parametrize("attempts", [4, 30, 65_534])
def test_a_task_whose_topic_has_fewer_tries_now_is_dead_by_its_next_failure(attempts: int) -> None:
    assert failed(row(attempts=attempts), ValueError()).dead


def test_dead_is_dead_at_once() -> None:
    assert failed(row(), Dead("wrong number")).dead


def test_a_retry_says_when() -> None:
    error = Retry(timedelta(seconds=5, microseconds=1))
    assert failed(row(), error).failure.next_time == NOW + 5001, "never early"


def test_a_try_is_never_due_before_the_deadline_even_if_the_clock_went_back() -> None:
    later = row(action_time=NOW + 500)
    assert failed(later, ValueError()).failure.next_time == NOW + 500


def test_a_task_that_ended_its_process_keeps_its_crashes() -> None:
    ended = Raised("ProcessEnded", "", dead=True, crashed=True)
    assert failed(row(crashes=5), ended).failure.new_crashes == 5


def test_what_another_handler_broke_off_uses_up_no_try_and_counts_as_a_crash() -> None:
    before = row(attempts=3, crashes=1)
    failure, dead = failed(before, Raised("Disturbed", "cancelled", disturbed=True))
    assert not dead, "no task dies of what another does"
    assert change(before, failure) == {"attempts": 3, "crashes": 2, "next_time": NOW, "error": "cancelled"}


# --- a try whose worker died or fell silent


def crash(before: TryRow | None, *, remaining: int = 4, dead: bool = False) -> Failure | None:
    return after_crash(before, TOPIC, remaining, NOW, LIMIT, dead=dead)


def test_a_crash_uses_up_a_try_and_is_counted() -> None:
    before = row()
    assert change(before, crash(before)) == {
        "attempts": 1,
        "crashes": 1,
        "next_time": NOW,
        "error": CRASHED,
    }


@pytest.mark.parametrize(
    ("attempts", "remaining", "left"),
    [(2, 2, 3), (3, 1, 3), (5, 1, 5)],  # 5 of 4: retries were lowered
)
def test_a_crash_never_uses_up_the_last_try(attempts: int, remaining: int, left: int) -> None:
    failure = crash(row(attempts=attempts), remaining=remaining)
    assert failure is not None
    assert (failure.new_attempts, failure.new_crashes) == (left, 1)


def test_what_the_row_says_already_is_not_charged_again() -> None:
    before = row(attempts=1)
    change_ = change(before, crash(before, remaining=4))
    assert change_["attempts"] == 1, "the entry still has all four tries: the row was written before"
    assert change_["crashes"] == 1, "its holder may run on, and must find another row"
    assert change_["error"] is None
    assert crash(before, remaining=4, dead=True) is None, "its holder is known to be dead"


@pytest.mark.parametrize(
    "changed",
    [
        {"status": int(PROCESSED)},
        {"status": int(CANCELLED)},
        {"status": int(DEAD)},
        {"lease": 1},
        {"next_time": NOW + 1},
        {"crashes": LIMIT},
    ],
)
def test_nothing_is_charged(changed: dict[str, object]) -> None:
    assert crash(row(**changed)) is None


def test_nothing_is_charged_to_a_task_without_a_row() -> None:
    assert crash(None) is None


def test_a_lease_that_ran_out_is_a_crash() -> None:
    assert crash(row(lease=-1)) is not None


def test_crashes_stay_within_their_column() -> None:
    failure = after_crash(row(crashes=MAX_CRASHES), TOPIC, 4, NOW, MAX_CRASHES + 9, dead=False)
    assert failure is not None
    assert failure.new_crashes == MAX_CRASHES


def test_a_suspect_is_who_crashed_as_often_as_the_limit() -> None:
    assert [is_suspect(row(crashes=crashes), LIMIT) for crashes in (0, 2, 3, 9)] == [
        False,
        False,
        True,
        True,
    ]
