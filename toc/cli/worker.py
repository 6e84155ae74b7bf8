"""toc worker | slots | workers"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toc.cli.output import console, instant, show, table
from toc.cli.values import Json, load_settings, opened


def worker(
    app: Annotated[
        str,
        typer.Option(
            "--app", metavar="MODULE:NAME", help="Your TimeoutCenter, such as shop.deadlines:center."
        ),
    ],
    processes: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes. Default: one per core.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Handlers that each process runs at once. Default 16.")
    ] = None,
) -> None:
    """Run handlers: the daemon of this host, until it is told to stop (SIGTERM or Ctrl-C).

    Example: toc worker --app shop.deadlines:center --processes 4
    """
    from toc.config import Settings
    from toc.worker import daemon

    settings = load_settings()
    given = {
        name: value for name, value in (("processes", processes), ("threads", threads)) if value is not None
    }
    settings = Settings(
        **(settings.model_dump() | given)
    )  # checks the ranges as it does those of the variables
    raise typer.Exit(daemon.run(app, settings, processes=settings.processes, threads=settings.threads))


def slots(
    topic: Annotated[str | None, typer.Option(metavar="NAME", help="Only this topic.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again each second until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show every slot: who owns it, what waits in it, and how late it is."""
    with opened() as center:
        if watch and not as_json:
            _watch(center, topic)
        else:
            show(_slot_records(center, topic), as_json=as_json, empty="no topics, so no slots")


def workers(as_json: Json = False) -> None:
    """Show the workers that are alive, and how many slots each owns."""
    raise NotImplementedError(as_json)


def _watch(center: Any, topic: str | None) -> None:
    import time

    from rich.live import Live

    with Live(console=console(), auto_refresh=False, screen=True) as live:
        while True:
            records = _slot_records(center, topic)
            live.update(table(records) if records else "no topics, so no slots", refresh=True)
            time.sleep(1)


def _slot_records(center: Any, topic: str | None) -> list[dict[str, Any]]:
    from toc import admin

    views = admin.slot_views(center.store, center.queues, {}, topic=topic)
    return [
        {
            "slot": str(view.slot),
            "owner": view.owner,
            "waiting": view.waiting,
            "prepared": view.prepared,
            "dead": view.dead,
            "next_due": None if view.next_due is None else instant(view.next_due),
            "overdue_ms": view.overdue_ms,
            "error": view.error,
        }
        for view in views
    ]
