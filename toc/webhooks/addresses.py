"""Which addresses a webhook may connect to. Pure decisions; ``connect`` applies them.

An address may embed another one, to which a translator or a tunnel would pass the connection on. Every
embedded address is judged as well, and one that is refused refuses the whole. NAT64 for local use
(64:ff9b:1::/48, RFC 8215) is refused as a whole: only its network knows where they embed another one.

    64:ff9b::/96         NAT64                  the last 32 bits (RFC 6052)
    2002::/16            6to4                   bits 16 to 47 (RFC 3056)
    2001::/32            Teredo                 bits 32 to 63, and the last 32 inverted (RFC 4380)
    ::ffff:0:0/96        IPv4-mapped            the last 32 bits (RFC 4291)
    ::ffff:0:0:0/96      IPv4-translated        the last 32 bits (RFC 2765)
    ::/96                IPv4-compatible        the last 32 bits (RFC 4291)
    ...:0:5efe:a.b.c.d   ISATAP                 the last 32 bits (RFC 5214)
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Allowed = Callable[[Address], bool]
"""Whether an address is listed: it may then be connected to, whatever it is."""

_V4: dict[str, tuple[str, ...]] = {
    "unspecified": ("0.0.0.0/8",),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    "shared by a carrier's customers": ("100.64.0.0/10",),
    "loopback": ("127.0.0.0/8",),
    "link-local": ("169.254.0.0/16",),
    "for documentation": ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),
    "for benchmarks": ("198.18.0.0/15",),
    "multicast": ("224.0.0.0/4",),
    "reserved": ("192.0.0.0/24", "192.88.99.0/24", "240.0.0.0/4"),
}
_V6: dict[str, tuple[str, ...]] = {
    "unspecified": ("::/128",),
    "loopback": ("::1/128",),
    "private": ("fc00::/7", "fec0::/10"),
    "link-local": ("fe80::/10",),
    "for documentation": ("2001:db8::/32", "3fff::/20"),
    "for benchmarks": ("2001:2::/48",),
    "multicast": ("ff00::/8",),
    "reserved": ("2001::/23",),
}
_SPECIAL4 = [(what, IPv4Network(text)) for what, texts in _V4.items() for text in texts]
_SPECIAL6 = [(what, IPv6Network(text)) for what, texts in _V6.items() for text in texts]
_GLOBAL6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_LAST_32 = tuple(map(IPv6Network, ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96")))
_ISATAP = (0x00005EFE, 0x02005EFE)


def embedded(address: Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that this one embeds; [] for a plain one."""
    if isinstance(address, IPv4Address):
        return []
    number = int(address)
    last = IPv4Address(number & 0xFFFFFFFF)
    if number < 2:  # unspecified and loopback look IPv4-compatible
        return []
    if address in _NAT64 or any(address in network for network in _LAST_32):
        return [last]
    if address in _SIX_TO_FOUR:
        return [IPv4Address(number >> 80 & 0xFFFFFFFF)]
    if address in _TEREDO:
        return [IPv4Address(number >> 64 & 0xFFFFFFFF), IPv4Address(~number & 0xFFFFFFFF)]
    if number >> 32 & 0xFFFFFFFF in _ISATAP:
        return [last]
    return []


def refusal(address: Address, allowed: Allowed) -> str | None:
    """Return why this address must not be connected to, or None if it may be.

    A listed address may be connected to, and so may one that embeds listed or public ones only.
    """
    if getattr(address, "scope_id", None) is not None:
        return "it is link-local"
    if allowed(address):
        return None
    inner = embedded(address)
    if inner:
        for one in inner:
            if not allowed(one) and (why := _special(one)) is not None:
                return f"it embeds {one}, which is {why}"
        if int(address) >> 32 & 0xFFFFFFFF not in _ISATAP:
            return None
        # only its interface part embeds an address: the network part is judged as well
    why = _special(address)
    return None if why is None else f"it is {why}"


def _special(address: Address) -> str | None:
    if isinstance(address, IPv4Address):
        return next((what for what, network in _SPECIAL4 if address in network), None)
    found = next((what for what, network in _SPECIAL6 if address in network), None)
    return found or (None if address in _GLOBAL6 else "reserved")
