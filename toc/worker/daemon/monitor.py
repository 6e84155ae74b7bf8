"""Collects the numbers that a daemon shows, checks its servers for them, and serves them over HTTP: /metrics
for Prometheus, /livez and /readyz for supervisors.

The numbers of the worker processes are in memory shared with the daemon. Separate threads check the servers,
at intervals that grow with the time of a check. So a scrape waits for no server, and a server that hangs
holds up nothing else.
"""

import mmap
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from socketserver import TCPServer
from typing import Any, NamedTuple

from toc.config import Settings
from toc.loop import Loop
from toc.maintenance.depths import depths
from toc.model.clock import Clock
from toc.model.errors import ConfigError, IndexUnavailable, StoreUnavailable
from toc.model.topic import Delivery, Slot
from toc.observe import metrics
from toc.observe.board import BOARD_BYTES, Family, Level, SharedMetrics, Values, own_board
from toc.observe.exposition import encode
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.sdk.parts import open_queues
from toc.worker.daemon.minutes import Minutes

log = get_logger(__name__)

LOOK_SECONDS = 2.0
"""Pause after a check of the servers, at least."""
LOOK_SHARE = 50
"""The pause lasts at least this many times as long as the check took, so checks take at most 2 % of
a core."""
LOOK_TIMEOUT_SECONDS = 1.0
STILL_SECONDS = 30.0
"""After this time without progress, the daemon counts as hanging."""
WAIT_SECONDS = 5.0
"""How long a client may let the server wait."""
MAX_AT_ONCE = 32
"""Most connections, each with a thread: beyond that the oldest is closed, however slow its client is."""


@dataclass(frozen=True)
class State:
    """What a daemon reports of itself once a second, here at ``at`` (monotonic)."""

    at: float
    processes: int
    """How many processes there should be."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """How many there are, by state: ready, starting, leaving."""
    owned: frozenset[Slot] = frozenset()
    """Slots that its workers consume."""
    moving: frozenset[Slot] = frozenset()
    """Slots that its workers are gaining or losing."""
    unowned: frozenset[Slot] = frozenset()
    """Slots that no worker may own; only the leading daemon knows any."""
    missing: int = 0
    """How many slots and tables its workers should have and have not claimed yet."""
    zookeeper: bool | None = None
    """Whether there is a session. None: ZooKeeper is not used."""
    drained: bool = False
    """Whether an operator wants no slots on this host."""
    stopping: bool = False

    def hangs(self) -> list[str]:
        """Return why the daemon must be restarted. A server out of reach is no reason: that brings none
        back."""
        still = time.monotonic() - self.at
        return [f"the daemon has been stuck for {still:.0f} s"] if still > STILL_SECONDS else []

    def lacks(self) -> list[str]:
        """Return why a daemon cannot do all its work, apart from servers that are out of reach."""
        ready = self.workers.get("ready", 0)
        reasons = {
            "it is stopping": self.stopping,
            f"{ready} of {self.processes} worker processes are ready": ready < self.processes,
            f"{self.missing} slots or tables are not claimed yet": self.missing,
            "ZooKeeper is out of reach": self.zookeeper is False,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def values(self) -> Values:
        """Return it as numbers."""
        values: Values = {}
        for name, slots in (("owned", self.owned), ("moving", self.moving), ("unowned", self.unowned)):
            for topic, count in Counter(slot.topic for slot in slots).items():
                _put(values, metrics.SLOTS, count, topic, name)
        for what in ("ready", "starting", "leaving"):
            _put(values, metrics.WORKERS, self.workers.get(what, 0), what)
        if self.zookeeper is not None:
            _put(values, metrics.ZOOKEEPER_UP, float(self.zookeeper))
            _put(values, metrics.DRAINED, float(self.drained))
        return values


class Answer(NamedTuple):
    """What a request gets."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Pages = Mapping[str, Callable[[str], Answer]]
"""Maps each path to what answers it, given the request's Accept header."""

_NO_PAGE = Answer(b"there are /metrics, /livez and /readyz\n", status=HTTPStatus.NOT_FOUND)


