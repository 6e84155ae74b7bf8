"""Access tokens of gateways: make, list, revoke."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from toc.model.access import MAX_PATTERNS, Role
from toc.model.access import Action as Right
from toc.operate.operation import REQUIRED, Doing, Param, Record, Value, operation
from toc.operate.records import token_record

NAME = Param("name", Value.TEXT, "Who uses it, such as shop-backend.", REQUIRED)


@operation("token.list", "GET /v1/tokens", Right.READ_TOKENS, "List access tokens")
def list_tokens(doing: Doing) -> Record:
    """List the tokens, without secrets. Who has a token sees those that have no more than his."""
    tokens, giver = doing.center.store.tokens.list(), doing.token
    return {"tokens": [token_record(one) for one in tokens if giver is None or giver.covers(one)]}


@operation(
    "token.create", "POST /v1/tokens", Right.CHANGE_TOKENS, "Make an access token",
    NAME,
    Param("roles", Role, "What it may do. May be repeated.", REQUIRED, least=1, most=len(Role), many=True,
          option="--role"),
    Param("topics", Value.TEXT, "On which topics: shop.*, or * for all. May be repeated.", REQUIRED, least=1,
          most=MAX_PATTERNS, many=True, option="--topic", metavar="PATTERN"),
    Param("expires", Value.SECONDS, "Ends after: 12h, 90d. Default: never.", above=0),
    Param("rate", Value.NUMBER, "Requests per second that each gateway process accepts.", above=0),
    takes="NewToken", status=201,
)  # fmt: skip
def create(
    doing: Doing,
    name: str,
    roles: Collection[Role],
    topics: Sequence[str],
    expires: float | None = None,
    rate: float | None = None,
) -> Record:
    """Make a token and show it, only this once. It can have no more than that by which it is made."""
    from toc.operate.tokens import create_token

    center = doing.center
    made = create_token(
        center.store, name, roles=roles, topics=topics, clock=center.clock, by=doing.by, expires=expires,
        rate=rate, giver=doing.token,
    )  # fmt: skip
    return token_record(made.token) | {"token": made.secret}


@operation("token.revoke", "DELETE /v1/tokens/{name}", Right.CHANGE_TOKENS, "Revoke an access token", NAME)
def revoke(doing: Doing, name: str) -> Record:
    """Revoke a token for good, everywhere within a second. Its name is not used again."""
    from toc.operate.tokens import revoke_token

    return token_record(revoke_token(doing.center.store, name, giver=doing.token))
