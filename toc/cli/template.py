"""toc template create | list | show | alter | delete"""

from __future__ import annotations

from typing import Annotated

import typer

from toc.cli.options import Json, grouped, option
from toc.cli.output import show, show_one
from toc.cli.topic import PARTITIONS, Policies
from toc.cli.values import audited, changing, opened
from toc.model.pattern import matches
from toc.model.template import Template
from toc.operate.records import template_record

app = typer.Typer(
    no_args_is_help=True, help="Patterns by which doors create topics when a task is submitted."
)

Pattern = Annotated[
    str, typer.Argument(metavar="PATTERN", help="Such as 'shop.*': a topic's name, * for any characters.")
]
MOST_TOPICS = "With this many matching topics, no more are created."


@app.command()
@grouped
def create(
    pattern: Pattern,
    slots: int = option("N", PARTITIONS, default=...),
    most_topics: int = option("N", MOST_TOPICS, default=100),
    *,
    policies: Policies,
    as_json: Json = False,
) -> None:
    """Let doors create topics that match, when tasks are submitted to them.

    Example: toc template create 'shop.*' --slots 8 --delivery pull --most-topics 50
    """
    template = Template(pattern, {"slot_amount": slots} | policies.parsed(), most_topics)
    told = {"most_topics": most_topics, "policies": template.policies}
    with opened(account=True) as center, audited(center, "template.create", pattern, **told):
        center.store.templates.create(template)
    show_one(template_record(template), as_json=as_json)


@app.command("list")
def list_templates(as_json: Json = False) -> None:
    """List the templates."""
    with opened() as center:
        records = [template_record(template) for template in center.store.templates.list()]
    show(records, as_json=as_json, empty="no templates; toc template create 'shop.*' --slots 8")


@app.command("show")
def show_template(pattern: Pattern, as_json: Json = False) -> None:
    """Show a template, and the topics that match it."""
    with opened() as center:
        template = center.store.templates.get(pattern)
        topics = [topic.name for topic in center.store.topics.list() if matches(pattern, topic.name)]
    show_one(template_record(template) | {"topics": topics}, as_json=as_json)


@app.command()
@grouped
def alter(
    pattern: Pattern,
    slots: int | None = option("N", PARTITIONS),
    most_topics: int | None = option("N", MOST_TOPICS),
    *,
    policies: Policies,
    as_json: Json = False,
) -> None:
    """Change a template. Topics that it has created stay as they are: `toc topic alter` changes those."""
    given = ({} if slots is None else {"slot_amount": slots}) | policies.parsed()
    told = {"most_topics": most_topics, "policies": given}
    with opened(account=True) as center, audited(center, "template.alter", pattern, **told):
        template = center.store.templates.alter(pattern, given, most_topics)
    show_one(template_record(template), as_json=as_json)


@app.command()
def delete(pattern: Pattern, as_json: Json = False) -> None:
    """Delete a template. Topics that it has created stay."""
    with changing("template.delete", pattern) as center:
        center.store.templates.delete(pattern)
    show_one({"deleted": pattern}, as_json=as_json)
