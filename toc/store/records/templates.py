"""The table of topic templates, and the creation of topics by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Table, select, update

from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.errors import UnknownTemplate
from toc.model.pattern import PATTERN
from toc.model.template import Template
from toc.model.topic import Topic
from toc.observe.log import get_logger
from toc.store.records.table import REPEATS, NamedTable
from toc.store.records.topics import TopicTable
from toc.store.servers.server import DatabaseServer

log = get_logger(__name__)


class TemplateTable(NamedTable[Template]):
    """The templates. Any method raises StoreUnavailable or SchemaBehind."""

    noun, names_fit, unknown = "template", PATTERN, UnknownTemplate

    def __init__(self, server: DatabaseServer, table: Table, topics: TopicTable, clock: Clock) -> None:
        super().__init__(server, table, clock)
        self._topics = topics

    def get(self, pattern: str) -> Template:
        """Return one. Raises UnknownTemplate."""
        return self._find(pattern)[0]

    def versions(self) -> dict[Template, int]:
        """Return all templates by pattern, each with its version, which guards topics created by it."""
        return {template: row["version"] for template, row in self._every()}

    def create(self, template: Template) -> None:
        """Add a template. Raises NameTaken."""
        now = self._clock.now_ms()
        self._add(
            f"there is a template {template.pattern!r} already; alter it",
            **_values(template),
            pattern=template.pattern,
            gmt_create=now,
            gmt_modified=now,
            version=0,
        )

    def alter(self, pattern: str, policies: Mapping[str, Any], most_topics: int | None) -> Template:
        """Change policies of a template, or its cap. Topics that it has made stay as they are.

        Raises UnknownTemplate and InvalidInput.
        """
        for _ in range(REPEATS):
            template, version = self._find(pattern)
            changed = template.altered(policies, most_topics)
            if self._update(self._at(pattern, version), **_values(changed)):
                return changed
        raise self._keeps_changing(pattern)

    def delete(self, pattern: str) -> None:
        """Remove a template. Topics that it has made stay. Raises UnknownTemplate."""
        self._delete(pattern)

    def create_topic(self, topic: Topic, pattern: str, version: int) -> bool:
        """Add a topic by a template of this version. False: the template has changed, or the biz_type is
        taken.

        Of two programs that create topics by one template at once, the second is refused, reads again, and
        so counts what the first has created. Raises TopicExists.
        """
        same = self._at(pattern, version)
        lock = select(self._name).where(self._name == pattern).with_for_update()
        count = update(self._table).where(same).values(version=self._column.version + 1)
        return self._topics.add(topic, select(self._name).where(same).exists(), before=[lock], after=[count])

    def _parse(self, row: Mapping[str, Any]) -> Template:
        return Template(row["pattern"], parse_object(row["policies"]), row["most_topics"])

    def _complain(self, name: str, exc: Exception) -> None:
        log.warning("template_not_understood", pattern=name, error=str(exc))


def _values(template: Template) -> dict[str, Any]:
    return {"policies": json.dumps(dict(template.policies)), "most_topics": template.most_topics}
