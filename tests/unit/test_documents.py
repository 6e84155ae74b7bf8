"""JSON within bounds, errors that stay whole, what handlers raise in words,
rows of tries as a server prints them."""

import copy
import importlib
import inspect
import json
import pickle
import pkgutil
import random
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import toc
from toc import CancelOutcome, Dead, Retry
from toc.model.documents import MAX_DEPTH, check_depth, check_values, parse, parse_object
from toc.model.errors import InvalidDocument, TocError
from toc.model.raised import MAX_ERROR_CHARS, STACK_CHARS, Raised, raised
from toc.observe.log import stack
from toc.store.servers.server import Result, Transient
from toc.store.tasks.rows import NO_INSTANT
from toc.store.tasks.tries import try_rows

# JSON that others wrote is read within bounds, with one error.


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


@pytest.mark.parametrize(("text", "why"), [
    ("", "not JSON: Expecting value at character 0"), ('{"secret": 1,}', "not JSON"),
    (b"\xff\xfe", "not JSON .UnicodeDecodeError"), ("[NaN]", "not JSON"), ("-Infinity", "not JSON"),
    ("[1e999]", "not JSON"), ("[" + "9" * 5000 + "]", "not JSON"),
    (r'["\ud800"]', "lone surrogate"), (r'{"\udc00x": 1}', "lone surrogate"),
    ('"' + "x" * (1 << 20), "longer than 1048576 characters"),
])  # fmt: skip
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


@pytest.mark.parametrize(("text", "values"), [
    ('{"a": [1, 2, {"b": []}]}', 6),
    ('["a,b,[c]{", "\\\\", "\\",[,"]', 4),
    ("[" + "[]," * 500, 1001),
    ('["' + '","' * 500 + '"]', 501),
])  # fmt: skip
def test_values_are_counted_before_any_is_made_and_texts_count_once(text: str, values: int) -> None:
    data = text.encode() + b" " * 2000
    check_values(data, values + 1)
    with pytest.raises(InvalidDocument, match="values"):
        check_values(data, values // 2 - 1)


# Errors leave a process whole: through pickle, as of multiprocessing, and through copies.

VALUES: dict[str, Any] = {
    "str": "what", "Duration": "30m", "str | None": "field", "int": 7, "int | None": 7,
    "float | None": 1.5, "list[int]": [7], "list[int | None]": [7, None],
    "dict[int, CancelOutcome]": {7: CancelOutcome.CANCELLED}, "timedelta | float": timedelta(seconds=1),
}  # fmt: skip
"""A value of each type that a constructor takes."""


def tree(kind: type[Exception] = TocError) -> Iterator[type[Exception]]:
    for one in kind.__subclasses__():
        yield one
        yield from tree(one)


for module in pkgutil.walk_packages(toc.__path__, "toc."):
    # Django's tasks need Python 3.12.
    if not module.name.startswith(("toc.migrations", "toc.__main__", "toc.django_tasks")):
        importlib.import_module(module.name)
KINDS = sorted({TocError, Retry, Dead, *tree()}, key=lambda kind: f"{kind.__module__}.{kind.__name__}")
WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy]


def pickled(protocol: int) -> Callable[[Any], Any]:
    return lambda error: pickle.loads(pickle.dumps(error, protocol))


WAYS += map(pickled, range(pickle.HIGHEST_PROTOCOL + 1))


def test_an_error_can_be_pickled_and_copied() -> None:
    for kind in KINDS:
        is_itself_pickled_and_copied(kind)


