"""Topics, their slots and their policies; patterns of their names, and what makes topics.

A template is what a door creates when a task is submitted to a topic that does not exist yet. A declaration
is what code says of a topic, beside its handler.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self

from typing_extensions import TypedDict

from toc.model.clock import Duration, named_seconds
from toc.model.errors import InvalidInput, InvalidTopic, UnknownTopic, shown
from toc.model.sharding import MAX_BIZ_ID, MAX_TABLES, is_whole

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


_DECADE = 10 * 366 * 86_400
_RANGES = {
    "biz_type": (0, MAX_BIZ_ID), "slot_amount": (1, MAX_SLOTS), "retries": (1, MAX_RETRIES),
    "prepare_timeout": (3, 86_400), "max_runtime": (1, 7 * 86_400), "horizon": (1, _DECADE),
    "retention": (0, _DECADE), "expires_in": (0, _DECADE), "concurrency": (0, 100_000),
    "resume_rate": (0, 1_000_000), "resumed_at": (0, MAX_BIZ_ID), "paused_at": (0, MAX_BIZ_ID),
}  # fmt: skip
"""The least and the largest whole number of each field that is one."""


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
    paused_by: str = ""
    """Who did that."""
    delivery: Delivery = Delivery.HANDLER
    """Who starts its tasks: ``handler``, a worker; ``pull``, a consumer that asks a gateway; ``webhook``, a
    worker that sends them. Altered only while it is paused and none of its tasks is prepared or leased."""
    closed: bool = False
    """It is being deleted and takes no new task."""
    target: str = ""
    """The webhook target of tasks that name no other; empty: those wait."""

    def __post_init__(self) -> None:
        check_topic_name(self.name, "name")
        for name, (low, high) in _RANGES.items():
            if not is_whole(value := getattr(self, name), low, high):
                what = f"{name} must be a whole number from {low} to {high}, not {shown(value)}"
                raise InvalidTopic(what, name)
        if self.slot_amount not in SLOT_AMOUNTS:
            what = f"slot_amount {self.slot_amount} is not a power of two: 1, 2, 4, ... 1024"
            raise InvalidTopic(what, "slot_amount")
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


MOST_COMPARED = 200
"""Names among which a misspelt one is looked for: up to 30 us each."""


def unknown_topic(name: str, known: Iterable[str], do: str) -> UnknownTopic:
    """Return the error that tells which name may be meant, else what to ``do``."""
    from difflib import get_close_matches  # for a mistake alone

    names = list(known)
    near = get_close_matches(name, names, n=1) if len(names) <= MOST_COMPARED else []
    meant = f"did you mean {near[0]!r}? Else " if near else ""
    return UnknownTopic(f"there is no topic {name!r}; {meant}{do}", name)


def check_native(name: object, field: str = "topic") -> None:
    """Raise InvalidTopic for the name of a topic of a dialect, whose tasks come through its own port."""
    first, dot, _ = name.partition(".") if isinstance(name, str) else ("", "", "")
    if dot and first in OF_DIALECTS:
        why = f"topics that begin with {first!r} and a dot are made and filled by that dialect alone"
        raise InvalidTopic(f"{why}; choose another name than {shown(name)}", field)


PATTERN = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._*-]{0,127}")

EVERYTHING = "*"
ALL = (EVERYTHING,)


def check_pattern(pattern: object, field: str = "pattern") -> None:
    """Raise InvalidInput, which names ``field``, unless ``pattern`` is a valid pattern."""
    if not isinstance(pattern, str) or not PATTERN.fullmatch(pattern):
        hint = "letters, digits, '.', '_', '-' and '*' for any of these, at most 128, such as 'shop.*'"
        raise InvalidInput(f"{shown(pattern)} is not a pattern of topics: {hint}", field)


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits. Takes time in proportion to both lengths, whatever the pattern."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    if not name.startswith(first) or len(name) < len(first) + len(last) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:  # the first place is the best: it leaves most for the parts that follow
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


covers = matches
"""Whether every name that fits a narrower pattern fits the first.

