"""The ``toc`` program: its commands, and how errors end it."""

import sys
import traceback
from collections.abc import Callable, Sequence

import typer

from toc.cli import output
from toc.cli.commands import GROUPS, PANELS
from toc.cli.output import say
from toc.model.errors import TocError, shown

app = typer.Typer(
    name="toc",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The timeout center: durable deadlines that fire within milliseconds. Try `toc demo` first.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
for name, group in GROUPS.items():
    app.add_typer(group, name=name, rich_help_panel=panel)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("timeout-center"))
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    2: the request is wrong; 3: a server must be upgraded or configured first; 4: a server is out of reach; 1:
    any other failure; 130: interrupted. ``run`` checks whether the output could be written.
    """
    return ended(lambda: app(args=arguments, prog_name="toc"))


def ended(run: Callable[[], int | None]) -> int:
    """Call this, say what it raises, and return the exit code."""
    try:
        return run() or 0
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except KeyboardInterrupt:
        return 130
    except TocError as exc:
        from toc.observe.log import redact

        say(f"error: {redact(str(exc))}")
        return exc.exit_code
    except OSError as exc:  # of a file: errors of servers have been translated
        say(f"error: {exc.strerror or exc}" + (f": {shown(exc.filename)}" if exc.filename else ""))
        return 1


def run() -> None:
    """The entry point of the ``toc`` command."""
    from toc.loop import leave_process

    output.prepare()
    try:
        code = output.finish(main())
    except KeyboardInterrupt:  # Ctrl-C while the output waits for a reader that does not read
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    leave_process(code)  # the application may have started threads that never end
