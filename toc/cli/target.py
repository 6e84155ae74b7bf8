"""toc target create | list | show | alter | rotate | test | pause | resume | delete; toc secrets"""

from __future__ import annotations

from typing import Annotated

import typer

from toc.cli.operations import Option, act, command, commands
from toc.cli.options import Json, option
from toc.cli.output import print_json, say, show, show_one
from toc.cli.values import file_bytes, number, opened
from toc.model.duration import parse_duration
from toc.model.errors import InvalidTarget, shown
from toc.operate.operation import Record
from toc.operate.operations import targets

app = typer.Typer(no_args_is_help=True, help="Receivers of webhooks.")
secrets = typer.Typer(no_args_is_help=True, help="The keys that encrypt the secrets of webhook targets.")

MAX_FILE = 100_000
"""Bytes that a file of headers may have."""


def _statuses(text: str) -> list[int | str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return [int(part) if part in ("400", "404", "422") else part for part in parts]


def _headers(source: str) -> dict[str, str]:
    """Read lines ``Name: value``. Raises InvalidInput, which quotes no value."""
    data = file_bytes("headers:", source, MAX_FILE)
    if len(data) > MAX_FILE:
        raise InvalidTarget(f"headers: the file has more than {MAX_FILE} bytes")
    found: dict[str, str] = {}
    for count, line in enumerate(data.decode("latin-1").split("\n"), 1):
        if not line.strip():
            continue
        name, colon, value = line.removesuffix("\r").partition(":")
        if not colon:
            raise InvalidTarget(f"headers: line {count} is not 'Name: value'")
        if name in found:
            raise InvalidTarget(f"headers: {shown(name)} is given twice")
        found[name] = value.strip(" ")
    return found


LIMITS: dict[str, Option] = {
    "rate": (
        option("N", "Requests per second, over all workers. Default 0: no limit."),
        lambda text: number(text, "--rate") or None,
    ),
    "dead_on": (option("LIST", "Answers that make a task dead: of 400,404,422. '': none."), _statuses),
    "topics": (
        option("LIST", "Patterns of the topics that may use it: shop.*,pay.*. Default all."),
        lambda text: [part.strip() for part in text.split(",")],
    ),
    "headers": (option("FILE", "Lines 'Name: value' that go with every request; - is stdin."), _headers),
}


def _show_secret(record: Record, *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    print(record["secret"])
    say("keep it: it is not shown again. The receiver checks signatures with it.")


@command(app, targets.create, **LIMITS)
def _show_new(record: Record, *, as_json: bool) -> None:
    """Headers come from a file or from stdin, because other users of this host can read command lines.

    Example: toc target create shop --url https://shop.example.com/hooks --rate 100
    """
    _show_secret(record, as_json=as_json)


@command(app, targets.list_targets)
def _show_list(record: Record, *, as_json: bool) -> None:
    show(
        record["targets"],
        as_json=as_json,
        empty="no targets; toc target create NAME --url https://host/path",
        spare=("created", "modified", "paused_by", "paused_why", "previous_until", "headers"),
    )


@command(app, targets.alter, **LIMITS)
def _show_altered(record: Record, *, as_json: bool) -> None:
    """An empty file removes all headers.

    Example: toc target alter shop --rate 0 --dead-on 404,422
    """
    show_one(record, as_json=as_json)


KEEP = option("TIME", "How long the former secret also signs; 0: not at all.", default="1d")
command(app, targets.rotate, keep=(KEEP, parse_duration))(_show_secret)


@command(app, targets.send_test)
def _show_answer(record: Record, *, as_json: bool) -> None:
    """Exits with 1 unless the answer is a 2xx. The request has the topic toc.test."""
    show_one(record, as_json=as_json)
    if record["status"] is None or not 200 <= record["status"] < 300:
        raise typer.Exit(1)


@app.command("show")
def _show_one(
    name: Annotated[str, typer.Argument(metavar="NAME", help=targets.NAME.about)], as_json: Json = False
) -> None:
    """Show a target, without secrets, and the topics that send to it."""
    with opened() as center:
        record = act(targets.show_target, center, name=name)
        topics = [topic.name for topic in center.store.topics.list() if topic.target == name]
    show_one(record | {"used_by": topics}, as_json=as_json)


commands(app, targets.pause, targets.resume)


@command(app, targets.delete)
def _show_deleted(record: Record, *, as_json: bool) -> None:
    show_one({"deleted": record["name"]}, as_json=as_json)


@secrets.command()
def key() -> None:
    """Print a new key for TOC_SECRET_KEY. toc does not keep it: without it, stored secrets are lost."""
    from toc.store.records.secretbox import new_key

    print(new_key())


@command(secrets, targets.rotate_keys)
def _show_rotated(record: Record, *, as_json: bool) -> None:
    show_one(record, as_json=as_json)
    if record["locked"]:
        say("no key of TOC_SECRET_KEY opens the locked ones: add theirs behind the others, or recreate them")
        raise typer.Exit(3)
