"""What pages are made of: facts, tables, forms, notes. What users wrote is cut and made harmless here; the
templates escape all of it."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import quote

from toc.model.clock import span
from toc.model.topic import EVERYTHING

MOST = 200
"""Characters of a value in a table."""
MOST_LINES = 20_000
"""Characters of a text that has lines of its own."""
_JOINERS = "\u200d\ufe0f"
"""They make one emoji of several."""


def harmless(value: object, most: int = MOST, *, lines: bool = False) -> str:
    """Return a value as a text that shows what it holds and does nothing: control characters and those that
    turn the direction of a text are named, and it has at most ``most`` characters and then how many more.

    ``lines``: it may have lines and tabs.
    """
    text = value if isinstance(value, str) else str(value)
    more = len(text) - most
    if more > 0:
        text = text[:most]
    if not text.isprintable():
        text = "".join(_named(one, lines=lines) for one in text)
    return f"{text}… ({more} more)" if more > 0 else text


def _named(one: str, *, lines: bool) -> str:
    if one.isprintable() or one in _JOINERS or (lines and one in "\n\t"):
        return one
    if one < " ":
        return chr(0x2400 + ord(one))
    return " " if unicodedata.category(one) == "Zs" else f"⟨U+{ord(one):04X}⟩"


class Cell(NamedTuple):
    """A value as it is shown. ``kind`` is its class: number, time. ``level`` makes it a badge: good, warn,
    bad, quiet. ``iso`` is an instant for programs."""

    text: str
    kind: str = ""
    href: str = ""
    level: str = ""
    iso: str = ""


def number(value: object) -> Cell:
    """Show a number."""
    shown = f"{value:,}".replace(",", "\u202f") if isinstance(value, int) else f"{value:g}"
    return Cell(shown, "number")


_LEVELS = {
    "ok": "good", "processed": "good", "done": "good", "owned": "good",
    "dead": "bad", "wrong": "bad", "failed": "bad", "unowned": "bad",
    "warn": "warn", "moving": "warn", "unknown": "warn", "interrupted": "warn",
}  # fmt: skip
_STATES = {"status", "state", "outcome", "level", "delivery"}
_IDS = {"job_id", "last_job_id", "worst_job_id", "biz_id", "biz_type"}
_DURATIONS = {
    "overdue", "seconds", "backoff_base", "backoff_cap", "prepare_timeout", "max_runtime", "horizon",
    "horizon_in_force", "retention", "expires_in", "every", "window", "jitter", "timeout", "worst_seconds",
    "lateness_p50", "lateness_p99",
}  # fmt: skip
_ZERO = {"expires_in": "never", "concurrency": "no limit", "resume_rate": "no limit", "tries": "as the topic"}
"""What 0 means where it is no amount."""
_NAME = re.compile(r"\{(\w+)\}")
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|[+-]\d\d:\d\d)")
_LINKS = {
    "job_id": "/console/tasks/{job_id}",
    "last_job_id": "/console/tasks/{last_job_id}",
    "topic": "/console/topics/{topic}",
}


def shown(value: Any, key: str = "") -> Cell:
    """Show a value of an answer, by its key and its type."""
    if isinstance(value, bool):
        return Cell("yes", level="warn") if value else Cell("no", level="quiet")
    if key in _IDS:
        return Cell(harmless(value), "id" if str(value).isdecimal() else "")
    if value == 0 and key in _ZERO:
        return Cell(_ZERO[key])
    if isinstance(value, int | float):
        return Cell(span(value), "number") if key in _DURATIONS else number(value)
    if isinstance(value, list):
        return Cell(harmless(", ".join(map(str, value))))
    if isinstance(value, dict):
        return Cell(harmless(json.dumps(value, ensure_ascii=False, default=str)))
    if key in _STATES:
        return Cell(harmless(value), level=_LEVELS.get(str(value), "quiet"))
    if _INSTANT.fullmatch(str(value)):
        return Cell(value.replace("T", " "), "time", iso=value)
    return Cell(harmless(value))


class Column(NamedTuple):
    """A value of a record: its key, and what it is called. ``link`` is a path with {keys} of the record."""

    key: str
    title: str
    link: str = ""

    def cell(self, record: Mapping[str, Any]) -> Cell:
        """Return its cell of a record; a value that there is not is empty."""
        value = record.get(self.key)
        if value is None or value in ("", [], {}):
            return Cell("-")
        cell = shown(value, self.key)
        return cell._replace(href=path(self.link, record)) if self.link and value != EVERYTHING else cell


def title_of(key: str) -> str:
    """Return what the key of a record is called."""
    return key.replace("_", " ").capitalize()


def columns(text: str, **links: str) -> tuple[Column, ...]:
    """Return the columns of a text: ``job_id: Task, topic``. A key without a title is called as it is."""
    pairs = [one.partition(":")[::2] for one in text.split(",")]
    keys = [(key.strip(), title.strip()) for key, title in pairs]
    links = _LINKS | links
    return tuple(Column(key, title or title_of(key), links.get(key, "")) for key, title in keys)


def path(pattern: str, values: Mapping[str, Any]) -> str:
    """Return a path or query with values instead of their {names}, each encoded."""
    return _NAME.sub(lambda name: quote(str(values[name[1]]), safe=""), pattern)


@dataclass(frozen=True)
class Block:
    """A part of a page. ``about`` stands below its title."""

    title: str = ""
    about: str = ""

    @property
    def kind(self) -> str:
        """The name of its macro in the templates."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Facts(Block):
    """The values of one record."""

    columns: Sequence[Column] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pairs(self) -> list[tuple[str, Cell]]:
        """What to show."""
        return [(one.title, one.cell(self.record)) for one in self.columns if one.key in self.record]


