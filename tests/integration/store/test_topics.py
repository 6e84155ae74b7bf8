"""The topic table: two hosts cannot disagree about a topic."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from toc.errors import InvalidTopic, TopicExists, UnknownTopic
from toc.store import Store
from toc.topic import Backoff, Topic, TopicType

_numbers = itertools.count(1000)


@pytest.fixture
def topic() -> Iterator[Topic]:
    number = next(_numbers)
    yield Topic(f"order.close-{number}", number, 16)


def test_a_topic_comes_back_as_it_was_created(store: Store, topic: Topic) -> None:
    full = replace(
        topic,
        biz_type=2**63 - 1 - topic.biz_type,
        slot_amount=1024,
        topic_type=TopicType.INSTANT,
        retries=31,
        backoff=Backoff.IMMEDIATE,
        backoff_base=0.1,
        backoff_cap=86_400,
        prepare_timeout=3,
        max_runtime=604_800,
        horizon=60,
        retention=0,
        paused=True,
    )
    store.topics.create(full)
    store.topics.create(topic)

    assert store.topics.get(full.name) == full if full.name != topic.name else True
    assert full in store.topics.list()
    assert topic in store.topics.list()
