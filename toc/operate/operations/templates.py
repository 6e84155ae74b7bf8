"""Topic templates: patterns by which doors create topics when a task is submitted."""

from __future__ import annotations

from toc.model.access import Action as Right
from toc.model.topic import Template, matches
from toc.operate.operation import REQUIRED, Doing, Param, Record, Value, operation
from toc.operate.operations.topics import NEW_SLOTS, POLICIES, SLOTS
from toc.operate.records import template_record

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


@operation(
    "template.show", "GET /v1/templates/{pattern}", Right.READ_TEMPLATES, "Show a topic template", PATTERN
)
def show_template(doing: Doing, pattern: str) -> Record:
    """Show a template, and the topics that match it."""
    store = doing.center.store
    record = template_record(store.templates.get(pattern))
    return record | {"topics": [one.name for one in store.topics.list() if matches(pattern, one.name)]}


@operation(
    "template.create", "POST /v1/templates", Right.CHANGE_TEMPLATES, "Create a topic template",
    PATTERN,
    Param("policies", Value.OBJECT, FIELDS, REQUIRED, parts=(NEW_SLOTS, *POLICIES)),
    Param("most_topics", Value.WHOLE, MAX_TOPICS, 100, least=1),
    takes="NewTemplate", status=201,
)  # fmt: skip
def create(doing: Doing, pattern: str, policies: Record, most_topics: int) -> Record:
    """Let doors create topics that match, when tasks are submitted to them."""
    template = Template(pattern, policies, most_topics)
    doing.center.store.templates.create(template)
    return template_record(template)


@operation(
    "template.alter", "PATCH /v1/templates/{pattern}", Right.CHANGE_TEMPLATES, "Change a topic template",
    PATTERN,
    Param("policies", Value.OBJECT, FIELDS, {}, parts=(SLOTS, *POLICIES)),
    Param("most_topics", Value.WHOLE, MAX_TOPICS, least=1),
    takes="AlteredTemplate",
)  # fmt: skip
def alter(doing: Doing, pattern: str, policies: Record, most_topics: int | None = None) -> Record:
    """Change a template. Topics that it has created stay as they are."""
    return template_record(doing.center.store.templates.alter(pattern, policies, most_topics))


@operation(
    "template.delete", "DELETE /v1/templates/{pattern}", Right.CHANGE_TEMPLATES, "Delete a topic template",
    PATTERN,
)  # fmt: skip
def delete(doing: Doing, pattern: str) -> Record:
    """Delete a template. Topics that it has created stay."""
    doing.center.store.templates.delete(pattern)
    return {"pattern": pattern}
