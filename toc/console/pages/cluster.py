"""Workers and slots: who owns what, what moves, and what operators have asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from toc.console.shown import Block, Column, Content, Table, flag, names, number, seconds, status, time
from toc.console.view import CLUSTER_SECONDS, View, page
from toc.model.access import Action

WORKERS = (
    Column("worker", "Worker"),
    Column("host", "Host"),
    Column("drained", "Drained", flag),
    Column("weight", "Weight", number),
    Column("owned", "Slots", number),
    Column("assigned", "Assigned", number),
    Column("tables", "Tables", number),
    Column("leader", "Leads", flag),
    Column("out_of_reach", "Does not reach", names),
    Column("version", "Release"),
    Column("joined", "Joined", time),
)
SLOTS = (
    Column("slot", "Slot"),
    Column("state", "State", status),
    Column("owner", "Owner"),
    Column("assigned", "Assigned to"),
    Column("why", "Why"),
    Column("since", "Since", time),
    Column("scheduled", "Scheduled", number),
    Column("prepared", "Taken", number),
    Column("dead", "Dead", number),
    Column("overdue", "Overdue", seconds),
)
INTENTS = (
    Column("what", "What"),
    Column("of", "Of"),
    Column("to", "To"),
    Column("by", "By"),
    Column("at", "When", time),
)
HOSTS = (
    Column("host", "Worker"),
    Column("slots", "Slots", number),
    Column("scheduled", "Scheduled", number),
    Column("prepared", "Taken", number),
)


def by_host(slots: Iterable[Mapping[str, Any]]) -> Table:
    """Return how many slots each worker owns, and what they hold."""
    found: dict[str, dict[str, Any]] = {}
    for one in slots:
        owner = one["owner"] or "nobody"
        held = found.setdefault(owner, {"host": owner, "slots": 0, "scheduled": 0, "prepared": 0})
        held["slots"] += 1
        held["scheduled"] += one["scheduled"] or 0
        held["prepared"] += one["prepared"] or 0
    return Table("Slots by worker", columns=HOSTS, records=list(found.values()))


@page("workers", Action.READ_CLUSTER, menu="Workers", live=True)
async def workers(view: View) -> Content:
    """Workers, slots that move, intents."""
    there, slots, asked = await asyncio.gather(
        view.part("Workers", "GET /v1/workers", fresh=CLUSTER_SECONDS),
        view.part("Slots", "GET /v1/slots", fresh=CLUSTER_SECONDS),
        view.part("Drains, weights and pins", "GET /v1/intents", fresh=CLUSTER_SECONDS),
    )
    blocks: list[Block] = [*there.notes, *slots.notes, *asked.notes]
    if there.value is not None:
        each = there.value["workers"]
        blocks.append(Table("Workers", columns=WORKERS, records=each, empty="No worker is alive."))
    if slots.value is not None:
        each = slots.value["slots"]
        moving = [one for one in each if one["owner"] is None or one["owner"] != one["assigned"]]
        empty = "Every slot is where it belongs."
        blocks.append(Table("Slots that move", columns=SLOTS[:6], records=moving, empty=empty))
        blocks.append(by_host(each))
    if asked.value is not None:
        blocks.append(Table("Drains, weights and pins", columns=INTENTS, records=asked.value["intents"]))
    return Content("Workers and slots", blocks, slots.at or there.at)
