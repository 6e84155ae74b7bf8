"""Patterns of topic names. ``*`` matches any characters of a name, also none."""

from __future__ import annotations

import re
from collections.abc import Iterable

from toc.model.errors import InvalidInput, shown

PATTERN = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._*-]{0,127}")

EVERYTHING = "*"


def check_pattern(pattern: object, field: str = "pattern") -> str:
    """Return ``pattern`` if it is a valid pattern. Raises InvalidInput, which names ``field``."""
    if not isinstance(pattern, str) or not PATTERN.fullmatch(pattern):
        raise InvalidInput(
            f"{shown(pattern)} is not a pattern of topics: letters, digits, '.', '_', '-' and '*' for any "
            f"of these, at most 128, such as 'shop.*'",
            field,
        )
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits. Takes time in proportion to both lengths, whatever the pattern."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    if not name.startswith(first) or len(name) < len(first) + len(last) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:  # the first place is the best: it leaves most for the parts that follow
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def covers(pattern: str, narrower: str) -> bool:
    """Whether every name that fits ``narrower`` fits ``pattern``.

    That is so exactly if ``pattern`` matches ``narrower`` as if that were a name: a name holds no
    ``*``, so only a ``*`` of ``pattern`` can match a ``*`` of ``narrower``.
    """
    return matches(pattern, narrower)


def match_everything(patterns: Iterable[str]) -> bool:
    """Whether one of the patterns fits every name: ``*``, also written more than once."""
    return any(covers(pattern, EVERYTHING) for pattern in patterns)


def any_matches(patterns: Iterable[str], name: str) -> bool:
    """Whether a name fits one of the patterns."""
    return any(matches(pattern, name) for pattern in patterns)
