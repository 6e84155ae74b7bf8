"""All connections of a process, and the server that takes them: bounds on their number.

Beyond a bound on connections the oldest goes of those that are still arriving, or of those that rest if there
are more of these; never the new one, and never a request that waits for its answer, of which there are fewer
than places (``Crowd.work``).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from uvicorn.config import Config
from uvicorn.server import Server

from toc.gateway.connections import SECONDS, Connection, Phase
from toc.gateway.shares import Shares
from toc.observe.metrics import CONNECTIONS

MAX_CONNECTIONS = 4096
"""Most connections of a process."""
MAX_PER_ADDRESS = 3000
"""Most of them from one address that is no proxy, unless the gateway's option says otherwise."""
OTHERS = 7
"""How many places one may have for each that is left to others."""
LOOK_SECONDS = 1.0


def client_address(text: str) -> IPv4Address | IPv6Address:
    """Return the address of a client; one of IPv4 as such, although a socket of IPv6 shows it as mapped."""
    address = ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


class Crowd:
    """All connections of a process. ``most`` bounds their number, ``per_address`` that of one address; not of
    ``proxies``, each of which speaks for many clients."""

    def __init__(
        self,
        most: int = MAX_CONNECTIONS,
        per_address: int = MAX_PER_ADDRESS,
        proxies: Iterable[IPv4Network | IPv6Network] = (),
    ) -> None:
        self.most = most
        self.per_address = min(per_address, most * 7 // 8)
        self._proxies = tuple(proxies)
        self.per_port = most * 7 // 8
        self.all: set[Connection] = set()
        self.work = Shares(most * 7 // 8, "too many requests are being answered", OTHERS)
        """For requests that are being worked on, whose connections cannot be closed for others."""
        self.waits = Shares(self.work.most * 7 // 8, "too many requests are being answered", OTHERS)
        """For those among them that wait for tasks."""
        self.phases: list[dict[Connection, float]] = [{} for _ in Phase]
        """The connections in each phase and since when, the longest first."""
        self.unread = self.phases[Phase.UNREAD]
        self._addresses: Counter[str] = Counter()
        self._ports: Counter[str] = Counter()

    def join(self, new: Connection) -> None:
        """Add a new connection. If there are too many, another one goes."""
        self.all.add(new)
        self._addresses[new.address] += 1
        self._ports[new.port] += 1
        self.phases[new.phase][new] = asyncio.get_running_loop().time()
        if new.address and self._addresses[new.address] > self.per_address:
            self._close_one(new, address=new.address)
        elif self._ports[new.port] > self.per_port:
            self._close_one(new, port=new.port)
        elif len(self.all) > self.most:
            self._close_one(new)

    def address_of(self, transport: asyncio.Transport) -> str:
        """Return whom a connection counts for: the client's address, of IPv6 the network that one client
        has (/64); nothing for a proxy."""
        name = transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            return ""
        if ":" not in name[0] and not self._proxies:
            return str(name[0])
        address = client_address(name[0])
        if any(address in network for network in self._proxies):
            return ""
        return str(address) if address.version == 4 else str(ip_network((address, 64), strict=False))

    def _close_one(self, new: Connection, **like: str) -> None:
        """Close the oldest of those that arrive, leave or do not read, or else of those that rest: of
        whichever there are more."""
        others = [self.phases[phase] for phase in SECONDS if phase is not Phase.IDLE]
        resting = [self.phases[Phase.IDLE]]

        def fits(one: Connection) -> bool:
            return one is not new and all(getattr(one, name) == value for name, value in like.items())

        more = sum(map(len, others)) > len(resting[0])
        for groups in (others, resting) if more else (resting, others):
            oldest = [next(filter(fits, group), None) for group in groups]
            since = {one: group[one] for one, group in zip(oldest, groups, strict=True) if one is not None}
            if since:
                min(since, key=since.__getitem__).close("crowded")
                return
        new.close("crowded")

    def left(self, connection: Connection) -> None:
        """Forget a connection."""
        self.phases[connection.phase].pop(connection, None)
        self.unread.pop(connection, None)
        if connection in self.all:
            self.all.discard(connection)
            for count, name in ((self._addresses, connection.address), (self._ports, connection.port)):
                count[name] -= 1
                if not count[name]:
                    del count[name]

    async def look_on(self) -> None:
        """Close what lasts too long, once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = loop.time()
            for phase, seconds in SECONDS.items():
                for connection, since in list(self.phases[phase].items()):
                    if now - since <= seconds:
                        break
                    connection.late(phase)
            CONNECTIONS.of().set(len(self.all))


Files = tuple[str | None, str | None]


class GatewayServer(Server):
    """uvicorn's server, which its owner stops, not a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Leave signals alone."""
        yield


def server(
    app: Any, crowd: Crowd, *, shutdown_deadline: float, port: str = "native", tls: Files = (None, None)
) -> GatewayServer:
    """Return a server for the application; ``port`` names it, ``tls`` are the files of certificate and key.
    Raises OSError or ssl.SSLError for a bad certificate."""
    config = Config(
        app,
        http=type("OwnConnection", (Connection,), {"crowd": crowd, "port": port}),
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=round(SECONDS[Phase.IDLE]),
        timeout_graceful_shutdown=max(1, round(shutdown_deadline)),
        ssl_certfile=tls[0],
        ssl_keyfile=tls[1],
    )
    config.load()
    return GatewayServer(config)
