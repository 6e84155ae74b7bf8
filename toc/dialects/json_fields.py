"""JSON objects and their fields as dialects read them: what is wrong is refused by one error."""

from __future__ import annotations

import json
from typing import Any

from toc.model.documents import check_values, parse, whole_text
from toc.model.errors import InvalidDocument, InvalidInput

LARGEST = 2**63 - 1
MAX_VALUES = 10_000
"""Most values of a request. Of delay/task's content, which may be an object, it is the bound."""


class NotUnderstood(InvalidInput):
    """A request that is no JSON object in UTF-8, or has a value of another type."""


def parsed(data: bytes) -> dict[str, Any]:
    """Return a JSON object; of a repeated name the last value counts. Raises NotUnderstood."""
    try:
        check_values(data, MAX_VALUES)
        found = parse(data, most=len(data), surrogates=True)
    except InvalidDocument:
        raise NotUnderstood("the request is not JSON in UTF-8") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise NotUnderstood("the request is not a JSON object")
    return found


def text(values: dict[str, Any], name: str) -> str:
    """Return a text, empty if it is missing. Raises NotUnderstood."""
    value = values.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise NotUnderstood(f"{name} must be a text")
    return whole_text(value)


def number(values: dict[str, Any], name: str) -> int:
    """Return a whole number of 64 bits, 0 if it is missing. Raises NotUnderstood."""
    value = values.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not -LARGEST - 1 <= value <= LARGEST:
        raise NotUnderstood(f"{name} must be a whole number")
    return value


def to_json(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def to_go_json(value: Any, *, sort_keys: bool = False, indent: bool = False) -> bytes:
    """Return a value as JSON, byte for byte as Go's encoder writes it: safe in HTML."""
    text = json.dumps(
        value,
        ensure_ascii=False,
        sort_keys=sort_keys,
        indent=4 if indent else None,
        separators=None if indent else (",", ":"),
    )
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")
