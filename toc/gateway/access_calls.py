"""Calls about who may do what, and what was done: tokens, templates, the audit."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field

from toc.gateway.calls import Answer, Asked, HttpCall, Instant, Model, Query
from toc.model.access import MOST_PATTERNS, Action, Role, Token
from toc.model.clock import to_ms
from toc.model.pattern import matches
from toc.model.template import Template
from toc.operate import tokens
from toc.operate.audit import action_record
from toc.operate.records import template_record, token_record

# --- tokens


class NewToken(Model):
    """An access token to make. It can have no more than the one by which it is made."""

    name: str
    roles: list[Annotated[Role, Field(strict=False)]] = Field(min_length=1, max_length=len(Role))
    topics: list[str] = Field(min_length=1, max_length=MOST_PATTERNS, description="Patterns, such as shop.*")
    expires: float | None = Field(None, gt=0, allow_inf_nan=False, description="Seconds; null: no end.")
    rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Requests per second at each gateway process; null: no limit.",
    )


async def list_tokens(asked: Asked) -> Answer:
    """List the tokens that have no more than the caller's; never the secrets."""
    table, covers = asked.service.center.store.tokens, asked.token.covers

    def found() -> list[dict[str, Any]]:
        return [token_record(one) for one in table.list() if covers(one)]

    return Answer({"tokens": await asked.service.at_topics(found)})


async def create_token(asked: Asked) -> Answer:
    """Make a token and show its secret, this once."""
    center, values = asked.service.center, dict(asked.body.__dict__)
    make = partial(tokens.create_token, center.store, values.pop("name"), **values)
    async with asked.audit("token.create", asked.body.name, values):
        made = await asked.service.at_topics(make, clock=center.clock, by=asked.token.name, giver=asked.token)
    return Answer({**token_record(made.token), "token": made.secret}, 201)


async def revoke_token(asked: Asked) -> Answer:
    """End a token for good, everywhere within 1 s."""
    name = asked.path["name"]
    async with asked.audit("token.revoke", name, {}):
        token: Token = await asked.service.at_topics(
            tokens.revoke_token, asked.service.center.store, name, giver=asked.token
        )
    return Answer(token_record(token))


# --- templates


class NewTemplate(Model):
    """A topic template. ``policies`` are fields of a topic; slot_amount must be one of them."""

    pattern: str
    policies: dict[str, Any]
    most_topics: int = Field(ge=1)


class AlteredTemplate(Model):
    """What to change of a template."""

    policies: dict[str, Any] = Field(default_factory=dict)
    most_topics: int | None = Field(None, ge=1)


async def list_templates(asked: Asked) -> Answer:
    """List the topic templates."""
    found = await asked.service.at_topics(asked.service.center.store.templates.list)
    return Answer({"templates": [template_record(one) for one in found]})


async def get_template(asked: Asked) -> Answer:
    """Show a topic template, and the topics that fit it."""
    pattern, center = asked.path["pattern"], asked.service.center
    template = await asked.service.at_topics(center.store.templates.get, pattern)
    names = [name for name in center.catalog.known() if matches(pattern, name)]
    return Answer({**template_record(template), "topics": sorted(names)})


async def create_template(asked: Asked) -> Answer:
    """Create a topic template."""
    body: NewTemplate = asked.body
    template = Template(body.pattern, body.policies, body.most_topics)
    details = {"most_topics": body.most_topics, "policies": body.policies}
    async with asked.audit("template.create", body.pattern, details):
        await asked.service.at_topics(asked.service.center.store.templates.create, template)
    return Answer(template_record(template), 201)


async def alter_template(asked: Asked) -> Answer:
    """Change a topic template; topics that it has made stay as they are."""
    body: AlteredTemplate = asked.body
    pattern = asked.path["pattern"]
    details = {"policies": body.policies, "most_topics": body.most_topics}
    async with asked.audit("template.alter", pattern, details):
        template = await asked.service.at_topics(
            asked.service.center.store.templates.alter, pattern, body.policies, body.most_topics
        )
    return Answer(template_record(template))


async def delete_template(asked: Asked) -> Answer:
    """Delete a topic template; topics that it has made stay."""
    pattern = asked.path["pattern"]
    async with asked.audit("template.delete", pattern, {}):
        await asked.service.at_topics(asked.service.center.store.templates.delete, pattern)
    return Answer({"pattern": pattern})


# --- audit


class AuditQuery(Query):
    """Which actions."""

    by: str | None = Field(None, max_length=128)
    action: str | None = Field(None, max_length=64)
    target: str | None = Field(None, max_length=255)
    after: Instant | None = Field(None, description="From this time on, RFC 3339.")
    limit: int = Field(100, ge=1, le=1000)
    next: int | None = Field(None, ge=1, lt=2**63, description="The next of the page before.")


async def audit(asked: Asked) -> Answer:
    """Show what operators did, the latest first."""
    query: AuditQuery = asked.query
    rows = await asked.service.at_topics(
        asked.service.center.store.audit.list, query.limit,
        actor=query.by, action=query.action, target=query.target,
        since=None if query.after is None else to_ms(query.after), below=query.next,
    )  # fmt: skip
    following = rows[-1].audit_id if len(rows) == query.limit else None
    return Answer({"actions": [action_record(row) for row in rows], "next": following})


CALLS = (
    HttpCall("GET", "/v1/tokens", Action.READ_TOKENS, list_tokens, "List access tokens"),
    HttpCall(
        "POST", "/v1/tokens", Action.CHANGE_TOKENS, create_token, "Make an access token",
        body=NewToken, status=201,
    ),
    HttpCall("DELETE", "/v1/tokens/{name}", Action.CHANGE_TOKENS, revoke_token, "Revoke an access token"),
    HttpCall("GET", "/v1/templates", Action.READ_TEMPLATES, list_templates, "List topic templates"),
    HttpCall(
        "POST", "/v1/templates", Action.CHANGE_TEMPLATES, create_template, "Create a topic template",
        body=NewTemplate, status=201,
    ),
    HttpCall(
        "GET", "/v1/templates/{pattern}", Action.READ_TEMPLATES, get_template, "Show a topic template"
    ),
    HttpCall(
        "PATCH", "/v1/templates/{pattern}", Action.CHANGE_TEMPLATES, alter_template,
        "Change a topic template",
        body=AlteredTemplate,
    ),
    HttpCall(
        "DELETE", "/v1/templates/{pattern}", Action.CHANGE_TEMPLATES, delete_template,
        "Delete a topic template",
    ),
    HttpCall("GET", "/v1/audit", Action.READ_AUDIT, audit, "See what operators did", query=AuditQuery),
)  # fmt: skip
