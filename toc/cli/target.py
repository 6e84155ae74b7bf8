"""toc target create | list | show | alter | rotate | test | pause | resume | delete; toc secrets"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.options import Group, Json, grouped, option
from toc.cli.output import print_json, say, show, show_one
from toc.cli.values import audited, changing, duration, file_bytes, opened, who
from toc.model.errors import InvalidTarget, shown
from toc.operate.records import target_record

if TYPE_CHECKING:
    from toc.sdk.targets import NewSecret

app = typer.Typer(no_args_is_help=True, help="Receivers of webhooks.")
secrets = typer.Typer(no_args_is_help=True, help="The keys that encrypt the secrets of webhook targets.")

MOST_FILE = 100_000
"""Bytes that a file of headers may have."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Such as shop: letters, digits, '.', '_', '-'.")]
URL = "Where tasks are sent: https://host/path."


class Limits(Group):
    """The limits of targets, and the headers of their requests."""

    timeout: str | None = option("TIME", "Longest request. Default 15s.")
    concurrency: int | None = option("N", "Requests in flight, over all workers. Default 50.")
    rate: float | None = option("N", "Requests per second, over all workers. Default 0: no limit.")
    dead_on: str | None = option("LIST", "Answers that make a task dead: of 400,404,422. '': none.")
    topics: str | None = option("LIST", "Patterns of the topics that may use it: shop.*,pay.*. Default all.")
    headers: str | None = option("FILE", "Lines 'Name: value' that go with every request; - is stdin.")

    def parsed(self) -> dict[str, Any]:
        """Return those that were given, by the names of Target's fields. Reads the headers."""
        given: dict[str, Any] = dict(self)
        if "timeout" in given:
            given["timeout"] = duration(given["timeout"])
        if "rate" in given:
            given["rate"] = given["rate"] or None
        if "dead_on" in given:
            parts = [part.strip() for part in given["dead_on"].split(",") if part.strip()]
            given["dead_on"] = [int(part) if part in ("400", "404", "422") else part for part in parts]
        if "topics" in given:
            given["topics"] = [part.strip() for part in given["topics"].split(",")]
        if "headers" in given:
            given["headers"] = _headers(given["headers"])
        return given


@app.command()
@grouped
def create(
    name: Name, url: str = option("URL", URL, default=...), *, limits: Limits, as_json: Json = False
) -> None:
    """Register a receiver and print its signing secret, only this once.

    Headers come from a file or from stdin, because other users of this host can read command lines.

    Example: toc target create shop --url https://shop.example.com/hooks --rate 100
    """
    from toc.operate.audit import target_changed

    given = limits.parsed()
    with changing("target.create", name, **target_changed({"url": url, **given})) as center:
        made = center.targets.create(name, url, **given)
    _tell_secret(made, as_json=as_json)


@app.command("list")
def list_targets(as_json: Json = False) -> None:
    """List the targets, and those that topics name but that do not exist."""
    with opened() as center:
        targets = center.targets.list()
        topics = center.store.topics.list()
    known = {target.name for target in targets}
    show(
        [target_record(target) for target in targets],
        as_json=as_json,
        empty="no targets; toc target create NAME --url https://host/path",
        spare=("created", "modified", "paused_by", "paused_why", "previous_until", "headers"),
    )
    for topic in topics:
        if topic.target and topic.target not in known:
            say(f"topic {topic.name} sends to target {topic.target}, which does not exist: its tasks wait")


@app.command("show")
def show_target(name: Name, as_json: Json = False) -> None:
    """Show a target, without secrets, and the topics that send to it."""
    with opened() as center:
        target = center.store.targets.get(name)
        topics = [topic.name for topic in center.store.topics.list() if topic.target == name]
    show_one(target_record(target) | {"used_by": topics}, as_json=as_json)


@app.command()
@grouped
def alter(name: Name, url: str | None = option("URL", URL), *, limits: Limits, as_json: Json = False) -> None:
    """Change a target. --headers replaces all its headers; an empty file removes them.

    Example: toc target alter shop --rate 0 --dead-on 404,422
    """
    from toc.operate.audit import target_changed

    given = limits.parsed()
    with changing("target.alter", name, **target_changed({"url": url, **given})) as center:
        target = center.targets.alter(name, url=url, **given)
    show_one(target_record(target), as_json=as_json)


