"""How commands declare their options, one line for each, and how numbers among them are read."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from toc.cli.values import number, whole

_NEGATIVE = re.compile(r"-(?:[0-9.]+(?:e[+-]?[0-9]+)?|inf|nan)", re.IGNORECASE)
_NUMBERS: dict[Any, tuple[Any, Callable[..., Any]]] = {
    int: (str, whole),
    float: (str, number),
    int | None: (str | None, whole),
    float | None: (str | None, number),
}
"""How a number is declared to typer, whose own reader also takes 1_0 and " 5", and by what it is read."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
JobId = Annotated[str, typer.Argument(metavar="JOB_ID", help="The number that submit returned.")]


class _Command(TyperCommand):
    """A command to which ``-1`` is an argument to refuse, not an unknown option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as click does, after letting negative numbers through."""
        ctx.ignore_unknown_options = any(_NEGATIVE.fullmatch(each) for each in args)
        return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """A group of commands."""

    def command(self, name: str | None = None, **more: Any) -> Callable[[Callable[..., Any]], Any]:
        """Declare the decorated function as a command. Its numbers are read by ``values``."""
        register = super().command(name, cls=_Command, **more)

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            register(_with_texts(function))
            return function

        return declare


def option(metavar: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return an option that takes a value, as the default of the parameter by which it is named.

    ``names`` replace that name. A ``default`` of ``...`` makes it required.
    """
    return typer.Option(default, *names, metavar=metavar, help=text, **more)


def flag(name: str, text: str) -> Any:
    """Return an option without a value, as the default of a parameter."""
    return typer.Option(False, name, help=text)


def _with_texts(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose numbers are texts to typer, and are read here."""
    own = inspect.signature(command, eval_str=True)
    numbers: dict[str, tuple[Callable[..., Any], Any]] = {}
    parameters = []
    for name, taken in own.parameters.items():
        marks: list[Any] = []
        kind = taken.annotation
        if get_origin(kind) is Annotated:
            kind, *marks = get_args(kind)
        if kind in _NUMBERS:
            text, read = _NUMBERS[kind]
            numbers[name] = read, marks[0] if marks else taken.default
            taken = taken.replace(annotation=Annotated[(text, *marks)] if marks else text)
        parameters.append(taken)

    @functools.wraps(command)
    def reading(**values: Any) -> None:
        for name, (read, declared) in numbers.items():
            if isinstance(values[name], str):
                bounds = declared.min, declared.max
                names = declared.param_decls or [f"--{name.replace('_', '-')}"]
                values[name] = read(values[name], names[0], *bounds)
        command(**values)

    reading.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    reading.__annotations__ = {taken.name: taken.annotation for taken in parameters}  # typer reads both
    return reading
