"""What applications declare in code: durations, expiries, payloads, hooks. On each rung, and in the kit."""

from __future__ import annotations

from datetime import timedelta

import pytest
from contract.system import Contract

from toc.model.errors import InvalidDelay, InvalidExpiry


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
    moved = center.get(job_id)
    assert moved is not None
    assert moved.action_time > by_default.action_time + timedelta(hours=7)
    assert moved.expires_at == moved.action_time + timedelta(hours=2)
    for said in (own, never):  # what it says itself holds for its new deadline, too
        center.reschedule(said.job_id, delay=timedelta(hours=1))
        there = center.get(said.job_id)
        assert there is not None
        assert (there.version, there.expires_at) == (1, said.expires_at)
    with pytest.raises(InvalidExpiry):
        center.reschedule(own.job_id, delay=timedelta(hours=9))
    with pytest.raises(InvalidDelay, match="expires_in"):
        center.submit("c.expires", biz_id=200, delay="1h", expires_in=-1)
    with pytest.raises(InvalidDelay, match="soon"):
        center.submit("c.expires", biz_id=200, delay="soon")


def test_an_occurrence_of_a_schedule_expires_as_its_topic_says(each: Contract) -> None:
    each.center.schedules.create("typed-expiry", topic="c.expires", every="1s", jitter="0s")
    task = each.wait(lambda: each.center.find(biz_id="typed-expiry"), "an occurrence is a task")[0]
    assert task.expires_at == task.action_time + timedelta(hours=2)
    each.center.schedules.delete("typed-expiry")
