"""Checks each server of the ZooKeeper ensemble with ``srvr``, which servers answer unless it is forbidden."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator

from toc.coordination.address import Address
from toc.model.finding import Finding, Level

_ENOUGH = 4096


def examine(address: str, *, timeout: float) -> list[Finding]:
    """Return what each server reports; one out of reach is a finding. ``timeout``: seconds for each."""
    place = Address.parse(address)
    found = list(_members(place, timeout))
    if place.credential is None:
        found.append(
            Finding(
                Level.NOTE,
                place.hosts,
                "no user is set, so anyone who can reach ZooKeeper can change who owns which slot",
                "set TOC_ZOOKEEPER=user:password@host:port: then only that user can change the nodes",
            )
        )
    elif not place.tls:
        found.append(
            Finding(
                Level.NOTE,
                place.hosts,
                "the password in TOC_ZOOKEEPER is sent unencrypted",
                "set secureClientPort in zoo.cfg, and append ?tls=true&ca=... to TOC_ZOOKEEPER",
            )
        )
    return found


def _members(place: Address, timeout: float) -> Iterator[Finding]:
    try:
        context = _context(place) if place.tls else None
    except OSError as exc:
        yield Finding(
            Level.REFUSE,
            place.hosts,
            f"the certificate or key in TOC_ZOOKEEPER cannot be read: {exc}",
            "correct the path or the file",
        )
        return
    for host, port in place.members():
        name = f"{host}:{port}"
        try:
            said = _ask(host, port, timeout, context)
        except ssl.SSLError as exc:
            why = getattr(exc, "verify_message", None) or exc.reason or type(exc).__name__
            do = "compare its certificate with the ca and the host name in TOC_ZOOKEEPER"
            yield Finding(Level.WARN, name, f"the TLS handshake with it failed: {why}", do)
            continue
        except OSError as exc:
            do = "bring it back: more than half of the ensemble must run"
            yield Finding(Level.WARN, name, f"it does not answer ({type(exc).__name__})", do)
            continue
        mode = re.search(r"^Mode: (\w+)", said, re.MULTILINE)
        version = re.search(r"^Zookeeper version: ([0-9.]+)", said, re.MULTILINE)
        if mode and version:
            alone = mode[1] == "standalone"
            yield Finding(
                Level.NOTE if alone else Level.OK,
                name,
                f"ZooKeeper {version[1]}, {mode[1]}",
                "run three members to survive the loss of one; without ZooKeeper, workers keep their slots"
                if alone
                else "",
            )
        elif "not currently serving" in said:
            yield Finding(
                Level.WARN, name, "it serves no requests, because it sees no majority", "see its log"
            )
        else:
            yield Finding(
                Level.NOTE,
                name,
                "it does not answer srvr, so its state is unknown",
                "set 4lw.commands.whitelist=srvr in zoo.cfg",
            )


def _context(place: Address) -> ssl.SSLContext:
    """Return the TLS settings of toc's sessions: the system's CAs or the named one, with host name check."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs()
    if place.ca:
        context.load_verify_locations(place.ca)
    if place.cert:
        context.load_cert_chain(place.cert, place.key)
    return context


def _ask(host: str, port: int, timeout: float, context: ssl.SSLContext | None) -> str:
    with socket.create_connection((host, port), timeout) as plain:
        connection = context.wrap_socket(plain, server_hostname=host) if context else plain
        with connection:
            connection.sendall(b"srvr")
            said = b""
            while len(said) < _ENOUGH and (more := connection.recv(_ENOUGH)):
                said += more
    return said.decode(errors="replace")
