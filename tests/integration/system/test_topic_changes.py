"""Topics are delivered otherwise and deleted while a cluster runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from harness.system import System

from toc import TimeoutCenter
from toc.model.errors import TocError, TopicClosed, TopicInUse, UnknownTopic
from toc.model.topic import Delivery, Topic
from toc.operate import admin, bulk, topics
from toc.operate.operation import Doing
from toc.operate.operations.topics import resume


def _pause(system: System, name: str) -> None:
    admin.alter_topic(system.center.store, name, {"paused": True})


def _resume(system: System, name: str) -> None:
    resume.perform(Doing(system.center, "ann", resume.right), {"topic": name, "rate": 0})


def test_a_delivery_changes_when_nothing_runs_and_no_handler_starts_what_is_pulled(
    hosts: System, tmp_path: Path
) -> None:
    hosts.create_topics(slots=4)
    hosts.start(processes=1)
    center, client = hosts.center, hosts.client
    with pytest.raises(TopicInUse, match="not paused"):
        topics.change_delivery(center, "test.sync", Delivery.PULL)

    end = tmp_path / "end"
    running = client.submit("test.sync", biz_id=1, delay=0.1, attribute={"until": str(end)})
    hosts.wait(lambda: len(hosts.starts(running)) == 1, "it runs", 10)
    _pause(hosts, "test.sync")
    with pytest.raises(TopicInUse, match=r"1 pending \(1 prepared"):
        topics.change_delivery(center, "test.sync", Delivery.PULL)
    told: list[str] = []
    changed: list[Topic] = []

    def change() -> None:
        changed.append(
            topics.change_delivery(center, "test.sync", Delivery.PULL, wait=True, progress=told.append)
        )

    waiting = threading.Thread(target=change)
    waiting.start()
    hosts.wait(lambda: any("1 tasks" in text for text in told), "it waits for the task", 10)
    assert not changed
    end.touch()
    waiting.join(60)
    assert [topic.delivery for topic in changed] == [Delivery.PULL]
    assert not hosts.pending([running])

    _resume(hosts, "test.sync")
    left = [client.submit("test.sync", biz_id=n, delay=0.05) for n in range(20)]
    # Its slots are nobody's: no member serves pulls. Other topics run on.
    others = [client.submit("test.async", biz_id=n, delay=1.0) for n in range(20)]
    hosts.wait(lambda: not hosts.pending(others), "the other topic runs", 20)
    assert len(hosts.pending(left)) == 20
    assert sum(len(hosts.starts(job_id)) for job_id in left) == 0

    _pause(hosts, "test.sync")
    topics.change_delivery(center, "test.sync", Delivery.HANDLER)
    _resume(hosts, "test.sync")
    hosts.wait(lambda: not hosts.pending(left), "handlers have it again", 20)
    assert hosts.not_run_once(left) == {}
    assert hosts.verdict().clean, hosts.logs()


def test_a_topic_is_deleted_only_empty_and_its_name_may_be_used_again(hosts: System) -> None:
    hosts.create_topics(slots=4)
    daemon = hosts.start(processes=1)
    center, store, client = hosts.center, hosts.center.store, hosts.center
    done = client.submit("test.sync", biz_id=1, delay=0.05)
    dead = client.submit("test.sync", biz_id=2, delay=0.05, attribute={"dead": 1})
    hosts.wait(lambda: not hosts.pending([done, dead]), "they have ended", 10)
    far = [client.submit("test.sync", biz_id=n, delay=3600) for n in range(30)]
    with pytest.raises(TopicInUse, match="not paused"):
        topics.delete_topic(center, "test.sync")
    _pause(hosts, "test.sync")
    with pytest.raises(
        TopicInUse, match=r"30 pending \(0 prepared, 0 leased or handed out\), 1 dead; `toc cancel"
    ):
        topics.delete_topic(center, "test.sync")
    with TimeoutCenter(hosts.settings) as other:
        far.append(other.submit("test.sync", biz_id=31, delay=3600))  # it takes tasks again

    # Another program dies right after it has closed it. A third goes on.
    _, version = store.topics.get_with_version("test.sync")
    assert store.topics.close("test.sync", version)
    with TimeoutCenter(hosts.settings) as other, pytest.raises(TopicClosed):
        other.submit("test.sync", biz_id=32, delay=3600)
    bulk.cancel(center, far)
    assert bulk.purge_dead(center, [dead])["purged"] == 1
    topics.delete_topic(center, "test.sync")

    with TimeoutCenter(hosts.settings) as other, pytest.raises(UnknownTopic):
        other.submit("test.sync", biz_id=33, delay=3600)
    rows = store.read([done, dead, *far])
    assert dead not in rows
    assert {rows[job_id].status for job_id in far} == {3}
    assert store.topics.retired() == {1: 259_200}
    with pytest.raises(TocError, match="deleted"):
        admin.create_topic(center, "test.sync", biz_type=1, slot_amount=4)

    # The name may be used again. The workers, which have lived through all of it, serve the new topic.
    admin.create_topic(center, "test.sync", biz_type=77, slot_amount=2)
    center.catalog.refresh()
    fresh = [hosts.client.submit("test.sync", biz_id=n, delay=0.5) for n in range(20)]
    hosts.wait(lambda: not hosts.pending(fresh), "the new topic runs", 20)
    assert hosts.not_run_once(fresh) == {}
    for event in ("worker_died", "worker_recycled", "index_lost_data"):
        assert not daemon.events(event)
