"""toc topic create | list | show | alter | sync | pause | resume | delete"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from toc.cli.operations import act, as_it_is, command, commands
from toc.cli.options import Json, flag, option
from toc.cli.output import say, show, show_one
from toc.cli.values import load_settings
from toc.operate.operation import Record
from toc.operate.operations import topics

if TYPE_CHECKING:
    from toc.operate.topic_sync import Step

app = typer.Typer(no_args_is_help=True, help="Create topics and change their policies.")


command(app, topics.create)(
    as_it_is("Example: toc topic create order.close --biz-type 1001 --slots 8 --retries 10")
)


@command(app, topics.list_topics)
def _show_list(record: Record, *, as_json: bool) -> None:
    records = record["topics"]
    if not as_json:  # `show` prints the policies: they do not fit on a screen
        keys = ("name", "biz_type", "slot_amount", "topic_type", "paused", "retries", "backoff")
        records = [{key: one[key] for key in keys} for one in records]
    empty = "no topics yet; toc topic create order.close --biz-type 1001 --slots 8"
    show(records, as_json=as_json, empty=empty)


command(app, topics.alter)(as_it_is("Example: toc topic alter order.close --slots 16 --backoff-cap 5m"))


@app.command()
def sync(
    app: str = option("MODULE:NAME", "Your TimeoutCenter: shop.deadlines:center.", default=...),
    dry_run: bool = flag("--dry-run", "Change nothing; show what would change, and what would be refused."),
    as_json: Json = False,
) -> None:
    """Create the topics that code declares, and alter what it names and what differs. Deletes none.

    Exits with 1 if something was refused.

    Example: toc topic sync --app shop.deadlines:center --dry-run
    """
    steps = synced(app, dry_run=dry_run)
    lines = [{"topic": step.topic, "action": step.action, "changes": step.changes_text()} for step in steps]
    records = [step.record() for step in steps] if as_json else lines
    show(records, as_json=as_json, empty="the app declares and handles no topic")
    refused = [step for step in steps if step.refused]
    for step in refused:
        say(f"{step.topic}: {step.refused}")
    if refused:
        raise typer.Exit(1)


def synced(app: str, *, dry_run: bool = False) -> list[Step]:
    """Bring the topics to what an application declares, unless it is a ``dry_run``."""
    from toc.operate.topic_sync import plan, sync_topics
    from toc.worker.app import load_app

    load_settings(daemon=not dry_run)
    with load_app(app) as center:
        if dry_run:
            return plan(center, center.declared())
        return sync_topics(center, center.declared(), lambda what, **values: act(what, center, **values))


commands(app, topics.show_topic, topics.pause, topics.resume)


@command(app, topics.delete)
def _show_deleted(record: Record, *, as_json: bool) -> None:
    """First stop the programs that submit to it, and remove its handler from your application. Finished tasks
    are kept for the topic's retention.

    Example: toc topic delete order.close
    """
    show_one({"deleted": record["name"]}, as_json=as_json)
