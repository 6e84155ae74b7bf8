"""Helpers to declare the options of commands: one line for each option.

Options that several commands share are declared only once, in a Group.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

_NEGATIVE = re.compile(r"-(?:[0-9.]+(?:e[+-]?[0-9]+)?|inf|nan)", re.IGNORECASE)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
JobId = Annotated[str, typer.Argument(metavar="JOB_ID", help="The number that submit returned.")]
MaybeJobId = Annotated[str | None, typer.Argument(metavar="[JOB_ID]", help="Which task.")]


class WithNumbers(TyperCommand):
    """A command with numeric arguments: ``-1`` is an argument to refuse, not an unknown option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as click does, after letting negative numbers through."""
        ctx.ignore_unknown_options = any(_NEGATIVE.fullmatch(each) for each in args)
        return super().parse_args(ctx, args)


def option(metavar: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return an option that takes a value, as the default of the parameter by which it is named.

    ``names`` replace that name. A ``default`` of ``...`` makes it required.
    """
    return typer.Option(default, *names, metavar=metavar, help=text, **more)


def flag(name: str, text: str) -> Any:
    """Return an option without a value, as the default of a parameter."""
    return typer.Option(False, name, help=text)


class Group(dict[str, Any]):
    """Options that several commands share: the attributes of a subclass. Holds those that were given."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Put the options of a Group in the place of each parameter that is one."""
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Group]] = {}
    parameters: list[inspect.Parameter] = []
    for name, taken in own.parameters.items():
        given: dict[str, tuple[Any, Any]] = {name: (taken.annotation, taken.default)}
        if inspect.isclass(taken.annotation) and issubclass(taken.annotation, Group):
            groups[name] = taken.annotation
            fields = inspect.get_annotations(taken.annotation, eval_str=True)
            given = {field: (kind, getattr(taken.annotation, field)) for field, kind in fields.items()}
        for field, (kind, default) in given.items():
            parameters.append(inspect.Parameter(field, taken.KEYWORD_ONLY, default=default, annotation=kind))

    @functools.wraps(command)
    def spread(**values: Any) -> None:
        for name, kind in groups.items():
            given = {field: values.pop(field) for field in kind.__annotations__}
            values[name] = kind({field: value for field, value in given.items() if value is not None})
        command(**values)

    spread.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return spread