@dataclass(frozen=True)
class Table(Block):
    """Records, a row each. ``more`` is where the next page is, ``empty`` is said if there are none."""

    columns: Sequence[Column] = ()
    records: Sequence[Mapping[str, Any]] = ()
    more: str = ""
    empty: str = "None."

    @property
    def rows(self) -> list[list[Cell]]:
        """What to show."""
        return [[one.cell(record) for one in self.columns] for record in self.records]

    def heads(self, rows: list[list[Cell]]) -> list[tuple[str, str]]:
        """Return the title of each column, and the class of its cells in these rows."""
        kinds = [next((cell.kind for cell in cells if cell.kind), "") for cells in zip(*rows, strict=True)]
        return [(one.title, kind) for one, kind in zip(self.columns, kinds, strict=True)]


@dataclass(frozen=True)
class _Times(Block):
    """Numbers of times that follow each other from ``start`` (RFC 3339) on."""

    start: str = ""

    @property
    def first(self) -> datetime:
        """The first time."""
        return datetime.fromisoformat(self.start)

    @property
    def began(self) -> int:
        """The first time, in seconds since 1970."""
        return int(self.first.timestamp())


@dataclass(frozen=True)
class Picture(_Times):
    """Numbers of times that follow each other, as bars, and as a table of those that are not 0.

    ``step`` is seconds. ``unit`` says what the numbers count. Those above ``limit`` stand out.
    """

    step: int = 60
    values: Sequence[int] = ()
    unit: str = ""
    limit: float | None = None

    @property
    def rows(self) -> list[tuple[str, Cell, bool]]:
        """Times, numbers, and whether these are above the limit."""
        most, step = self.limit, timedelta(seconds=self.step)
        return [
            (f"{self.first + i * step:%m-%d %H:%M}", number(value), most is not None and value > most)
            for i, value in enumerate(self.values)
            if value
        ]


@dataclass(frozen=True)
class Heat(_Times):
    """How late the starts of each minute were: the numbers up to each of the ``bounds`` (seconds), then those
    beyond; as a picture, and as a table of the minutes that have any."""

    minutes: Sequence[Sequence[int]] = ()
    bounds: Sequence[float] = ()

    @property
    def rows(self) -> list[tuple[str, Cell, str]]:
        """Minutes, their starts, and how late the latest was."""
        names = [*(f"up to {span(one)}" for one in self.bounds), f"more than {span(self.bounds[-1])}"]
        found = []
        for i, row in enumerate(self.minutes):
            if counted := [n for n, count in enumerate(row) if count]:
                at = f"{self.first + timedelta(minutes=i):%H:%M}"
                found.append((at, number(sum(row)), names[counted[-1]]))
        return found


@dataclass(frozen=True)
class Note(Block):
    """A sentence. ``level`` as of a cell. ``href`` is where to read on."""

    text: str = ""
    level: str = "quiet"
    href: str = ""


@dataclass(frozen=True)
class Lines(Block):
    """A text with lines of its own, such as a stack."""

    text: str = ""

    @property
    def shown(self) -> str:
        """What to show."""
        return harmless(self.text, MOST_LINES, lines=True)


class Field(NamedTuple):
    """An input of a form. ``kind``: text, number, select, checkbox, hidden, area. ``error``: why its value
    was refused."""

    name: str
    label: str
    kind: str = "text"
    value: str = ""
    hint: str = ""
    choices: Sequence[str] = ()
    required: bool = False
    error: str = ""


@dataclass(frozen=True)
class Form(Block):
    """What a reader fills in. A ``post`` changes something; ``danger`` says that it cannot be undone."""

    fields: Sequence[Field] = ()
    action: str = ""
    submit: str = "Find"
    post: bool = False
    danger: bool = False


@dataclass(frozen=True)
class Content:
    """A whole page. ``read_ms`` is when the oldest of what it shows was read. ``status`` is the answer's."""

    title: str
    blocks: Sequence[Block] = ()
    read_ms: int | None = None
    status: int = 200


def following(url: str, query: Mapping[str, str], **changed: object) -> str:
    """Return the address of a page with other values in its query; those that are None are left out."""
    values = {name: value for name, value in {**query, **changed}.items() if value not in (None, "")}
    pairs = "&".join(f"{quote(name)}={quote(str(value), safe='')}" for name, value in values.items())
    return f"{url}?{pairs}" if pairs else url
