"""The topics with their policies, and the templates of which doors make topics."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

from sqlalchemy import delete, exists, insert, literal, select

from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.errors import InvalidTopic, TopicClosed, TopicExists, UnknownTemplate, UnknownTopic
from toc.model.topic import NAME, PATTERN, Delivery, Template, Topic, check_topic_name
from toc.store.records.table import REPEATS, NamedTable
from toc.store.schema import IDENTITY_TABLE, TOPIC_TABLE
from toc.store.servers.server import Duplicate, Statement
from toc.store.servers.shards import Shards

_FIELDS = tuple(field.name for field in fields(Topic))
_FIXED = frozenset({"name", "biz_type", "delivery"})


class TopicTable(NamedTable[Topic]):
    """The topics. Unique keys on name and biz_type keep two hosts from disagreeing.

    Any method raises StoreUnavailable or SchemaBehind.
    """

    in_schema, noun, names_fit, unknown = TOPIC_TABLE, "topic", NAME, UnknownTopic

    def __init__(self, shards: Shards, clock: Clock) -> None:
        super().__init__(shards, clock)
        self._retired = shards.first["timeout_retired"]
        self._identity = shards.first[IDENTITY_TABLE]

    def in_force(self) -> list[Topic]:
        """Return all topics as the index has them: with its horizon where that is shorter than their own."""
        bound, topics = self._server.run([self._horizon, self._select])
        most = max((int(seconds) for (seconds,) in bound.rows), default=0)
        return [
            replace(topic, horizon=min(topic.horizon, most or topic.horizon))
            for topic, _row in self._understood(topics.rows)
        ]

    def get(self, name: str) -> Topic | None:
        """Return the topic of a name, or None."""
        with suppress(UnknownTopic):
            return self._find(name)[0]
        return None

    def get_with_version(self, name: str) -> tuple[Topic, int]:
        """Return a topic and its version. Every change makes a new version. Raises UnknownTopic."""
        return self._find(check_topic_name(name))

    def create(self, topic: Topic) -> None:
        """Add a topic. Raises TopicExists if its name or biz_type is taken, or was a deleted topic's."""
        now = self._clock.now_ms()
        values = topic.values() | {"gmt_create": now, "gmt_modified": now, "version": 0}
        row = select(*(literal(value, self._column[name].type) for name, value in values.items()))
        free = ~exists().where(self._retired.c.biz_type == topic.biz_type)
        if_free = row.select_from(select(literal(1)).subquery("one")).where(free)
        try:
            added = self._write(insert(self._table).from_select(list(values), if_free))
        except Duplicate as exc:
            named = self.get(topic.name) is not None
            what = f"topic {topic.name!r}" if named else f"a topic with biz_type {topic.biz_type}"
            raise TopicExists(f"{what} exists already; `toc topic list` shows all") from exc
        if not added:
            raise TopicExists(
                f"biz_type {topic.biz_type} was a deleted topic's and is never used again; choose another"
            )

    def alter(self, name: str, /, **changes: Any) -> Topic:
        """Change policies of a topic and return the new topic, with when and by whom it was paused.

        Raises UnknownTopic, and InvalidTopic for a value out of range or a field that
        cannot change.
        """
        by = changes.pop("paused_by", "")[:128]
        for _ in range(REPEATS):
            topic, version = self.get_with_version(name)
            if "paused" in changes:  # a resume of a topic that is not paused only sets a rate
                now = self._clock.now_ms() if changes["paused"] else 0
                first = (topic.paused_at, topic.paused_by) if topic.paused else (now, by)
                changes["paused_at"], changes["paused_by"] = first
            changed = altered(topic, changes)
            values = changed.values()
            if self._update(self._at(name, version), **{field: values[field] for field in changes}):
                return changed
        raise self._keeps_changing(name)

    def deliver(self, name: str, version: int, delivery: Delivery) -> bool:
        """Change the delivery of a paused topic. False if it was changed since ``version``."""
        return self._update(self._at(name, version), self._column.paused == 1, delivery=Delivery(delivery))

    def close(self, name: str, version: int) -> bool:
        """Have a paused topic take no new task. False if it was changed since ``version``."""
        return self._update(self._at(name, version), self._column.paused == 1, closed=True)

    def raise_slots(self, name: str, slot_amount: int) -> bool:
        """Give a topic at least this slot_amount, which a row has. Returns whether this changed anything."""
        fewer = self._column.slot_amount < slot_amount
        return self._update(self._name == name, fewer, slot_amount=slot_amount)

    def retire(self, topic: Topic, version: int) -> bool:
        """Remove a closed topic. Its biz_type is never used again. False if it was changed since ``version``.

        The biz_type is retired first, in a transaction of its own: a reader that finds the topic
        gone also finds its biz_type retired. If the program ends in between, call this again.
        """
        with suppress(Duplicate):  # an earlier attempt has stopped after this
            values = {"biz_type": topic.biz_type, "name": topic.name, "retention": topic.retention}
            self._write(insert(self._retired).values(**values, gmt_create=self._clock.now_ms()))
        closed = self._at(topic.name, version), self._column.closed == 1
        return self._write(delete(self._table).where(*closed)) == 1

    def retired(self) -> dict[int, int]:
        """Return the biz_types of deleted topics, and for how many seconds their finished rows are kept."""
        return dict(self._rows(select(self._retired.c.biz_type, self._retired.c.retention)))

    @cached_property
    def _horizon(self) -> Statement:
        return self._compiled(select(self._identity.c.horizon))

    def _parse(self, row: Mapping[str, Any]) -> Topic:
        return Topic.of(row)

    def _unknown(self, name: object) -> UnknownTopic:
        return UnknownTopic(f"there is no topic {name!r}", str(name))


