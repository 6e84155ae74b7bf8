"""toc worker | gateway: the daemons."""

from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toc.cli.output import say
from toc.cli.values import daemon_settings, flag, option
from toc.model.errors import ConfigError, InvalidInput, NotInstalled, shown

if TYPE_CHECKING:
    from toc.worker.daemon.processes import SideProcesses

_AT = "ADDRESS:PORT"
BACKLOG = 2048
"""Connections that wait to be taken, for instance while a process is replaced."""


def worker(
    app: str | None = option("MODULE:NAME", "Your TimeoutCenter: shop.deadlines:center."),
    webhooks: bool = flag("--webhooks", "Send the tasks of topics whose delivery is webhook."),
    processes: int | None = option("N", "Worker processes. Default: one per core."),
    threads: int | None = option("N", "Handlers that each process runs at once. Default 16."),
) -> None:
    """Run handlers, send webhooks, or both: the daemon of this host. SIGTERM or Ctrl-C stops it.

    Examples: toc worker --app shop.deadlines:center --processes 4
              toc worker --webhooks
    """
    if app is None and not webhooks:
        raise InvalidInput("give --app MODULE:NAME, --webhooks, or both")
    asked = {"processes": processes, "threads": threads}
    settings = daemon_settings(**{name: value for name, value in asked.items() if value is not None})
    if webhooks:
        check_webhooks()
    from toc.worker.app import NO_HANDLERS
    from toc.worker.daemon.supervisor import run_daemon

    raise typer.Exit(run_daemon(NO_HANDLERS if app is None else app, settings, None, webhooks=webhooks))


def check_webhooks() -> None:
    """Raise NotInstalled unless webhooks can be sent from here."""
    try:
        import toc.webhooks.sender  # noqa: F401 - imports the HTTP client
    except ImportError as exc:
        raise NotInstalled("--webhooks needs aiohttp", "webhooks") from exc


def _set(variable: str, metavar: str, text: str, **more: Any) -> Any:
    """Return an option that a variable TOC_GATEWAY_... sets, too."""
    return option(metavar, text, envvar=f"TOC_GATEWAY_{variable}", **more)


def gateway(
    host: str = option("ADDRESS", "Where to listen; a numeric address.", default="127.0.0.1"),
    port: int = option("N", "0: any free port.", default=8080, min=0, max=65_535),
    processes: int = option(
        "N", "HTTP processes; on two cores one answers soonest.", default=1, min=1, max=64
    ),
    tls_cert: Path | None = option("FILE", "Certificate chain in PEM; turns TLS on."),
    tls_key: Path | None = option("FILE", "Its key in PEM."),
    plain_from: list[str] | None = option(
        "CIDR", "Networks that may connect without TLS, such as a proxy's; may be repeated."
    ),
    per_address: int = _set(
        "PER_ADDRESS", "N", "Most connections of one client's address to one process.",
        default=3000, min=2, max=1_000_000,
    ),
    proxy: list[str] | None = _set(
        "PROXY", "CIDR", "A proxy, whose address may have any number of connections; may be repeated."
    ),
    youzan: str | None = _set("YOUZAN", _AT, "Speak Youzan's delay queue here."),
    redis_delayed: str | None = _set("REDIS_DELAYED", _AT, "Speak redis-delayed here."),
    delay_task: str | None = _set("DELAY_TASK", _AT, "Speak delay/task here."),
    lmstfy: str | None = _set("LMSTFY", _AT, "Speak lmstfy's API here."),
    lmstfy_admin: str | None = _set("LMSTFY_ADMIN", _AT, "Speak lmstfy's admin API here."),
    dialect_from: list[str] | None = _set(
        "DIALECT_FROM", "CIDR",
        "Networks that may use the ports of dialects, which have no tokens; may be repeated.",
    ),
    dialect_host: list[str] | None = _set(
        "DIALECT_HOST", "NAME", "A name by which clients know these ports; may be repeated."
    ),
) -> None:  # fmt: skip
    """Serve the HTTP API to clients with access tokens (`toc token create`). SIGTERM stops it in good order.

    One worker without handlers runs beside the HTTP processes, so that a system of gateways alone is
    complete. Outside loopback it needs TLS, or --plain-from; ports of dialects need --dialect-from.

    Example: toc gateway --host 0.0.0.0 --port 8443 --tls-cert chain.pem --tls-key key.pem

    Example: toc gateway --youzan 127.0.0.1:9277
    """
    beside = http_processes(host, port, processes, tls_cert, tls_key, plain_from or [])
    bounds = ["--per-address", str(per_address), *_each("--proxy", _networks("--proxy", proxy or []))]
    beside = replace(beside, command=(*beside.command, *bounds))
    named = {
        "youzan": youzan, "redis-delayed": redis_delayed, "delay-task": delay_task, "lmstfy": lmstfy,
        "lmstfy-admin": lmstfy_admin,
    }  # fmt: skip
    there = {name: at for name, at in named.items() if at}
    beside = with_dialects(beside, there, dialect_from or [], dialect_host or [])
    settings = daemon_settings(processes=1)
    from toc.worker.app import NO_HANDLERS
    from toc.worker.daemon.supervisor import run_daemon

    raise typer.Exit(run_daemon(NO_HANDLERS, settings, beside))


