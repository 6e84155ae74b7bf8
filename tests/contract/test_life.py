"""What happens to a task while a worker runs, with and without an index, spread, awaited, in the kit;
what code declares."""

import json
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from contract.conftest import KIT, RUNGS
from contract.system import Contract
from harness.rows import known
from harness.tables import engine_of

from benchmarks.local import MariaDB
from toc import CancelOutcome, NewTask
from toc.model.errors import InvalidDelay, InvalidExpiry, InvalidInput

# What happens to a task while a worker runs: with and without an index, spread, awaited, and in the kit.

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def ms(instant: datetime) -> int:
    return (instant.replace(tzinfo=UTC) - EPOCH) // timedelta(milliseconds=1)


def submit(contract: Contract, topic: str, biz_id: int, delay: Any = 0.05, **attribute: Any) -> int:
    return contract.center.submit(topic, biz_id=biz_id, delay=delay, attribute=attribute)


def started(contract: Contract, job_id: int) -> list[dict[str, Any]]:
    return contract.wait(lambda: contract.history(job_id), f"{job_id} has started")


def gone(contract: Contract, job_id: int) -> None:
    contract.wait(lambda: not contract.scores(job_id), f"{job_id} is out of the index")


def test_a_task_fires_at_its_time_and_leaves_no_entry(every: Contract) -> None:
    for job_id in [submit(every, "c.plain", 1, 0.3 + n / 10, hello="wörld") for n in range(5)]:
        every.wait_status(job_id, 2)
        gone(every, job_id)
        (start,) = every.history(job_id)
        due = ms(every.row(job_id)["action_time"])
        assert hasattr(every, "kit") or start["at"] / 1e6 >= due, "the kit has a clock of its own"
        assert (start["attempt"], start["status"], start["biz_id"], start["topic"]) == (1, 0, 1, "c.plain")
        assert start["attribute"] == {"hello": "wörld"}
        assert ms(datetime.fromisoformat(start["action_time"])) == due


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
    each.wait_status(job_id, 4)
    assert each.row(job_id)["last_error"] == reason
    assert len(each.history(job_id)) == 1
    each.wait(lambda: all(key.startswith("dead_{") for key in each.scores(job_id)), "buried")


def test_redrive_runs_a_dead_task_again_with_all_its_tries(each: Contract) -> None:
    job_id = submit(each, "c.thrice", 6, **{"raise": "error", "times": 99})
    each.wait_status(job_id, 4)
    before = len(each.history(job_id))
    listed = each.json("dead", "list", "--topic", "c.thrice")
    (record,) = [record for record in listed if record["job_id"] == str(job_id)]
    assert "no 3" in str(record)
    done = each.toc("dead", "redrive", str(job_id))
    assert done.returncode == 0, done.stderr
    each.wait(lambda: len(each.history(job_id)) == before + 3, "three more tries")
    each.wait_status(job_id, 4)
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
            each.wait_status(job_id, 2)
            assert len(each.history(job_id)) == 1
    assert all(len(each.history(job_id)) == 2 for job_id in bad)


def test_cancel_of_a_waiting_task_holds(every: Contract) -> None:
    job_id = submit(every, "c.plain", 8, 2.5)
    assert every.center.cancel(job_id) is CancelOutcome.CANCELLED
    assert every.scores(job_id) == {}
    assert every.center.cancel(job_id) is CancelOutcome.CANCELLED
    other = submit(every, "c.plain", 9, 2.7)
    every.wait_status(other, 2)
    assert every.status(job_id) == 3
    assert every.history(job_id) == []
    assert every.center.cancel(job_id) is CancelOutcome.CANCELLED
    assert every.center.cancel(other) is CancelOutcome.TOO_LATE
    assert every.status(other) == 2


@pytest.mark.parametrize("failing", [False, True])
def test_cancel_of_a_running_task_says_so_and_there_is_no_later_try(every: Contract, failing: bool) -> None:
    gate = f"cancel-{failing}"
    extra: dict[str, Any] = {"raise": "error"} if failing else {}
    job_id = submit(every, "c.thrice", 10 + failing, gate=gate, **extra)
    started(every, job_id)
    assert every.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    every.open_gate(gate)
    gone(every, job_id)
    assert every.status(job_id) == 3
    assert every.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    assert len(every.history(job_id)) == 1


def test_cancel_of_an_unknown_task_is_unknown(every: Contract) -> None:
    known = submit(every, "c.plain", 12, 3600)
    assert every.center.cancel(known + 1) is CancelOutcome.UNKNOWN
    assert every.center.cancel(2**62 + 5) is CancelOutcome.UNKNOWN
    assert every.center.get(known + 1) is None


