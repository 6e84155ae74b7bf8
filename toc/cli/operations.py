"""Commands made of what operators can do: ``toc.operate.operation`` declares it for every door."""

from __future__ import annotations

import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from keyword import iskeyword
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from toc.cli import values
from toc.cli.output import progress_line, say, show_one
from toc.cli.values import Json, Yes, flag, option
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


class _Text(NamedTuple):
    """How a value is typed: its name in the help, what reads it, and what the help says of its form."""

    metavar: str
    read: Callable[[str], Any] = str
    hint: str = ""


def _past(text: str) -> datetime:
    return values.past(text, round(time.time() * 1000))


_TEXTS: dict[Any, _Text] = {
    Value.TEXT: _Text("TEXT"),
    Value.TOPIC: _Text("TOPIC"),
    Value.BIZ_ID: _Text("ID"),
    Value.NUMBER: _Text("N"),
    Value.SECONDS: _Text("TIME", parse_duration),
    Value.WHOLE_SECONDS: _Text("TIME", values.whole_seconds),
    Value.INSTANT: _Text("TIME", parse_instant),
    Value.PAST: _Text("TIME", _past, " An age such as 2h, or RFC 3339."),
    Value.OBJECT: _Text("JSON", values.attribute),
    Value.HEADERS: _Text("FILE", values.headers, " Lines 'Name: value'; - is stdin."),
}


def act(operation: Operation, center: TimeoutCenter, *, yes: bool = True, **given: Any) -> Any:
    """Do it in the name of the OS user. Returns what it returns, when everybody has noticed the change.

    ``yes``: do not ask.
    """
    doing = Doing(center, values.who(), operation.right, confirm=partial(confirm, yes=yes))
    if operation.place is Place.LONG:
        try:
            with progress_line("") as tell, _interruptible():
                doing.progress = partial(tell, None)
                record = operation.perform(doing, given)
        except BaseException as exc:
            for note in getattr(exc, "__notes__", ()):
                say(note)
            raise
    else:
        record = operation.perform(doing, given)
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


def acted(operation: Operation, *, yes: bool = True, **given: Any) -> Any:
    """Do it with a center of its own, as ``act`` does."""
    # A session with ZooKeeper would also tell of itself.
    with values.opened(account=operation.changes and operation.place is not Place.CLUSTER) as center:
        return act(operation, center, yes=yes, **given)


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
    show: Show = show_one,
    name: str = "",
    *,
    arguments: int = 1,
    **replaced: Param | None,
) -> Callable[..., None]:
    """Return the command of an operation. It is called as the verb, unless it has another ``name``.

    The first ``arguments`` params have no option. ``replaced`` are params that are others here; those that
    are None have no option.
    """
    params = {part.name: part for param in operation.params for part in param.parts or (param,)} | replaced

    def run(*, as_json: bool, yes: bool = True, **typed: Any) -> None:
        given: Record = {}
        for name, param in params.items():
            value = None if param is None else typed[_safe(name)]
            if param and value not in (None, []) and (value is not False or param.default is False):
                given[name] = _read(param, value, as_text=typed.get("text", False))
        given.pop("text", None)
        show(acted(operation, yes=yes, **_nested(operation, given)), as_json=as_json)

    run.__doc__ = f"{operation.do.__doc__}\n\n{operation.typed_about}".rstrip()
    run.__name__ = name or operation.name.partition(".")[2]
    taken = [_parameter(_safe(name), *_declared(param)) for name, param in params.items() if param]
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
    form = _TEXTS.get(param.kind, _Text("N" if bounds else ""))
    metavar = param.metavar or form.metavar or None
    taken = option(metavar, param.about + form.hint, name, default=param.default, **bounds)
    if param.many:
        kind = list[str] if isinstance(param.kind, Value) else list.__class_getitem__(kind)
    return (kind | None if param.default is None else kind), taken


def _read(param: Param, typed: Any, *, as_text: bool) -> Any:
    """Return the value of what was typed. A list is typed with commas, or an option for each."""
    if param.kind is Value.BIZ_ID:
        return values.biz_id(typed, as_text=as_text)
    if param.kind is Value.JOB_ID:
        return list(map(values.job_number, typed)) if param.many else values.job_number(typed)
    if param.kind is Value.NUMBER:
        value = values.number(typed, param.option or f"--{param.name}", param.least, param.most)
        return None if param.null and not value else value
    if param.many and param.kind in (Value.TEXT, Value.WHOLE):
        parts = [part.strip() for text in typed for part in text.split(",") if part.strip()]
        return [int(part) if param.kind is Value.WHOLE and part.isdecimal() else part for part in parts]
    return _TEXTS[param.kind].read(typed) if param.kind in _TEXTS else typed


def _nested(operation: Operation, given: Record) -> Record:
    """Return the values of params, those of parts within the one that they are parts of."""
    for param in operation.params:
        if param.parts:
            named = [part.name for part in param.parts if part.name in given]
            given[param.name] = {name: given.pop(name) for name in named}
    return given