@app.command()
def rotate(
    name: Name,
    keep: str = option("TIME", "How long the former secret also signs; 0: not at all.", default="1d"),
    as_json: Json = False,
) -> None:
    """Give a target a new signing secret and print it, only this once.

    Until --keep is over, requests are signed with both, so receivers can switch without a gap.
    """
    seconds = duration(keep)
    with changing("target.rotate", name, keep=seconds) as center:
        made = center.targets.rotate(name, keep=seconds)
    _tell_secret(made, as_json=as_json)


@app.command("test")
def send_test(name: Name, as_json: Json = False) -> None:
    """Send a target one signed request that belongs to no task.

    Exits with 1 unless the answer is a 2xx. The request has the topic toc.test.
    """
    with opened(account=True) as center, audited(center, "target.test", name) as record:
        answer = center.targets.test(name)
        record.update(status=answer.status)
    show_one(answer._asdict(), as_json=as_json)
    if answer.status is None or not 200 <= answer.status < 300:
        raise typer.Exit(1)


@app.command()
def pause(
    name: Name,
    why: str = option("TEXT", "A reason, shown to other operators.", default=""),
    as_json: Json = False,
) -> None:
    """Send nothing more to a target; its tasks wait. Requests in flight end."""
    with changing("target.pause", name, why=why) as center:
        target = center.targets.pause(name, why=why, by=who())
    show_one(target_record(target), as_json=as_json)


@app.command()
def resume(name: Name, as_json: Json = False) -> None:
    """Send to a paused target again. Its own answer 410 may have paused it."""
    with changing("target.resume", name) as center:
        target = center.targets.resume(name)
    show_one(target_record(target), as_json=as_json)


@app.command()
def delete(name: Name, as_json: Json = False) -> None:
    """Delete a target and its secret. Its tasks wait until a target of that name exists again."""
    with changing("target.delete", name) as center:
        center.targets.delete(name)
    show_one({"deleted": name}, as_json=as_json)


@secrets.command()
def key() -> None:
    """Print a new key for TOC_SECRET_KEY. toc does not keep it: without it, stored secrets are lost."""
    from toc.store.records.secretbox import new_key

    print(new_key())


@secrets.command("rotate")
def rotate_keys(as_json: Json = False) -> None:
    """Encrypt the secrets of all targets with the first key of TOC_SECRET_KEY. May be repeated.

    First put the new key before the old one on every host: it is refused while a worker that sends webhooks
    does not know it. Remove the old key afterwards.
    """
    from toc.operate.targets import rotate_key

    with opened(account=True) as center, audited(center, "secrets.rotate", "all targets") as record:
        done, locked = rotate_key(center)
        record.update(targets=done, locked=locked)
    show_one({"targets": done, "locked": list(locked)}, as_json=as_json)
    if locked:
        say("no key of TOC_SECRET_KEY opens the locked ones: add theirs behind the others, or recreate them")
        raise typer.Exit(3)


def _headers(source: str) -> dict[str, str]:
    """Read lines ``Name: value``. Raises InvalidInput, which quotes no value."""
    data = file_bytes("headers:", source, MOST_FILE)
    if len(data) > MOST_FILE:
        raise InvalidTarget(f"headers: the file has more than {MOST_FILE} bytes")
    found: dict[str, str] = {}
    for number, line in enumerate(data.decode("latin-1").split("\n"), 1):
        if not line.strip():
            continue
        name, colon, value = line.removesuffix("\r").partition(":")
        if not colon:
            raise InvalidTarget(f"headers: line {number} is not 'Name: value'")
        if name in found:
            raise InvalidTarget(f"headers: {shown(name)} is given twice")
        found[name] = value.strip(" ")
    return found


def _tell_secret(made: NewSecret, *, as_json: bool) -> None:
    if as_json:
        print_json(target_record(made.target) | {"secret": made.secret})
        return
    print(made.secret)
    say("keep it: it is not shown again. The receiver checks signatures with it.")
