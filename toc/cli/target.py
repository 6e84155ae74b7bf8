"""toc target create | list | show | alter | rotate | test | pause | resume | delete; toc secrets"""

from __future__ import annotations

import typer

from toc.cli.operations import as_it_is, command, commands
from toc.cli.output import print_json, say, show, show_one
from toc.operate.operation import Record
from toc.operate.operations import targets

app = typer.Typer(no_args_is_help=True, help="Receivers of webhooks.")
secrets = typer.Typer(no_args_is_help=True, help="The keys that encrypt the secrets of webhook targets.")


def _show_secret(record: Record, *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    print(record["secret"])
    say("keep it: it is not shown again. The receiver checks signatures with it.")


@command(app, targets.create)
def _show_new(record: Record, *, as_json: bool) -> None:
    """Headers come from a file or from stdin, because other users of this host can read command lines.

    Example: toc target create shop --url https://shop.example.com/hooks --rate 100
    """
    _show_secret(record, as_json=as_json)


@command(app, targets.list_targets)
def _show_list(record: Record, *, as_json: bool) -> None:
    empty = "no targets; toc target create NAME --url https://host/path"
    show(record["targets"], as_json=as_json, empty=empty)


command(app, targets.alter)(
    as_it_is(
        "An empty file removes all headers.\n\nExample: toc target alter shop --rate 0 --dead-on 404,422"
    )
)
command(app, targets.rotate)(_show_secret)


@command(app, targets.send_test)
def _show_answer(record: Record, *, as_json: bool) -> None:
    """Exits with 1 unless the answer is a 2xx. The request has the topic toc.test."""
    show_one(record, as_json=as_json)
    if record["status"] is None or not 200 <= record["status"] < 300:
        raise typer.Exit(1)


commands(app, targets.show_target, targets.pause, targets.resume, targets.delete)


@secrets.command()
def key() -> None:
    """Print a new key for TOC_SECRET_KEY. toc does not keep it: without it, stored secrets are lost."""
    from toc.store.records.targets import new_key

    print(new_key())


@command(secrets, targets.rotate_keys)
def _show_rotated(record: Record, *, as_json: bool) -> None:
    show_one(record, as_json=as_json)
    if record["locked"]:
        say("no key of TOC_SECRET_KEY opens the locked ones: add theirs behind the others, or recreate them")
        raise typer.Exit(3)
