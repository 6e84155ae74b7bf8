"""What ``toc top`` shows: queues from Redis, slots by worker, rates and lateness from the daemons' /metrics.

Reads only the topics from MySQL. Reads the queues of all slots at once, and scrapes all daemons at the same
time, each once. What is out of reach is named and left blank; the rest is shown.
"""

import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

from toc.coordination.assignment import Member
from toc.coordination.views import WorkerRow
from toc.index.messages import Peek
from toc.maintenance.depths import depths as slot_depths
from toc.model.errors import IndexUnavailable, StoreUnavailable, Unavailable
from toc.model.topic import Topic
from toc.observe import metrics
from toc.observe.board import Family, Key, Level, Metric, MetricKind, Values
from toc.observe.exposition import JSON, MAX_BYTES, decode
from toc.observe.metrics import add_up, quantile
from toc.operate.cluster import living_workers
from toc.operate.operation import Record
from toc.operate.records import worker_record
from toc.sdk.client import TimeoutCenter

SCRAPE_SECONDS = 2.0
"""Seconds that a daemon has to answer."""
MAX_DAEMONS = 32
"""How many daemons are scraped at once."""
_OF_WORKER = "worker host owned assigned tables tables_assigned drained leader metrics"
_ANYWHERE = ("", "0.0.0.0", "[::]")  # noqa: S104 - nothing listens here
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class Picture:
    """The cluster at one moment. ``seconds`` is the time since the previous Picture, None in the first."""

    seconds: float | None
    topics: Sequence[Record]
    workers: Sequence[Record]
    daemons: int
    """How many daemons answered."""
    trouble: Sequence[str]
    """What is out of reach, or wrong in the answers."""
    silent: Sequence[str] = ()
    """The daemons (host:port) that were asked and did not answer."""


class Top:
    """Makes one Picture of the cluster after the other.

    ``named`` are the host:port addresses of daemons to ask; if there are none, those that workers announce.
    """

    def __init__(self, center: TimeoutCenter, named: Sequence[str] = ()) -> None:
        self._center = center
        self._named = named
        self._workers: Sequence[WorkerRow] = ()
        self.workers_error: Unavailable | None = None
        """Why the workers could not be read the last time; None if they were."""
        self._at: float | None = None
        self._before: dict[str, Values] = {}

    def look(self) -> Picture:
        """Return the present state, and what has happened since the previous call."""
        trouble: list[str] = []
        with suppress(StoreUnavailable):
            self._center.catalog.refresh()  # MySQL away: use those known; reading workers reports it
        topics = self._center.catalog.known()
        if not topics:
            trouble.append("no topics: none has been created, or MySQL is out of reach")
        self.workers_error = None
        try:
            self._workers = sorted(living_workers(self._center), key=lambda row: row.member.worker_id)
        except Unavailable as exc:
            self.workers_error = exc
            trouble.append(str(exc).splitlines()[0])
        addresses = self._named or addresses_of(row.member for row in self._workers)
        scraped = scrape(addresses)
        now = time.monotonic()
        seconds, self._at = None if self._at is None else now - self._at, now
        reached = {address: values for address, values in scraped.items() if isinstance(values, dict)}
        trouble += [f"{address}: {why}" for address, why in scraped.items() if isinstance(why, str)]
        if not addresses:
            told = "daemons tell them by TOC_METRICS_ADDRESS or --daemon, all members by `toc lateness`"
            trouble.append(f"no rates and no lateness: {told}")
        current: Values = {}
        gained: Values = {}
        for address, values in reached.items():
            add_up(current, values)
            add_up(gained, since(self._before.get(address, values), values))
        self._before = reached
        for member in (row.member for row in self._workers if row.member.out_of_reach):
            trouble.append(f"{member.worker_id} does not reach {', '.join(sorted(member.out_of_reach))}")
        depths = self._depths(topics.values(), trouble)
        numbers = current if reached else None, gained if reached and seconds else None, seconds or 1.0
        views = [_topic(one, depths.get(name, []), *numbers) for name, one in sorted(topics.items())]
        workers = [
            {key: worker_record(row)[key] for key in _OF_WORKER.split()} | {"machine": row.member.machine}
            for row in self._workers
        ]
        silent = [address for address in addresses if address not in reached]
        return Picture(seconds, views, workers, len(reached), trouble, silent)

    def _depths(self, topics: Collection[Topic], trouble: list[str]) -> dict[str, list[Peek]]:
        center, slots = self._center, [slot for topic in topics for slot in topic.slots()]
        found = slot_depths(center.store, center.queues, topics, slots, center.clock.now_ms())
        depths: dict[str, list[Peek]] = {}
        failures = [depth for depth in found.values() if isinstance(depth, IndexUnavailable)]
        for slot, depth in found.items():
            if not isinstance(depth, IndexUnavailable):
                depths.setdefault(slot.topic, []).append(depth)
        if any(depth.more for each in depths.values() for depth in each):
            trouble.append("only the first tasks of each table are counted: there may be more")
        if failures:
            trouble.append(f"{len(failures)} of {len(slots)} slots could not be read: {failures[0]}")
        return depths


