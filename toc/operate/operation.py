"""What operators can do, declared once: name, route, right, values, audit and function.

    @operation("topic.pause", "POST /v1/topics/{topic}:pause", Right.CHANGE_TOPIC, "Pause a topic", NAME)
    def pause(doing: Doing, topic: str) -> Record: ...

The gateway makes a call of it: route, checks, document. The command line makes a command of it, to which it
adds how the result is printed. Both use its docstring. The modules with operations import nothing that asks a
server, so that commands start soon: what does so is imported where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from inspect import getdoc
from typing import TYPE_CHECKING, Any

from toc.model.access import Access, Token
from toc.model.access import Action as Right

if TYPE_CHECKING:
    from toc.coordination.operator import Operator
    from toc.sdk.client import TimeoutCenter

Record = dict[str, Any]
"""What an operation returns: values that JSON can carry."""

REQUIRED: Any = ...


class Value(Enum):
    """What a value is. In JSON durations are seconds; at the command line they may have a unit."""

    TEXT = auto()
    TOPIC = auto()
    """The name of a topic that whoever asks may know of."""
    WHOLE = auto()
    NUMBER = auto()
    SECONDS = auto()
    WHOLE_SECONDS = auto()
    FLAG = auto()
    INSTANT = auto()
    PAST = auto()
    """An instant; at the command line an age, too."""
    BIZ_ID = auto()
    """A number or a text; in a query, and at the command line, what is all digits is a number."""
    JOB_ID = auto()
    OBJECT = auto()
    HEADERS = auto()
    """Texts by name."""


class Place(StrEnum):
    """What a function waits for. Each has threads of its own in a gateway, so that what is away holds up
    nothing else."""

    FIRST = "first"
    """The first database: topics, templates, targets, tokens, the audit."""
    SCHEDULE = "schedule"
    """The server of the schedule that is named."""
    ALL = "all"
    """All database servers."""
    TASKS = "tasks"
    """The server of a biz_id, if there is one among the values, otherwise all."""
    CLUSTER = "cluster"
    """ZooKeeper and Redis."""
    RECEIVER = "targets"
    """A receiver of webhooks."""
    LONG = "long"
    """Many steps, or workers."""


@dataclass(frozen=True, slots=True)
class Param:
    """A value that an operation takes: an argument of its function, a field of a request, an option.

    ``kind`` is a Value, an enum of texts or a Literal of them. A REQUIRED default makes it required; without
    a default it is given or not. ``least``, ``above`` and ``most`` bound a number, ``least`` and ``most`` the
    characters of a text. ``many``: a list. ``null``: null is a value, too. ``option`` and ``metavar`` are for
    the command line, at which ``parts`` are options of their own. ``typed``: it is for the command line
    alone.
    """

    name: str
    kind: Any
    about: str = ""
    default: Any = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    many: bool = False
    null: bool = False
    option: str = ""
    metavar: str = ""
    parts: tuple[Param, ...] = ()
    typed: bool = False


@dataclass(slots=True)
class Doing:
    """One use of an operation: by whom, and what came of it."""

    center: TimeoutCenter
    by: str
    """``user@host`` at the command line, the name of the token at a gateway."""
    right: Right
    token: Token | None = None
    """None at the command line, where the operator may do everything."""
    progress: Callable[[str], None] = lambda _text: None
    """Called with a text that says what the function waits for."""
    confirm: Callable[[str], None] = lambda _question: None
    """Called with a question; raises an error if the answer is no."""
    result: Record = field(default_factory=dict)
    """What becomes part of the result in the audit."""
    _opened: ExitStack = field(default_factory=ExitStack)
    _operator: Operator | None = None

    @property
    def operator(self) -> Operator:
        """The cluster, opened on first use. Raises ConfigError without ZooKeeper."""
        if self._operator is None:
            from toc.operate.cluster import open_operator

            self._operator = self._opened.enter_context(open_operator(self.center.settings))
        return self._operator

    def close(self) -> None:
        """Close what it has opened."""
        self._opened.close()

    def may(self, right: Right, topic: str | None = None) -> bool:
        """Whether whoever asks has a right, on a topic."""
        return self.token is None or self.token.may(right, topic) is Access.ALLOWED

    def sees(self, topic: str) -> bool:
        """Whether whoever asks may do it on a topic, and so know of it."""
        return self.may(self.right, topic)


@dataclass(frozen=True, slots=True)
class Operation:
    """The declaration of what an operator can do. ``name`` is that of the audit: subject and verb.

    ``params``: the first is the target in the audit, unless ``target`` makes another of the values.
    ``typed_about``: what the help of its command says beside its docstring. ``takes`` names the form of the
    request, ``gives`` is the type of the answer, both for the document. Without a route it is for the command
    line alone. ``check`` runs before the audit, and refuses; ``details`` are what the audit tells of the
    values. ``settles``: seconds after which everybody has noticed the change. What only looks has no audit,
    nor has what is not ``audited``: its function records what it finds to change. ``asks``: it asks
    ``Doing.confirm`` first.
    """

    name: str
    route: str
    right: Right
    title: str
    do: Callable[..., Any]
    params: tuple[Param, ...] = ()
    typed_about: str = ""
    takes: str = ""
    gives: Any = Record
    status: int = 200
    place: Place = Place.FIRST
    settles: float = 0.0
    changes: bool = True
    audited: bool = True
    asks: bool = False
    check: Callable[..., None] | None = None
    target: Callable[[Doing], str] | None = None
    details: Callable[[Record], Mapping[str, Any]] = dict

    def perform(self, doing: Doing, values: Mapping[str, Any]) -> Any:
        """Do it with these values, by the names of ``params``, and record it in the audit."""
        from toc.operate.audit import audited

        with closing(doing):
            if self.check is not None:
                self.check(doing, **values)
            if not (self.changes and self.audited) or values.get("dry_run"):
                return self.do(doing, **values)
            typed = {param.name for param in self.params if param.typed}
            told = {name: value for name, value in values.items() if name not in typed}
            target = told.pop(self.params[0].name) if self.target is None else self.target(doing)
            details = self.details(told)
            with audited(doing.center.store, doing.by, self.name, target, **details) as doing.result:
                return self.do(doing, **values)


def operation(
    name: str, route: str, right: Right, title: str, *params: Param, **more: Any
) -> Callable[[Callable[..., Any]], Operation]:
    """Declare the decorated function as an operation; ``more`` are further fields of Operation.

    What its docstring says after ``toc:`` is for the help of the command alone.
    """
    more.setdefault("changes", not route.startswith("GET "))

    def declare(do: Callable[..., Any]) -> Operation:
        do.__doc__, _, typed = (getdoc(do) or "").partition("\n\ntoc: ")
        return Operation(name, route, right, title, do, params, typed_about=typed, **more)

    return declare
