"""Topics, their slots and their policies."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple, Self

from toc.model.errors import InvalidTopic, shown
from toc.model.sharding import MAX_BIZ_ID, MAX_TABLES, is_power_of_two, is_whole

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAME_HINT = "letters, digits, '.', '_' and '-', at most 128, beginning with a letter or digit"
OF_DIALECTS = frozenset({"youzan", "redis-delayed", "delay-task", "delay-task-callback", "lmstfy"})
"""How the names of topics begin, before a dot, that dialects alone create and submit to."""
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAMESPACE_HINT = "letters, digits, '.', '_' and '-', at most 64, beginning with a letter or digit"
MAX_SLOTS = MAX_TABLES
"""Most slots of a topic. A slot is chosen by the same checksum as a table, so it is bounded as they are."""
SLOT_AMOUNTS = frozenset(1 << power for power in range(MAX_SLOTS.bit_length()))
"""Every number of slots that a topic can have."""
MAX_RETRIES = 31
MAX_DOUBLINGS = 900
"""Most times that the backoff is doubled. 2.0**900 is far beyond any cap, and still fits in a
float."""


class TopicType(StrEnum):
    """When tasks of a topic may be due."""

    TIMED = "timed"
    """action_time must be after now."""
    INSTANT = "instant"
    """action_time may be now or past, and defaults to now."""


class Backoff(StrEnum):
    """How long a failed task waits before its next try."""

    EXPONENTIAL = "exponential"
    """uniform(0, min(base * 2**tries_used, cap)): full jitter."""
    IMMEDIATE = "immediate"
    """No wait."""


class Delivery(StrEnum):
    """Who starts a topic's tasks."""

    HANDLER = "handler"
    """A handler of the application, in a worker process."""
    PULL = "pull"
    """A consumer that asks a gateway for them."""
    WEBHOOK = "webhook"
    """A receiver to which they are sent over HTTP."""


