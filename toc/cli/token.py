"""toc token create | list | revoke"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from toc.cli.options import Json, option
from toc.cli.output import print_json, say, show, show_one
from toc.cli.values import changing, duration, opened, who
from toc.model.access import Role
from toc.operate.records import token_record

if TYPE_CHECKING:
    from toc.model.access import Token

app = typer.Typer(no_args_is_help=True, help="Access tokens of the gateway.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Who uses it, such as shop-backend.")]


@app.command()
def create(
    name: Name,
    role: list[Role] = option(None, "What it may do. May be repeated.", default=...),
    topic: list[str] = option(
        "PATTERN", "On which topics: shop.*, or * for all. May be repeated.", default=...
    ),
    expires: str | None = option("TIME", "Ends after: 12h, 90d. Default: never."),
    rate: float | None = option("N", "Requests per second that each gateway process accepts."),
    as_json: Json = False,
) -> None:
    """Make a token and print it, only this once.

    Example: toc token create shop-backend --role produce --topic 'shop.*' --expires 90d
    """
    from toc.operate import tokens

    seconds = None if expires is None else duration(expires)
    roles = sorted(each.value for each in set(role))
    with changing("token.create", name, roles=roles, topics=topic, expires=seconds, rate=rate) as center:
        made = tokens.create_token(
            center.store, name, roles=role, topics=topic, clock=center.clock, by=who(), expires=seconds,
            rate=rate,
        )  # fmt: skip
    if as_json:
        print_json(token_record(made.token) | {"token": made.secret})
        return
    print(made.secret)
    say("keep it: it is not shown again. It is in force within a second.")


@app.command("list")
def list_tokens(as_json: Json = False) -> None:
    """List the tokens, without secrets. Revoked ones stay in the list."""
    with opened() as center:
        tokens = center.store.tokens.list()
        now = center.clock.now_ms()
    records = [token_record(token) | {"state": _state(token, now)} for token in tokens]
    show(
        records,
        as_json=as_json,
        empty="no tokens; toc token create NAME --role produce --topic 'shop.*'",
        spare=("revoked_at", "created", "created_by"),
    )


@app.command()
def revoke(name: Name, as_json: Json = False) -> None:
    """Revoke a token for good, everywhere within a second. Its name is not used again."""
    from toc.operate import tokens

    with changing("token.revoke", name) as center:
        token = tokens.revoke_token(center.store, name)
    show_one(token_record(token), as_json=as_json)


def _state(token: Token, now_ms: int) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "valid" if token.lives(now_ms) else "expired"
