"""The decisions of the protocol, case by case: what a row says of its task, what a try makes of a row."""

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from harness.rows import known

from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.errors import InvalidLease
from toc.model.pull import LEASE_ENDED, PullLease, PullRow
from toc.model.raised import EXPIRED, Raised, raised
from toc.model.task import MAX_ATTEMPTS, UNLIMITED, Dead, Retry, TaskStatus, TryRow
from toc.model.topic import Backoff, Delivery, Topic
from toc.model.verdict import (
    CRASHED,
    MAX_CRASHES,
    Check,
    Failure,
    Place,
    Unpulled,
    after_crash,
    after_expiry,
    after_failure,
    after_lapse,
    after_nack,
    belongs,
    beyond_horizon,
    check,
    entry_score,
    is_undecided,
    unpulled,
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


@pytest.mark.parametrize(("status", "place"), [
    (PENDING, Place.STORE_QUEUE),
    (PROCESSED, Place.NOWHERE),
    (CANCELLED, Place.NOWHERE),
    (DEAD, Place.DEAD_QUEUE),
    (1, Place.NOWHERE),  # by hand; put back, it would come again at once, for ever
    (-1, Place.NOWHERE),
    (127, Place.NOWHERE),
])  # fmt: skip
def test_the_status_says_where_the_entry_belongs(status: int, place: Place) -> None:
    assert belongs(row(status=int(status))) is place


def test_a_task_without_a_row_has_no_entry() -> None:
    assert belongs(None) is Place.NOWHERE


SKEW = MAX_CLOCK_SKEW_MS


@pytest.mark.parametrize(("changed", "what"), [
    ({}, Check.START), ({"next_time": NOW - 3_600_000}, Check.START),
    ({"next_time": NOW + 1}, Check.SOON), ({"next_time": NOW + SKEW}, Check.SOON),
    ({"next_time": NOW + SKEW + 1}, Check.ELSEWHERE),  # it was rescheduled, or the entry was too early
    ({"next_time": NOW + SKEW + 5}, Check.ELSEWHERE), ({"lease": 5000}, Check.LEASED),
    ({"lease": -1}, Check.LEASED), ({"lease": 5000, "next_time": NOW + SKEW}, Check.LEASED),
    ({"lease": 5000, "next_time": NOW + SKEW + 1}, Check.ELSEWHERE),
    ({"status": int(PROCESSED)}, Check.ELSEWHERE),
    ({"status": int(CANCELLED), "lease": 5000}, Check.ELSEWHERE),
    ({"status": int(DEAD)}, Check.ELSEWHERE),
])  # fmt: skip
def test_an_entry_starts_only_of_a_pending_due_unleased_row(changed: dict[str, object], what: Check) -> None:
    assert check(row(**changed), now=NOW, taken=NOW) is what


def test_a_row_that_redis_calls_due_and_this_machine_does_not_tells_of_a_clock() -> None:
    ahead = NOW + SKEW + 1
    assert check(row(next_time=ahead), now=NOW, taken=ahead) is Check.CLOCK_BEHIND
    assert check(row(next_time=ahead), now=NOW, taken=ahead - 1) is Check.ELSEWHERE


@pytest.mark.parametrize(
    ("attempts", "score"),
    [
        (0, NOW),
        (1, NOW + 3 / 32),
        (3, NOW + 1 / 32),
        (4, NOW + 1 / 32),  # a task with tries of its own
        (34, NOW + 1 / 32),
    ],
)
def test_the_score_carries_the_topics_tries_left_once_one_was_used(attempts: int, score: float) -> None:
    assert entry_score(TOPIC, NOW, attempts) == score


EXPIRES = {"expires_at": NOW + 1000}


@pytest.mark.parametrize(("changed", "what"), [
    ({"expires_at": NOW}, Check.START),  # to the millisecond
    ({"expires_at": NOW - 1}, Check.EXPIRED),
    ({"expires_at": NOW - 1, "attempts": 3}, Check.EXPIRED),
    ({"expires_at": NOW - 1, "next_time": NOW + 9000}, Check.ELSEWHERE),  # it may be running until then
    ({"expires_at": NOW - 1, "next_time": NOW + 1}, Check.SOON),
    ({"expires_at": NOW - 1, "lease": 5000}, Check.LEASED),  # a try that runs may finish
    ({"expires_at": NOW - 1, "lease": -1}, Check.EXPIRED),
    ({"expires_at": NOW - 1, "status": int(DEAD)}, Check.ELSEWHERE),
    ({"expires_at": NOW - 1, "status": int(CANCELLED)}, Check.ELSEWHERE),
])  # fmt: skip
def test_no_try_starts_of_a_task_that_has_expired(changed: dict[str, object], what: Check) -> None:
    assert check(row(**changed), now=NOW, taken=NOW) is what


@pytest.mark.parametrize(("changed", "ended"), [
    ({}, (False, 0, None)),
    ({"attempts": 2}, (True, 2, None)),  # with its last error
    ({"crashes": 1}, (True, 0, None)),
    ({"begun": 1}, (True, 0, None)),  # its worker stopped while it ran, and charged nothing
    ({"lease": -1}, (True, 1, CRASHED)),
    ({"lease": -1, "attempts": 2}, (True, 2, CRASHED)),
])  # fmt: skip
def test_an_expired_task_is_dead_only_if_a_try_had_started(
    changed: dict[str, object], ended: tuple[bool, int, str | None]
) -> None:
    before = row(expires_at=NOW - 1, **changed)
    failure = after_failure(before, TOPIC, EXPIRED, NOW)
    assert failure.dead, "it has ended, one way or the other"
    assert failure == after_expiry(before, NOW)
    assert failure.expired
    assert failure[:4] == (before.job_id, before.version, before.attempts, before.crashes)
    assert (failure.started, failure.new_attempts, failure.error) == ended
    assert (failure.new_crashes, failure.next_time) == (before.crashes, NOW)


@pytest.mark.parametrize(("after", "dead"), [(1.0, False), (1.001, True)])
def test_a_task_whose_next_try_would_come_after_it_expired_is_dead_at_once(after: float, dead: bool) -> None:
    failure = failed(row(**EXPIRES), Retry(timedelta(seconds=after)))
    assert (failure.dead, failure.expired, failure.started) == (dead, dead, True)
    assert failure.error is not None, "the error is what the try raised"


def test_a_death_that_is_not_of_its_expiry_does_not_say_so() -> None:
    for error, attempts in ((ValueError(), 3), (Dead("wrong number"), 0)):
        failure = failed(row(attempts=attempts, expires_at=NOW - 1), error)
        assert (failure.dead, failure.expired) == (True, False)


def test_a_crash_leaves_an_expired_task_to_the_row_check() -> None:
    failure = known(crash(row(expires_at=NOW - 1)))
    assert (failure.new_attempts, failure.expired) == (1, False)


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


def failed(before: TryRow, error: Raised | BaseException) -> Failure:
    return after_failure(before, TOPIC, error if isinstance(error, Raised) else raised(error), NOW)


def test_a_failed_try_is_used_up_and_ends_the_row_of_crashes() -> None:
    before = row(crashes=2)
    failure = failed(before, ValueError("no luck"))
    assert not failure.dead
    assert change(before, failure) == {
        "attempts": 1,
        "crashes": 0,
        "next_time": NOW,
        "error": "ValueError: no luck",
    }


@pytest.mark.parametrize(
    ("tries", "attempts", "dead"),
    [
        (0, 2, False), (0, 3, True),
        (0, 4, True),  # its topic has fewer tries now
        (0, 65_534, True),
        (1, 0, True),  # fewer than its topic
        (40, 3, False), (40, 38, False), (40, 39, True), (UNLIMITED - 1, UNLIMITED - 3, False),
        (UNLIMITED - 1, UNLIMITED - 2, True), (UNLIMITED, UNLIMITED - 2, False),
        (UNLIMITED, UNLIMITED - 1, False), (UNLIMITED, UNLIMITED, False),
    ],
)  # fmt: skip
def test_the_tries_of_the_row_decide_death(tries: int, attempts: int, dead: bool) -> None:
    failure = failed(row(tries=tries, attempts=attempts), ValueError())
    assert failure.dead is dead
    assert attempts != failure.new_attempts <= MAX_ATTEMPTS, "the next try must not be taken for this one"


def test_a_task_that_was_tried_very_often_waits_for_the_cap() -> None:
    slow = Topic("order.close", 7, 8, backoff_base=0.5, backoff_cap=60)
    failure = after_failure(row(tries=UNLIMITED, attempts=65_000), slow, raised(ValueError()), NOW)
    assert 0 <= failure.next_time - NOW <= 60_000


def test_a_retry_says_when() -> None:
    error = Retry(timedelta(seconds=5, microseconds=1))
    assert failed(row(), error).next_time == NOW + 5001, "never early"


def test_a_try_is_never_due_before_the_deadline_even_if_the_clock_went_back() -> None:
    later = row(action_time=NOW + 500)
    assert failed(later, ValueError()).next_time == NOW + 500


def test_a_task_that_ended_its_process_keeps_its_crashes() -> None:
    ended = Raised("ProcessEnded", "", dead=True, crashed=True)
    assert failed(row(crashes=5), ended).new_crashes == 5


def test_what_another_handler_broke_off_uses_up_no_try_and_counts_as_a_crash() -> None:
    before = row(attempts=3, crashes=1)
    failure = failed(before, Raised("Disturbed", "cancelled", disturbed=True))
    assert not failure.dead, "no task dies of what another does"
    assert change(before, failure) == {"attempts": 3, "crashes": 2, "next_time": NOW, "error": "cancelled"}


# --- a try whose worker died or fell silent


def crash(before: TryRow | None, *, remaining: int = 4, dead: bool = False) -> Failure | None:
    return after_crash(before, TOPIC, remaining, NOW, LIMIT, dead=dead)


@pytest.mark.parametrize(("changed", "undecided"), [
    ({}, True), ({"lease": 5_000}, True), ({"next_time": NOW + 1}, True), ({"attempts": 1}, False),
    ({"crashes": 1}, False), ({"version": 1}, False), ({"status": int(PROCESSED)}, False),
    ({"status": int(CANCELLED)}, False),
])  # fmt: skip
def test_a_refused_failure_counts_for_as_long_as_nothing_has_happened_to_its_task(
    changed: dict[str, Any], undecided: bool
) -> None:
    assert is_undecided(row(), row(**changed)) is undecided


def test_a_refused_failure_of_a_task_without_a_row_is_over() -> None:
    assert not is_undecided(row(), None)


@pytest.mark.parametrize(("tries", "attempts", "remaining", "left"), [
    (0, 2, 2, 3), (0, 3, 1, 3),
    (0, 5, 1, 5),  # 5 of 4: retries were lowered
    (1, 0, 4, 0), (40, 1, 3, 2), (40, 3, 1, 4), (40, 38, 1, 39), (40, 39, 1, 39),
    (UNLIMITED, UNLIMITED - 1, 1, UNLIMITED), (UNLIMITED, UNLIMITED, 1, UNLIMITED - 30),
])  # fmt: skip
def test_a_crash_never_uses_up_the_last_try(tries: int, attempts: int, remaining: int, left: int) -> None:
    before = row(tries=tries, attempts=attempts)
    assert TOPIC.remaining(attempts) == remaining
    failure = known(crash(before, remaining=remaining))
    assert (failure.new_attempts, failure.new_crashes) == (left, 1)
    assert failure.error == CRASHED
    again = crash(before._replace(attempts=left), remaining=remaining, dead=True)
    assert again is None or left == attempts or remaining == 1, (
        "a crash is charged once, until the topic's tries are used up"
    )


def test_what_the_row_says_already_is_not_charged_again() -> None:
    before = row(attempts=1)
    change_ = change(before, crash(before, remaining=4))
    assert change_["attempts"] == 1, "the entry still has all four tries: the row was written before"
    assert change_["crashes"] == 1, "its holder may run on, and must find another row"
    assert change_["error"] is None
    assert crash(before, remaining=4, dead=True) is None, "its holder is known to be dead"


@pytest.mark.parametrize("changed", [
    {"status": int(PROCESSED)}, {"status": int(CANCELLED)}, {"status": int(DEAD)}, {"lease": 1},
    {"next_time": NOW + 1}, {"crashes": LIMIT},
])  # fmt: skip
def test_nothing_is_charged(changed: dict[str, object]) -> None:
    assert crash(row(**changed)) is None


def test_nothing_is_charged_to_a_task_without_a_row() -> None:
    assert crash(None) is None


def test_a_lease_that_ran_out_is_a_crash() -> None:
    assert crash(row(lease=-1)) is not None


def test_crashes_stay_within_their_column() -> None:
    failure = known(after_crash(row(crashes=MAX_CRASHES), TOPIC, 4, NOW, MAX_CRASHES + 9, dead=False))
    assert failure.new_crashes == MAX_CRASHES


# --- pull consumers


def pulled(**changed: Any) -> PullRow:
    """A row whose ttr has just ended: the second of four tries, pulled."""
    plain = PullRow(
        1, 42, 7, int(PENDING), NOW, NOW, 0, 2, 0, 5, 8, 0, 0, 0, 0, NOW, NOW, b"n" * 16, None, None, "{}"
    )
    return plain._replace(**changed)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({}, Unpulled.AGAIN),  # a try is left: it should have been handed out
        ({"next_time": NOW + 1}, Unpulled.NOT_DUE),
        ({"attempts": 4}, Unpulled.OVER),
        ({"attempts": 4, "next_time": NOW + 1}, Unpulled.NOT_DUE),
        ({"attempts": 4, "nonce": b""}, Unpulled.AGAIN),  # the topic has fewer tries now: one more
        ({"attempts": 2, "tries": 2}, Unpulled.OVER),
        ({"attempts": 4, "tries": 9}, Unpulled.AGAIN),
        ({"attempts": 65_535, "tries": 65_535}, Unpulled.AGAIN),  # without limit
        ({"expires_at": NOW - 1}, Unpulled.OVER),
        ({"expires_at": NOW}, Unpulled.AGAIN),
        ({"expires_at": NOW - 1, "next_time": NOW + 1}, Unpulled.NOT_DUE),  # a running try may finish
        ({"status": int(PROCESSED)}, Unpulled.ELSEWHERE),
        ({"status": int(DEAD), "attempts": 4}, Unpulled.ELSEWHERE),
    ],
)
def test_what_becomes_of_an_entry_that_was_not_handed_out(changed: dict[str, Any], what: Unpulled) -> None:
    assert unpulled(pulled(**changed), TOPIC) is what