def is_itself_pickled_and_copied(kind: type[Exception]) -> None:
    values = ["what"]
    if inspect.isfunction(kind.__init__):
        _self, *parameters = inspect.signature(kind.__init__).parameters.values()
        kinds = [p.annotation for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        values = [VALUES[getattr(one, "__name__", one)] for one in kinds]
    error = kind(*values)
    error.add_note("a note")
    for way in WAYS:
        same = way(error)
        assert type(same) is kind
        assert (str(same), same.args, vars(same)) == (str(error), error.args, vars(error))


# What handlers raise, in words.


class Unnamed(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("it has no name")


class Unspeakable(Exception, metaclass=Unnamed):
    def __str__(self) -> str:
        raise SystemExit("it has no text")


class Fickle(Retry):
    @property
    def after(self) -> Any:
        raise RuntimeError("it does not know")

    @after.setter
    def after(self, value: Any) -> None: ...


class Text(str):
    def __getitem__(self, _key: Any) -> str:
        raise RuntimeError("it has no beginning")

    __format__ = encode = __getitem__  # type: ignore[assignment]


def nothing(*_args: object) -> Any:
    raise RuntimeError("it tells nothing")


class Closed(Exception):
    """Nothing can be asked of it."""

    __class__ = __traceback__ = __cause__ = __context__ = __suppress_context__ = property(nothing)
    __repr__ = __reduce__ = __reduce_ex__ = __eq__ = __hash__ = __bool__ = nothing

    def __str__(self) -> str:
        return Text("no")


class ClosedRetry(Closed, Retry):
    """Nor of this one."""


@pytest.mark.parametrize(("error", "words"), [
    (ValueError("no"), Raised("ValueError", "ValueError: no")),
    (KeyError(), Raised("KeyError", "KeyError")),
    (Dead("never"), Raised("Dead", "never", dead=True)),
    (Retry(timedelta(microseconds=1500), "soon"), Raised("Retry", "soon", after_ms=2)),
    (Fickle(1.0, "some day"), Raised("Fickle", "some day")),
    (Unspeakable(), Raised("Unspeakable", "Unspeakable: (its text cannot be made)")),
    (ValueError("\ud800"), Raised("ValueError", "ValueError: ?")),
    (BdbQuit(), Raised("BdbQuit", "BdbQuit: a debugger needs a terminal, which a worker does not have")),
])  # fmt: skip
def test_an_error_is_put_into_words_whatever_it_is(error: BaseException, words: Raised) -> None:
    assert raised(error) == words


def test_no_text_is_longer_than_what_a_row_keeps() -> None:
    assert len(raised(ValueError("x" * 10**6)).text) == MAX_ERROR_CHARS
    long = type("X" * 10**6, (Exception,), {})
    assert len(raised(long()).text) == len(raised(long()).name) == MAX_ERROR_CHARS


def test_an_error_of_which_nothing_can_be_asked_is_put_into_words() -> None:
    assert raised(Closed()) == Raised("Closed", "Closed: no")
    assert raised(ClosedRetry(1.0)) == Raised("ClosedRetry", "no", after_ms=1000)


def raise_closed() -> None:
    raise Closed


@pytest.mark.parametrize("do", [nothing, raise_closed, lambda: json.loads("{")])
def test_what_was_raised_says_where_in_the_application_not_in_a_library(do: Callable[[], object]) -> None:
    at = trace = ""
    try:
        do()
    except BaseException as exc:
        at, trace = raised(exc).at, stack(exc)
    assert at.startswith(f"{__file__}:")
    assert __file__ in trace


def test_a_stack_has_the_innermost_lines_and_nothing_of_what_was_said() -> None:
    def deep(left: int) -> None:
        if left == 0:
            raise KeyError("card 4711")
        deep(left - 1)

    for left in (1, 100):
        with pytest.raises(KeyError) as caught:
            deep(left)
        found = raised(caught.value).stack
        assert len(found) <= STACK_CHARS
        assert found.endswith(" in deep")
        assert "4711" not in found


# Rows of tries as a server prints them: what is damaged is told from what is no instant.

AT = "2026-11-25 22:27:19.280"
MS = 1_795_645_639_280


def text(action: str = AT, following: str = AT, expires: str = "") -> str:
    return f"7,42,{action},{following},3;0;0;0;0;0;0;{expires};0;-1;0,-,{{}}"


def test_instants_are_read_as_servers_print_them() -> None:
    mysql, sqlite = try_rows([Result([(text(),), (text(str(MS), str(MS + 1), str(MS + 2)),)], 2)])
    assert (mysql.action_time, mysql.next_time, mysql.expires_at) == (MS, MS, 0)
    assert (sqlite.action_time, sqlite.next_time, sqlite.expires_at) == (MS, MS + 1, MS + 2)


def test_what_is_no_instant_is_one_that_no_calendar_has_and_nothing_expires_then() -> None:
    (row,) = try_rows([Result([(text("0000-00-00 00:00:00.000", AT, "0000-00-00 00:00:00.000"),)], 1)])
    assert (row.action_time, row.next_time, row.expires_at) == (NO_INSTANT, MS, 0)


@pytest.mark.parametrize("place", [0, 4, 5, 8, 11, 12, 14, 17, 18, 21])
def test_an_instant_with_a_damaged_byte_is_a_damaged_answer(place: int) -> None:
    damaged = AT[:place] + chr(ord(AT[place]) ^ 0x40) + AT[place + 1 :]
    with pytest.raises(Transient):
        try_rows([Result([(text(damaged),)], 1)])
