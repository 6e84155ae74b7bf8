"""How a worker process follows the topic table."""

from __future__ import annotations

from typing import Any

from toc.model.handler import Handler
from toc.model.topic import Delivery, Slot, Topic
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


def test_a_topic_waits_for_its_new_handler_while_another_changes() -> None:
    hook, wide = Topic("hook", 1, 2, delivery=Delivery.WEBHOOK), Topic("wide", 2, 8)
    parts: Any = Topics(hook, wide), Busy(), Webhooks()
    catalog, dispatcher, webhooks = parts
    handlers: dict[str, Handler] = {}
    looks: list[Slot] = []
    deliveries = Deliveries(
        catalog=catalog,
        handlers=handlers,
        dispatcher=dispatcher,
        webhooks=webhooks,
        look_at=lambda slot, _due: looks.append(slot),
    )
    catalog.now = hook, Topic("wide", 2, 16)
    deliveries.run_once()
    assert not handlers
    dispatcher.busy = False
    deliveries.run_once()
    assert handlers["hook"].delivery is Delivery.WEBHOOK
    changes = dispatcher.changes
    looks.clear()
    deliveries.run_once()
    assert dispatcher.changes == changes, "it has followed"
    assert not looks
    new = Topic("new", 3, 2, delivery=Delivery.WEBHOOK)
    catalog.now = (*catalog.now, new)
    deliveries.run_once()
    assert looks == list(new.slots()), "the first task of a new topic does not wait for the next look"
