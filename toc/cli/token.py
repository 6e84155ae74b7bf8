"""toc token create | list | revoke"""

from __future__ import annotations

import time

import typer

from toc.cli.operations import command, commands
from toc.cli.output import print_json, say, show
from toc.model.documents import instant
from toc.operate.operation import Record
from toc.operate.operations import tokens

app = typer.Typer(no_args_is_help=True, help="Access tokens of the gateway.")


@command(app, tokens.create)
def _show_new(record: Record, *, as_json: bool) -> None:
    """Example: toc token create shop-backend --role produce --topic 'shop.*' --expires 90d"""
    if as_json:
        print_json(record)
        return
    print(record["token"])
    say("keep it: it is not shown again. It is in force within a second.")


@command(app, tokens.list_tokens)
def _show_list(record: Record, *, as_json: bool) -> None:
    """Revoked ones stay in the list."""
    show(
        [token | {"state": _state(token)} for token in record["tokens"]],
        as_json=as_json,
        empty="no tokens; toc token create NAME --role produce --topic 'shop.*'",
    )


commands(app, tokens.revoke)


def _state(token: Record) -> str:
    if token["revoked_at"] is not None:
        return "revoked"
    ends = token["expires_at"]
    return "valid" if ends is None or ends > instant(time.time() * 1000) else "expired"
