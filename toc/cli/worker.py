"""toc worker | slots | workers | intents | drain | undrain | pin | unpin | weight | unweight | rebalance"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.options import Json, flag, option
from toc.cli.output import ago, and_more, most_urgent, say, screen, show, table
from toc.cli.streams import end_if_lost
from toc.cli.values import daemon_settings, load_settings, opened, who
from toc.model.errors import IndexUnavailable, InvalidInput, NotInstalled
from toc.model.wire import instant
from toc.operate.records import (
    intent_records,
    local_worker_records,
    move_record,
    ownership_record,
    queue_record,
    worker_record,
)

if TYPE_CHECKING:
    from toc.operate.admin import SlotView
    from toc.operate.placement import Placement
    from toc.sdk.client import TimeoutCenter

Host = Annotated[str, typer.Argument(metavar="HOST", help="A host, as `toc workers` shows it.")]
SlotName = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="A topic, with NUMBER; or a slot, such as order.close_3, without."),
]

Absent = Annotated[
    bool, typer.Option("--absent", help="Accept a host that has no worker now; takes effect when it has.")
]

SLOT_SPARE = ("state", "dead", "since", "next_due")
WATCH_SPARE = (*SLOT_SPARE, "prepared", "scheduled")
_LATE_SECONDS = 2.0
"""The daemons look at slots this often."""
"""On a watched terminal a slot has one line, so that as many as possible are shown."""


def worker(
    app: str | None = option("MODULE:NAME", "Your TimeoutCenter: shop.deadlines:center."),
    webhooks: bool = flag("--webhooks", "Send the tasks of topics whose delivery is webhook."),
    processes: int | None = option("N", "Worker processes. Default: one per core."),
    threads: int | None = option("N", "Handlers that each process runs at once. Default 16."),
) -> None:
    """Run handlers, send webhooks, or both: the daemon of this host. SIGTERM or Ctrl-C stops it.

    Examples: toc worker --app shop.deadlines:center --processes 4
              toc worker --webhooks
    """
    if app is None and not webhooks:
        raise InvalidInput("give --app MODULE:NAME, --webhooks, or both")
    asked = {"processes": processes, "threads": threads}
    settings = daemon_settings(**{name: value for name, value in asked.items() if value is not None})
    if webhooks:
        check_webhooks()
    from toc.worker.app import NO_HANDLERS
    from toc.worker.daemon.start import run_daemon

    raise typer.Exit(run_daemon(NO_HANDLERS if app is None else app, settings, webhooks=webhooks))


def check_webhooks() -> None:
    """Raise NotInstalled unless webhooks can be sent from here."""
    try:
        import toc.webhooks.probe  # noqa: F401 - imports the HTTP client
    except ImportError as exc:
        raise NotInstalled("--webhooks needs aiohttp", "webhooks") from exc


def slots(
    topic: str | None = option("NAME", "Only this topic."),
    watch: bool = flag("--watch", "Refresh each second until Ctrl-C."),
    as_json: Json = False,
) -> None:
    """Show every slot: its owner and why, its tasks, how long the first that none has taken has been due.

    What workers have taken and cannot start is told by topic, from the daemons' /metrics. Without ZooKeeper
    only the one daemon knows the owners, and they are not shown.
    """
    if watch and as_json:
        raise InvalidInput("give --watch or --json, not both")
    with opened() as center:
        if watch:
            _watch(center, topic)
        else:
            views = _slot_views(center, topic)
            records = [_slot_record(view) for view in views] if as_json else _slot_lines(center, views)
            show(records, as_json=as_json, empty="no topics, so no slots", spare=_spare(records))
            _say_late(center, views)


def workers(as_json: Json = False) -> None:
    """Show the living workers, their slots, and the tables that they sweep.

    Without ZooKeeper: the workers that use Redis.
    """
    from toc.operate.cluster import open_operator

    settings = load_settings()
    if settings.zookeeper is None:
        from toc.operate import admin

        with opened() as center:
            owned = admin.local_workers(center.store, center.queues)
        empty = "no workers; start one with `toc worker --app ...`"
        show(local_worker_records(owned), as_json=as_json, empty=empty)
        return
    with open_operator(settings) as operator:
        rows = operator.workers()
    now = time.time() * 1000
    records = [
        worker_record(row)
        | {
            "metrics": row.member.metrics,
            "weighed_by": row.weighed_by,
            "drained_by": row.drained_by,
            "drained_at": None if row.drained_at is None else instant(row.drained_at),
        }
        for row in rows
    ]
    if not as_json:
        for record, row in zip(records, rows, strict=True):
            record["tables"] = _of(row.tables, row.tables_assigned)
            record["joined"] = ago(row.joined, now)
            record["out_of_reach"] = ", ".join(record["out_of_reach"])
            record["topics"] = "all" if record["topics"] is None else ", ".join(record["topics"])
            # `toc intents` shows who asked for it
            del record["weighed_by"], record["drained_by"], record["drained_at"], record["tables_assigned"]
            if not any(row.member.out_of_reach for row in rows):
                del record["out_of_reach"]
    show(
        records,
        as_json=as_json,
        empty="no workers; start one on each host with `toc worker --app ...`",
        spare=("metrics", "pid", "topics", "joined", "leader"),
    )


def intents(as_json: Json = False) -> None:
    """Show drains, weights and pins: by whom and when."""
    from toc.operate.cluster import open_operator

    with open_operator(load_settings()) as operator:
        wanted = operator.intents()
    show(
        intent_records(wanted),
        as_json=as_json,
        empty="no drains, pins or weights: slots go where balance puts them",
    )


def drain(host: Host, absent: Absent = False) -> None:
    """Take all slots from a host until `toc undrain`.

    Exits with 1, and does nothing, if the host has no worker now and is not drained either.
    """
    _check_name("host", host)
    with _placement() as placement:
        present = placement.drain(host, absent=absent)
    if present:
        say(f"{host} is being drained; `toc workers` shows when it owns nothing")
    else:
        say(f"{host} gets no slots until `toc undrain`")


def undrain(host: Host) -> None:
    """Let a drained host have slots again. Exits with 1 if it was not drained and has no worker."""
    _check_name("host", host)
    with _placement() as placement:
        found = placement.undrain(host)
    say(f"{host} may have slots again" if found else f"{host} was not drained")


def pin(
    topic: SlotName,
    number: Annotated[str, typer.Argument(metavar="[NUMBER]", help="The slot's number in the topic.")],
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="A host, or a worker of `toc workers`.")
    ] = None,
    absent: Absent = False,
) -> None:
    """Assign a slot to a host or worker. While that is absent, the slot goes where balance puts it.

    Exits with 1, and does nothing, if there is no such host or worker now.

    Examples: toc pin order.close 3 host1
              toc pin order.close_3 host1
    """
    # Arguments are filled from left to right: of two, the second is the target.
    slot, target = (topic, number) if target is None else (f"{topic}_{number}", target)
    _check_name("target", target)
    with _placement() as placement:
        placement.pin(slot, target, absent=absent)
    say(f"{slot} is pinned to {target}")


def unpin(
    topic: SlotName,
    number: Annotated[str | None, typer.Argument(metavar="[NUMBER]", help="Its number in the topic.")] = None,
) -> None:
    """Let a pinned slot go where balance puts it."""
    slot = topic if number is None else f"{topic}_{number}"
    with _placement() as placement:
        found = placement.unpin(slot)
    say(f"{slot} is not pinned any more" if found else f"{slot} was not pinned")


def weight(
    host: Host,
    share: Annotated[float, typer.Argument(metavar="WEIGHT", help="More than 0: 2 is twice what 1 gets.")],
    absent: Absent = False,
) -> None:
    """Give the workers of a host another share of the slots than its TOC_WEIGHT, until `toc unweight`.

    Exits with 1, and does nothing, if the host has no worker now and no weight set by an operator.
    """
    from toc.coordination.operator import check_weight

    check_weight(share)
    _check_name("host", host)
    with _placement() as placement:
        placement.weigh(host, share, absent=absent)
    say(f"each worker of {host} weighs {share:g} now")


def unweight(host: Host) -> None:
    """Let TOC_WEIGHT of the host's daemon count again.

    Exits with 1 if the host had no other weight and has no worker either.
    """
    _check_name("host", host)
    with _placement() as placement:
        found = placement.unweigh(host)
    say(f"{host} has the weight of its daemon again" if found else f"{host} had no weight set by an operator")


def rebalance(dry_run: bool = flag("--dry-run", "Only show what would move."), as_json: Json = False) -> None:
    """Spread every topic's slots evenly, and show the moves."""
    with _placement() as placement:
        moves = placement.rebalance(dry_run=dry_run)
    show([move_record(move) for move in moves], as_json=as_json, empty="nothing to move: all is even")


