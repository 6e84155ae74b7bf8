"""Reads MessagePack, as far as other queues write it: everything but extensions."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 32
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_ARRAYS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}


def unpack(data: bytes) -> Any:
    """Return the one value in ``data``. Texts that are not UTF-8 stay bytes. Raises ValueError."""
    value, end = _value(data, 0, 0)
    if end != len(data):
        raise ValueError("there is more than one value")
    return value


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH or at >= len(data):
        raise ValueError("nested too deeply, or cut off")
    first, at = data[at], at + 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first < 0x90:
        return _map(data, at, first & 15, depth)
    if first < 0xA0:
        return _array(data, at, first & 15, depth)
    if first < 0xC0:
        return _text(data, at, first & 31)
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _NUMBERS:
        return _number(data, at, _NUMBERS[first])
    kinds: tuple[tuple[dict[int, str], Callable[[bytes, int, int], tuple[Any, int]]], ...] = (
        (_TEXTS, _text),
        (_BYTES, _raw),
        (_ARRAYS, lambda data, at, count: _array(data, at, count, depth)),
        (_MAPS, lambda data, at, count: _map(data, at, count, depth)),
    )
    for kind, read in kinds:
        if first in kind:
            count, at = _number(data, at, kind[first])
            return read(data, at, count)
    raise ValueError(f"type {first:#x} is not known")


def _number(data: bytes, at: int, form: str) -> tuple[Any, int]:
    try:
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    except struct.error as exc:
        raise ValueError("cut off") from exc


def _raw(data: bytes, at: int, count: int) -> tuple[bytes, int]:
    if at + count > len(data):
        raise ValueError("cut off")
    return data[at : at + count], at + count


def _text(data: bytes, at: int, count: int) -> tuple[str | bytes, int]:
    raw, at = _raw(data, at, count)
    try:
        return raw.decode(), at
    except UnicodeDecodeError:
        return raw, at


def _array(data: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        value, at = _value(data, at, depth + 1)
        found.append(value)
    return found, at


def _map(data: bytes, at: int, count: int, depth: int) -> tuple[dict[Any, Any], int]:
    found = {}
    for _ in range(count):
        key, at = _value(data, at, depth + 1)
        if isinstance(key, (dict, list)):
            raise ValueError("a key is no text")  # noqa: TRY004 - one error for all that is wrong
        found[key], at = _value(data, at, depth + 1)
    return found, at
