"""toc topic create | list | show | alter | pause | resume | delete"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.bulk import confirm
from toc.cli.options import Group, Json, Yes, flag, grouped, option
from toc.cli.output import print_json, progress_bar, say, show, show_one
from toc.cli.values import audited, changing, duration, opened, whole_seconds
from toc.model.catalog import NOTICED_SECONDS
from toc.model.errors import InvalidInput
from toc.model.topic import Backoff, Delivery, Topic, TopicType
from toc.operate.records import topic_record

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter

"""For how many seconds `show` counts pending tasks without --count."""

_NOT_COUNTED = "not counted: --count does"

app = typer.Typer(no_args_is_help=True, help="Create topics and change their policies.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Such as order.close: letters, digits, '.', '_', '-'.")
]
PARTITIONS = "Partitions: a power of two, 1 to 1024."


class Policies(Group):
    """The policies of topics, by the names of Topic's fields."""

    topic_type: TopicType | None = option(
        None, "timed: deadlines lie ahead (the default). instant: tasks may be due at once.", "--type"
    )
    retries: int | None = option("N", "Total tries, 1 to 31. Default 16.")
    backoff: Backoff | None = option(None, "How long a failed task waits. Default exponential.")
    backoff_base: str | None = option("TIME", "First wait, doubled each try. Default 1s.")
    backoff_cap: str | None = option("TIME", "Longest wait. Default 10m.")
    prepare_timeout: str | None = option("TIME", "A worker silent this long loses its tasks. Default 30s.")
    max_runtime: str | None = option("TIME", "A try that runs longer fails. Default 1h.")
    horizon: str | None = option("TIME", "Later tasks wait in MySQL only. Default 1d.")
    retention: str | None = option("TIME", "How long finished rows are kept. Default 3d.")
    concurrency: int | None = option(
        "N", "Handlers that each worker process runs at once. Default 0: as many as it has threads."
    )
    delivery: Delivery | None = typer.Option(
        None,
        help="Who starts its tasks: handler (default); pull: consumers at a gateway; webhook: receivers.",
    )
    target: str | None = option("NAME", "Where a webhook topic sends its tasks; '' for nowhere.")

    def parsed(self) -> dict[str, Any]:
        """Return those that were given, with durations as seconds. Raises InvalidDelay."""
        parse: dict[str, Callable[[str], float]] = {
            **dict.fromkeys(("backoff_base", "backoff_cap"), duration),
            **dict.fromkeys(("prepare_timeout", "max_runtime", "horizon", "retention"), whole_seconds),
        }
        return {name: parse[name](value) if name in parse else value for name, value in self.items()}


@app.command()
@grouped
def create(
    name: Name,
    biz_type: int = option("N", "Its number in the rows, unique to the topic.", default=...),
    slots: int = option("N", PARTITIONS, default=...),
    *,
    policies: Policies,
    as_json: Json = False,
) -> None:
    """Create a topic.

    Example: toc topic create order.close --biz-type 1001 --slots 8 --retries 10
    """
    from toc.operate import admin

    given = policies.parsed()
    with changing("topic.create", name, biz_type=biz_type, slot_amount=slots, **given) as center:
        topic = admin.create_topic(center, name, biz_type=biz_type, slot_amount=slots, **given)
    show_one(topic_record(topic), as_json=as_json)


@app.command("list")
def list_topics(as_json: Json = False) -> None:
    """List the topics."""
    with opened() as center:
        records = [topic_record(topic) for topic in center.store.topics.list()]
    if not as_json:  # `show` prints the policies: they do not fit on a screen
        keys = ("name", "biz_type", "slot_amount", "topic_type", "paused", "retries", "backoff")
        records = [{key: record[key] for key in keys} for record in records]
    show(
        records,
        as_json=as_json,
        empty="no topics yet; toc topic create order.close --biz-type 1001 --slots 8",
        spare=("backoff", "topic_type"),
    )


@app.command("show")
def show_topic(
    name: Name,
    count: bool = flag("--count", "Count all pending tasks by their number of slots."),
    as_json: Json = False,
) -> None:
    """Show a topic with its policies.

    `pending by slots` counts, with --count, pending tasks by the number of slots that the topic had when they
    were submitted. It reads every pending row.
    """
    from toc.operate import admin

    with opened() as center:
        topic = admin.get_topic(center.store, name)
        found = None
        if count:
            with progress_bar("tables") as progress:
                found = admin.pending_by_slots(center.store, topic, progress=progress)
    record = topic_record(topic)
    if as_json:
        print_json(record | {"pending_by_slots": found})
    else:
        show_one(record | {"pending_by_slots": _amounts(found)}, as_json=False)