class Slot(NamedTuple):
    """One partition of a topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}_{self.number}"


@dataclass(frozen=True, slots=True)
class Topic:
    """A named stream of tasks of one biz_type, with its policies. All durations are seconds."""

    name: str
    biz_type: int
    slot_amount: int
    """Partitions, a power of two up to 1024, for new tasks. It only grows.

    So the slots of rows with a former amount are among the present ones."""
    topic_type: TopicType = TopicType.TIMED
    """``timed``: new tasks must be due after now; ``instant``: they may be due at once."""
    retries: int = 16
    """All tries, the first included, 1 to 31."""
    backoff: Backoff = Backoff.EXPONENTIAL
    """The wait after n tries: ``exponential``, uniform(0, min(base * 2^n, cap)); or ``immediate``, none."""
    backoff_base: float = 1.0
    """Up to 86,400."""
    backoff_cap: float = 600.0
    """Up to 86,400."""
    prepare_timeout: int = 30
    """A worker that was silent for so long loses the entries that it has taken, 3 to 86,400."""
    max_runtime: int = 3600
    """A try that runs longer has failed, 1 to 604,800. A coroutine then has 5 s to clean up."""
    horizon: int = 86_400
    """Tasks due later than this from now are in MySQL only, 1 to ten years."""
    retention: int = 259_200
    """How long processed and cancelled rows are kept, up to ten years; at least a minute."""
    expires_in: int = 0
    """A task submitted without an expiry expires so long after its action_time, up to ten years; 0: never."""
    paused: bool = False
    """Tasks are accepted and kept, and none starts."""
    concurrency: int = 0
    """How many of its handlers each worker process runs at once, up to 100,000; 0: no limit of its own."""
    resume_rate: int = 0
    """How many tasks that were due before ``resumed_at`` all workers together start per second, up to
    1,000,000; 0: no limit."""
    resumed_at: int = 0
    """When it was resumed, in epoch milliseconds."""
    paused_at: int = 0
    """When it was paused the last time, in epoch milliseconds."""
    delivery: Delivery = Delivery.HANDLER
    """Who starts its tasks: ``handler``, a worker; ``pull``, a consumer that asks a gateway; ``webhook``, a
    worker that sends them. Altered only while it is paused and none of its tasks is prepared or leased."""
    closed: bool = False
    """It is being deleted and takes no new task."""
    target: str = ""
    """The webhook target of tasks that name no other; empty: those wait."""

    def __post_init__(self) -> None:
        check_topic_name(self.name, "name")
        _whole("biz_type", self.biz_type, 0, MAX_BIZ_ID)
        _whole("slot_amount", self.slot_amount, 1, MAX_SLOTS)
        if not is_power_of_two(self.slot_amount):
            raise InvalidTopic(
                f"slot_amount {self.slot_amount} is not a power of two: 1, 2, 4, ... 1024", "slot_amount"
            )
        _whole("retries", self.retries, 1, MAX_RETRIES)
        _whole("prepare_timeout", self.prepare_timeout, 3, 86_400)
        _whole("max_runtime", self.max_runtime, 1, 7 * 86_400)
        _whole("horizon", self.horizon, 1, 10 * 366 * 86_400)
        _whole("retention", self.retention, 0, 10 * 366 * 86_400)
        _whole("expires_in", self.expires_in, 0, 10 * 366 * 86_400)
        _whole("concurrency", self.concurrency, 0, 100_000)
        _whole("resume_rate", self.resume_rate, 0, 1_000_000)
        _whole("resumed_at", self.resumed_at, 0, MAX_BIZ_ID)
        _whole("paused_at", self.paused_at, 0, MAX_BIZ_ID)
        if self.target != "" and not (isinstance(self.target, str) and NAME.fullmatch(self.target)):
            raise InvalidTopic(f"target {shown(self.target)} is not the name of a webhook target", "target")
        for name in ("backoff_base", "backoff_cap"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value <= 86_400:  # nor NaN
                raise InvalidTopic(f"{name} must be 0 to 86400 seconds, not {shown(value)}", name)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Build a topic from field values, with enums as their values. Ignores fields that this version
        lacks.

        Raises ValueError or TypeError if the values do not make a topic.
        """
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        for name, kind in (("topic_type", TopicType), ("backoff", Backoff), ("delivery", Delivery)):
            if name in known:
                try:
                    known[name] = kind(known[name])
                except ValueError as exc:
                    what = f"{name} must be one of {', '.join(kind)}, not {shown(known[name])}"
                    raise InvalidTopic(what, name) from exc
        for name in {"paused", "closed"} & known.keys():
            known[name] = bool(known[name])
        return cls(**known)

    def values(self) -> dict[str, Any]:
        """Return the fields as JSON can carry them. ``of`` is the inverse."""
        return asdict(self)

    def slot(self, crc: int, slot_amount: int | None = None) -> Slot:
        """Return the slot for a slot_crc, under the slot_amount stored in the row (default: the topic's).

        The topic's counts as well in place of one that no topic can have, which another program has written.
        """
        return Slot(self.name, crc % (slot_amount if slot_amount in SLOT_AMOUNTS else self.slot_amount))

    def slots(self) -> list[Slot]:
        """Return all slots of the topic."""
        return [Slot(self.name, number) for number in range(self.slot_amount)]

    def retry_delay_ms(self, tries_used: int) -> int:
        """Return the milliseconds to wait after ``tries_used`` failed tries.

        Full jitter, as in Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
        """
        if self.backoff is Backoff.IMMEDIATE:
            return 0
        doubled = 2.0 ** min(tries_used, MAX_DOUBLINGS)
        ceiling = min(self.backoff_base * doubled, self.backoff_cap)
        return round(random.uniform(0, ceiling) * 1000)  # noqa: S311 - spreads load, guards nothing

    def remaining(self, attempts: int) -> int:
        """Return what scores carry after ``attempts`` used-up tries: the tries left, at least 1.

        It counts with the topic's tries even if the task has its own, because a fresh entry carries no
        number, which means the topic's tries.
        """
        return max(1, self.retries - attempts)


def check_topic_name(name: object, field: str = "topic") -> str:
    """Return ``name`` if it is a legal topic name. Raises InvalidTopic of the parameter ``field``."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidTopic(f"{shown(name)} is not a topic name: {NAME_HINT}", field)
    return name


def check_native(name: object, field: str = "topic") -> None:
    """Raise InvalidTopic for the name of a topic of a dialect, whose tasks come through its own port."""
    first, dot, _ = name.partition(".") if isinstance(name, str) else ("", "", "")
    if dot and first in OF_DIALECTS:
        raise InvalidTopic(
            f"topics that begin with {first!r} and a dot are made and filled by that dialect alone; "
            f"choose another name than {shown(name)}",
            field,
        )


def _whole(name: str, value: object, low: int, high: int) -> None:
    if not is_whole(value, low, high):
        raise InvalidTopic(f"{name} must be a whole number from {low} to {high}, not {shown(value)}", name)