def altered(topic: Topic, changes: Mapping[str, Any]) -> Topic:
    """Return a topic with other policies. Raises TopicClosed, and InvalidTopic for a value out of range or a
    field that cannot change."""
    for field in changes:
        if field not in _FIELDS or field in _FIXED:
            raise InvalidTopic(f"{field} of a topic cannot be changed", field)
    name = topic.name
    if topic.closed and changes.get("closed", True):
        raise TopicClosed(f"topic {name!r} is being deleted; `toc topic resume {name}` stops that")
    changed = Topic.of({**topic.values(), **changes})
    if changed.slot_amount < topic.slot_amount:
        raise InvalidTopic(
            f"slot_amount of {name!r} is {topic.slot_amount} and only grows: tasks stay in the slots "
            "in which they were submitted",
            "slot_amount",
        )
    return changed


class TemplateTable(NamedTable[Template]):
    """The templates. Any method raises StoreUnavailable or SchemaBehind."""

    in_schema, noun, names_fit, unknown = "timeout_template", "template", PATTERN, UnknownTemplate

    def get(self, pattern: str) -> Template:
        """Return one. Raises UnknownTemplate."""
        return self._find(pattern)[0]

    def create(self, template: Template) -> None:
        """Add a template. Raises NameTaken."""
        now = self._clock.now_ms()
        taken = f"there is a template {template.pattern!r} already; alter it"
        values = {"pattern": template.pattern, "gmt_create": now, "gmt_modified": now, "version": 0}
        self._add(taken, **values, **_values(template))

    def alter(self, pattern: str, policies: Mapping[str, Any], most_topics: int | None) -> Template:
        """Change policies of a template, and its cap unless that is None. Topics that it has made stay as
        they are.

        Raises UnknownTemplate and InvalidInput.
        """
        for _ in range(REPEATS):
            template, version = self._find(pattern)
            cap = template.most_topics if most_topics is None else most_topics
            changed = replace(template, policies={**template.policies, **policies}, most_topics=cap)
            if self._update(self._at(pattern, version), **_values(changed)):
                return changed
        raise self._keeps_changing(pattern)

    def delete(self, pattern: str) -> None:
        """Remove a template. Topics that it has made stay. Raises UnknownTemplate."""
        self._delete(pattern)

    def _parse(self, row: Mapping[str, Any]) -> Template:
        return Template(row["pattern"], parse_object(row["policies"]), row["most_topics"])


def _values(template: Template) -> dict[str, Any]:
    return {"policies": json.dumps(dict(template.policies)), "most_topics": template.most_topics}
