"""What a member did in one minute, by topic: a row of numbers for each, a Tally. Pure.

    starts, processed, failed, dead, then the starts by lateness, in the buckets of toc_lateness_seconds

Hand-outs to consumers count as starts and are in no bucket. A try counts when its outcome is written: that a
ttr has ended is written only of a last one.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
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
STARTS, PROCESSED, FAILED, DEAD, LATENESS = range(5)
"""Places in a Tally; from LATENESS on there is a number for each bucket."""

Tally = Sequence[int]


class Minute(NamedTuple):
    """What a member did in a minute, by topic. ``most``: the most starts that it has seen in a minute since
    it began."""

    topics: Mapping[str, Tally]
    most: int


def plus(one: Tally, other: Tally) -> list[int]:
    """The sums of both."""
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def minus(one: Tally, before: Tally) -> list[int]:
    """How much was added since ``before``."""
    return [a - b for a, b in zip_longest(one, before, fillvalue=0)]


def write(minute: Minute) -> str:
    """Return it as JSON; all but the MOST_TOPICS largest topics become OTHERS."""
    ranked = sorted(minute.topics.items(), key=lambda one: (-one[1][STARTS], one[0]))
    topics = dict(ranked[:MOST_TOPICS])
    for _, tally in ranked[MOST_TOPICS:]:
        topics[OTHERS] = plus(topics.get(OTHERS, ()), tally)
    return json.dumps({"most": minute.most, "topics": topics}, separators=(",", ":"), ensure_ascii=False)


def read(text: str) -> Minute:
    """Return what ``write`` wrote. Raises InvalidDocument."""
    found = parse_object(text)
    try:
        least = [0] * LATENESS
        topics = {topic: plus(least, list(map(int, tally))) for topic, tally in found["topics"].items()}
        return Minute(topics, int(found["most"]))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InvalidDocument(f"it is no minute of a member ({type(exc).__name__})") from None
