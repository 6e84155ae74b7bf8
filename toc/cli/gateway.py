"""toc gateway"""

from __future__ import annotations

import socket
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toc.cli.output import say
from toc.cli.values import load_settings
from toc.model.errors import ConfigError, InvalidInput, shown

if TYPE_CHECKING:
    from toc.worker.daemon.supervisor import Beside

BACKLOG = 2048
"""Connections that wait to be taken, for instance while a process is replaced."""


def gateway(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; a numeric address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65_535, help="0: any free port.")] = 8080,
    processes: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=64, help="HTTP processes; on two cores one answers soonest."),
    ] = 1,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain in PEM: speak TLS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key in PEM.")] = None,
    plain_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR", help="Answer these networks without TLS, such as a proxy's; may be repeated."
        ),
    ] = None,
) -> None:
    """Serve the HTTP API, by access tokens (`toc token create`). SIGTERM ends it in good order.

    One worker without handlers runs beside the HTTP processes, so that a system of gateways alone is
    complete. Outside loopback it needs TLS, or --plain-from.

    Example: toc gateway --host 0.0.0.0 --port 8443 --tls-cert chain.pem --tls-key key.pem
    """
    from toc.config import Settings
    from toc.observe.log import detach

    beside = http_processes(host, port, processes, tls_cert, tls_key, plain_from or [])
    detach()
    settings = load_settings(daemon=True)
    settings.need_database_urls()
    settings.need_redis_url()
    settings = Settings(**(settings.model_dump() | {"processes": 1}))
    from toc.worker.app import NO_HANDLERS
    from toc.worker.daemon.start import run_daemon

    raise typer.Exit(run_daemon(NO_HANDLERS, settings, beside))


def http_processes(
    host: str, port: int, processes: int, tls_cert: Path | None, tls_key: Path | None, plain_from: list[str]
) -> Beside:
    """Listen, and return what a daemon keeps running to serve that. Raises ConfigError or InvalidInput."""
    from toc.worker.daemon.supervisor import Beside

    try:
        import toc.gateway.process
    except ImportError as exc:
        raise ConfigError(
            f"the gateway needs {exc.name}, which is not installed: pip install 'timeout-center[gateway]'"
        ) from exc
    try:
        address = ip_address(host)
        networks = [str(ip_network(text)) for text in plain_from]
    except ValueError as exc:
        raise InvalidInput(
            f"{exc}; write an address such as 0.0.0.0 and networks such as 10.0.0.0/8"
        ) from exc
    if (tls_cert is None) != (tls_key is None):
        raise InvalidInput("give both --tls-cert and --tls-key, or neither")
    for file in filter(None, (tls_cert, tls_key)):
        if not file.is_file():
            raise InvalidInput(f"{shown(str(file))} is not a file")
    if not address.is_loopback and tls_cert is None and not networks:
        raise ConfigError(
            f"{host} is not loopback, and tokens must not cross a network in the clear: give --tls-cert and "
            f"--tls-key, or name with --plain-from who may come without TLS (a proxy that speaks it)"
        )
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host} port {port}: {exc.strerror or exc}") from exc
    scheme = "http" if tls_cert is None else "https"
    where = f"[{host}]" if address.version == 6 else host
    say(f"gateway at {scheme}://{where}:{listener.getsockname()[1]}, its documentation at /docs")
    command = [sys.executable, "-m", toc.gateway.process.__name__, "--listen", str(listener.fileno())]
    if tls_cert is not None and tls_key is not None:
        command += ["--tls-cert", str(tls_cert.absolute()), "--tls-key", str(tls_key.absolute())]
    for network in networks:
        command += ["--allow", network]
    return Beside("http", processes, tuple(command), (listener.detach(),))
