"""Collects the numbers that a daemon shows, and checks its servers for them.

The numbers of the worker processes are in memory shared with the daemon. Separate threads check the servers,
at intervals that grow with the time of a check. So a scrape waits for no server, and a server that hangs
holds up nothing else.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from toc.index.messages import Peek
from toc.index.queues import Queues
from toc.maintenance.depths import depths
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable, StoreUnavailable
from toc.model.topic import Delivery
from toc.observe.board import BOARD_BYTES, Family, Level, SharedMetrics, Values, own_board
from toc.observe.exposition import encode
from toc.observe.log import get_logger
from toc.observe.metrics import (
    CLOCK_DIFFERENCE,
    DATABASE_UP,
    DEAD,
    DRAINED,
    DUE,
    HORIZON,
    OVERDUE,
    PAUSED,
    PREPARED,
    PULLED,
    REDIS_UP,
    RESUMED,
    SCHEDULED,
    SLOTS,
    UNSEEN,
    WORKERS,
    ZOOKEEPER_UP,
    add_up,
    beginning,
)
from toc.store.store import Store
from toc.worker.daemon.http import Answer, listen
from toc.worker.daemon.minutes import Minutes
from toc.worker.daemon.state import State, hangs, lacks

log = get_logger(__name__)

LOOK_SECONDS = 2.0
"""Pause after a check of the servers, at least."""
LOOK_SHARE = 50
"""The pause lasts at least this many times as long as the check took, so checks take at most 2 % of
a core."""
LOOK_TIMEOUT_SECONDS = 1.0


class Monitor:
    """The numbers and probes of a daemon; served if an address is set. What was done is also written, by the
    minute.

    ``address`` is TOC_METRICS_ADDRESS, ``host`` its host's name in the cluster, ``handled`` the topics of
    the application. Raises ConfigError if it cannot listen there.
    """

    def __init__(
        self,
        address: str | None,
        *,
        host: str,
        queues: Queues,
        store: Store,
        catalog: TopicCatalog,
        handled: Collection[str] = (),
    ) -> None:
        self._handled = handled
        self._queues = queues
        self._store = store
        self._catalog = catalog
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
        self._stopped = threading.Event()
        self._started = False
        pages = {"/metrics": self._metrics, "/livez": self._livez, "/readyz": self._readyz}
        self._server = listen(address, pages) if address else None
        self._minutes = Minutes(store.minutes, host, self.values, self._clock)

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
                add_up(self._ended, board.read(), ended=True)

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
        self._thread("metrics", self._server.serve_forever)
        self._thread("look-index", lambda: self._look_on(self._look_at_index))
        self._thread("look-databases", lambda: self._look_on(self._look_at_databases))
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
        self._stopped.set()
        self._queues.close()
        self._minutes.stop()
        server, self._server = self._server, None
        if server is not None:
            if self._started:
                server.shutdown()  # it would never return if the server did not serve
            server.server_close()

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        # These threads are not watched: measurements that fail must never end a daemon.
        threading.Thread(target=target, name=f"toc-{name}", daemon=True).start()

    # --- looking at the servers

    def _look_on(self, look: Callable[[], None]) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                look()
            except Exception:
                log.warning("look_failed", exc_info=True)
            took = time.monotonic() - began
            self._stopped.wait(max(LOOK_SECONDS, LOOK_SHARE * min(took, LOOK_TIMEOUT_SECONDS)))

    def _look_at_index(self) -> None:
        values: Values = {}
        away: list[str] = []
        try:
            if self._queues.present:
                away = _put_clocks(values, REDIS_UP, self._queues.clocks())
        except IndexUnavailable as exc:  # the servers cannot even be listed
            away.append(str(exc))
        state, topics = self._state, self._catalog.known()
        counted = state.owned | state.unowned
        unseen = 0
        slots = counted | state.moving
        now = self._clock.now_ms()
        found = depths(self._store, self._queues, topics.values(), slots, now, ahead=False)
        for slot, depth in found.items():
            if isinstance(depth, IndexUnavailable):
                unseen += slot in counted
                continue
            if slot in counted:  # moving slots are counted by one daemon; both report their lateness
                _add_depth(values, slot.topic, depth)
            now, due = depth.redis_now_ms, depth.next_due
            _put(values, OVERDUE, 0.0 if due is None else max(now - due, 0.0) / 1000, slot.topic)
            topic = topics.get(slot.topic)
            if topic is not None and due is not None and due < topic.resumed_at and not topic.paused:
                _put(values, RESUMED, (now - topic.resumed_at) / 1000, topic.name)
        _put(values, UNSEEN, unseen)
        for topic in topics.values():
            _put(values, PAUSED, float(topic.paused), topic.name)
            _put(values, HORIZON, topic.horizon, topic.name)
            _put(values, PULLED, float(topic.delivery is Delivery.PULL), topic.name)
            _put(values, RESUMED, 0.0, topic.name)
        self._index, self._away["Redis"] = values, away

    def _look_at_databases(self) -> None:
        values: Values = {}
        away = _put_clocks(values, DATABASE_UP, self._store.clocks())
        self._databases, self._away["database"] = values, away

    # --- what is shown

    def values(self) -> Values:
        """Return all numbers: those of live and ended worker processes, and the daemon's own."""
        known = self._catalog.known()
        total = beginning(known, known.keys() & self._handled)
        with self._lock:
            add_up(total, self._ended)
            for board in self._boards.values():
                add_up(total, board.read())
            add_up(total, own_board().read())
        for part in (_state_values(self._state), self._index, self._databases):
            add_up(total, part)
        return total

    def _metrics(self, accept: str) -> Answer:
        return Answer(*encode(self.values(), accept))

    def _livez(self, _accept: str) -> Answer:
        return _probe(hangs(self._state, time.monotonic()))

    def _readyz(self, _accept: str) -> Answer:
        lacking = hangs(self._state, time.monotonic()) + lacks(self._state)
        for what in ("Redis", "database"):
            lacking += self._away.get(what, [f"no {what} server has been checked yet"])
        return _probe(lacking)


