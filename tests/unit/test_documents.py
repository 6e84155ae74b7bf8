"""JSON that others wrote is read within bounds, with one error."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from toc.model.documents import MAX_DEPTH, check_depth, check_values, parse, parse_object
from toc.model.errors import InvalidDocument


def nested(depth: int) -> str:
    return ('{"a":[' * (depth // 2) + "[" * (depth % 2)) + ("]" * (depth % 2) + "]}" * (depth // 2))


def depth_of(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(depth_of, children), default=0)


@pytest.mark.parametrize("depth", [1, 63, 64])
def test_what_is_nested_as_deep_as_allowed_is_read(depth: int) -> None:
    value = parse(nested(depth))
    assert depth_of(value) == depth


@pytest.mark.parametrize("depth", [65, 66, 300, 3000, 1_000_000])
def test_what_is_deeper_is_refused(depth: int) -> None:
    for text in (nested(depth), f"[{'[1],' * 70} {nested(depth - 1)}]", "[" * depth, '{"a":' * depth):
        with pytest.raises(InvalidDocument, match="nested more than 64 deep"):
            parse(text[: 1 << 20])


def test_brackets_in_texts_count_for_nothing() -> None:
    value = {"a": '[{"\\"[' * 500, '{"': ["]" * 70, "\\"]}
    assert parse(json.dumps(value)) == value


def test_the_depth_of_any_document_is_told_as_the_parser_has_it() -> None:
    chance = random.Random(7)

    def grown(depth: int) -> Any:
        if not depth:
            return chance.choice([1, None, '"[[{', "\\", "é"])
        children = [grown(depth - 1), *(grown(chance.randrange(min(depth, 3))) for _ in range(2))]
        return children if chance.random() < 0.5 else {f"{n}[": one for n, one in enumerate(children)}

    for _ in range(100):
        value = grown(chance.randrange(50, 80))
        data = json.dumps(value, indent=chance.choice([None, 1])).encode()
        if depth_of(value) <= MAX_DEPTH:
            check_depth(data)
        else:
            with pytest.raises(InvalidDocument):
                check_depth(data)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON: Expecting value at character 0"),
        ('{"secret": 1,}', "not JSON"),
        (b"\xff\xfe", "not JSON .UnicodeDecodeError"),
        ("[NaN]", "not JSON"),
        ("-Infinity", "not JSON"),
        ("[1e999]", "not JSON"),
        ("[" + "9" * 5000 + "]", "not JSON"),
        (r'["\ud800"]', "lone surrogate"),
        (r'{"\udc00x": 1}', "lone surrogate"),
        ('"' + "x" * (1 << 20), "longer than 1048576 characters"),
    ],
)
def test_what_could_not_be_shown_again_is_refused_without_being_quoted(text: str | bytes, why: str) -> None:
    with pytest.raises(InvalidDocument, match=why) as refused:
        parse(text)
    assert "secret" not in str(refused.value)


def test_what_is_allowed_by_its_reader() -> None:
    assert parse(r'["\ud800"]', surrogates=True) == ["\ud800"]
    assert parse(r'["\ud83d\ude00", "\\ud800"]') == ["\U0001f600", r"\ud800"]
    assert len(parse('"' + "x" * (1 << 20) + '"', most=2 << 20)) == 1 << 20
    for text in ("[]", "1", "null", '"{}"'):
        with pytest.raises(InvalidDocument, match="not a JSON object"):
            parse_object(text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"a": [1, 2, {"b": []}]}', 6),
        ('["a,b,[c]{", "\\\\", "\\",[,"]', 4),
        ("[" + "[]," * 500, 1001),
        ('["' + '","' * 500 + '"]', 501),
    ],
)
def test_values_are_counted_before_any_is_made_and_texts_count_once(text: str, values: int) -> None:
    data = text.encode() + b" " * 2000
    check_values(data, values + 1)
    with pytest.raises(InvalidDocument, match="values"):
        check_values(data, values // 2 - 1)
