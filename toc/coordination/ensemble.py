"""Checks each member of the ZooKeeper ensemble with a session of its own."""

from __future__ import annotations

from dataclasses import replace

from toc.coordination.address import Address
from toc.coordination.session import Session
from toc.model.errors import CoordinationUnavailable
from toc.model.finding import Finding, Level


def examine(address: str, *, timeout: float) -> list[Finding]:
    """Return whether each member serves; one out of reach is a finding. ``timeout``: seconds for each."""
    place = Address.parse(address)
    found = [_member(place, host, port, timeout) for host, port in place.members()]
    if len(found) == 1:
        do = "run three members to survive the loss of one; without ZooKeeper, workers keep their slots"
        found.append(Finding(Level.NOTE, place.hosts, "it is the only member", do))
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


def _member(place: Address, host: str, port: int, timeout: float) -> Finding:
    name = f"{host}:{port}"
    session = Session(replace(place, hosts=name), lambda: None, connect_timeout=timeout)
    try:
        session.start()
    except CoordinationUnavailable as exc:
        do = "bring it back: more than half of the ensemble must run"
        return Finding(Level.WARN, name, f"it does not answer: {exc}", do)
    session.stop()
    return Finding(Level.OK, name, "it serves", "")
