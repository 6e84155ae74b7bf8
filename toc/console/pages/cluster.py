"""Workers and slots: who owns what, what moves, and what operators have asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from toc.console.shown import Block, Content, Table, columns
from toc.console.view import CLUSTER_SECONDS, View, page
from toc.model.access import Action

WORKERS = columns(
    "worker, host, drained, weight, owned: Slots, assigned, tables, leader: Leads, "
    "out_of_reach: Does not reach, version: Release, joined"
)
SLOTS = columns(
    "slot, state, owner, assigned: Assigned to, why, since, scheduled, prepared: Taken, dead, overdue"
)
INTENTS = columns("what, of, to, by, at: When")
HOSTS = columns("worker, slots, scheduled, prepared: Taken")


def by_host(slots: Iterable[Mapping[str, Any]]) -> Table:
    """Return how many slots each worker owns, and what they hold."""
    found: dict[str, dict[str, Any]] = {}
    for one in slots:
        owner = one["owner"] or "nobody"
        held = found.setdefault(owner, {"worker": owner, "slots": 0, "scheduled": 0, "prepared": 0})
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
        title = "Slots that have no owner or move"
        blocks.append(Table(title, columns=SLOTS[:6], records=moving, empty=empty))
        blocks.append(by_host(each))
    if asked.value is not None:
        blocks.append(Table("Drains, weights and pins", columns=INTENTS, records=asked.value["intents"]))
    return Content("Workers and slots", blocks, slots.at or there.at)
