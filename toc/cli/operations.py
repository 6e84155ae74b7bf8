"""Commands made of what operators can do: ``toc.operate.operation`` declares it for every door."""

from __future__ import annotations

import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from keyword import iskeyword
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toc.cli.options import Json, Yes, flag, option
from toc.cli.output import progress_line, say, show_one
from toc.cli.values import attribute, biz_id, headers, job_number, number, opened, past, who, whole_seconds
from toc.model.clock import parse_duration
from toc.model.documents import parse_instant
from toc.model.errors import InvalidInput
from toc.operate.operation import REQUIRED, Doing, Operation, Param, Place, Record, Value

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter

Show = Callable[..., None]
"""Prints the record of an operation: ``show(record, as_json=...)``."""

_TYPES: dict[Any, Any] = {Value.WHOLE: int, Value.FLAG: bool}
"""What is not here is a text to typer, but for the members of enums."""
_TIMES: dict[Any, Callable[[str], Any]] = {
    Value.SECONDS: parse_duration,
    Value.WHOLE_SECONDS: whole_seconds,
    Value.INSTANT: parse_instant,
    Value.PAST: lambda text: past(text, round(time.time() * 1000)),
}
_READ: dict[Any, Callable[[str], Any]] = {**_TIMES, Value.OBJECT: attribute, Value.HEADERS: headers}
"""The functions that read texts."""
_METAVARS: dict[Any, str] = {
    **dict.fromkeys(_TIMES, "TIME"), Value.OBJECT: "JSON", Value.TEXT: "TEXT", Value.TOPIC: "TOPIC",
    Value.BIZ_ID: "ID", Value.NUMBER: "N", Value.HEADERS: "FILE",
}  # fmt: skip
"""What a value is called in the help."""
_HINTS = {
    Value.PAST: " An age such as 2h, or RFC 3339.",
    Value.HEADERS: " Lines 'Name: value'; - is stdin.",
}
"""How it is typed."""


def act(operation: Operation, center: TimeoutCenter, *, yes: bool = True, **values: Any) -> Any:
    """Do it in the name of the OS user. Returns what it returns, when everybody has noticed the change.

    ``yes``: do not ask.
    """
    doing = Doing(center, who(), operation.right, confirm=partial(confirm, yes=yes))
    if operation.place is Place.LONG:
        with progress_line("") as tell, _interruptible():
            doing.progress = partial(tell, None)
            record = operation.perform(doing, values)
    else:
        record = operation.perform(doing, values)
    time.sleep(operation.settles)  # what is said then must be true
    return record


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM, and the end of the terminal, break the block off as Ctrl-C does: a bulk job stops. Left
    running without a gateway, it would go on when nobody expects it any more, with the next one."""
    # Under nohup a command is to outlive its terminal.
    ends = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_DFL]
    for end in ends:
        signal.signal(end, signal.default_int_handler)
    try:
        yield
    finally:
        for end in ends:
            signal.signal(end, signal.SIG_DFL)


def acted(operation: Operation, *, yes: bool = True, **values: Any) -> Any:
    """Do it with a center of its own, as ``act`` does."""
    # A session with ZooKeeper would also tell of itself.
    with opened(account=operation.changes and operation.place is not Place.CLUSTER) as center:
        return act(operation, center, yes=yes, **values)


def confirm(question: str, *, yes: bool) -> None:
    """Ask, unless ``yes``. Raises InvalidInput when nobody can answer, typer.Exit when the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question}: add --yes to confirm")
    if not typer.confirm(f"{question}?", err=True):
        say("nothing was done")
        raise typer.Exit(1)


