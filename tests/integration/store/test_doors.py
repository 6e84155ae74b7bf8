"""Tables of the doors and of topics; on MariaDB and SQLite."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from fault.kit.proxy import Proxy
from harness.rows import NewRow, change, insert_many, known

from toc import NewTask, Settings, TaskStatus, TimeoutCenter
from toc.model.clock import Clock
from toc.model.errors import (
    InvalidTopic,
    StoreUnavailable,
    TooManyTopics,
    TopicClosed,
    TopicExists,
    UnknownTemplate,
    UnknownTopic,
)
from toc.model.topic import Delivery, Template, Topic
from toc.operate.audit import audited
from toc.operate.templates import ensure_topic
from toc.store.store import Store
from toc.store.tasks.select import Selection

# Tables of the doors: templates, retired biz_types, tokens, the audit; on MariaDB and SQLite.


@pytest.fixture
def centers(place: Any) -> Iterator[list[TimeoutCenter]]:
    """Eight processes' SDKs, as far as threads can be processes."""
    settings = Settings(
        database_urls=place.urls, databases=place.databases, tables=place.tables, database_prefix=place.prefix
    )
    made = [TimeoutCenter(settings) for _ in range(8)]
    yield made
    for center in made:
        center.close()


def test_many_gateways_create_topics_by_a_template_up_to_its_cap(
    centers: list[TimeoutCenter], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.templates.create(Template("wide.*", {"slot_amount": 2}, 100))
    store.templates.create(Template("wide.narrow.*", {"slot_amount": 4, "delivery": "pull"}, 5))
    # Draws that clash, with topics and with one that is gone: everybody draws again.
    store.topics.create(Topic("wide.first", 1000, 1))
    old = Topic("wide.old", 1001, 1, paused=True)
    store.topics.create(old)
    assert store.topics.close(old.name, 0)
    assert store.topics.retire(old, 1)
    draws = iter(range(1000, 2000))
    monkeypatch.setattr("secrets.randbelow", lambda _: next(draws) // 3 * 3 - 10**9)

    def ensure(number: int) -> str:
        try:
            return ensure_topic(centers[number % 8], f"wide.narrow.{number % 9}", by="test").name
        except TooManyTopics:
            return "too many"

    with ThreadPoolExecutor(8) as threads:
        told = Counter(threads.map(ensure, range(72)))
    made = [topic for topic in store.topics.list() if topic.name.startswith("wide.narrow.")]
    assert len(made) >= 5, "those that are created at the same moment may be more"
    assert told.keys() - {"too many"} == {topic.name for topic in made}
    assert {(topic.slot_amount, topic.delivery) for topic in made} == {(4, Delivery.PULL)}
    assert not {topic.biz_type for topic in made} & {1000, 1001}
    assert len({topic.biz_type for topic in made}) == len(made)
    assert ensure_topic(centers[0], "wide.other", by="test").slot_amount == 2
    with pytest.raises(UnknownTopic, match="no template"):
        ensure_topic(centers[0], "elsewhere", by="test")
    store.templates.alter("wide.narrow.*", {"retries": 3}, len(made) + 1)
    more = [name for number in range(9) if (name := ensure(number)) != "too many"]
    assert len(set(more)) == min(len(made) + 1, 9)
    assert {topic.retries for topic in store.topics.list() if topic.name in more} == {16, 3}
    for pattern in ("wide.*", "wide.narrow.*"):
        store.templates.delete(pattern)
    with pytest.raises(UnknownTemplate):
        store.templates.delete("wide.*")


def test_a_deleted_topics_biz_type_is_never_used_again(store: Store, centers: list[TimeoutCenter]) -> None:
    topic = Topic("gone", 555, 2, paused=True, retention=77)
    store.topics.create(topic)
    assert not store.topics.retire(topic, 0), "it is not closed"
    assert store.topics.retired()[555] == 77, "as if it had stopped there: done again below"
    assert store.topics.close("gone", 0)
    assert not store.topics.close("gone", 0), "it was changed since"
    with pytest.raises(TopicClosed):
        store.topics.alter("gone", retries=3)
    with pytest.raises(TopicClosed):
        centers[0]._checked(NewTask("gone", biz_id=1, delay=5))
    assert not store.topics.retire(topic, 0), "it was changed since"
    assert store.topics.retire(topic, 1)
    assert store.topics.get("gone") is None
    with pytest.raises(TopicExists, match="deleted"):
        store.topics.create(replace(topic, name="other"))
    store.topics.create(replace(topic, biz_type=556))


def test_a_delivery_is_changed_only_while_paused_and_unchanged(store: Store) -> None:
    store.topics.create(Topic("delivered", 600, 1))
    assert not store.topics.deliver("delivered", 0, Delivery.PULL), "not paused"
    store.topics.alter("delivered", paused=True)
    assert not store.topics.deliver("delivered", 0, Delivery.PULL), "changed since"
    assert store.topics.deliver("delivered", 1, Delivery.PULL)
    assert known(store.topics.get("delivered")).delivery is Delivery.PULL


def test_open_tasks_are_counted_and_held_ones_only_while_held(fresh_store: Store, new_row: NewRow) -> None:
    store = fresh_store
    rows = [new_row(biz_type=9, status=status) for status in (0, 0, 0, 0, 4, 2, 3)]
    insert_many(store, [*rows, new_row(biz_type=8)])
    pending = Selection(TaskStatus.PENDING, biz_types=[9])
    assert store.selections.count(pending) == 4
    one_each = {store._shards.table_of(row.job_id) for row in rows[:4]}
    assert store.selections.count(pending, most=len(store.tables) - 1) == len(one_each)
    assert store.selections.count(replace(pending, held=True)) == 0
    for row, sets in (
        (rows[0], "lease_owner=1,lease_until={later}"),
        (rows[1], "lease_owner=1,lease_until={before}"),
        (rows[2], "pull_nonce=X'00112233445566778899aabbccddeeff',next_time={later}"),
        (rows[3], "pull_nonce=X'00112233445566778899aabbccddeeff',next_time={before}"),
    ):
        server, now = store._shards.servers[store.server_of(row.job_id)], Clock().now_ms()
        fields = sets.format(later=server.instant(now + 60_000), before=server.instant(now - 60_000))
        change(store, row.job_id, fields)
    assert store.selections.count(replace(pending, held=True)) == 2


def test_every_change_has_its_intent_and_what_came_of_it(store: Store) -> None:
    began = Clock().now_ms()
    with audited(store, "ann@h", "topic.alter", "a", retries=3) as record:
        (going_on,) = store.audit.list(10, target="a")
        assert (going_on.result, going_on.ended) == (None, None)
        record["tasks"] = 7
    with pytest.raises(UnknownTopic), audited(store, "bob@h", "topic.pause", "b"):
        raise UnknownTopic("there is no b, says mysql://root:secret@h")
    with pytest.raises(KeyboardInterrupt), audited(store, "bob@h", "topic.pause", "c"):
        raise KeyboardInterrupt
    rows = store.audit.list(10, since=began - 1)
    assert [(row.actor, row.action, row.target) for row in rows] == [
        ("bob@h", "topic.pause", "c"),
        ("bob@h", "topic.pause", "b"),
        ("ann@h", "topic.alter", "a"),
    ]
    results = [json.loads(row.result or "") for row in rows]
    assert results[0] == {"outcome": "interrupted"}
    assert (results[1]["outcome"], "secret" in results[1]["error"]) == ("failed", False)
    assert results[2] == {"outcome": "done", "tasks": 7}
    assert json.loads(rows[2].details) == {"retries": 3}
    assert store.audit.list(10, actor="ann@h")[0] == rows[2]
    assert list(store.audit.list(1, below=rows[0].audit_id)) == [rows[1]]
    assert not store.audit.purge(60_000)
    assert list(store.audit.list(1)) == [rows[0]]
    assert not store.audit.purge(-60_000)
    assert store.audit.list(10) == []


def test_without_the_audit_nothing_is_changed(through_proxy: Store, proxy: Proxy) -> None:
    proxy.refuse()
    with (
        pytest.raises(StoreUnavailable, match="nothing was changed"),
        audited(through_proxy, "ann@h", "topic.pause", "a"),
    ):
        pytest.fail("the change was made all the same")


# The topic table: two hosts cannot disagree about a topic.

_numbers = itertools.count(5000)


@pytest.fixture
def topic() -> Topic:
    number = next(_numbers)
    return Topic(f"order.close-{number}", number, 16)


def test_a_slot_amount_only_grows(store: Store, topic: Topic) -> None:
    store.topics.create(replace(topic, slot_amount=4))
    with pytest.raises(InvalidTopic, match="is 4 and only grows") as refused:
        store.topics.alter(topic.name, slot_amount=2, retries=3)
    assert refused.value.field == "slot_amount"
    for amount, news, becomes in ((1, False, 4), (4, False, 4), (16, True, 16), (8, False, 16)):
        assert store.topics.raise_slots(topic.name, amount) is news
        assert store.topics.get(topic.name) == replace(topic, slot_amount=becomes)
    assert not store.topics.raise_slots("order.nobody", 8)
