"""Is each member of the ZooKeeper ensemble there? Asked with ``srvr``, which they answer unless forbidden."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import closing

from toc.coordination.session import Address
from toc.finding import Finding, Level

_PORT = 2181
_ENOUGH = 4096


def examine(address: str, *, timeout: float) -> list[Finding]:
    """What each member says of itself; one out of reach is a finding. ``timeout``: seconds for each."""
    place = Address.parse(address)
    found = list(_members(place, timeout))
    if place.credential is None:
        found.append(
            Finding(
                Level.NOTE,
                place.hosts,
                "no user is named, so whoever reaches ZooKeeper may change who owns what",
                "TOC_ZOOKEEPER=user:password@host:port makes the nodes its own",
            )
        )
    return found


def _members(place: Address, timeout: float) -> Iterator[Finding]:
    if place.tls:
        yield Finding(Level.NOTE, place.hosts, "members are not asked one by one over TLS", "")
        return
    members = [_split(member.strip()) for member in place.hosts.split(",")]
    for host, port in members:
        name = f"{host}:{port}"
        try:
            said = _ask(host, port, timeout)
        except OSError as exc:
            rest = "; the others serve on" if len(members) > 1 else ""
            do = "bring it back: of an ensemble more than half must run"
            yield Finding(Level.WARN, name, f"it does not answer ({type(exc).__name__}){rest}", do)
            continue
        mode = re.search(r"^Mode: (\w+)", said, re.MULTILINE)
        version = re.search(r"^Zookeeper version: ([0-9.]+)", said, re.MULTILINE)
        if mode and version:
            alone = mode[1] == "standalone"
            yield Finding(
                Level.NOTE if alone else Level.OK,
                name,
                f"ZooKeeper {version[1]}, {mode[1]}",
                "three members survive the loss of one; without any, workers go on as they are"
                if alone
                else "",
            )
        elif "not currently serving" in said:
            yield Finding(Level.WARN, name, "it serves nobody: it sees no majority", "see its log")
        else:
            yield Finding(
                Level.NOTE, name, "it does not say how it is", "4lw.commands.whitelist=srvr in zoo.cfg"
            )


def _split(member: str) -> tuple[str, int]:
    host, colon, port = member.rpartition(":")
    if not colon or member.endswith("]"):
        return member.strip("[]"), _PORT
    return host.strip("[]"), int(port)


def _ask(host: str, port: int, timeout: float) -> str:
    with closing(socket.create_connection((host, port), timeout)) as connection:
        connection.sendall(b"srvr")
        said = b""
        while len(said) < _ENOUGH and (more := connection.recv(_ENOUGH)):
            said += more
    return said.decode(errors="replace")