def _probe(trouble: Sequence[str]) -> Answer:
    status = HTTPStatus.SERVICE_UNAVAILABLE if trouble else HTTPStatus.OK
    return Answer("".join(f"{line}\n" for line in trouble or ["ok"]).encode(), status=status)


def _put(values: Values, family: Family[Level], value: float, *labels: str) -> None:
    add_up(values, {(family.metric.name, *labels): [value]})


def _put_clocks(
    values: Values, up: Family[Level], clocks: Mapping[str, float | IndexUnavailable | StoreUnavailable]
) -> list[str]:
    """Put which servers answer, and their clocks. Returns why the others do not answer."""
    away = []
    for server, clock in clocks.items():
        _put(values, up, float(isinstance(clock, float)), server)
        if isinstance(clock, float):
            _put(values, CLOCK_DIFFERENCE, clock, server)
        else:
            away.append(str(clock))
    return away


def _add_depth(values: Values, topic: str, depth: Peek) -> None:
    for family, value in (
        (SCHEDULED, depth.store),
        (DUE, depth.due),
        (PREPARED, depth.prepared),
        (DEAD, depth.dead),
    ):
        _put(values, family, value, topic)


def _state_values(state: State) -> Values:
    values: Values = {}
    for name, slots in (("owned", state.owned), ("moving", state.moving), ("unowned", state.unowned)):
        for topic, count in Counter(slot.topic for slot in slots).items():
            _put(values, SLOTS, count, topic, name)
    for what in ("ready", "starting", "leaving"):
        _put(values, WORKERS, state.workers.get(what, 0), what)
    if state.zookeeper is not None:
        _put(values, ZOOKEEPER_UP, float(state.zookeeper))
        _put(values, DRAINED, float(state.drained))
    return values
