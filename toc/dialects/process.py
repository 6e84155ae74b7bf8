"""One HTTP process of a gateway that speaks dialects too. Started by the daemon as
``python -m toc.dialects.process``, never by hand."""

import argparse
import socket
from ipaddress import ip_network

from toc.dialects.delay_task import DelayTask
from toc.dialects.lmstfy import Lmstfy, LmstfyAdmin
from toc.dialects.port import Dialect, Guard, Port
from toc.dialects.redis_delayed import RedisDelayed
from toc.dialects.youzan import Youzan
from toc.gateway import process
from toc.gateway.service import Service
from toc.gateway.shares import memory

DIALECTS: dict[str, type[Dialect]] = {
    one.name: one for one in (Youzan, RedisDelayed, DelayTask, Lmstfy, LmstfyAdmin)
}
"""Every dialect, by the name of its option."""


def ports(service: Service, arguments: argparse.Namespace) -> list[tuple[str, Port, socket.socket]]:
    """Return the ports of the dialects that are served, each with its name and socket."""
    guard = Guard([ip_network(text) for text in arguments.dialect_from], arguments.dialect_host)
    held = memory()
    found = []
    for text in arguments.dialect:
        name, _, descriptor = text.partition("=")
        port = Port(DIALECTS[name](service), guard, held)
        found.append((name, port, socket.socket(fileno=int(descriptor))))
    return found


def main() -> None:
    """The entry point of the process."""
    process.main(ports)


if __name__ == "__main__":
    main()
