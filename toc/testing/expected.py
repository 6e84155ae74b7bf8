"""What a test expects of a submitted task, and what differs from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from typing_extensions import TypedDict

from toc.model.clock import Duration, seconds_of
from toc.model.task import Task

TOLERANCE = timedelta(milliseconds=5)
"""How far a due time may be off in any case: deadlines are rounded up to a millisecond."""
MAX_SHOWN = 5
"""Most tasks that a failure shows."""


class Like(TypedDict, total=False):
    """How a test describes a task. What is not named may be anything. ``attribute``: items that it must
    have."""

    biz_id: int | str | None
    due_in: Duration | None
    due_at: datetime | None
    attribute: Mapping[str, Any] | None
    body: bytes | None


class Expected:
    """A task as a test describes it. ``tolerance``: how far its due time may be off."""

    def __init__(self, topic: str, like: Like, tolerance: timedelta) -> None:
        self.topic, self.tolerance = topic, tolerance
        self.biz_id, self.body = like.get("biz_id"), like.get("body")
        self.attribute, self.due_at = like.get("attribute"), like.get("due_at")
        due_in = like.get("due_in")
        self.due_in = None if due_in is None else timedelta(seconds=seconds_of(due_in))

    def differences(self, task: Task, now: datetime) -> list[str]:
        """How a task differs, each as a sentence; empty if it does not."""
        found = []
        if task.topic != self.topic:
            found.append(f"its topic is {task.topic!r}")
        if self.biz_id is not None and task.biz_id != self.biz_id:
            found.append(f"its biz_id is {task.biz_id!r}")
        due = self.due_at if self.due_in is None else now + self.due_in
        if due is not None and abs(task.action_time - due) > self.tolerance:
            found.append(f"it is due {_apart(task.action_time - due)}")
        for key, value in (self.attribute or {}).items():
            if key not in task.attribute:
                found.append(f"its attribute has no {key!r}")
            elif task.attribute[key] != value:
                found.append(f"its attribute has {key!r}: {task.attribute[key]!r}")
        if self.body is not None and task.body != self.body:
            found.append(f"its body is {task.body!r}")
        return found

    def __str__(self) -> str:
        named = {"biz_id": self.biz_id, "attribute": self.attribute, "body": self.body}
        parts = [
            repr(self.topic),
            *(f"{name}={value!r}" for name, value in named.items() if value is not None),
        ]
        if self.due_in is not None:
            parts.append(f"due in {short(self.due_in)}")
        elif self.due_at is not None:
            parts.append(f"due at {self.due_at.isoformat()}")
        return ", ".join(parts)


def nearest_first(expected: Expected, tasks: Iterable[Task], now: datetime) -> str:
    """What there is instead, the least different first."""
    found = sorted(
        ((expected.differences(task, now), task) for task in tasks),
        key=lambda one: (one[1].topic != expected.topic, len(one[0]), one[1].job_id),
    )
    if not found:
        return "no task was submitted at all"
    lines = [f"    {describe(task, now)}: {'; '.join(differs)}" for differs, task in found[:MAX_SHOWN]]
    more = [f"    and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
    return "\n".join(["submitted instead, the nearest first:", *lines, *more])


def describe(task: Task, now: datetime) -> str:
    """A task in one line."""
    wait = task.action_time - now
    due = f"due in {short(wait)}" if wait >= timedelta(0) else f"due {short(-wait)} ago"
    return f"{task.topic} biz_id={task.biz_id!r} {task.status.name.lower()}, {due}, {task.attribute!r}"


def short(duration: timedelta) -> str:
    """A duration as people write it: ``7d``, ``1h 30m``, ``2.5s``. From a minute on in whole seconds."""
    milliseconds = round(duration / timedelta(milliseconds=1))
    if milliseconds >= 60_000:
        milliseconds = round(milliseconds, -3)
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        whole, milliseconds = divmod(milliseconds, size)
        if whole:
            parts.append(f"{whole}{unit}")
    if not parts or milliseconds >= 1000:
        parts.append(f"{milliseconds / 1000:g}s")
    return " ".join(parts)


def _apart(difference: timedelta) -> str:
    later = difference > timedelta(0)
    return f"{short(difference if later else -difference)} {'later' if later else 'earlier'}"
