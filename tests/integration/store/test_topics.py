"""The topic table: two hosts cannot disagree about a topic."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from toc.model.errors import InvalidTopic, TopicExists
from toc.model.topic import Topic
from toc.store.store import Store

_numbers = itertools.count(1000)


@pytest.fixture
def topic() -> Topic:
    number = next(_numbers)
    return Topic(f"order.close-{number}", number, 16)


def test_of_many_hosts_that_create_a_topic_one_succeeds(store: Store, topic: Topic) -> None:
    def create(slots: int) -> str:
        try:
            store.topics.create(replace(topic, slot_amount=slots))
        except TopicExists:
            return "exists"
        return "created"

    with ThreadPoolExecutor(8) as threads:
        assert Counter(threads.map(create, [2**n for n in range(8)])) == {"created": 1, "exists": 7}


def test_two_operators_who_alter_at_once_both_have_their_way(store: Store, topic: Topic) -> None:
    store.topics.create(topic)
    changes = [{"retries": 5}, {"paused": True}, {"horizon": 600}, {"slot_amount": 64}]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda change: store.topics.alter(topic.name, **change), changes))

    found = store.topics.get(topic.name)
    assert found is not None
    assert found.paused_at
    changed = replace(topic, retries=5, paused=True, horizon=600, slot_amount=64)
    assert replace(found, paused_at=0) == changed


def test_a_slot_amount_only_grows(store: Store, topic: Topic) -> None:
    store.topics.create(replace(topic, slot_amount=4))
    with pytest.raises(InvalidTopic, match="is 4 and only grows") as refused:
        store.topics.alter(topic.name, slot_amount=2, retries=3)
    assert refused.value.field == "slot_amount"
    for amount, news, becomes in ((1, False, 4), (4, False, 4), (16, True, 16), (8, False, 16)):
        assert store.topics.raise_slots(topic.name, amount) is news
        assert store.topics.get(topic.name) == replace(topic, slot_amount=becomes)
    assert not store.topics.raise_slots("order.nobody", 8)
