"""toc template create | list | show | alter | delete"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.output import show, show_one
from toc.cli.topic import (
    BackoffBase,
    BackoffCap,
    BackoffKind,
    Concurrency,
    DeliveryKind,
    Horizon,
    MaxRuntime,
    PrepareTimeout,
    Retention,
    Retries,
    Slots,
    Type,
    policies,
)
from toc.cli.values import Json, audited, opened, who
from toc.model.errors import UnknownTemplate
from toc.model.features import Feature
from toc.observe.log import get_logger

if TYPE_CHECKING:
    from toc.model.template import Template

app = typer.Typer(
    no_args_is_help=True, help="Patterns by which doors create topics when a task is submitted."
)

Pattern = Annotated[
    str, typer.Argument(metavar="PATTERN", help="Such as 'shop.*': a topic's name, * for any characters.")
]
MostTopics = Annotated[
    int | None,
    typer.Option(
        "--most-topics", metavar="N", help="With so many topics that fit, none is created any more."
    ),
]


@app.command()
def create(
    pattern: Pattern,
    slots: Annotated[
        int, typer.Option("--slots", metavar="N", help="Partitions: a power of two, 1 to 1024.")
    ],
    most_topics: Annotated[
        int,
        typer.Option(
            "--most-topics", metavar="N", help="With so many topics that fit, none is created any more."
        ),
    ] = 100,
    topic_type: Type = None,
    retries: Retries = None,
    backoff: BackoffKind = None,
    backoff_base: BackoffBase = None,
    backoff_cap: BackoffCap = None,
    prepare_timeout: PrepareTimeout = None,
    max_runtime: MaxRuntime = None,
    horizon: Horizon = None,
    retention: Retention = None,
    concurrency: Concurrency = None,
    delivery: DeliveryKind = None,
    as_json: Json = False,
) -> None:
    """Let doors create topics: at a submit to a topic that is not there, the longest pattern that fits.

    Example: toc template create 'shop.*' --slots 8 --delivery pull --most-topics 50
    """
    from toc.model.template import Template

    given = policies(
        topic_type=topic_type,
        retries=retries,
        backoff=backoff,
        backoff_base=backoff_base,
        backoff_cap=backoff_cap,
        prepare_timeout=prepare_timeout,
        max_runtime=max_runtime,
        horizon=horizon,
        retention=retention,
        concurrency=concurrency,
        delivery=delivery,
    )
    template = Template(pattern, {"slot_amount": slots} | given, most_topics)
    log = get_logger(__name__)
    with opened(account=True) as center:
        if delivery is not None:
            center.require(Feature.DELIVERY)
        with audited(center, "template.create", pattern, most_topics=most_topics, **template.policies):
            center.store.templates.create(template)
        log.info("template_changed", by=who(), pattern=pattern, what="created")
    show_one(_record(template), as_json=as_json)


@app.command("list")
def list_templates(as_json: Json = False) -> None:
    """List the templates."""
    with opened() as center:
        templates = center.store.templates.list()
    show(
        [_record(template) for template in templates],
        as_json=as_json,
        empty="no templates; toc template create 'shop.*' --slots 8",
    )


@app.command("show")
def show_template(pattern: Pattern, as_json: Json = False) -> None:
    """Show a template, and the topics that fit it."""
    from toc.model.pattern import matches

    with opened() as center:
        template = next((each for each in center.store.templates.list() if each.pattern == pattern), None)
        if template is None:
            raise UnknownTemplate(f"there is no template {pattern!r}; `toc template list` shows all")
        topics = [topic.name for topic in center.store.topics.list() if matches(pattern, topic.name)]
    show_one(_record(template) | {"topics": topics}, as_json=as_json)


@app.command()
def alter(
    pattern: Pattern,
    slots: Slots = None,
    most_topics: MostTopics = None,
    topic_type: Type = None,
    retries: Retries = None,
    backoff: BackoffKind = None,
    backoff_base: BackoffBase = None,
    backoff_cap: BackoffCap = None,
    prepare_timeout: PrepareTimeout = None,
    max_runtime: MaxRuntime = None,
    horizon: Horizon = None,
    retention: Retention = None,
    concurrency: Concurrency = None,
    delivery: DeliveryKind = None,
    as_json: Json = False,
) -> None:
    """Change a template. Topics that it has created stay as they are: `toc topic alter` changes those."""
    given = policies(
        slot_amount=slots,
        topic_type=topic_type,
        retries=retries,
        backoff=backoff,
        backoff_base=backoff_base,
        backoff_cap=backoff_cap,
        prepare_timeout=prepare_timeout,
        max_runtime=max_runtime,
        horizon=horizon,
        retention=retention,
        concurrency=concurrency,
        delivery=delivery,
    )
    log = get_logger(__name__)
    with opened(account=True) as center:
        if delivery is not None:
            center.require(Feature.DELIVERY)
        with audited(center, "template.alter", pattern, most_topics=most_topics, **given):
            template = center.store.templates.alter(pattern, given, most_topics)
        log.info("template_changed", by=who(), pattern=pattern, what="altered")
    show_one(_record(template), as_json=as_json)


@app.command()
def delete(pattern: Pattern, as_json: Json = False) -> None:
    """Delete a template. Topics that it has created stay."""
    log = get_logger(__name__)
    with opened(account=True) as center:
        with audited(center, "template.delete", pattern):
            center.store.templates.delete(pattern)
        log.info("template_changed", by=who(), pattern=pattern, what="deleted")
    show_one({"deleted": pattern}, as_json=as_json)


def _record(template: Template) -> dict[str, Any]:
    """Return a template for display."""
    return {
        "pattern": template.pattern,
        "most_topics": template.most_topics,
        "policies": dict(template.policies),
    }
