"""Topic templates, and the topics that doors create by them when a task is submitted."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from toc.model.access import Action as Right
from toc.model.errors import StoreUnavailable, TooManyTopics, TopicExists
from toc.model.topic import Template, Topic, best_of, check_topic_name, matches
from toc.observe.log import get_logger
from toc.operate.operation import REQUIRED, Doing, Param, Record, Value, operation
from toc.operate.records import template_record
from toc.operate.topics import NEW_SLOTS, POLICIES, SLOTS, drawn_type

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter

log = get_logger(__name__)

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
        check_room(template, name, known)  # programs that create topics at this moment may exceed it
        made = template.topic(name, drawn_type())
        with suppress(TopicExists):  # another program was faster, or its number was taken: look again
            center.store.topics.create(made)
            log.info("topic_created", by=by, topic=name, biz_type=made.biz_type, template=template.pattern)
            center.catalog.refresh()
            return made
    raise StoreUnavailable(f"topic {name!r} could not be created: too many are created at once; try again")


def check_room(template: Template, name: str, known: Iterable[str]) -> None:
    """Raise TooManyTopics if the cap of a template is reached, ``known`` being the names of all topics."""
    if sum(matches(template.pattern, other) for other in known) >= template.most_topics:
        raise TooManyTopics(
            f"topic {name!r} was not created: template {template.pattern!r} already has as many topics as "
            f"it allows ({template.most_topics}); `toc template alter` raises that"
        )


PATTERN = Param(
    "pattern", Value.TEXT, "Such as 'shop.*': a topic's name, * for any characters.", REQUIRED,
    metavar="PATTERN",
)  # fmt: skip
FIELDS = "Fields of a topic; slot_amount must be one of them."
MAX_TOPICS = "With this many matching topics, no more are created."


@operation("template.list", "GET /v1/templates", Right.READ_TEMPLATES, "List topic templates")
def list_templates(doing: Doing) -> Record:
    """List the templates."""
    return {"templates": [template_record(one) for one in doing.center.store.templates.list()]}


@operation("template.show", "GET /v1/templates/{pattern}", Right.READ_TEMPLATES, "Show a topic template",
           PATTERN)  # fmt: skip
def show_template(doing: Doing, pattern: str) -> Record:
    """Show a template, and the topics that match it."""
    store = doing.center.store
    record = template_record(store.templates.get(pattern))
    return record | {"topics": [one.name for one in store.topics.list() if matches(pattern, one.name)]}


@operation("template.create", "POST /v1/templates", Right.CHANGE_TEMPLATES, "Create a topic template",
           PATTERN, Param("policies", Value.OBJECT, FIELDS, REQUIRED, parts=(NEW_SLOTS, *POLICIES)),
           Param("most_topics", Value.WHOLE, MAX_TOPICS, 100, least=1), takes="NewTemplate",
           status=201)  # fmt: skip
def create(doing: Doing, pattern: str, policies: Record, most_topics: int) -> Record:
    """Let doors create topics that match, when tasks are submitted to them.

    toc: Example: toc template create 'shop.*' --slots 8 --delivery pull --most-topics 50
    """
    template = Template(pattern, policies, most_topics)
    doing.center.store.templates.create(template)
    return template_record(template)


@operation("template.alter", "PATCH /v1/templates/{pattern}", Right.CHANGE_TEMPLATES,
           "Change a topic template",
           PATTERN, Param("policies", Value.OBJECT, FIELDS, {}, parts=(SLOTS, *POLICIES)),
           Param("most_topics", Value.WHOLE, MAX_TOPICS, least=1), takes="AlteredTemplate")  # fmt: skip
def alter(doing: Doing, pattern: str, policies: Record, most_topics: int | None = None) -> Record:
    """Change a template. Topics that it has created stay as they are."""
    return template_record(doing.center.store.templates.alter(pattern, policies, most_topics))


@operation("template.delete", "DELETE /v1/templates/{pattern}", Right.CHANGE_TEMPLATES,
           "Delete a topic template", PATTERN)  # fmt: skip
def delete(doing: Doing, pattern: str) -> Record:
    """Delete a template. Topics that it has created stay."""
    doing.center.store.templates.delete(pattern)
    return {"pattern": pattern}
