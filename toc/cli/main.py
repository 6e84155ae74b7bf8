"""The ``toc`` program: its commands, and how errors end it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer

from toc.cli import (
    audit,
    config,
    db,
    dead,
    dev,
    doctor,
    gateway,
    importing,
    index,
    schedule,
    streams,
    target,
    task,
    template,
    token,
    top,
    topic,
    worker,
)
from toc.cli.options import Commands
from toc.cli.output import say
from toc.model.errors import TocError, shown

app = Commands(
    name="toc",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The timeout center: durable deadlines that fire within milliseconds. Try `toc demo` first.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_START = "Try and develop"
_OPERATE = "Set up and operate"
_TASKS = "Tasks"

app.command(rich_help_panel=_START)(dev.demo)
app.command("dev", rich_help_panel=_START)(dev.dev)
app.add_typer(dev.cluster, name="cluster", rich_help_panel=_START)

app.command(rich_help_panel=_TASKS)(task.submit)
app.command(rich_help_panel=_TASKS)(task.get)
app.command(rich_help_panel=_TASKS)(task.find)
app.command("running", rich_help_panel=_TASKS)(task.running_tasks)
app.command(rich_help_panel=_TASKS)(task.cancel)
app.command(rich_help_panel=_TASKS)(task.reschedule)

app.add_typer(db.app, name="db", rich_help_panel=_OPERATE)
app.add_typer(topic.app, name="topic", rich_help_panel=_OPERATE)
app.add_typer(template.app, name="template", rich_help_panel=_OPERATE)
app.add_typer(schedule.app, name="schedule", rich_help_panel=_OPERATE)
app.add_typer(target.app, name="target", rich_help_panel=_OPERATE)
app.add_typer(target.secrets, name="secrets", rich_help_panel=_OPERATE)
app.command("worker", rich_help_panel=_OPERATE)(worker.worker)
app.command(rich_help_panel=_OPERATE)(gateway.gateway)
app.add_typer(importing.app, name="import", rich_help_panel=_OPERATE)
app.command(rich_help_panel=_OPERATE)(top.top)
for command in (
    worker.slots,
    worker.workers,
    worker.intents,
    worker.drain,
    worker.undrain,
    worker.pin,
    worker.unpin,
    worker.weight,
    worker.unweight,
    worker.rebalance,
):
    app.command(rich_help_panel=_OPERATE)(command)
app.add_typer(dead.app, name="dead", rich_help_panel=_OPERATE)
app.add_typer(token.app, name="token", rich_help_panel=_OPERATE)
app.command(rich_help_panel=_OPERATE)(audit.audit)
app.command(rich_help_panel=_OPERATE)(index.sweep)
app.command(rich_help_panel=_OPERATE)(index.rebuild)
app.command(rich_help_panel=_OPERATE)(doctor.doctor)
app.add_typer(config.app, name="config", rich_help_panel=_OPERATE)


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
    try:
        app(args=arguments, prog_name="toc")
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
    return 0


def run() -> None:
    """The entry point of the ``toc`` command."""
    from toc.loop import leave_process

    streams.prepare()
    try:
        code = streams.finish(main())
    except KeyboardInterrupt:  # Ctrl-C while the output waits for a reader that does not read
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    leave_process(code)  # the application may have started threads that never end
