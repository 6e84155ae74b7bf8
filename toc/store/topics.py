"""The topic table: topics and their policies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from toc.model.clock import Clock
from toc.model.errors import InvalidTopic, TopicClosed, TopicExists, UnknownTopic
from toc.model.topic import Backoff, Delivery, Topic, TopicType, check_topic_name
from toc.observe.log import get_logger
from toc.store.server import DatabaseServer, Duplicate, Param, Statement
from toc.store.unsharded_table import REPEATS, UnshardedTable

log = get_logger(__name__)

_FIELDS = tuple(field.name for field in fields(Topic))
_FIXED = frozenset({"name", "biz_type", "delivery"})


class TopicTable(UnshardedTable):
    """The topics. Unique keys on name and biz_type keep two hosts from disagreeing.

    Any method raises StoreUnavailable or SchemaBehind.
    """

    def __init__(self, server: DatabaseServer, table: str, *, retired: str, clock: Clock) -> None:
        super().__init__(server, table, clock)
        self._retired = retired

    def list(self) -> list[Topic]:
        """Return all topics, by name."""
        return sorted((topic for topic, _version in self._select("1=1")), key=lambda topic: topic.name)

    def state(self) -> tuple[int, int]:
        """Return what is another pair if a topic has changed: their number and the sum of their versions."""
        return self._state("version")

    def get(self, name: str) -> Topic | None:
        """Return the topic of a name, or None."""
        return next((topic for topic, _version in self._select("name=%s", name)), None)

    def create(self, topic: Topic) -> None:
        """Add a topic. Raises TopicExists if its name or biz_type is taken, or was a deleted topic's."""
        if not self.add(topic):
            raise TopicExists(
                f"biz_type {topic.biz_type} was a deleted topic's and is never used again; choose another"
            )

    def add(
        self,
        topic: Topic,
        where: str = "1=1",
        params: Sequence[Param] = (),
        *,
        before: Sequence[Statement] = (),
        after: Sequence[Statement] = (),
    ) -> bool:
        """Add a topic if the condition ``where`` holds. False: it does not, or the biz_type is retired.

        ``before`` and ``after`` run in the same transaction. Raises TopicExists.
        """
        now = self._now()
        placeholders, values = _literals(topic, _FIELDS)
        insert = (
            f"INSERT INTO {self._table} ({','.join(_FIELDS)},gmt_create,gmt_modified,version) "
            f"SELECT {','.join(placeholders)},{now},{now},0 FROM (SELECT 1 AS one) AS one "
            f"WHERE NOT EXISTS (SELECT 1 FROM {self._retired} WHERE biz_type={topic.biz_type:d}) AND {where}"
        )
        statements = [*before, Statement(insert, [*values, *params]), *after]
        try:
            results = self._server.run(statements, transaction=len(statements) > 1, again=False)
            return results[len(before)].matched == 1
        except Duplicate as exc:
            other = self.get(topic.name)
            what = f"topic {topic.name!r}" if other else f"a topic with biz_type {topic.biz_type}"
            raise TopicExists(f"{what} exists already; `toc topic list` shows all") from exc

    def alter(self, name: str, /, **changes: Any) -> Topic:
        """Change policies of a topic and return the new topic.

        Raises UnknownTopic, and InvalidTopic for a value out of range or a field that
        cannot change.
        """
        for field in changes:
            if field not in _FIELDS or field in _FIXED:
                raise InvalidTopic(f"{field} of a topic cannot be changed", field)
        for _ in range(REPEATS):
            topic, version = self.get_with_version(name)
            if topic.closed and changes.get("closed", True):
                raise TopicClosed(f"topic {name!r} is being deleted; `toc topic resume {name}` stops that")
            changed = replace(topic, **_typed(changes))
            if changed.slot_amount < topic.slot_amount:
                raise InvalidTopic(
                    f"slot_amount of {name!r} is {topic.slot_amount} and only grows: tasks stay in the slots "
                    "in which they were submitted",
                    "slot_amount",
                )
            names = tuple(changes)
            placeholders, params = _literals(changed, names)
            sets = [f"{field}={placeholder}" for field, placeholder in zip(names, placeholders, strict=True)]
            if self._update(",".join(sets), f"name=%s AND version={version:d}", *params, name):
                return changed
        raise self._keeps_changing(f"topic {name!r}")

    def get_with_version(self, name: str) -> tuple[Topic, int]:
        """Return a topic and its version. Every change makes a new version. Raises UnknownTopic."""
        found = self._select("name=%s", check_topic_name(name))
        if not found:
            raise UnknownTopic(f"there is no topic {name!r}", name)
        return found[0]

    def deliver(self, name: str, version: int, delivery: Delivery) -> bool:
        """Change the delivery of a paused topic. False if it was changed since ``version``."""
        change = f"delivery='{Delivery(delivery).value}'"
        return self._update(change, f"name=%s AND paused=1 AND version={version:d}", name)

    def close(self, name: str, version: int) -> bool:
        """Have a paused topic take no new task. False if it was changed since ``version``."""
        return self._update("closed=1", f"name=%s AND paused=1 AND version={version:d}", name)

    def retire(self, topic: Topic, version: int) -> bool:
        """Remove a closed topic. Its biz_type is never used again. False if it was changed since ``version``.

        The biz_type is retired first, in a transaction of its own: a reader that finds the topic
        gone also finds its biz_type retired. If the program ends in between, call this again.
        """
        now = self._now()
        insert = (
            f"INSERT INTO {self._retired} (biz_type,name,retention,gmt_create) "
            f"VALUES ({topic.biz_type:d},%s,{topic.retention:d},{now})"
        )
        with suppress(Duplicate):  # an earlier attempt has stopped after this
            self._write(insert, [topic.name])
        delete = f"DELETE FROM {self._table} WHERE name=%s AND closed=1 AND version={version:d}"
        return self._write(delete, [topic.name]) == 1

    def retired(self) -> dict[int, int]:
        """Return the biz_types of deleted topics, and for how many seconds their finished rows are kept."""
        return dict(self._rows(f"SELECT biz_type,retention FROM {self._retired}"))

    def raise_slots(self, name: str, slot_amount: int) -> bool:
        """Give a topic at least this slot_amount, which a row has. Returns whether this changed anything."""
        return self._update(f"slot_amount={slot_amount:d}", f"name=%s AND slot_amount<{slot_amount:d}", name)

    def _update(self, sets: str, where: str, *params: Param) -> bool:
        change = f"SET {sets},gmt_modified={self._now()},version=version+1"
        return self._write(f"UPDATE {self._table} {change} WHERE {where}", params) == 1

    def _select(self, where: str, *params: Param) -> Sequence[tuple[Topic, int]]:
        select = f"SELECT {','.join(_FIELDS)},version FROM {self._table} WHERE {where}"
        return self._understood(self._rows(select, params))

    def _understood(self, rows: Sequence[Any]) -> Sequence[tuple[Topic, int]]:
        """Return the topics in rows of ``_FIELDS``, each with its version."""
        topics = []
        for row in rows:
            try:
                topics.append((Topic.of(dict(zip(_FIELDS, row, strict=False))), row[-1]))
            except (ValueError, TypeError) as exc:  # of a newer version, or edited by hand: skip it
                if self._complains(row[0]):
                    log.warning("topic_not_understood", topic=row[0], error=str(exc))
        return topics


def _typed(changes: dict[str, Any]) -> dict[str, Any]:
    typed = dict(changes)
    for name, kind in (("topic_type", TopicType), ("backoff", Backoff)):
        if name in typed:
            try:
                typed[name] = kind(typed[name])
            except ValueError as exc:
                raise InvalidTopic(
                    f"{name} must be one of {', '.join(kind)}, not {typed[name]!r}", name
                ) from exc
    return typed


def _literals(topic: Topic, names: tuple[str, ...]) -> tuple[list[str], list[Param]]:
    """Return fields of a topic as SQL: numbers as literals, texts as parameters."""
    placeholders: list[str] = []
    params: list[Param] = []
    for name in names:
        value = getattr(topic, name)
        if isinstance(value, str):
            placeholders.append("%s")
            params.append(str(value))
        else:
            placeholders.append(f"{value:d}" if isinstance(value, int) else f"{value!r}")
    return placeholders, params
