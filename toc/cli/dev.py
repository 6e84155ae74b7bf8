"""toc demo | dev"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toc.cli.daemons import check_webhooks, http_processes, with_dialects
from toc.cli.output import end_if_lost, progress_line, say, show_one
from toc.cli.values import Json, flag, load_settings, option, who
from toc.model.access import Role
from toc.model.errors import ConfigError
from toc.model.topic import Delivery

if TYPE_CHECKING:
    from toc.config import Settings
    from toc.worker.daemon.processes import SideProcesses

LOOPBACK = "127.0.0.1"
DEV_RECEIVER = f"http://{LOOPBACK}:8080"
"""Where `toc dev` sends webhooks besides to public addresses: as in examples/webhooks."""
A_WEEK = 7 * 86_400.0
HANDLERS_SECONDS = 5
"""How long handlers may go on when a file has changed; then their tasks are given back."""


def demo(
    count: int = option("N", "How many orders to make up.", default=1000, min=1, max=10_000),
    seconds: int = option("N", "How long 30 minutes take.", default=15, min=1, max=600),
    as_json: Json = False,
) -> None:
    """Run a thousand orders, which are closed unless they are paid, and check every outcome.

    Needs nothing installed: it starts a private Redis, SQLite and a worker, and removes them at the end. Real
    cancels race a real clock. Exits with 0 only if all outcomes are right.

    Example: toc demo --count 100 --seconds 3
    """
    from toc.dev.demo import embedded, play
    from toc.observe import log

    log.configure("warning")
    _clean_up_when_terminated()
    say("starting a private Redis, SQLite and a worker ...")
    with embedded():
        say(f"{count} orders; 30 minutes take {seconds} s here; done in about {seconds} s")
        with progress_line("") as tell:
            report = play(count, seconds, tell)
    show_one(report, as_json=as_json)
    say("exactly right" if report["right"] else "NOT right")
    raise typer.Exit(0 if report["right"] else 1)


def _clean_up_when_terminated() -> None:
    """Make SIGTERM end the program like an exit, so that servers stop and temporary files are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def dev(
    app: str | None = option("MODULE:NAME", "Run a worker for this TimeoutCenter."),
    directory: Path = option("DIR", "Where to keep all files, also after the end.", default=Path(".toc")),
    redis: bool = flag("--redis", "Start a private Redis too, for milliseconds always."),
    debug: bool = flag(
        "--debug", "Run handlers here, one at a time, however long: breakpoint() works, and uses up no try."
    ),
) -> None:
    """Run all that an application needs until Ctrl-C, to develop it. Tasks are kept in an SQLite file.

    Prints the settings for your application and for other toc commands; if the extra `gateway` is
    installed, the address of an HTTP gateway, a token for it, and the ports of the other protocols. If the
    extra `webhooks` is installed, it sends webhooks, also to http://127.0.0.1:8080. Brings the
    topics to what the app declares, as `toc topic sync` does. Tells what becomes of each task, and loads
    the app again when a Python file below this directory changes; with --debug it does not, and runs only
    handlers. One machine, one disk: not for production.

    Examples: toc dev --app shop.deadlines:center
              toc dev --app shop.deadlines:center --debug
              toc dev --app shop.deadlines:center --redis
    """
    from toc.dev.local import embedded_stack, only_config, write_config
    from toc.operate.admin import migrator
    from toc.sdk.client import TimeoutCenter

    _clean_up_when_terminated()
    with embedded_stack(directory, redis=redis) as servers:
        for_webhooks = _for_webhooks(directory)
        own = {"shutdown_deadline": HANDLERS_SECONDS, **for_webhooks}
        config = write_config(directory.absolute() / "toc.toml", servers | own)
        with only_config(config):
            settings = load_settings(daemon=True)
            migrator(settings).upgrade()
            with TimeoutCenter(settings) as center:
                center.store.identity.set_indexed(redis)  # nothing else runs: the directory is locked

            print(f"export TOC_CONFIG={shlex.quote(str(config))}", flush=True)
            end_if_lost()
            if debug:
                if app is None:
                    raise ConfigError("--debug needs --app")
                raise typer.Exit(_debug(app))
            beside = _gateway(settings)
            if app is None:
                say("running; Ctrl-C ends it, and everything is kept in " + str(directory))
            if app is None and beside is None and not for_webhooks:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.pause()
            else:
                raise typer.Exit(_run(app, settings, beside, webhooks=bool(for_webhooks)))


