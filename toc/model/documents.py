"""JSON that others wrote: requests, arguments, and what is read from servers, where any program may write.

One parser with one error, so that no text ends the thread that reads it: neither by its depth, which would
exhaust the stack, nor by values that cannot be written as JSON again.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, NoReturn

from toc.model.errors import InvalidDocument

MAX_DEPTH = 64
"""How many arrays and objects may be within each other: ``[[1]]`` has a depth of 2."""
MAX_CHARS = 1 << 20
"""Characters of a document, unless its reader says otherwise. ZooKeeper's nodes and our columns hold no
more."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string, or one without an end: it then reaches to the end, so that this takes one pass."""
_BRACES = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def parse(text: str | bytes, *, most: int = MAX_CHARS, surrogates: bool = False) -> Any:
    """Parse JSON. Raises InvalidDocument, whose message quotes nothing of the text.

    It refuses what has more than ``most`` characters, is nested more than MAX_DEPTH deep, or could not be
    shown as JSON: NaN, numbers that are infinite, and lone surrogates unless ``surrogates``.
    """
    if len(text) > most:
        raise InvalidDocument(f"it is longer than {most} characters")
    try:
        text = text.decode() if isinstance(text, bytes) else text
        # The fast path: what has so few brackets cannot be deeper.
        if text.count("[") + text.count("{") > MAX_DEPTH:
            check_depth(text.encode(errors="surrogatepass"))
        value = _DECODER.decode(text)
        if not surrogates and "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidDocument("it has a lone surrogate, which UTF-8 cannot encode") from None
    except InvalidDocument:
        raise
    except json.JSONDecodeError as exc:
        raise InvalidDocument(f"it is not JSON: {exc.msg} at character {exc.pos}") from None
    except (ValueError, RecursionError) as exc:  # such as no UTF-8; a number of thousands of digits
        raise InvalidDocument(f"it is not JSON ({type(exc).__name__})") from None
    return value


def parse_object(text: str | bytes, *, most: int = MAX_CHARS, surrogates: bool = False) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidDocument as ``parse`` does."""
    value = parse(text, most=most, surrogates=surrogates)
    if not isinstance(value, dict):
        raise InvalidDocument("it is not a JSON object")
    return value


def whole_text(value: str) -> str:
    """Return a text with its lone surrogates replaced, which UTF-8 cannot encode."""
    if value.isascii():
        return value
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def check_depth(data: bytes) -> None:
    """Raise InvalidDocument if JSON is nested more than MAX_DEPTH deep. Builds nothing of it.

    What is not JSON may pass; a parser then gets at most twice as deep before it finds that out.
    """
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    rest = _STRING.sub(b"", data).translate(_BRACES, _OTHERS)
    for _ in range(MAX_DEPTH):  # each turn takes away the innermost level
        if b"[" * (MAX_DEPTH + 1) in rest or b"[]" not in rest:
            break
        rest = rest.replace(b"[]", b"")
    if b"[]" in rest or rest.count(b"[") > MAX_DEPTH:
        raise InvalidDocument(f"it is nested more than {MAX_DEPTH} deep")


def check_values(data: bytes, most: int) -> None:
    """Raise InvalidDocument if JSON has more than ``most`` values. Builds none of them.

    It takes about a millisecond for each MiB, less if they come early. Of what is not JSON it counts the part
    that a parser reads before it finds that out.
    """
    end = 4 * most
    while end < 4 * len(data):  # a part first, which may be enough to tell
        if _values(data[:end], most) > most:
            raise InvalidDocument(f"it has more than {most} values")
        end *= 4


def _values(data: bytes, most: int) -> int:
    """Count the values of the beginning of a JSON text, roughly if there are many more than ``most``."""
    found = data.count(b",") + data.count(b"[") + data.count(b"{")
    if found <= most:  # even if none of these is within a text
        return found
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') > 4 * most:  # at most a name and a text for each value
        return most + 1
    outside = b"".join(data.split(b'"')[::2])
    return outside.count(b",") + outside.count(b"[") + outside.count(b"{")


def _refuse(_: str) -> NoReturn:
    raise ValueError


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
