"""Names of other systems as toc can store them, and the templates by which their topics are created."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from toc.model.errors import InvalidInput
from toc.model.sharding import check_key
from toc.model.topic import NAME, Template

MAX_TOPICS = 100
"""How many topics a dialect creates by one template; `toc template alter` allows more."""

_HASHED = re.compile(r"h-[0-9a-f]{32}")


def template_of(prefix: str, **policies: Any) -> Template:
    """Return the template of a dialect's topics, whose names begin with ``prefix``."""
    usual = {"slot_amount": 4, "topic_type": "instant", "delivery": "pull"}
    return Template(f"{prefix}*", {**usual, **policies}, MAX_TOPICS)


def topic_for(name: str, prefix: str = "") -> str:
    """Return the topic for a dialect's name: ``prefix`` and the name, or ``h-`` and a hash if toc forbids it.

    A name that looks like such a hash is hashed as well, so no two names ever share a topic.
    """
    return prefix + (name if _fits(name, prefix) else hashed(name))


def key_for(text: str) -> str:
    """Return the biz_id for a dialect's text: the text, or ``h-`` and a hash if the text cannot be a key.

    Keys have no control characters.
    """
    try:
        check_key("id", text)
    except InvalidInput:
        return hashed(text)
    return hashed(text) if _HASHED.fullmatch(text) else text


def hashed(name: str) -> str:
    """Return ``h-`` and 128 bits of the name's hash."""
    return f"h-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}"


def _fits(name: str, prefix: str) -> bool:
    return NAME.fullmatch(prefix + name) is not None and not _HASHED.fullmatch(name) and name != ""