def test_cancel_by_biz_answers_for_each_task_of_that_biz_id_on_that_topic(every: Contract) -> None:
    waiting = [submit(every, "c.plain", 13, 3600) for _ in range(3)]
    other = submit(every, "c.thrice", 13, 3600)
    done = submit(every, "c.plain", 13)
    every.wait_status(done, 2)
    assert every.center.cancel_by_biz("c.plain", biz_id=13) == {
        **dict.fromkeys(waiting, CancelOutcome.CANCELLED),
        done: CancelOutcome.TOO_LATE,
    }
    assert every.status(other) == 0
    assert every.center.cancel_by_biz("c.plain", biz_id=131313) == {}


def test_reschedule_moves_a_task_both_ways_and_it_fires_at_the_new_time_only(every: Contract) -> None:
    sooner = submit(every, "c.plain", 14, 3600)
    later = submit(every, "c.plain", 15, 2.5)
    now = datetime.now(UTC)
    outcome = every.center.reschedule(later, action_time=now + timedelta(seconds=3.5))
    assert outcome.name == "RESCHEDULED"
    outcome = every.center.reschedule(sooner, action_time=now + timedelta(seconds=2))
    assert outcome.name == "RESCHEDULED"
    for job_id in (sooner, later):
        every.wait_status(job_id, 2)
        (start,) = every.history(job_id)
        assert start["at"] / 1e6 >= ms(every.row(job_id)["action_time"])
        assert start["version"] == 1
        again = every.center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(seconds=9))
        assert again.name == "TOO_LATE"
    nowhere = every.center.reschedule(sooner + 1, action_time=datetime.now(UTC) + timedelta(seconds=9))
    assert nowhere.name == "UNKNOWN"


def test_reschedule_of_a_running_task_runs_it_again_at_the_new_time(every: Contract) -> None:
    job_id = submit(every, "c.plain", 16, gate="sixteen")
    started(every, job_id)
    due = datetime.now(UTC) + timedelta(seconds=2)
    assert every.center.reschedule(job_id, action_time=due).name == "MAY_HAVE_STARTED"
    every.open_gate("sixteen")
    every.wait_status(job_id, 2)
    first, second = every.history(job_id)
    assert second["at"] / 1e6 >= ms(every.row(job_id)["action_time"])
    assert (first["version"], second["version"]) == (0, 1)
    gone(every, job_id)


def test_an_instant_task_runs_at_once_and_may_lie_in_the_past(each: Contract) -> None:
    now = each.center.submit("c.now", biz_id=70)
    past = each.center.submit("c.now", biz_id=71, action_time=datetime.now(UTC) - timedelta(days=1))
    for job_id in (now, past):
        each.wait_status(job_id, 2)
        assert len(each.history(job_id)) == 1


def test_a_time_that_has_passed_is_refused_unless_it_shall_run(each: Contract) -> None:
    words = ("submit", "c.plain", "--biz-id", "74", "--action-time", "2020-01-01T00:00:00Z")
    assert each.toc(*words).returncode != 0
    job_id = int(each.json(*words, "--past", "run")["job_id"])
    each.wait_status(job_id, 2)
    assert len(each.history(job_id)) == 1


@pytest.mark.parametrize("each", RUNGS, indirect=True)
def test_what_runs_is_shown_with_its_worker(each: Contract) -> None:
    def shown() -> list[dict[str, Any]]:
        running = each.json("running", "--topic", "c.plain")
        return [one for one in running if one["job_id"] == str(job_id)]

    job_id = submit(each, "c.plain", 73, gate="shown")
    (one,) = each.wait(shown, "it is shown")
    assert one["owner"]
    each.open_gate("shown")
    each.wait_status(job_id, 2)
    assert shown() == []


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


@pytest.mark.parametrize(
    ("each", "topic"),  # threads, the event loop, batches
    [
        *(("with an index", topic) for topic in ("c.plain", "c.async", "c.batch-whole")),
        ("the database alone", "c.plain"),
    ],
    indirect=["each"],
)
def test_what_waits_for_a_handler_when_its_topic_is_paused_goes_back_uncharged(
    each: Contract, topic: str
) -> None:
    gate = f"paused-{topic}"
    tasks = {submit(each, topic, n, gate=gate) for n in range(200, 400)}
    look = " UNION ALL ".join(f"SELECT * FROM {table}" for table in {each.table(job_id) for job_id in tasks})

    def rows() -> dict[int, dict[str, Any]]:
        return {row["job_id"]: row for row in each.query(look) if row["job_id"] in tasks}

    def held() -> set[int]:
        return {job_id for job_id, row in rows().items() if row["lease_until"] and not row["status"]}

    def began() -> set[int]:
        return tasks & {start["job_id"] for start in each.history()}

    each.wait(lambda: began() and held() - began(), "some run, and some wait")
    assert each.toc("topic", "pause", topic).returncode == 0
    try:
        ran = began()
        each.open_gate(gate)
        each.wait(lambda: not held(), "some have ended, the others went back")
        assert began() == ran
        rest = [row for job_id, row in rows().items() if job_id not in ran]
        assert {(row["status"], row["attempts"], row["crashes"]) for row in rest} == {(0, 0, 0)}
    finally:
        each.open_gate(gate)
        assert each.toc("topic", "resume", topic).returncode == 0
    each.wait(lambda: {row["status"] for row in rows().values()} == {2}, "all are processed")
    starts = [start for start in each.history() if start["job_id"] in tasks]
    assert len(starts) == len(tasks)


