"""What the daemons of a cluster tell at /metrics: where they answer, and their numbers."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, NamedTuple

from toc.model.errors import Unavailable
from toc.observe import metrics
from toc.observe.board import Values
from toc.observe.exposition import decode
from toc.observe.metrics import add_up
from toc.operate.cluster import workers

if TYPE_CHECKING:
    from toc.coordination.assignment import Member
    from toc.sdk.client import TimeoutCenter

SCRAPE_SECONDS = 2.0
"""Seconds that a daemon has to answer."""
MAX_DAEMONS = 32
"""How many daemons are scraped at once."""
_ANYWHERE = ("", "0.0.0.0", "[::]")  # noqa: S104 - nothing listens here
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def addresses(workers: Iterable[Member]) -> Sequence[str]:
    """Return the host:port at which daemons serve their numbers, as these workers announce them."""
    here = socket.gethostname()
    return sorted({_reached(each, each.metrics, here) for each in workers if each.metrics})


def _reached(worker: Member, metrics_address: str, here: str) -> str:
    """Return the address of a worker's daemon as seen from the machine ``here``."""
    host, _, port = metrics_address.rpartition(":")
    if worker.machine == here:
        return f"{'127.0.0.1' if host in _ANYWHERE else host}:{port}"
    return f"{worker.host if host in (*_ANYWHERE, *_LOOPBACK) else host}:{port}"


def scrape(asked: Sequence[str]) -> dict[str, Values | str]:
    """Return each daemon's numbers, or a short text that says why there are none."""
    if not asked:
        return {}
    with ThreadPoolExecutor(min(len(asked), MAX_DAEMONS)) as pool:
        return dict(zip(asked, pool.map(_scrape_one, asked), strict=True))


def _scrape_one(address: str) -> Values | str:
    try:
        connection = HTTPConnection(address, timeout=SCRAPE_SECONDS)  # direct: no proxy from the environment
    except HTTPException:
        return "not an address"  # as anybody may have written there
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        if response.status != 200:
            return f"no numbers (HTTP status {response.status})"
        return decode(response.read().decode())
    except OSError as exc:
        return f"no answer ({exc})"
    except (HTTPException, LookupError, ValueError, OverflowError):  # OverflowError: no port is that large
        return "the server there is not a toc daemon"
    finally:
        connection.close()


class Late(NamedTuple):
    """What is due of a topic: for how many seconds the first task that has not started, taken by a worker or
    not; and how many taken ones wait for a handler."""

    seconds: float
    waiting: int


def late(center: TimeoutCenter) -> dict[str, Late]:
    """Return what all daemons that answer tell of each topic. Nothing if they cannot be found."""
    members: list[Member] = []
    with suppress(Unavailable):  # reported elsewhere
        members = [row.member for row in workers(center)]
    total: Values = {}
    for values in scrape(addresses(members)).values():
        if not isinstance(values, str):
            add_up(total, values)

    def gauge(name: str, topic: str) -> float:
        return total.get((name, topic), [0.0])[0]

    overdue, waiting = metrics.OVERDUE.metric.name, metrics.WAITING.metric.name
    topics = [key[1] for key in total if key[0] == overdue]
    return {topic: Late(gauge(overdue, topic), int(gauge(waiting, topic))) for topic in topics}