def _of(owned: int, assigned: int) -> int | str:
    """Return the number owned, with the number assigned where the two differ."""
    return owned if owned == assigned else f"{owned} of {assigned}"


def _check_name(what: str, name: str) -> None:
    """Raise InvalidInput for a bad name, before ZooKeeper is asked."""
    from toc.coordination.znodes import check_node_name

    check_node_name(what, name)


@contextmanager
def _placement() -> Iterator[Placement]:
    """Yield what changes where slots go, in the name of this user."""
    from toc.operate.cluster import open_operator
    from toc.operate.placement import Placement

    with opened() as center, open_operator(center.settings) as operator:
        hint = "add --absent if it will come later"
        yield Placement(operator, center.store, by=who(), cluster=center.settings.cluster, hint=hint)


def _watch(center: TimeoutCenter, topic: str | None) -> None:
    from rich.console import Group

    with screen() as (to, draw):
        while True:
            views = _slot_views(center, topic)
            seen = most_urgent(views, to.height - 5, _urgency) if to.is_terminal else views
            lines = [_in_one_line(each) for each in _slot_lines(center, seen)]
            drawn = table(lines, to.width, WATCH_SPARE, cut="why")[0] if lines else "no topics, so no slots"
            draw(Group(drawn, and_more(len(views) - len(seen), "slots")))
            end_if_lost()
            time.sleep(1)


