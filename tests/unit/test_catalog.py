"""A process's view of the topics, when the process was idle and when the table does not answer."""

from __future__ import annotations

import threading
import time

import pytest
from harness.clocks import PushedClock

from toc.model import catalog as catalog_module
from toc.model.catalog import NOTICED_SECONDS, OLD_PATIENCE_SECONDS, TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import UnknownTopic
from toc.model.topic import Topic


def test_a_process_that_was_idle_waits_to_learn_that_its_topic_was_deleted() -> None:
    topics = [Topic("t", 7, 4)]

    def read() -> list[Topic]:
        time.sleep(0.1)  # such as over a new connection
        return list(topics)

    clock = PushedClock()
    catalog = TopicCatalog(read, clock)
    assert catalog.get("t") == topics[0]
    topics.clear()
    clock.pushed += NOTICED_SECONDS + 0.1
    with pytest.raises(UnknownTopic):
        catalog.get("t")


def test_a_read_that_ends_late_does_not_bring_an_older_view_back() -> None:
    topics = [Topic("t", 7, 4)]
    read_old, answers = threading.Event(), threading.Event()

    def read() -> list[Topic]:
        found = list(topics)
        if len(topics) == 1:
            read_old.set()
            answers.wait(60)
        return found

    catalog = TopicCatalog(read, Clock())
    late = threading.Thread(target=catalog.refresh)
    late.start()
    assert read_old.wait(60)
    topics.append(Topic("new", 8, 4))
    assert "new" in catalog.refresh()
    answers.set()
    late.join()
    assert "new" in catalog.known()


def test_while_the_table_does_not_answer_one_caller_waits_and_the_others_use_the_old_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    answers.set()

    def read() -> list[Topic]:
        answers.wait()
        return [Topic("t", 7, 4)]

    clock = PushedClock()
    catalog = TopicCatalog(read, clock)
    catalog.get("t")
    answers.clear()
    clock.pushed += NOTICED_SECONDS + 0.1
    began = time.monotonic()
    assert catalog.get("t").biz_type == 7
    assert time.monotonic() - began >= OLD_PATIENCE_SECONDS
    monkeypatch.setattr(catalog_module, "OLD_PATIENCE_SECONDS", 3600.0)  # who waited would not come back
    for _ in range(2):
        clock.pushed += NOTICED_SECONDS + 0.1
        assert catalog.get("t").biz_type == 7
    answers.set()
