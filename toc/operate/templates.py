"""Topic templates, and the topics that doors create by them when a task is submitted."""

from __future__ import annotations

import secrets

from toc.model.errors import StoreUnavailable, TooManyTopics, TopicExists
from toc.model.topic import Template, Topic, best_of, check_topic_name, matches
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter

log = get_logger(__name__)

DRAWN_FROM, DRAWN_BELOW = 10**9, 10**15
"""The range from which the biz_type of a topic is drawn that a template or code creates. Two draws seldom
clash. The biz_type of another topic, even of a deleted one, is refused."""

_REPEATS = 20


def topic_to_be(center: TimeoutCenter, name: str) -> Topic:
    """Return what the template that fits a name best would make of it, with biz_type 0. Creates nothing.

    Raises UnknownTopic if no template fits, StoreUnavailable.
    """
    return best_of(center.store.templates.list(), name).topic(name, 0)


def ensure_topic(center: TimeoutCenter, name: str, *, by: str) -> Topic:
    """Return a topic; if there is none of that name, create it by the template that fits best.

    For a submit, never for a poll. ``by`` is named in the log. A topic that another program creates at the
    same time is used. Costs nothing for a topic that this process knows. Raises InvalidTopic, UnknownTopic if
    no template fits, TooManyTopics if its cap is reached, StoreUnavailable.
    """
    topic = center.catalog.known().get(name)
    if topic is not None:
        return topic
    check_topic_name(name)
    for _ in range(_REPEATS):
        known = center.catalog.refresh()
        if name in known:
            return known[name]
        template = best_of(center.store.templates.list(), name)
        made = _create(center, name, template, known)
        if made is not None:
            log.info("topic_created", by=by, topic=name, biz_type=made.biz_type, template=template.pattern)
            center.catalog.refresh()
            return made
    raise StoreUnavailable(f"topic {name!r} could not be created: too many are created at once; try again")


def drawn_type() -> int:
    """Return a biz_type that very probably no topic has had."""
    return secrets.randbelow(DRAWN_BELOW - DRAWN_FROM) + DRAWN_FROM


def _create(center: TimeoutCenter, name: str, template: Template, known: dict[str, Topic]) -> Topic | None:
    """Create a topic by a template. None: another program was faster, or a number was taken; look again.

    Programs that create topics at the same moment may exceed the template's cap by these.
    """
    if sum(matches(template.pattern, other) for other in known) >= template.most_topics:
        raise TooManyTopics(
            f"topic {name!r} was not created: template {template.pattern!r} already has as many topics as "
            f"it allows ({template.most_topics}); `toc template alter` raises that"
        )
    topic = template.topic(name, drawn_type())
    try:
        return topic if center.store.topics.add(topic) else None
    except TopicExists:
        return None
