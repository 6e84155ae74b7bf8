"""Brings the topic table to what code declares: creates topics, alters what is named and differs.

Each step is the operation that an operator would use, with its checks and its audit. One that is refused says
why, and the others go on. Nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from toc.model.errors import TocError
from toc.model.topic import Declaration, Topic
from toc.operate import topics
from toc.operate.operation import Record
from toc.operate.operations import topics as operations
from toc.operate.templates import drawn_type
from toc.sdk.client import TimeoutCenter


class Step(NamedTuple):
    """What becomes of one declared topic: ``refused`` tells the error that it meets, or would meet."""

    topic: str
    action: str
    """create, alter, none, or refused."""
    changes: dict[str, Any]
    was: dict[str, Any]
    refused: str = ""

    def changes_text(self) -> str:
        """Return the changes in a line."""
        return ", ".join(
            f"{name} {self.was[name]} -> {value}" if name in self.was else f"{name} {value}"
            for name, value in self.changes.items()
        )

    def record(self) -> Record:
        """Return it as JSON carries it."""
        changes = {name: {"was": self.was.get(name), "is": value} for name, value in self.changes.items()}
        return {
            "topic": self.topic, "action": self.action, "changes": changes, "refused": self.refused or None
        }  # fmt: skip


def plan(center: TimeoutCenter, declared: Iterable[Declaration]) -> list[Step]:
    """Return what a sync would do, and what of it would be refused. Changes nothing."""
    known = {topic.name: topic for topic in center.store.topics.list()}
    return [_step(center, one, known.get(one.name)) for one in declared]


def sync_topics(
    center: TimeoutCenter, declared: Iterable[Declaration], perform: Callable[..., Record]
) -> list[Step]:
    """Do it: ``perform`` gets the operations with their values. Returns what was done, or refused."""
    return [_done(step, perform) for step in plan(center, declared)]


def _step(center: TimeoutCenter, one: Declaration, topic: Topic | None) -> Step:
    if topic is None:
        made = one.topic(0)
        changes = {name: getattr(made, name) for name in ("slot_amount", *one.fields)}
        step = Step(one.name, "create", changes, {})
    else:
        changes = one.changes(topic)
        was = {name: getattr(topic, name) for name in changes}
        step = Step(one.name, "alter" if changes else "none", changes, was)
    try:
        if topic is None:
            topics.check_new(center, one.topic(0), typed="biz_type" in changes)
        elif changes:
            topics.check_change(center, topic, changes)
    except TocError as exc:
        return _refused(step, exc)
    return step


def _done(step: Step, perform: Callable[..., Record]) -> Step:
    try:
        if step.action == "alter":
            perform(operations.alter, topic=step.topic, **step.changes)
        elif step.action == "create":
            perform(operations.create, name=step.topic, **{"biz_type": drawn_type(), **step.changes})
    except TocError as exc:
        return _refused(step, exc)
    return step


def _refused(step: Step, error: TocError) -> Step:
    return step._replace(action="refused", refused=f"{type(error).__name__}: {error}")