def http_processes(
    host: str, port: int, processes: int, tls_cert: Path | None, tls_key: Path | None, plain_from: list[str]
) -> SideProcesses:
    """Listen, and return what a daemon keeps running to serve that. Raises ConfigError or InvalidInput."""
    from toc.model.topic import Delivery
    from toc.worker.daemon.processes import SideProcesses

    try:
        import toc.gateway.process
    except ImportError as exc:
        raise NotInstalled(f"the gateway needs {exc.name}, which is not installed", "gateway") from exc
    try:
        address = ip_address(host)
    except ValueError as exc:
        raise InvalidInput(f"--host: {exc}; write an address such as 0.0.0.0") from exc
    networks = _networks("--plain-from", plain_from)
    if (tls_cert is None) != (tls_key is None):
        raise InvalidInput("give both --tls-cert and --tls-key, or neither")
    if tls_cert is not None and tls_key is not None:  # else its processes would end, one after the other
        try:
            for file in (tls_cert, tls_key):
                if not file.is_file():  # such as a pipe, which can be read once
                    raise FileNotFoundError(f"{file} is no file")
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls_cert, tls_key, lambda: "")
        except OSError as exc:
            both = f"--tls-cert {shown(str(tls_cert))}, --tls-key {shown(str(tls_key))}"
            raise InvalidInput(f"{both} are not a certificate and its key without a password: {exc}") from exc
    if not address.is_loopback and tls_cert is None and not networks:
        raise ConfigError(
            f"{host} is not loopback, and tokens must not cross a network in the clear: give --tls-cert and "
            f"--tls-key, or name with --plain-from the networks without TLS (such as a proxy's)"
        )
    listener = listen(address, port)
    scheme = "http" if tls_cert is None else "https"
    say(f"gateway at {scheme}://{_address_of(listener)}, its documentation at /docs, the console at /console")
    command = [sys.executable, "-m", toc.gateway.process.__name__, "--listen", str(listener.fileno())]
    if tls_cert is not None and tls_key is not None:
        command += ["--tls-cert", str(tls_cert.absolute()), "--tls-key", str(tls_key.absolute())]
    command += _each("--allow", networks)
    pulled = frozenset({Delivery.PULL.value})
    return SideProcesses("http", processes, tuple(command), (listener.detach(),), pulled)


def _networks(name: str, texts: Sequence[str]) -> list[str]:
    """Return networks in their usual form. Raises InvalidInput."""
    try:
        return [str(ip_network(text)) for text in texts]
    except ValueError as exc:
        raise InvalidInput(f"{name}: {exc}; write a network such as 10.0.0.0/8") from exc


def _each(name: str, values: Sequence[str]) -> list[str]:
    """Return an option for each value."""
    return [word for value in values for word in (name, value)]


def with_dialects(
    beside: SideProcesses, named: Mapping[str, str], networks: Sequence[str], hosts: Sequence[str]
) -> SideProcesses:
    """Listen for dialects, given by name with ADDRESS:PORT, and return what serves them as well.

    Raises ConfigError or InvalidInput.
    """
    allowed = _networks("--dialect-from", networks)
    command, descriptors = list(beside.command), list(beside.descriptors)
    if named:
        import toc.dialects.process

        command[command.index("-m") + 1] = toc.dialects.process.__name__
    for name, where in named.items():
        host, _, digits = where.rpartition(":")
        try:
            address, port = ip_address(host.removeprefix("[").removesuffix("]")), int(digits)
        except ValueError as exc:
            raise InvalidInput(
                f"--{name} {shown(where)}: write a numeric address and a port, such as 127.0.0.1:9277"
            ) from exc
        if not address.is_loopback and not allowed:
            raise ConfigError(
                f"--{name} {where} is not loopback, and anyone who reaches the port may use it: name the "
                f"networks that may with --dialect-from"
            )
        listener = listen(address, port)
        say(f"{name} at http://{_address_of(listener)}")
        descriptors.append(listener.detach())
        command += ["--dialect", f"{name}={descriptors[-1]}"]
    command += _each("--dialect-from", allowed) + _each("--dialect-host", hosts)
    return replace(beside, command=tuple(command), descriptors=tuple(descriptors))


def listen(address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError."""
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as exc:
        listener.close()
        raise ConfigError(f"cannot listen on {address} port {port}: {getattr(exc, 'strerror', exc)}") from exc
    return listener


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