class Monitor:
    """The numbers and probes of a daemon; served if TOC_METRICS_ADDRESS is set. What was done is also
    written, by the minute. Raises ConfigError if it cannot listen there."""

    def __init__(self, center: TimeoutCenter, settings: Settings) -> None:
        self._center = center
        self._catalog = center.catalog
        # its own connections, with short timeouts, to detect a server that hangs
        self._queues = open_queues(settings, LOOK_TIMEOUT_SECONDS)
        self._clock = Clock()
        self._lock = threading.Lock()
        self._boards: dict[str, SharedMetrics] = {}
        self._ended: Values = {}
        """Counts of processes that have ended."""
        self._state = State(time.monotonic(), 0)
        self._index: Values = {}
        self._databases: Values = {}
        self._away: dict[str, list[str]] = {}
        """For each kind of server, the errors of those out of reach; absent until the first check."""
        looks = {"look-index": self._look_at_index, "look-databases": self._look_at_databases}
        self._looks = [Loop(name, partial(self._look, look)) for name, look in looks.items()]
        self._started = False
        pages = {"/metrics": self._metrics, "/livez": self._livez, "/readyz": self._readyz}
        self._server = listen(settings.metrics_address, pages) if settings.metrics_address else None
        self._minutes = Minutes(center.store.minutes, settings.host, self.values, self._clock)

    # --- told by the daemon's thread

    @contextmanager
    def board(self, worker_id: str) -> Iterator[int]:
        """Make shared memory for the numbers of a new worker process. Yields a descriptor to inherit."""
        descriptor = os.memfd_create("toc-metrics")
        try:
            os.ftruncate(descriptor, BOARD_BYTES)
            with self._lock:
                self._boards[worker_id] = SharedMetrics(mmap.mmap(descriptor, BOARD_BYTES))
            yield descriptor
        finally:
            os.close(descriptor)

    def ended(self, worker_id: str) -> None:
        """Note that the process has ended, or was not started. Its counts stay."""
        with self._lock:
            board = self._boards.pop(worker_id, None)
            if board is not None:
                metrics.add_up(self._ended, board.read(), ended=True)

    def tell(self, state: State) -> None:
        """Report the daemon's state."""
        self._state = state

    # --- start and stop

    def start(self) -> None:
        """Write what is done in each minute. Listen, and check the servers, if an address is set."""
        self._minutes.start()
        if self._server is None:
            return
        self._started = True
        # not watched: measurements that fail must never end a daemon
        threading.Thread(target=self._server.serve_forever, name="toc-metrics", daemon=True).start()
        for loop in self._looks:
            loop.start()
        log.info("metrics_served", address=self.address)

    @property
    def address(self) -> str | None:
        """Where it listens, as host:port. None if it does not."""
        if self._server is None:
            return None
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def stop(self) -> None:
        """Stop listening. May be called twice, or without start."""
        for loop in self._looks:
            loop.stop(0)
        self._queues.close()
        self._minutes.stop()
        server, self._server = self._server, None
        if server is not None:
            if self._started:
                server.shutdown()  # it would never return if the server did not serve
            server.server_close()

    # --- looking at the servers

    def _look(self, look: Callable[[], None]) -> float:
        began = time.monotonic()
        try:
            look()
        except Exception:
            log.warning("look_failed", exc_info=True)
        took = time.monotonic() - began
        return max(LOOK_SECONDS, LOOK_SHARE * min(took, LOOK_TIMEOUT_SECONDS))

    def _look_at_index(self) -> None:
        values: Values = {}
        away: list[str] = []
        try:
            if self._queues.present:
                away = _put_clocks(values, metrics.REDIS_UP, self._queues.clocks())
        except IndexUnavailable as exc:  # the servers cannot even be listed
            away.append(str(exc))
        state, topics = self._state, self._catalog.known()
        counted = state.owned | state.unowned
        unseen = 0
        slots, now = counted | state.moving, self._clock.now_ms()
        found = depths(self._center.store, self._queues, topics.values(), slots, now, ahead=False)
        for slot, depth in found.items():
            if isinstance(depth, IndexUnavailable):
                unseen += slot in counted
                continue
            if slot in counted:  # moving slots are counted by one daemon; both report their lateness
                _put(values, metrics.SCHEDULED, depth.store, slot.topic)
                _put(values, metrics.DUE, depth.due, slot.topic)
                _put(values, metrics.PREPARED, depth.prepared, slot.topic)
                _put(values, metrics.DEAD, depth.dead, slot.topic)
            now, due = depth.redis_now_ms, depth.next_due
            _put(values, metrics.OVERDUE, 0.0 if due is None else max(now - due, 0.0) / 1000, slot.topic)
            topic = topics.get(slot.topic)
            if topic is not None and due is not None and due < topic.resumed_at and not topic.paused:
                _put(values, metrics.RESUMED, (now - topic.resumed_at) / 1000, topic.name)
        _put(values, metrics.UNSEEN, unseen)
        for topic in topics.values():
            _put(values, metrics.PAUSED, float(topic.paused), topic.name)
            _put(values, metrics.HORIZON, topic.horizon, topic.name)
            _put(values, metrics.PULLED, float(topic.delivery is Delivery.PULL), topic.name)
            _put(values, metrics.RESUMED, 0.0, topic.name)
        self._index, self._away["Redis"] = values, away

    def _look_at_databases(self) -> None:
        values: Values = {}
        away = _put_clocks(values, metrics.DATABASE_UP, self._center.store.clocks())
        self._databases, self._away["database"] = values, away

    # --- what is shown

    def values(self) -> Values:
        """Return all numbers: those of live and ended worker processes, and the daemon's own."""
        known = self._catalog.known()
        total = metrics.beginning(known, known.keys() & self._center.handlers)
        with self._lock:
            metrics.add_up(total, self._ended)
            for board in (*self._boards.values(), own_board()):
                metrics.add_up(total, board.read())
        for part in (self._state.values(), self._index, self._databases):
            metrics.add_up(total, part)
        return total

    def _metrics(self, accept: str) -> Answer:
        return Answer(*encode(self.values(), accept))

    def _livez(self, _accept: str) -> Answer:
        return _probe(self._state.hangs())

    def _readyz(self, _accept: str) -> Answer:
        lacking = self._state.hangs() + self._state.lacks()
        for what in ("Redis", "database"):
            lacking += self._away.get(what, [f"no {what} server has been checked yet"])
        return _probe(lacking)


