"""The table of topic templates, and the creation of topics by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.errors import InvalidInput, UnknownTemplate, shown
from toc.model.pattern import check_pattern
from toc.model.template import Template
from toc.model.topic import Topic
from toc.observe.log import get_logger
from toc.store.server import DatabaseServer, Statement
from toc.store.topics import TopicTable
from toc.store.unsharded_table import REPEATS, UnshardedTable

log = get_logger(__name__)


class TemplateTable(UnshardedTable):
    """The templates. Any method raises StoreUnavailable or SchemaBehind."""

    _named = "pattern"

    def __init__(self, server: DatabaseServer, table: str, topics: TopicTable, clock: Clock) -> None:
        super().__init__(server, table, clock)
        self._topics = topics

    def list(self) -> list[Template]:
        """Return all templates, by pattern."""
        return list(self.versions())

    def get(self, pattern: str) -> Template:
        """Return one. Raises UnknownTemplate."""
        found = next((each for each in self.list() if each.pattern == pattern), None)
        if found is None:
            raise _unknown(pattern)
        return found

    def versions(self) -> dict[Template, int]:
        """Return all templates by pattern, each with its version, which guards topics created by it."""
        select = f"SELECT pattern,policies,most_topics,version FROM {self._table} ORDER BY pattern"
        found: dict[Template, int] = {}
        for pattern, policies, most, version in self._rows(select):
            try:
                found[Template(pattern, parse_object(policies), most)] = version
            except (ValueError, TypeError, AttributeError, InvalidInput) as exc:
                # Of a later version, or edited by hand.
                if self._complains(pattern):
                    log.warning("template_not_understood", pattern=pattern, error=str(exc))
        return found

    def create(self, template: Template) -> None:
        """Add a template. Raises NameTaken."""
        now = self._now()
        insert = (
            f"INSERT INTO {self._table} (pattern,policies,most_topics,gmt_create,gmt_modified,version) "
            f"VALUES (%s,%s,{template.most_topics:d},{now},{now},0)"
        )
        texts = [template.pattern, json.dumps(dict(template.policies))]
        self._add(insert, texts, f"there is a template {template.pattern!r} already; alter it")

    def alter(self, pattern: str, policies: Mapping[str, Any], most_topics: int | None) -> Template:
        """Change policies of a template, or its cap. Topics that it has made stay as they are.

        Raises UnknownTemplate and InvalidInput.
        """
        for _ in range(REPEATS):
            found = next((each for each in self.versions().items() if each[0].pattern == pattern), None)
            if found is None:
                raise _unknown(pattern)
            template, version = found
            changed = template.altered(policies, most_topics)
            params = [json.dumps(dict(changed.policies)), pattern]
            update = (
                f"UPDATE {self._table} SET policies=%s,most_topics={changed.most_topics:d},"
                f"gmt_modified={self._now()},version=version+1 WHERE pattern=%s AND version={version:d}"
            )
            if self._write(update, params) == 1:
                return changed
        raise self._keeps_changing(f"template {pattern!r}")

    def delete(self, pattern: str) -> None:
        """Remove a template. Topics that it has made stay. Raises UnknownTemplate."""
        try:
            check_pattern(pattern)  # MySQL takes one with a trailing space for the same pattern
        except InvalidInput:
            raise _unknown(pattern) from None
        if not self._write(f"DELETE FROM {self._table} WHERE pattern=%s", [pattern]):
            raise _unknown(pattern)

    def create_topic(self, topic: Topic, pattern: str, version: int) -> bool:
        """Add a topic by a template of this version. False: the template has changed, or the biz_type is
        taken.

        Of two programs that create topics by one template at once, the second is refused, reads again, and
        so counts what the first has created. Raises TopicExists.
        """
        where = f"EXISTS (SELECT 1 FROM {self._table} WHERE pattern=%s AND version={version:d})"
        lock = f"SELECT 1 FROM {self._table} WHERE pattern=%s{self._server.for_update}"
        change = f"UPDATE {self._table} SET version=version+1 WHERE pattern=%s AND version={version:d}"
        return self._topics.add(
            topic,
            where,
            [pattern],
            before=[Statement(lock, [pattern])],
            after=[Statement(change, [pattern])],
        )


def _unknown(pattern: str) -> UnknownTemplate:
    return UnknownTemplate(f"there is no template {shown(pattern)}; `toc template list` shows all")
