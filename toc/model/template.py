"""Topic templates: what a door creates when a task is submitted to a topic that does not exist
yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from toc.model.errors import InvalidInput, InvalidTopic, UnknownTopic, shown
from toc.model.pattern import check_pattern, matches
from toc.model.sharding import is_whole
from toc.model.topic import Topic

MAX_TOPICS = 10_000
"""The largest cap of a template."""

POLICIES = {one.name for one in fields(Topic)} - {
    *("name", "biz_type", "paused", "resume_rate", "resumed_at", "paused_at", "closed"),
}
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
            raise InvalidInput(
                f"most_topics must be a whole number from 1 to {MAX_TOPICS}, not {shown(self.most_topics)}",
                "most_topics",
            )
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

    def altered(self, policies: Mapping[str, Any], most_topics: int | None) -> Template:
        """Return the template with some policies changed, and with another cap unless
        ``most_topics`` is None.

        Raises InvalidInput.
        """
        cap = self.most_topics if most_topics is None else most_topics
        return replace(self, policies={**self.policies, **policies}, most_topics=cap)


def best_of(templates: Iterable[Template], name: str) -> Template:
    """Return the template for a name: of those that match, the one with the longest pattern.

    Raises UnknownTopic if none matches.
    """
    fitting = [template for template in templates if matches(template.pattern, name)]
    if not fitting:
        raise UnknownTopic(
            f"there is no topic {name!r}, and no template makes one; create it with "
            f"`toc topic create {name} --biz-type N --slots N`",
            name,
        )
    return max(fitting, key=lambda template: (len(template.pattern), template.pattern))