def made(
    operation: Operation,
    *,
    arguments: int = 1,
    **replaced: Param | None,
) -> Callable[[Show], Callable[..., None]]:
    """Return a function that makes a command of one that prints the record of an operation.

    The help is the docstring of the operation and then that of the decorated function. The first
    ``arguments`` params have no option. ``replaced`` are params that are others here; those that are None
    have no option. A function with a parameter ``values`` gets them, too.
    """
    params = {part.name: part for param in operation.params for part in param.parts or (param,)}
    for name, one in replaced.items():
        if one is None:
            del params[name]
        else:
            params[name] = one

    def declare(show: Show) -> Callable[..., None]:
        def run(*, as_json: bool, yes: bool = True, **typed: Any) -> None:
            given: Record = {}
            for name, param in params.items():
                value = typed[_safe(name)]
                if value not in (None, []) and (value is not False or param.default is False):
                    given[name] = _read(param, value, as_text=typed.get("text", False))
            given.pop("text", None)
            values = _values(operation, given)
            record = acted(operation, yes=yes, **values)
            more = {"values": values} if "values" in inspect.signature(show).parameters else {}
            show(record, as_json=as_json, **more)

        docs = operation.do.__doc__ or "", show.__doc__ or ""
        run.__doc__ = "\n\n".join(filter(None, map(inspect.cleandoc, docs)))
        run.__name__ = show.__name__
        taken = [_parameter(_safe(name), *_declared(param)) for name, param in params.items()]
        for place, param in enumerate(operation.params[:arguments]):
            about = typer.Argument(metavar=param.metavar or "NAME", help=param.about)
            kind = list[str] if param.many else _TYPES.get(param.kind, str)
            if param.default is REQUIRED:
                taken[place] = _parameter(_safe(param.name), Annotated[kind, about], inspect.Parameter.empty)
            elif param.metavar.startswith("["):
                taken[place] = _parameter(_safe(param.name), Annotated[kind | None, about], None)
        if operation.asks:
            taken.append(_parameter("yes", Yes, False))
        taken.append(_parameter("as_json", Json, False))
        run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        return run

    return declare


def command(app: typer.Typer, operation: Operation, **more: Any) -> Callable[[Show], Callable[..., None]]:
    """Make a command of an operation, as ``made`` does, and add it to a group, by the verb."""
    name = operation.name.partition(".")[2]
    return lambda show: app.command(name)(made(operation, **more)(show))


def commands(app: typer.Typer, *operations: Operation) -> None:
    """Declare commands that print a record as it is, a line for each value."""
    for operation in operations:
        command(app, operation)(as_it_is())


def plain(operation: Operation, **more: Any) -> Callable[..., None]:
    """Return a command that is called as the verb and prints a record as it is."""
    run = made(operation, **more)(as_it_is())
    run.__name__ = operation.name.partition(".")[2]
    return run


def as_it_is(example: str = "") -> Show:
    """Return what prints a record, a line for each value. The help of its command ends with the example."""

    def show(record: Record, *, as_json: bool) -> None:
        show_one(record, as_json=as_json)

    show.__doc__ = example
    return show


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _safe(name: str) -> str:
    """Return a name that a parameter of Python can have."""
    return f"{name}_" if iskeyword(name) else name


def _declared(param: Param) -> tuple[Any, Any]:
    """Return a param as typer has it: its type and default."""
    name = param.option or f"--{param.name.replace('_', '-')}"
    kind: Any = param.kind if isinstance(param.kind, type) else _TYPES.get(param.kind, str)
    if kind is bool:
        return kind, flag(name, param.about)
    bounds = {"min": param.least, "max": param.most} if kind is int else {}
    metavar = param.metavar or ("N" if bounds else _METAVARS.get(param.kind))
    taken = option(metavar, param.about + _HINTS.get(param.kind, ""), name, default=param.default, **bounds)
    if param.many:
        kind = list[str] if isinstance(param.kind, Value) else list.__class_getitem__(kind)
    return (kind | None if param.default is None else kind), taken


def _read(param: Param, typed: Any, *, as_text: bool) -> Any:
    """Return the value of what was typed. A list is typed with commas, or an option for each."""
    if param.kind is Value.BIZ_ID:
        return biz_id(typed, as_text=as_text)
    if param.kind is Value.JOB_ID:
        return list(map(job_number, typed)) if param.many else job_number(typed)
    if param.kind is Value.NUMBER:
        value = number(typed, param.option or f"--{param.name}", param.least, param.most)
        return None if param.null and not value else value
    if param.many and param.kind in (Value.TEXT, Value.WHOLE):
        parts = [part.strip() for text in typed for part in text.split(",") if part.strip()]
        return [int(part) if param.kind is Value.WHOLE and part.isdecimal() else part for part in parts]
    return _READ[param.kind](typed) if param.kind in _READ else typed


def _values(operation: Operation, given: Record) -> Record:
    """Return the values of params, those of parts within the one that they are parts of."""
    values = dict(given)
    for param in operation.params:
        if param.parts:
            values[param.name] = {
                part.name: values.pop(part.name) for part in param.parts if part.name in given
            }
    return values
