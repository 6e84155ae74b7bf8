"""Receives the bodies of requests, within a bound on each and one on all that are received at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from toc.gateway.connections import ClientGone
from toc.model.errors import BodyTooLarge, Busy

MOST_BUFFERED = 128 << 20
"""Most bytes of bodies that are being received at once. One sender uses at most as many as are left free,
so that it cannot keep out the bodies of others. A sender is a token, or on a port of a dialect the address of
a client."""

ESCAPED = 6
"""Most bytes of JSON for one byte of a text."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Intake:
    """The bodies that a process is receiving. For one event loop."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        """Bytes, by sender."""

    async def body(self, receive: Receive, sender: str, most: int, declared: str | None) -> bytes:
        """Return the whole body of a request, of at most ``most`` bytes. ``declared`` is its Content-Length.

        Raises BodyTooLarge, Busy or ClientGone; the first two perhaps before all of it has come.
        """
        if declared is not None and declared.isdecimal() and int(declared[:20]) > most:
            raise BodyTooLarge(f"at most {most} bytes are allowed")
        parts: list[bytes] = []
        size = 0
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                self._held[sender] += len(part)
                if size > most:
                    raise BodyTooLarge(f"at most {most} bytes are allowed")
                if self._held[sender] > MOST_BUFFERED - self._held.total():
                    raise Busy("too many bytes are being received")
                parts.append(part)
                more = message.get("more_body", False)
        finally:
            self._held[sender] -= size
            if not self._held[sender]:
                del self._held[sender]
        return parts[0] if len(parts) == 1 else b"".join(parts)


def client_address(text: str) -> IPv4Address | IPv6Address:
    """Return the address of a client; one of IPv4 as such, although a socket of IPv6 shows it as mapped."""
    address = ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address
