"""toc doctor"""

from __future__ import annotations

from collections import Counter

import typer

from toc.cli.options import Json, flag
from toc.cli.output import progress_line, say, show
from toc.cli.values import opened


def doctor(
    problems: bool = flag("--problems", "Show only failures and warnings."), as_json: Json = False
) -> None:
    """Check servers, settings, clocks, workers and topics; say what to do.

    Exits with 0 when all is well, 1 when there are warnings, 2 when something is wrong. It changes nothing.
    """
    from toc.operate import doctor as doctors

    with opened() as center, progress_line("looking at the databases") as progress:
        lines = doctors.examine(center, progress)
    shown = doctors.problems(lines) if problems else lines
    show(doctors.findings(shown), as_json=as_json, empty="nothing is wrong")
    counts = Counter(line.level.value for line in lines)
    say(
        ", ".join(
            f"{counts[level.value]} {level.value}" for level in doctors.WORST_FIRST if counts[level.value]
        )
    )
    raise typer.Exit(doctors.exit_code(lines))