def _amounts(found: dict[int, int] | None) -> str:
    if found is None:
        return _NOT_COUNTED
    return ", ".join(f"{tasks} under {amount}" for amount, tasks in found.items()) or "none"


@app.command()
@grouped
def alter(
    name: Name,
    slots: int | None = option("N", PARTITIONS),
    *,
    policies: Policies,
    wait: bool = flag("--wait", "With --delivery: wait until none of its tasks is prepared or leased."),
    as_json: Json = False,
) -> None:
    """Change policies of a topic in use. Name and biz_type cannot change.

    Its delivery can be changed while it is paused and none of its tasks is prepared or leased.

    Examples: toc topic alter order.close --slots 16 --backoff-cap 5m
              toc topic alter order.close --delivery handler --wait
    """
    changes = policies.parsed()
    if slots is not None:
        changes["slot_amount"] = slots
    with changing("topic.alter", name, **changes) as center:
        topic = _alter(center, name, changes, wait=wait)
    if slots is not None:
        say(
            f"new tasks go to {topic.slot_amount} slots, those that are pending keep theirs: "
            f"`toc topic show {name} --count` counts them"
        )
    show_one(topic_record(topic), as_json=as_json)


@app.command()
def pause(name: Name, as_json: Json = False) -> None:
    """Start no more tasks of a topic. New ones are still accepted; running ones finish.

    Returns after some 3 s, when every worker knows it.
    """
    from toc.operate import admin

    with changing("topic.pause", name) as center:
        topic = admin.alter_topic(center.store, name, {"paused": True})
    time.sleep(NOTICED_SECONDS)  # the message that follows must be true
    _tell(topic, "paused", as_json)


@app.command()
def resume(
    name: Name,
    rate: int | None = option("N", "Start at most N waiting tasks per second, cluster-wide.", min=1),
    as_json: Json = False,
) -> None:
    """Start the tasks of a paused topic again, oldest first.

    --rate limits the tasks that are due by now; tasks that become due later are not limited. On a topic that
    is not paused this sets another rate, or none.
    """
    from toc.operate import admin

    with changing("topic.resume", name, rate=rate or 0) as center:
        topic = admin.resume_topic(center.store, name, rate=rate or 0, now_ms=center.clock.now_ms())
    _tell(topic, "running" if rate is None else f"running; what waited starts at {rate} a second", as_json)


@app.command()
def delete(
    name: Name,
    purge: bool = flag("--purge", "First cancel its pending tasks and delete its dead ones."),
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete a paused topic without pending and dead tasks. Its biz_type is never used again.

    First stop the programs that submit to it, and remove its handler from your application. Finished tasks
    are kept for the topic's retention.

    Examples: toc topic delete order.close
              toc topic delete order.close --purge
    """
    from toc.operate import admin, topics

    with opened(account=True) as center:
        admin.get_topic(center.store, name)
        what = ", with all its pending and dead tasks," if purge else ""
        confirm(f"delete topic {name}{what} for good", yes=yes)
        with audited(center, "topic.delete", name, purge=purge) as record, progress_bar(name) as bar:
            ended = topics.delete_topic(center, name, purge=purge, progress=lambda text: bar(0.0, text))
            counts = {"pending_cancelled": ended.rows.pending, "dead_deleted": ended.rows.dead}
            record.update(counts)
    show_one({"deleted": name, **counts}, as_json=as_json)


def _alter(center: TimeoutCenter, name: str, changes: Mapping[str, Any], *, wait: bool) -> Topic:
    from toc.operate import admin, topics

    rest = dict(changes)
    delivery = rest.pop("delivery", None)
    if wait and delivery is None:
        raise InvalidInput("--wait goes with --delivery")
    if delivery is not None:
        # Refuse the rest first: a refusal must not leave half of what was asked.
        replace(admin.get_topic(center.store, name), **rest)
        if rest.get("target"):
            center.store.targets.check_usable(rest["target"], name)
        with progress_bar(name) as bar:
            topic = topics.change_delivery(
                center, name, delivery, wait=wait, progress=lambda text: bar(0.0, text)
            )
        if not rest:
            return topic
    return admin.alter_topic(center.store, name, rest)


def _tell(topic: Topic, state: str, as_json: bool) -> None:
    if as_json:
        print_json(topic_record(topic))
    else:
        say(f"{topic.name} is {state}")