@pytest.mark.parametrize(("changed", "status", "expired", "error"), [
    ({"attempts": 4}, DEAD, False, LEASE_ENDED),
    ({"expires_at": NOW - 1}, DEAD, True, LEASE_ENDED),
    ({"expires_at": NOW - 1, "nonce": b""}, DEAD, True, None),  # dead with its last error
    ({"expires_at": NOW - 1, "nonce": b"", "attempts": 0}, CANCELLED, True, None),  # it never started
    ({"expires_at": NOW - 1, "nonce": b"", "attempts": 0, "begun": 1}, DEAD, True, None),
    ({"expires_at": NOW - 1, "nonce": b"", "attempts": 0, "crashes": 1}, DEAD, True, None),
])  # fmt: skip
def test_how_a_pulled_task_ends_without_an_answer(
    changed: dict[str, Any], status: TaskStatus, expired: bool, error: str | None
) -> None:
    row = pulled(**changed)
    end = after_lapse(row)
    assert (end.started, end.expired, end.error) == (status is DEAD, expired, error)
    assert (end.new_attempts, end.new_crashes, end.nonce) == (row.attempts, row.crashes, row.nonce)


def test_a_nack_waits_as_told_or_by_the_backoff_and_the_last_one_is_dead() -> None:
    def nacked(delay_ms: int | None, *, dead: bool = False, **changed: Any) -> tuple[bool, int]:
        return after_nack(pulled(**changed), TOPIC, delay_ms=delay_ms, dead=dead, error="no")[1:3]

    assert nacked(1500) == (False, 1500)
    assert nacked(None) == (False, 0), "immediate"
    assert nacked(1500, dead=True) == (True, 0)
    assert nacked(1500, attempts=4) == (True, 0), "written or not: its consumer has answered"
    assert nacked(1500, attempts=65_535, tries=65_535) == (False, 1500)


def test_no_death_of_a_gateway_changes_a_row() -> None:
    topic = replace(TOPIC, delivery=Delivery.PULL)
    assert after_crash(row(), topic, 4, NOW, LIMIT, dead=True) is None


def test_a_lease_is_read_as_it_was_written_and_nothing_else_is() -> None:
    lease = PullLease(2**63 - 1, 3, 2**63 - 1, 1023, bytes(range(16)))
    secret = bytes(range(32))
    text = lease.text(secret)
    assert re.fullmatch(r"[A-Za-z0-9_-]{72}", text)
    assert PullLease.parse(text, secret) == lease
    others = [
        lease.text(bytes(32)),
        *(lease._replace(version=3 + n).text(secret)[:20] + text[20:] for n in (1, 2)),
    ]
    for bad in (
        "",
        text[:-1],
        text + "A",
        text[:-1] + "\n",
        "é" * 72,
        "A" * 72,
        None,
        7,
        "x" * 100_000,
        *others,
    ):
        with pytest.raises(InvalidLease):
            PullLease.parse(bad, secret)