def _spare(records: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the columns that a narrow terminal drops first: ``why`` too, if every reason is a usual one."""
    usual = all(record["why"] in (None, "balance") for record in records)
    return ("state", "why", *SLOT_SPARE[1:]) if usual else SLOT_SPARE


def _in_one_line(record: dict[str, Any]) -> dict[str, Any]:
    """Put the columns that are seldom filled at the start of ``why``, so that a slot takes one line."""
    going, error = record.pop("moving_to", None), record.pop("error", None)
    words = [error, going and f"to {going}", record["why"]]
    return record | {"why": ": ".join(word for word in words if word) or None}


def _urgency(view: SlotView) -> tuple[int, bool]:
    """Sort key of what must stay on the screen: late slots, then slots without an owner or moving."""
    late = (view.overdue_ms or 0) // 1000
    return late, view.ownership is not None and view.ownership.state.value != "owned"


def _say_late(center: TimeoutCenter, views: list[SlotView]) -> None:
    """Tell of topics with tasks that their slots do not show as late: workers have taken them, or put them
    off."""
    from toc.operate.daemons import late

    seen: dict[str, float] = {}
    for view in views:
        seen[view.slot.topic] = max(seen.get(view.slot.topic, 0), (view.overdue_ms or 0) / 1000)
    for topic, told in sorted(late(center.settings).items()):
        if topic in seen and told.seconds > seen[topic] + _LATE_SECONDS:
            say(
                f"{topic}: a task that its workers cannot start has been due for {told.seconds:.0f} s, "
                f"{told.waiting} wait for a handler; see toc top, toc doctor"
            )


def _slot_views(center: TimeoutCenter, topic: str | None) -> list[SlotView]:
    from toc.operate import admin
    from toc.operate.cluster import slot_owners

    return admin.slot_views(center.store, center.queues, slot_owners(center.settings), topic=topic)


def _slot_lines(center: TimeoutCenter, views: list[SlotView]) -> list[dict[str, Any]]:
    """Return the slots for people: times as distances from now, without empty columns."""
    now = center.clock.now_ms()
    records = [_slot_record(view) for view in views]
    for record, view in zip(records, views, strict=True):
        if view.ownership and view.ownership.since:
            record["since"] = ago(view.ownership.since, now)
        if not isinstance(view.queues, IndexUnavailable) and view.queues.next_due is not None:
            record["next_due"] = ago(view.queues.next_due, view.queues.redis_now_ms)
    seldom = ("state", "moving_to", "error")
    idle = [name for name in seldom if not any(each[name] for each in records)]
    return [{name: value for name, value in each.items() if name not in idle} for each in records]


def _slot_record(view: SlotView) -> dict[str, Any]:
    ownership, counts = view.ownership, queue_record(view)
    record = ownership_record(view) | {
        "moving_to": ownership.assigned if ownership and ownership.state.value == "moving" else None,
        "why": (ownership and ownership.reason) or None,
    }
    counts["overdue_seconds"] = counts.pop("overdue")
    error = str(view.queues) if isinstance(view.queues, IndexUnavailable) else None
    return record | counts | {"error": error}