def _run(app: str | None, settings: Settings, beside: SideProcesses | None, *, webhooks: bool) -> int:
    """Run a daemon with one worker process; that of an app anew when its files change."""
    from toc.config import Settings
    from toc.dev.reload import run_with_reloads
    from toc.worker.app import NO_HANDLERS
    from toc.worker.daemon.supervisor import run_daemon

    settings = Settings(**(settings.model_dump() | {"processes": 1}))
    if app is None:
        return run_daemon(NO_HANDLERS, settings, beside, webhooks=webhooks)

    def run() -> None:
        from toc.cli.main import ended
        from toc.loop import leave_process

        def serve() -> int:
            _sync_topics(app)
            return run_daemon(app, settings, beside, webhooks=webhooks, tell=True)

        leave_process(ended(serve))

    return run_with_reloads(run, Path.cwd(), say)


def _debug(app: str) -> int:
    """Run an app's handlers on a thread of this process, which has the terminal, until Ctrl-C."""
    from toc.worker.app import load_app, tell
    from toc.worker.run.wrapped import tell_ready

    os.environ["TOC_SHUTDOWN_DEADLINE"] = "1"  # who ends it at a breakpoint does not wait for the handler
    # Streams without Python code, which a debugger would step into while it prints.
    sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
    _sync_topics(app)
    tell(center := load_app(app), limited=False)
    with contextlib.suppress(KeyboardInterrupt), center.worker(threads=1) as worker:
        worker.ready.wait()
        tell_ready(center.handlers)
        signal.pause()
    return 0


def _for_webhooks(directory: Path) -> dict[str, list[str]]:
    """Return the settings that webhooks need: a key, which the directory keeps, and a receiver that may be
    reached on this machine. Nothing if webhooks are not installed."""
    from toc.store.records.targets import new_key

    try:
        check_webhooks()
    except ConfigError as exc:
        say(f"no webhooks: {exc}")
        return {}
    path = directory / "secret_key"
    path.touch(mode=0o600)
    key = path.read_text() or new_key()
    path.write_text(key)
    say(f"webhooks may go to {DEV_RECEIVER} too")
    return {"secret_key": [key], "webhook_allow": [DEV_RECEIVER, LOOPBACK]}


def _gateway(settings: Settings) -> SideProcesses | None:
    """Return what serves the HTTP API and the other protocols, and print the addresses and a token.

    None if it is not installed.
    """
    from toc.operate.tokens import create_token
    from toc.sdk.client import TimeoutCenter

    try:
        beside = http_processes(LOOPBACK, 0, 1, None, None, [])
    except ConfigError as exc:
        say(f"no gateway: {exc}")
        return None
    with TimeoutCenter(settings) as center:
        made = create_token(
            center, f"dev-{secrets.token_hex(6)}", roles=[Role.ADMIN], topics=["*"], by=who(), expires=A_WEEK
        )
    say(f"its token, for a week: {made.secret}")
    from toc.dialects.process import DIALECTS

    return with_dialects(beside, dict.fromkeys(DIALECTS, f"{LOOPBACK}:0"), [], [])


def _sync_topics(app: str) -> None:
    from toc.cli.setup import synced
    from toc.worker.app import check_topics, load_app

    for step in synced(app):
        if step.refused:
            say(f"topic {step.topic} stays as it is: {step.refused}")
        elif step.action != "none":
            say(f"{step.action.removesuffix('e')}ed topic {step.topic}: {step.changes_text()}")
    with load_app(app) as center:
        check_topics(center, app)
        for_handlers = (one for one in center.catalog.known().values() if one.delivery is Delivery.HANDLER)
        if left := sorted({one.name for one in for_handlers} - center.handlers.keys()):
            say(f"no handler is for {', '.join(left)}: their tasks wait")
