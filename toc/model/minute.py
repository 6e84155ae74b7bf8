"""What a member did in one minute: starts, outcomes and lateness by topic. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from toc.model.documents import parse_object
from toc.model.errors import InvalidDocument

MINUTE_MS = 60_000
KEPT = 60
"""How many minutes are shown."""
OTHERS = ""
"""In place of a topic: those that are not told apart."""
MOST_TOPICS = 50
"""How many topics of a minute are told apart: those with the most starts."""


class Tally(NamedTuple):
    """Numbers of one topic. ``lateness``: the starts by how late they were, in the buckets of
    ``toc_lateness_seconds``; those of hand-outs to consumers are in none.

    A try counts in the minute in which its outcome is written.
    """

    starts: int = 0
    processed: int = 0
    failed: int = 0
    dead: int = 0
    lateness: Sequence[int] = ()

    def plus(self, other: Tally) -> Tally:
        """The sums of both."""
        short, long = sorted((self.lateness, other.lateness), key=len)
        return Tally(
            self.starts + other.starts,
            self.processed + other.processed,
            self.failed + other.failed,
            self.dead + other.dead,
            [a + b for a, b in zip(short, long, strict=False)] + list(long[len(short) :]),
        )

    def minus(self, before: Tally) -> Tally:
        """How much was added since ``before``."""
        starts, processed, failed, dead, lateness = before
        return self.plus(Tally(-starts, -processed, -failed, -dead, [-number for number in lateness]))


class Minute(NamedTuple):
    """What a member did in a minute, by topic. ``most``: the most starts that it has seen in a minute since
    it began."""

    topics: Mapping[str, Tally]
    most: int


def write(minute: Minute) -> str:
    """Return it as JSON; all but the MOST_TOPICS largest topics become OTHERS."""
    ranked = sorted(minute.topics.items(), key=lambda one: (-one[1].starts, one[0]))
    topics = dict(ranked[:MOST_TOPICS])
    for _, tally in ranked[MOST_TOPICS:]:
        topics[OTHERS] = topics.get(OTHERS, Tally()).plus(tally)
    return json.dumps({"most": minute.most, "topics": topics}, separators=(",", ":"), ensure_ascii=False)


def read(text: str) -> Minute:
    """Return what ``write`` wrote. Raises InvalidDocument."""
    found = parse_object(text)
    try:
        topics = {
            str(name): Tally(int(starts), int(processed), int(failed), int(dead), list(map(int, lateness)))
            for name, (starts, processed, failed, dead, lateness) in found["topics"].items()
        }
        return Minute(topics, int(found["most"]))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InvalidDocument(f"it is no minute of a member ({type(exc).__name__})") from None
