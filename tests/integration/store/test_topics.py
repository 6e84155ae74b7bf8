"""The topic table: two hosts cannot disagree about a topic."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from toc.model.errors import InvalidTopic, TopicExists
from toc.model.topic import Topic, TopicType
from toc.store.store import Store

_numbers = itertools.count(1000)


@pytest.fixture
def topic() -> Topic:
    number = next(_numbers)
    return Topic(f"order.close-{number}", number, 16)


def test_an_unknown_topic_is_none_and_names_differ_by_case(store: Store, topic: Topic) -> None:
    store.topics.create(topic)
    assert store.topics.get(topic.name.upper()) is None
    assert store.topics.get("' OR 1=1 -- ") is None


@pytest.mark.parametrize("same", ["name", "biz_type"])
def test_a_name_or_biz_type_that_is_taken_is_refused(store: Store, topic: Topic, same: str) -> None:
    store.topics.create(topic)
    number = next(_numbers)
    other = Topic(f"other-{number}", number, 8)
    with pytest.raises(TopicExists, match=str(getattr(topic, same))):
        store.topics.create(replace(other, **{same: getattr(topic, same)}))
    assert store.topics.get(topic.name) == topic
    store.topics.create(other)


def test_of_many_hosts_that_create_a_topic_one_succeeds(store: Store, topic: Topic) -> None:
    def create(slots: int) -> str:
        try:
            store.topics.create(replace(topic, slot_amount=slots))
        except TopicExists:
            return "exists"
        return "created"

    with ThreadPoolExecutor(8) as threads:
        assert Counter(threads.map(create, [2**n for n in range(8)])) == {"created": 1, "exists": 7}


def test_alter_changes_what_is_named_and_returns_the_topic(store: Store, topic: Topic) -> None:
    store.topics.create(topic)
    changed = store.topics.alter(
        topic.name, slot_amount=32, paused=True, topic_type="instant", backoff_base=2
    )
    assert changed == replace(
        topic, slot_amount=32, paused=True, topic_type=TopicType.INSTANT, backoff_base=2
    )
    assert store.topics.get(topic.name) == changed


def test_two_operators_who_alter_at_once_both_have_their_way(store: Store, topic: Topic) -> None:
    store.topics.create(topic)
    changes = [{"retries": 5}, {"paused": True}, {"horizon": 600}, {"slot_amount": 64}]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda change: store.topics.alter(topic.name, **change), changes))

    assert store.topics.get(topic.name) == replace(topic, retries=5, paused=True, horizon=600, slot_amount=64)


def test_a_slot_amount_only_grows(store: Store, topic: Topic) -> None:
    store.topics.create(replace(topic, slot_amount=4))
    with pytest.raises(InvalidTopic, match="is 4 and only grows") as refused:
        store.topics.alter(topic.name, slot_amount=2, retries=3)
    assert refused.value.field == "slot_amount"
    for amount, news, becomes in ((1, False, 4), (4, False, 4), (16, True, 16), (8, False, 16)):
        assert store.topics.raise_slots(topic.name, amount) is news
        assert store.topics.get(topic.name) == replace(topic, slot_amount=becomes)
    assert not store.topics.raise_slots("order.nobody", 8)
