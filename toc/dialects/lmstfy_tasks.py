"""lmstfy's jobs as tasks. Knows no server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toc.dialects import names
from toc.dialects.lmstfy_wire import U16
from toc.dialects.names import hashed, topic_for
from toc.model.clock import from_ms
from toc.model.pull import MAX_TTR_SECONDS
from toc.model.sharding import MAX_TABLES, crc32
from toc.model.task import NewTask
from toc.model.topic import Template

NAME = "lmstfy"
DEDUP_KEY = f"{NAME}:job"
RETENTION_SECONDS = 86_400
MAX_TRIES = U16 - 1
"""The most tries of a job. One more, 65,535, would mean no limit."""
PREFIX = f"{NAME}."
LONGEST_NAMESPACE = 86
"""Most characters of a namespace in a topic's name, so that a hash and the dots fit behind it."""


def prefix_of(namespace: str) -> str:
    """Return how the topics of a namespace begin."""
    fits = len(namespace) <= LONGEST_NAMESPACE
    return (topic_for(namespace, PREFIX) if fits else PREFIX + hashed(namespace)) + "."


def topic_of(namespace: str, queue: str) -> str:
    """Return the topic of a queue: ``lmstfy.namespace.queue``, with a hash for what does not fit."""
    return topic_for(queue, prefix_of(namespace))


def template_of(namespace: str) -> Template:
    """Return the template by which topics of a namespace are created."""
    return names.template_of(prefix_of(namespace), max_runtime=MAX_TTR_SECONDS, retention=RETENTION_SECONDS)


def task_of(
    namespace: str,
    queue: str,
    job_id: str,
    body: bytes,
    *,
    due: int,
    expires_at: int,
    tries: int,
    attributes: Mapping[str, str],
    slot_basis: str | None = None,
) -> NewTask:
    """Return a job as a task. Instants are ms; ``expires_at`` 0: never.

    Its attribute keeps the names, which a topic may not hold.
    """
    attribute: dict[str, Any] = {"namespace": namespace, "queue": queue}
    if attributes:
        attribute["attributes"] = dict(attributes)
    return NewTask(
        topic_of(namespace, queue),
        job_id,
        action_time=from_ms(due),
        attribute=attribute,
        dedup_key=DEDUP_KEY,
        slot_basis=slot_basis,
        tries=min(tries, MAX_TRIES),
        expires_at=from_ms(max(expires_at, due)) if expires_at else None,
        body=body or None,
    )


def ascending(job_ids: Iterable[str]) -> list[str]:
    """Return ids of jobs in an order in which their tasks, made at one instant, have ascending job_ids.

    Tasks of one slot that are due at one instant are handed out in the order of their job_ids.
    """
    return sorted(job_ids, key=lambda job_id: crc32(job_id) & (MAX_TABLES - 1))
