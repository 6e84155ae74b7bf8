"""The database alone: no index, so the rows say what is due, what has begun, and that it is so."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from harness import forks
from harness.system import System

from benchmarks.local import RedisServer
from toc import CancelOutcome, RescheduleOutcome, Settings, TimeoutCenter
from toc.index.no_index import NoIndex
from toc.model.errors import ConfigError


def test_the_row_alone_answers(alone: System) -> None:
    alone.create_topics()
    center, leases = alone.center, alone.center.store.leases
    leases.identify("a-worker")
    past, ahead = (center.submit("test.sync", biz_id=1, delay=seconds) for seconds in (0.001, 60))
    assert isinstance(center.queues, NoIndex)
    assert center.reschedule(ahead, action_time=_soon()) is RescheduleOutcome.RESCHEDULED
    time.sleep(0.1)  # their times pass
    assert center.cancel(past) is center.cancel(ahead) is CancelOutcome.CANCELLED
    began = [center.submit("test.sync", biz_id=n, delay=0.001) for n in range(2)]
    assert leases.take(dict.fromkeys(began, 30)) == dict.fromkeys(began, True)
    assert center.reschedule(began[0], action_time=_soon()) is RescheduleOutcome.MAY_HAVE_STARTED
    assert {center.cancel(one) for one in began} == {CancelOutcome.MAY_HAVE_STARTED}


def test_a_process_whose_settings_disagree_is_refused_by_name(
    alone: System, clean_redis: RedisServer
) -> None:
    alone.create_topics()
    identity = alone.center.store.identity
    assert not identity.indexed()
    indexed = Settings(**{**alone.settings.model_dump(), "redis_url": clean_redis.url})

    def refused(*words: str, **more: str) -> str:
        done = forks.run(list(words), env={**alone.env, **more}, directory=alone.directory)
        assert done.returncode == ConfigError.exit_code, done.stdout
        return done.stderr

    worker = ["worker", "--app", "harness.app:center"]
    for words in (worker, ["gateway", "--port", "0"]):
        told = refused(*words, TOC_REDIS_URL=clean_redis.url)
        assert "TOC_REDIS_URL is set, and the tasks on" in told
        assert "are not indexed: unset it, or run `toc index on`" in told
    with TimeoutCenter(indexed) as ahead:  # what it indexes is not looked at
        assert ahead.cancel(ahead.submit("test.sync", biz_id=1, delay=60)) is CancelOutcome.CANCELLED
    due = alone.center.submit("test.sync", biz_id=1, delay=0.001)
    identity.set_indexed(True)
    with (
        TimeoutCenter(alone.settings) as behind,
        pytest.raises(ConfigError, match="TOC_REDIS_URL is not set"),
    ):
        behind.submit("test.sync", biz_id=2, delay=60)
    for words in (worker, ["gateway", "--port", "0"], ["slots"]):
        assert "TOC_REDIS_URL is not set" in refused(*words)
    # The application that goes on meanwhile cannot know what a worker has taken by the index.
    assert alone.center.cancel(due) is CancelOutcome.MAY_HAVE_STARTED


def _soon() -> datetime:
    return datetime.now(UTC) + timedelta(milliseconds=50)
