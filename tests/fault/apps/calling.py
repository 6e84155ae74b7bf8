"""The application of ``hostile`` with one topic more, whose handler is a coroutine, too."""

from fault.apps import hostile

center = hostile.center
center.handler("test.other")(hostile.on_event_loop)
