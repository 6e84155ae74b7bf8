"""toc worker | slots | workers | intents | drain | undrain | pin | unpin | weight | unweight | rebalance"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.operations import acted, made
from toc.cli.options import Json, flag, option
from toc.cli.output import ago, print_json, say, screen, show, table
from toc.cli.streams import end_if_lost
from toc.cli.values import daemon_settings, opened
from toc.model.clock import to_ms
from toc.model.errors import IndexUnavailable, InvalidInput, NotInstalled
from toc.model.wire import parse_instant
from toc.operate.operation import Record
from toc.operate.operations import cluster
from toc.operate.records import ownership_record, queue_record

if TYPE_CHECKING:
    from toc.operate.admin import SlotView
    from toc.sdk.client import TimeoutCenter

SlotName = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="A topic, with NUMBER; or a slot, such as order.close_3, without."),
]

SLOT_SPARE = ("state", "dead", "since", "next_due")
_LATE_SECONDS = 2.0
"""The daemons look at slots this often."""
WATCH_SPARE = (*SLOT_SPARE, "prepared", "scheduled")
"""The columns that a narrow terminal drops first while it is watched."""


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
    from toc.operate.admin import slot_views

    if watch and as_json:
        raise InvalidInput("give --watch or --json, not both")
    with opened() as center:
        if watch:
            _watch(center, topic)
        else:
            views = slot_views(center, topic)
            records = [_slot_record(view) for view in views] if as_json else _slot_lines(center, views)
            show(records, as_json=as_json, empty="no topics, so no slots", spare=_spare(records))
            _say_late(center, views)


@made(cluster.workers)
def workers(record: Record, *, as_json: bool) -> None:
    """Example: toc workers --json"""
    found = record["workers"]
    if not as_json and found and "joined" in found[0]:
        found = list(map(_worker_line, found))
        if not any(one["out_of_reach"] for one in found):
            for one in found:
                del one["out_of_reach"]
    show(
        found,
        as_json=as_json,
        empty="no workers; start one on each host with `toc worker --app ...`",
        spare=("metrics", "pid", "topics", "joined", "leader"),
    )


def _worker_line(one: Record) -> Record:
    """Return a worker for people. `toc intents` shows who asked for what."""
    line = {key: one[key] for key in one if key not in _NOT_SHOWN}
    return line | {
        "tables": _of(one["tables"], one["tables_assigned"]),
        "joined": ago(to_ms(parse_instant(one["joined"])), time.time() * 1000),
        "out_of_reach": ", ".join(one["out_of_reach"]),
        "topics": "all" if one["topics"] is None else ", ".join(one["topics"]),
    }


_NOT_SHOWN = ("weighed_by", "drained_by", "drained_at", "tables_assigned")


@made(cluster.intents)
def intents(record: Record, *, as_json: bool) -> None:
    """Example: toc intents --json"""
    empty = "no drains, pins or weights: slots go where balance puts them"
    show(record["intents"], as_json=as_json, empty=empty)


@made(cluster.drain)
def drain(record: Record, *, as_json: bool) -> None:
    """Exits with 1, and does nothing, if the host has no worker now and is not drained either."""
    host = record["host"]
    done = "is being drained; `toc workers` shows when it owns nothing"
    _tell(record, f"{host} {done if record['present'] else 'gets no slots until `toc undrain`'}", as_json)


@made(cluster.undrain)
def undrain(record: Record, *, as_json: bool) -> None:
    """Exits with 1 if it was not drained and has no worker."""
    done = "may have slots again" if record["changed"] else "was not drained"
    _tell(record, f"{record['host']} {done}", as_json)


def pin(
    topic: SlotName,
    number: Annotated[str, typer.Argument(metavar="[NUMBER]", help="The slot's number in the topic.")],
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="A host, or a worker of `toc workers`.")
    ] = None,
    absent: bool = flag("--absent", cluster.ABSENT.about),
    as_json: Json = False,
) -> None:
    """Assign a slot to a host or worker. While that is absent, the slot goes where balance puts it.

    Exits with 1, and does nothing, if there is no such host or worker now.

    Examples: toc pin order.close 3 host1
              toc pin order.close_3 host1
    """
    # Arguments are filled from left to right: of two, the second is the target.
    slot, target = (topic, number) if target is None else (f"{topic}_{number}", target)
    record = acted(cluster.pin, slot=slot, target=target, absent=absent)
    _tell(record, f"{slot} is pinned to {target}", as_json)


def unpin(
    topic: SlotName,
    number: Annotated[str | None, typer.Argument(metavar="[NUMBER]", help="Its number in the topic.")] = None,
    as_json: Json = False,
) -> None:
    """Let a pinned slot go where balance puts it."""
    slot = topic if number is None else f"{topic}_{number}"
    record = acted(cluster.unpin, slot=slot)
    _tell(record, f"{slot} {'is not pinned any more' if record['changed'] else 'was not pinned'}", as_json)


@made(cluster.weigh, arguments=2)
def weight(record: Record, *, as_json: bool) -> None:
    """Exits with 1, and does nothing, if the host has no worker now and no weight set by an operator."""
    _tell(record, f"each worker of {record['host']} weighs {record['weight']:g} now", as_json)


@made(cluster.unweigh)
def unweight(record: Record, *, as_json: bool) -> None:
    """Exits with 1 if the host had no other weight and has no worker either."""
    done = "has the weight of its daemon again" if record["changed"] else "had no weight set by an operator"
    _tell(record, f"{record['host']} {done}", as_json)


@made(cluster.rebalance)
def rebalance(record: Record, *, as_json: bool) -> None:
    """Example: toc rebalance --dry-run"""
    show(record["moves"], as_json=as_json, empty="nothing to move: all is even")


def _tell(record: Record, text: str, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        say(text)


def _of(owned: int, assigned: int) -> int | str:
    """Return the number owned, with the number assigned where the two differ."""
    return owned if owned == assigned else f"{owned} of {assigned}"


def _watch(center: TimeoutCenter, topic: str | None) -> None:
    """Draw the slots each second. Those that are late or move come first: not all may have room."""
    from toc.operate.admin import slot_views

    with screen() as (to, draw):
        while True:
            views = sorted(slot_views(center, topic), key=_urgency, reverse=True)
            lines = _slot_lines(center, views)
            draw(table(lines, to.width, WATCH_SPARE)[0] if lines else "no topics, so no slots")
            end_if_lost()
            time.sleep(1)


def _spare(records: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the columns that a narrow terminal drops first: ``why`` too, if every reason is a usual one."""
    usual = all(record["why"] in (None, "balance") for record in records)
    return ("state", "why", *SLOT_SPARE[1:]) if usual else SLOT_SPARE


def _urgency(view: SlotView) -> tuple[bool, bool]:
    """Whether a slot is late; whether it has no owner or is moving."""
    return (
        view.overdue_ms or 0
    ) >= 1000, view.ownership is not None and view.ownership.state.value != "owned"


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
