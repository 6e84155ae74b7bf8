"""One HTTP process of a gateway that speaks dialects too. Started by the daemon as
``python -m toc.dialects.process``, never by hand."""

from __future__ import annotations

import argparse
import socket
from ipaddress import ip_network

from toc.dialects.port import Guard, Port
from toc.dialects.registry import DIALECTS
from toc.gateway import process
from toc.gateway.exchange import Memory
from toc.gateway.service import Service


def ports(service: Service, arguments: argparse.Namespace) -> list[tuple[str, Port, socket.socket]]:
    """Return the ports of the dialects that are served, each with its name and socket."""
    guard = Guard([ip_network(text) for text in arguments.dialect_from], arguments.dialect_host)
    memory = Memory()
    found = []
    for text in arguments.dialect:
        name, _, descriptor = text.partition("=")
        port = Port(DIALECTS[name](service), guard, memory)
        found.append((name, port, socket.socket(fileno=int(descriptor))))
    return found


def main() -> None:
    """The entry point of the process."""
    process.main(ports)


if __name__ == "__main__":
    main()
