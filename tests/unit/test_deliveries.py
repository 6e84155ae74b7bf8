"""How a worker process follows the topic table."""

from __future__ import annotations

from typing import Any

from toc.model.handler import Handler
from toc.model.topic import Delivery, Topic
from toc.worker.deliveries import Deliveries


async def send(_task: object) -> None:
    raise AssertionError


class Topics:
    """A catalog: what each refresh finds."""

    def __init__(self, *topics: Topic) -> None:
        self.now = topics

    def known(self) -> dict[str, Topic]:
        return {topic.name: topic for topic in self.now}

    refresh = known


class Busy:
    """A dispatcher that holds entries of a topic while it is ``busy``."""

    busy = True
    changes = 0

    def serve(self, _handler: Handler) -> bool:
        return not self.busy

    def topics_changed(self) -> None:
        self.changes += 1


class Webhooks:
    def handler(self, topic: str) -> Handler:
        return Handler(topic, send, None, True, delivery=Delivery.WEBHOOK)


def test_a_topic_becomes_narrower_while_another_waits_for_its_new_handler() -> None:
    hook, wide = Topic("hook", 1, 2, delivery=Delivery.WEBHOOK), Topic("wide", 2, 8)
    parts: Any = Topics(hook, wide), Busy(), Webhooks()
    catalog, dispatcher, webhooks = parts
    narrowed: list[None] = []
    handlers: dict[str, Handler] = {}
    deliveries = Deliveries(
        catalog=catalog,
        handlers=handlers,
        dispatcher=dispatcher,
        webhooks=webhooks,
        narrowed=lambda: narrowed.append(None),
    )
    catalog.now = hook, Topic("wide", 2, 4)
    deliveries.run_once()
    assert len(narrowed) == 1
    assert not handlers
    dispatcher.busy = False
    deliveries.run_once()
    assert handlers["hook"].delivery is Delivery.WEBHOOK
    changes = dispatcher.changes
    deliveries.run_once()
    assert (len(narrowed), dispatcher.changes) == (1, changes), "it has followed"
