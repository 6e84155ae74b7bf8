"""What keeps tasks waiting for their webhook targets, for ``toc doctor``."""

from __future__ import annotations

from collections.abc import Iterable

from toc.model.errors import SecretsLocked, TocError
from toc.model.finding import Finding, Level
from toc.model.topic import Delivery, Topic
from toc.sdk.client import TimeoutCenter


def examine(center: TimeoutCenter, topics: Iterable[Topic]) -> list[Finding]:
    """Return the targets that are missing, paused, or locked for this host. Asks no receiver."""
    try:
        targets = {target.name: target for target in center.targets.list()}
    except TocError:
        return []  # the schema or the server fails: reported elsewhere
    found = []
    for topic in topics:
        if topic.delivery is Delivery.WEBHOOK and topic.target and topic.target not in targets:
            what = f"topic {topic.name} sends to it, and it is not there: its tasks wait"
            do = f"toc target create {topic.target}, or toc topic alter {topic.name} --target NAME"
            found.append(Finding(Level.WARN, topic.target, what, do))
    for target in targets.values():
        if target.paused:
            why = f": {target.paused_why}" if target.paused_why else ""
            what = f"paused by {target.paused_by}{why}; its tasks wait"
            found.append(Finding(Level.NOTE, target.name, what, f"toc target resume {target.name}"))
        try:
            center.store.targets.open(target)
        except SecretsLocked as exc:
            found.append(Finding(Level.WARN, target.name, str(exc), "set TOC_SECRET_KEY on this host"))
    return found
