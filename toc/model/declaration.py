"""Topics declared in code, beside their handlers, and how they differ from the topic table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypedDict

from toc.model.duration import Duration, seconds_of
from toc.model.errors import InvalidTopic
from toc.model.topic import Topic, check_native, check_topic_name

NEW_SLOTS = 4
"""Slots of a new topic that says nothing of them."""


class Policies(TypedDict, total=False):
    """What code may say of a topic: the options of ``toc topic create``. What it leaves out stays as it is; a
    new topic has the defaults, and a biz_type that no other topic has had."""

    biz_type: int
    slots: int
    type: str
    retries: int
    backoff: str
    backoff_base: Duration
    backoff_cap: Duration
    prepare_timeout: Duration
    max_runtime: Duration
    horizon: Duration
    retention: Duration
    expires_in: Duration
    concurrency: int
    delivery: str
    target: str


FIELDS = {name: name for name in Policies.__annotations__} | {"slots": "slot_amount", "type": "topic_type"}
"""The field of Topic that each sets."""
_SECONDS = frozenset(
    {"backoff_base", "backoff_cap", "prepare_timeout", "max_runtime", "horizon", "retention", "expires_in"}
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A topic as code declares it: ``fields`` are those of Topic that it names."""

    name: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, policies: Mapping[str, Any]) -> Declaration:
        """Check a declaration. Raises InvalidTopic."""
        check_topic_name(name)
        check_native(name)
        if unknown := sorted(policies.keys() - FIELDS.keys()):
            raise InvalidTopic(f"topic {name!r}: {unknown[0]!r} is none of {', '.join(FIELDS)}", unknown[0])
        fields = {
            FIELDS[one]: _seconds(value) if one in _SECONDS else value for one, value in policies.items()
        }
        found = cls(name, fields)
        found.topic(0)
        return found

    def topic(self, biz_type: int) -> Topic:
        """Return the topic that it makes; ``biz_type`` counts unless it names one. Raises InvalidTopic."""
        return Topic.of({"biz_type": biz_type, "slot_amount": NEW_SLOTS, **self.fields, "name": self.name})

    def changes(self, topic: Topic) -> dict[str, Any]:
        """Return the fields that differ from a topic as it stands, as they are declared."""
        declared = self.topic(topic.biz_type)
        return {
            name: getattr(declared, name)
            for name in self.fields
            if getattr(declared, name) != getattr(topic, name)
        }


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


def _seconds(value: Duration) -> float:
    seconds = seconds_of(value)
    return int(seconds) if seconds == int(seconds) else seconds
