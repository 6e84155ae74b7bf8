"""toc topic create | list | show | alter | pause | resume | delete"""

from __future__ import annotations

import typer

from toc.cli.operations import command, commands
from toc.cli.output import show, show_one
from toc.operate.operation import Record
from toc.operate.operations import topics

app = typer.Typer(no_args_is_help=True, help="Create topics and change their policies.")


@command(app, topics.create)
def _show_new(record: Record, *, as_json: bool) -> None:
    """Example: toc topic create order.close --biz-type 1001 --slots 8 --retries 10"""
    show_one(record, as_json=as_json)


@command(app, topics.list_topics)
def _show_list(record: Record, *, as_json: bool) -> None:
    records = record["topics"]
    if not as_json:  # `show` prints the policies: they do not fit on a screen
        keys = ("name", "biz_type", "slot_amount", "topic_type", "paused", "retries", "backoff")
        records = [{key: one[key] for key in keys} for one in records]
    show(
        records,
        as_json=as_json,
        empty="no topics yet; toc topic create order.close --biz-type 1001 --slots 8",
        spare=("backoff", "topic_type"),
    )


@command(app, topics.alter)
def _show_altered(record: Record, *, as_json: bool) -> None:
    """Example: toc topic alter order.close --slots 16 --backoff-cap 5m"""
    show_one(record, as_json=as_json)


commands(app, topics.show_topic, topics.pause, topics.resume)


@command(app, topics.delete)
def _show_deleted(record: Record, *, as_json: bool) -> None:
    """First stop the programs that submit to it, and remove its handler from your application. Finished tasks
    are kept for the topic's retention.

    Examples: toc topic delete order.close
              toc topic delete order.close --purge
    """
    counts = {"pending_cancelled": record["cancelled"], "dead_deleted": record["purged"]}
    show_one({"deleted": record["name"], **counts}, as_json=as_json)
