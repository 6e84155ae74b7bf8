"""What applications declare in code: durations, expiries, payloads, hooks. On each rung, and in the kit."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from contract.system import Contract
from harness.rows import known

from toc.model.errors import InvalidDelay, InvalidExpiry, InvalidInput


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
