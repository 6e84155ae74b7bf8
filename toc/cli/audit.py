"""toc audit"""

from __future__ import annotations

from dataclasses import replace

from toc.cli.operations import made
from toc.cli.output import show
from toc.operate.operation import Record
from toc.operate.operations.audit import LIMIT
from toc.operate.operations.audit import audit as operation


@made(operation, limit=replace(LIMIT, default=50, most=10_000), next=None)
def audit(record: Record, *, as_json: bool) -> None:
    """Example: toc audit --after 1d --target order.close"""
    actions = record["actions"]
    if not as_json:
        for action in actions:
            del action["id"], action["ended"]
    show(actions, as_json=as_json, empty="no actions")
