"""The table of topic templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toc.model.documents import parse_object
from toc.model.errors import UnknownTemplate
from toc.model.pattern import PATTERN
from toc.model.template import Template
from toc.observe.log import get_logger
from toc.store.records.table import REPEATS, NamedTable

log = get_logger(__name__)


class TemplateTable(NamedTable[Template]):
    """The templates. Any method raises StoreUnavailable or SchemaBehind."""

    noun, names_fit, unknown = "template", PATTERN, UnknownTemplate

    def get(self, pattern: str) -> Template:
        """Return one. Raises UnknownTemplate."""
        return self._find(pattern)[0]

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

    def _parse(self, row: Mapping[str, Any]) -> Template:
        return Template(row["pattern"], parse_object(row["policies"]), row["most_topics"])

    def _complain(self, name: str, exc: Exception) -> None:
        log.warning("template_not_understood", pattern=name, error=str(exc))


def _values(template: Template) -> dict[str, Any]:
    return {"policies": json.dumps(dict(template.policies)), "most_topics": template.most_topics}