@pytest.mark.parametrize("each", [*RUNGS, KIT], indirect=True)
def test_rows_of_the_callers_transaction_run_once_it_commits(each: Contract, mariadb: MariaDB) -> None:
    with engine_of(mariadb.url) as engine:
        with engine.begin() as connection:
            now = each.center.submit("c.now", biz_id=1, connection=connection)
            soon = each.center.submit("c.plain", biz_id=1, delay=1.8, connection=connection)
        for job_id in (now, soon):
            (start,) = started(each, job_id)
            assert start["at"] / 1e6 >= ms(each.row(job_id)["action_time"])


# What applications declare in code: durations, expiries, payloads, hooks. On each rung, and in the kit.


def test_a_task_expires_as_its_topic_says_unless_it_says_so_itself(each: Contract) -> None:
    center = each.center
    job_id = center.submit("c.expires", biz_id=200, delay="1h")
    by_default = center.get(job_id)
    own = center.get(center.submit("c.expires", biz_id=200, delay="1h", expires_in="5m"))
    never = center.get(center.submit("c.expires", biz_id=200, delay="1h", expires_in=0))
    assert by_default is not None
    assert by_default.expires_at == by_default.action_time + timedelta(hours=2)
    assert own is not None
    assert own.expires_at == own.action_time + timedelta(minutes=5)
    assert never is not None
    assert never.expires_at is None
    center.reschedule(job_id, delay=timedelta(hours=9))
    moved = known(center.get(job_id))
    assert moved.action_time > by_default.action_time + timedelta(hours=7)
    assert moved.expires_at == moved.action_time + timedelta(hours=2)
    for said in (own, never):  # what it says itself holds for its new deadline, too
        center.reschedule(said.job_id, delay=timedelta(hours=1))
        there = known(center.get(said.job_id))
        assert (there.version, there.expires_at) == (1, said.expires_at)
    with pytest.raises(InvalidExpiry):
        center.reschedule(own.job_id, delay=timedelta(hours=9))
    with pytest.raises(InvalidInput, match="not both"):
        center.submit("c.expires", biz_id=200, delay="1h", expires_in="5m", expires_at=datetime.now(UTC))
    with pytest.raises(InvalidDelay, match="expires_in"):
        center.submit("c.expires", biz_id=200, delay="1h", expires_in=-1)
    with pytest.raises(InvalidDelay, match="soon"):
        center.submit("c.expires", biz_id=200, delay="soon")


def test_an_occurrence_of_a_schedule_expires_as_its_topic_says(each: Contract) -> None:
    each.center.schedules.create("typed-expiry", topic="c.expires", every="1s", jitter="0s")
    task = each.wait(lambda: each.center.find(biz_id="typed-expiry"), "an occurrence is a task")[0]
    assert task.expires_at == task.action_time + timedelta(hours=2)
    each.center.schedules.delete("typed-expiry")


def test_a_typed_handler_gets_the_attribute_or_the_body_within_the_middleware(each: Contract) -> None:
    center = each.center
    short = center.submit("c.typed", biz_id=201, delay=0.1, attribute={"number": 7})
    long = json.dumps({"number": 8, "note": "x" * 5000}).encode()
    whole = center.submit(
        "c.typed", biz_id=202, delay=0.1, body=long, content_type="application/json", tries=1
    )
    for job_id, expected in ((short, [7, 0, [201]]), (whole, [8, 5000, [202]])):
        each.wait_status(job_id, 2)
        (start,) = each.history(job_id)
        assert [start["number"], start["note"], start["around"]] == expected


def test_a_returned_dead_ends_the_task_and_the_hook_is_told_once(each: Contract) -> None:
    job_id = each.center.submit("c.typed", biz_id=203, delay=0.1, attribute={"number": 1, "note": "dead"})
    each.wait_status(job_id, 4)
    each.wait(lambda: len(each.history(job_id)) == 2, "the hook was told")
    start, told = each.history(job_id)
    assert (start["status"], told["status"], told["reason"]) == (0, 4, "returned")


def test_a_payload_that_does_not_fit_is_given_back_uncharged_and_shown(each: Contract) -> None:
    job_id = each.center.submit("c.typed", biz_id=204, delay=0.1, attribute={"number": "canary"})
    each.wait(lambda: each.row(job_id)["last_error"], "it was given back")
    row = each.row(job_id)
    assert (row["status"], row["attempts"], row["crashes"]) == (0, 0, 0)
    assert row["next_time"] > row["action_time"]
    assert "number: Input should be a valid integer" in row["last_error"]
    assert "canary" not in row["last_error"]
    assert each.history(job_id) == []
    shown = json.loads(each.toc("get", str(job_id), "--json").stdout)
    assert shown["last_error"] == row["last_error"]
    each.center.cancel(job_id)