def _probe(trouble: Sequence[str]) -> Answer:
    status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
    return Answer("".join(f"{line}\n" for line in trouble or ["ok"]).encode(), status=status)


def _put(values: Values, family: Family[Level], value: float, *labels: str) -> None:
    metrics.add_up(values, {(family.metric.name, *labels): [value]})


def _put_clocks(
    values: Values, up: Family[Level], clocks: Mapping[str, float | IndexUnavailable | StoreUnavailable]
) -> list[str]:
    """Put which servers answer, and their clocks. Returns why the others do not answer."""
    away = []
    for server, clock in clocks.items():
        _put(values, up, float(isinstance(clock, float)), server)
        if isinstance(clock, float):
            _put(values, metrics.CLOCK_DIFFERENCE, clock, server)
        else:
            away.append(str(clock))
    return away


def listen(address: str, pages: Pages) -> ThreadingHTTPServer:
    """Bind to TOC_METRICS_ADDRESS; the caller runs ``serve_forever``, which answers each request on a thread
    of its own. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")

    open_now: dict[socket.socket, None] = {}

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def server_bind(self) -> None:
            """Bind without a DNS lookup of the own name, which the library would make."""
            TCPServer.server_bind(self)
            self.server_name, self.server_port = "toc", self.server_address[1]

        def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - its signature
            """Take every connection; of too many, the oldest ends."""
            open_now[request] = None
            for oldest in list(open_now)[:-MAX_AT_ONCE]:
                with suppress(OSError):  # it has ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)
            return True

        def shutdown_request(self, request: Any) -> None:
            """End a connection."""
            open_now.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Log nothing for a client that hung up."""

    class Handler(BaseHTTPRequestHandler):
        server_version = f"toc/{version('timeout-center')}"
        sys_version = ""
        timeout = WAIT_SECONDS

        def do_GET(self) -> None:
            """Answer a request."""
            page = pages.get(self.path.partition("?")[0])
            answer = _NO_PAGE if page is None else page(self.headers.get("Accept", ""))
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its signature
            """Log nothing for scrapes."""

    try:
        return Server((host, int(port)), Handler)
    except OSError as exc:
        raise ConfigError(
            f"TOC_METRICS_ADDRESS={address}: cannot listen there: {exc.strerror or exc}"
        ) from exc
