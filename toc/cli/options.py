"""How commands declare their options, one line for each."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
JobId = Annotated[str, typer.Argument(metavar="JOB_ID", help="The number that submit returned.")]


def option(metavar: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return an option that takes a value, as the default of the parameter by which it is named.

    ``names`` replace that name. A ``default`` of ``...`` makes it required.
    """
    return typer.Option(default, *names, metavar=metavar, help=text, **more)


def flag(name: str, text: str) -> Any:
    """Return an option without a value, as the default of a parameter."""
    return typer.Option(False, name, help=text)