def since(before: Mapping[Key, Sequence[float]], now: Mapping[Key, Sequence[float]]) -> Values:
    """Return by how much counters and histograms grew. One that shrank was restarted with its daemon."""
    gained: Values = {}
    for key, cells in now.items():
        if metrics.METRICS[key[0]].kind not in (MetricKind.COUNTER, MetricKind.HISTOGRAM):
            continue
        old = before.get(key, ())
        if len(old) != len(cells) or any(a < b for a, b in zip(cells, old, strict=True)):
            old = [0.0] * len(cells)
        gained[key] = [a - b for a, b in zip(cells, old, strict=True)]
    return gained


def _topic(
    topic: Topic, depths: Sequence[Peek], current: Values | None, gained: Values | None, seconds: float
) -> Record:
    """Return a topic now. Rates are per second since the picture before; None without data.

    Durations are seconds. ``due`` counts those of ``scheduled`` that are due and that no worker has taken,
    ``waiting`` those of ``prepared`` that wait for a handler. ``overdue`` is how long the earliest unstarted
    task has been due: as the daemons tell also one that a worker has taken.
    """

    def part(metric: Metric, wanted: float) -> float | None:
        cells = None if gained is None else gained.get((metric.name, topic.name))
        return None if cells is None else quantile(metric.buckets, cells, wanted)

    def rate(*outcomes: str) -> float | None:
        if gained is None:
            return None
        tries = metrics.TRIES.metric.name
        return sum(gained.get((tries, topic.name, outcome), [0.0])[0] for outcome in outcomes) / seconds

    def gauge(family: Family[Level]) -> float:
        return (current or {}).get((family.metric.name, topic.name), [0.0])[0]

    overdue = [(depth.redis_now_ms - depth.next_due) / 1000 for depth in depths if depth.next_due is not None]
    return {
        "topic": topic.name,
        "paused": topic.paused,
        "ended_per_second": rate("processed", "failed", "dead", "duplicate", "overtaken"),
        "retried_per_second": rate("failed", "crashed"),
        "lateness_p50": part(metrics.LATENESS.metric, 0.5),
        "lateness_p99": part(metrics.LATENESS.metric, 0.99),
        "handler_p99": part(metrics.RUNTIME.metric, 0.99),
        "running": None if current is None else int(gauge(metrics.HANDLERS)),
        "waiting": None if current is None else int(gauge(metrics.WAITING)),
        "scheduled": sum(depth.store for depth in depths),
        "due": sum(depth.due for depth in depths),
        "prepared": sum(depth.prepared for depth in depths),
        "dead": sum(depth.dead for depth in depths),
        "overdue": max(0.0, gauge(metrics.OVERDUE), *overdue),
    }


# --- what daemons tell


def addresses_of(workers: Iterable[Member]) -> Sequence[str]:
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
        connection.request("GET", "/metrics", headers={"Accept": JSON})
        response = connection.getresponse()
        if response.status != 200:
            return f"no numbers (HTTP status {response.status})"
        return decode(response.read(MAX_BYTES + 1))
    except OSError as exc:
        return f"no answer ({exc})"
    except (HTTPException, LookupError, TypeError, ValueError, OverflowError):  # no port is so large
        return "the server there is not a toc daemon"
    finally:
        connection.close()