That is so exactly if the first matches the narrower one as if that were a name: a name holds no ``*``, so
only a ``*`` of the first can match a ``*`` of the narrower one.
"""


def any_matches(patterns: Iterable[str], name: str) -> bool:
    """Whether a name fits one of the patterns."""
    return any(matches(pattern, name) for pattern in patterns)


MAX_TOPICS = 10_000
"""The largest cap of a template."""

_OWN = {"name", "biz_type", "paused", "resume_rate", "resumed_at", "paused_at", "paused_by", "closed"}
POLICIES = {one.name for one in fields(Topic)} - _OWN
"""The fields of a topic that a template sets."""


@dataclass(frozen=True, slots=True)
class Template:
    """A pattern of names with the policies of the topics that are created by it.

    ``policies`` are fields of Topic as JSON carries them; slot_amount must be one of them. ``most_topics``:
    once that many topics fit the pattern, however they were made, no further one is created.
    """

    pattern: str
    policies: Mapping[str, Any] = field(hash=False)
    most_topics: int

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if not is_whole(self.most_topics, 1, MAX_TOPICS):
            what = f"a whole number from 1 to {MAX_TOPICS}, not {shown(self.most_topics)}"
            raise InvalidInput(f"most_topics must be {what}", "most_topics")
        if unknown := sorted(self.policies.keys() - POLICIES):
            raise InvalidInput(f"a template cannot set {', '.join(unknown)}", "policies")
        if "slot_amount" not in self.policies:
            raise InvalidInput("a template needs a slot_amount", "policies")
        try:
            self.topic("t", 0)
        except InvalidTopic as exc:
            raise InvalidTopic(str(exc), f"policies.{exc.field}" if exc.field else "policies") from exc

    def topic(self, name: str, biz_type: int) -> Topic:
        """Return the topic that it makes of a name. Raises InvalidTopic."""
        try:
            return Topic.of({**self.policies, "name": name, "biz_type": biz_type})
        except InvalidTopic:
            raise
        except (ValueError, TypeError) as exc:
            raise InvalidTopic(str(exc)) from exc


def best_of(templates: Iterable[Template], name: str) -> Template:
    """Return the template for a name: of those that match, the one with the longest pattern.

    Raises UnknownTopic if none matches.
    """
    fitting = [template for template in templates if matches(template.pattern, name)]
    if not fitting:
        do = f"create it with `toc topic create {name} --biz-type N --slots N`"
        raise UnknownTopic(f"there is no topic {name!r}, and no template makes one; {do}", name)
    return max(fitting, key=lambda template: (len(template.pattern), template.pattern))


NEW_SLOTS = 4
"""Slots of a new topic that says nothing of them."""


class Policies(TypedDict, total=False):
    """What code may say of a topic: the options of ``toc topic create``. What it leaves out stays as it is; a
    new topic has the defaults, and a biz_type that no other topic has had."""

    biz_type: int
    slots: int
    type: TopicType | Literal["timed", "instant"]
    retries: int
    backoff: Backoff | Literal["exponential", "immediate"]
    backoff_base: Duration
    backoff_cap: Duration
    prepare_timeout: Duration
    max_runtime: Duration
    horizon: Duration
    retention: Duration
    expires_in: Duration
    concurrency: int
    delivery: Delivery | Literal["handler", "pull", "webhook"]
    target: str


FIELDS = {name: name for name in Policies.__annotations__} | {"slots": "slot_amount", "type": "topic_type"}
"""The field of Topic that each sets."""
_PLAIN = {"biz_type", "slots", "type", "retries", "backoff", "concurrency", "delivery", "target"}
"""Those that are no durations."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A topic as code declares it: ``fields`` are those of Topic that it names."""

    name: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, policies: Mapping[str, Any]) -> Declaration:
        """Check a declaration. Raises InvalidTopic, InvalidDelay."""
        check_topic_name(name)
        check_native(name)
        if unknown := sorted(policies.keys() - FIELDS.keys()):
            raise InvalidTopic(f"topic {name!r}: {unknown[0]!r} is none of {', '.join(FIELDS)}", unknown[0])
        given = {FIELDS[one]: it if one in _PLAIN else _whole(one, it) for one, it in policies.items()}
        found = cls(name, given)
        found.topic(0)
        return found

    def topic(self, biz_type: int) -> Topic:
        """Return the topic that it makes; ``biz_type`` counts unless it names one. Raises InvalidTopic."""
        return Topic.of({"biz_type": biz_type, "slot_amount": NEW_SLOTS, **self.fields, "name": self.name})

    def changes(self, topic: Topic) -> dict[str, Any]:
        """Return the fields that differ from a topic as it stands, as they are declared."""
        declared = self.topic(topic.biz_type)
        wanted = {name: getattr(declared, name) for name in self.fields}
        return {name: value for name, value in wanted.items() if value != getattr(topic, name)}


def drift(declared: Iterable[Declaration], known: Mapping[str, Topic]) -> dict[str, str]:
    """Return by name how topics differ from what code declares."""
    found = {}
    for one in declared:
        if (topic := known.get(one.name)) is None:
            found[one.name] = "there is none"
        elif changes := one.changes(topic):
            found[one.name] = ", ".join(
                f"{name} is {getattr(topic, name)}, declared {value}" for name, value in changes.items()
            )
    return found


def _whole(name: str, value: Duration) -> float:
    seconds = named_seconds(name, value)
    return int(seconds) if seconds == int(seconds) else seconds
