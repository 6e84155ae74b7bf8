"""The topic table: topics and their policies."""

# ruff: noqa: S608 - SQL is made of our own names and of numbers; texts are parameters (toc.store.server)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from toc.model.clock import Clock
from toc.model.errors import InvalidTopic, StoreUnavailable, TopicExists, UnknownTopic
from toc.model.topic import Backoff, Topic, TopicType, check_topic_name
from toc.observe.log import get_logger
from toc.store.server import DatabaseServer, Duplicate, Param, Statement

log = get_logger(__name__)

_FIELDS = tuple(field.name for field in fields(Topic))
_FIXED = frozenset({"name", "biz_type", "former_slots"})
_TRIES = 5


class TopicTable:
    """The topics. Unique keys on name and biz_type keep two hosts from disagreeing.

    Any method raises StoreUnavailable or SchemaBehind.
    """

    def __init__(self, server: DatabaseServer, table: str, clock: Clock) -> None:
        self._server = server
        self._table = table
        self._clock = clock

    def list(self) -> list[Topic]:
        """Return all topics, by name."""
        return sorted((topic for topic, _version in self._select("1=1")), key=lambda topic: topic.name)

    def get(self, name: str) -> Topic | None:
        """Return the topic of a name, or None."""
        return next((topic for topic, _version in self._select("name=%s", name)), None)

    def create(self, topic: Topic) -> None:
        """Add a topic. Raises TopicExists if its name or biz_type is taken."""
        now = self._server.instant(self._clock.now_ms())
        marks, params = _literals(topic, _FIELDS)
        try:
            self._server.run(
                [
                    Statement(
                        f"INSERT INTO {self._table} ({','.join(_FIELDS)},gmt_create,gmt_modified,version) "
                        f"VALUES ({','.join(marks)},{now},{now},0)",
                        params,
                    )
                ],
                again=False,
            )
        except Duplicate as exc:
            other = self.get(topic.name)
            what = f"topic {topic.name!r}" if other else f"a topic with biz_type {topic.biz_type}"
            raise TopicExists(f"{what} exists already; `toc topic list` shows all") from exc

    def alter(self, name: str, /, **changes: Any) -> Topic:
        """Change policies of a topic and return the new topic.

        A lowered slot_amount applies to new tasks; the slots of the former one are consumed until
        ``stop_consuming``. Raises UnknownTopic, and InvalidTopic for a value out of range or a field that
        cannot change.
        """
        check_topic_name(name)
        for field in changes:
            if field not in _FIELDS or field in _FIXED:
                raise InvalidTopic(f"{field} of a topic cannot be changed")
        for _ in range(_TRIES):
            found = self._select("name=%s", name)
            if not found:
                raise UnknownTopic(f"there is no topic {name!r}")
            topic, version = found[0]
            changed = replace(topic, **_typed(changes))
            if changed.slot_amount != topic.slot_amount:
                # Rows keep their slot_amount, so all slots that may hold them remain consumed.
                largest = max(topic.consumed, changed.slot_amount)
                changed = replace(changed, former_slots=0 if largest == changed.slot_amount else largest)
            names = (*changes, "former_slots")
            marks, params = _literals(changed, names)
            sets = "".join(f"{field}={mark}," for field, mark in zip(names, marks, strict=True))
            now = self._server.instant(self._clock.now_ms())
            result = self._server.run(
                [
                    Statement(
                        f"UPDATE {self._table} SET {sets}gmt_modified={now},version=version+1 "
                        f"WHERE name=%s AND version={version:d}",
                        [*params, name],
                    )
                ],
                again=False,
            )
            if result[0].matched == 1:
                return changed
        raise StoreUnavailable(f"{self._server.name}: topic {name!r} keeps changing; try again")

    def keep_consuming(self, name: str, slot_amount: int) -> bool:
        """Consume the slots of this amount, which a pending row has, whatever the topic's amount is.

        Returns whether this changed anything. For late rows: a submit that had read the topic before its
        slot_amount was lowered, a dead task that is redriven.
        """
        return self._update(
            f"former_slots={slot_amount:d}",
            f"name=%s AND slot_amount<{slot_amount:d} AND former_slots<{slot_amount:d}",
            name,
        )

    def stop_consuming(self, topic: Topic) -> bool:
        """Stop consuming former slots: no pending row has more than ``topic``'s slot_amount.

        Returns False if the topic was altered since.
        """
        return self._update(
            "former_slots=0",
            f"name=%s AND slot_amount={topic.slot_amount:d} AND former_slots={topic.former_slots:d}",
            topic.name,
        )

    def _update(self, sets: str, where: str, name: str) -> bool:
        now = self._server.instant(self._clock.now_ms())
        update = f"UPDATE {self._table} SET {sets},gmt_modified={now},version=version+1 WHERE {where}"
        (result,) = self._server.run([Statement(update, [name])], again=False)
        return result.matched == 1

    def _select(self, where: str, *params: Param) -> Sequence[tuple[Topic, int]]:
        select = f"SELECT {','.join(_FIELDS)},version FROM {self._table} WHERE {where}"
        (result,) = self._server.run([Statement(select, params)])
        topics = []
        for row in result.rows:
            try:
                topics.append((Topic.of(dict(zip(_FIELDS, row, strict=False))), row[-1]))
            except (ValueError, TypeError) as exc:  # of a newer version, or edited by hand: skip it
                log.warning("topic_not_understood", topic=row[0], error=str(exc))
        return topics


def _typed(changes: dict[str, Any]) -> dict[str, Any]:
    typed = dict(changes)
    for name, kind in (("topic_type", TopicType), ("backoff", Backoff)):
        if name in typed:
            try:
                typed[name] = kind(typed[name])
            except ValueError as exc:
                raise InvalidTopic(f"{name} must be one of {', '.join(kind)}, not {typed[name]!r}") from exc
    return typed


def _literals(topic: Topic, names: tuple[str, ...]) -> tuple[list[str], list[Param]]:
    """Return fields of a topic as SQL: numbers as literals, texts as parameters."""
    marks: list[str] = []
    params: list[Param] = []
    for name in names:
        value = getattr(topic, name)
        if isinstance(value, str):
            marks.append("%s")
            params.append(str(value))
        else:
            marks.append(f"{value:d}" if isinstance(value, int) else f"{value!r}")
    return marks, params
