"""A worker within the application's own process: ``with center.worker():``.

It is a member of the cluster as a daemon is: one thread keeps its row and its slots, another one runs the
pipeline. The process belongs to the application. So this never ends it, handles its signals or tunes it, and
replaces no more than itself: where a worker process would be replaced, the pipeline takes nothing more, gives
back what has not started, and begins anew under another name.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from toc.coordination.assignment import Member
from toc.coordination.presence import Presence
from toc.loop import PREFIX, embedded
from toc.model.clock import Clock, RateLimit
from toc.model.errors import ConfigError, InvalidInput, Unavailable
from toc.model.topic import Delivery
from toc.observe.board import own_board
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter, apart
from toc.store.servers.server import Denied, Refused
from toc.worker import guards
from toc.worker.app import check_servers
from toc.worker.control import ControlPipe
from toc.worker.daemon.keeper import RESTART_CAP_SECONDS, Keeper
from toc.worker.daemon.minutes import Minutes
from toc.worker.daemon.processes import Child
from toc.worker.run.handler_loop import NAME
from toc.worker.run.wrapped import traced
from toc.worker.worker import Worker

log = get_logger(__name__)

AGAIN_SECONDS = 1.0
"""Pause after a failure of the thread that keeps the slots."""
LATE_SECONDS = 10.0
"""How long after the shutdown deadline ``stop`` waits."""
OPEN_AGAIN_SECONDS = 2.0
"""Pause after a start for which a server was away: what is due waits as long once it is back."""
MAX_THREADS = 1024
"""As many as TOC_THREADS can be."""
HANDLERS = f"{PREFIX}handler-", f"{PREFIX}{NAME}"
"""How the names of threads that run handlers begin."""


_working: dict[int, object] = {}
"""What stands for the worker of this process until its thread has ended, by the pid: a forked child has
none."""


class _Life(Child):
    """One pipeline from its begin to its end."""

    def __init__(self, center: TimeoutCenter, member: Member, threads: int, identity: str) -> None:
        self._center = apart(center)  # its leases are in its own name: one that leaves may still run handlers
        self._center.catalog.learn(center.catalog.known().values())  # the first database may be away
        ours, theirs = socket.socketpair()
        super().__init__(ControlPipe(ours), replace(member, pid=os.getpid()), 0)
        self._presence = Presence(self.worker_id)
        link = ControlPipe(theirs)
        self.worker = Worker(self._center, self.worker_id, link, threads=threads, identity=identity)
        threading.Thread(target=self._run, name="toc-worker", daemon=True).start()

    def _run(self) -> None:
        try:
            self.worker.run(own_process=False)
        except Exception as exc:
            log.critical("worker_failed", worker=self.worker_id, exc_info=exc)
        finally:
            self.worker.close()
            self._center.store.close()

    def close(self) -> None:
        """Close what it held open."""
        self.link.close()
        self._presence.close()


class _Keeper(Keeper[_Life]):
    """Keeps one pipeline running. ``stopping`` asks for its end; ``ready`` is set once it has been given its
    slots."""

    def __init__(
        self, center: TimeoutCenter, threads: int | None, ready: threading.Event, stopping: threading.Event
    ) -> None:
        self._identity = center.store.identity.get()
        super().__init__(center, center.settings, workers=1, serves=frozenset({Delivery.HANDLER.value}))
        self._threads, self._ready, self._stopping = threads or self.settings.threads, ready, stopping
        host = f"{self.settings.host}-embedded"
        self._minutes = Minutes(center.store.minutes, host, own_board().read, Clock())
        self._complains = RateLimit(Clock())

    def start(self) -> None:
        """Enter the cluster."""
        self._slots.start()
        self._minutes.start()

    def run(self) -> None:
        """Work until ``stopping`` is set."""
        try:
            while not self.over:
                try:
                    if self._stopping.is_set() and self._stop_at is None:
                        self._stop()
                    self._turn()
                except Exception as exc:  # without this thread the row would go, and the pipeline run on
                    log.critical("worker_failed", exc_info=exc)
                    self._stopping.wait(AGAIN_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        """Leave the cluster, and close what it holds open."""
        self._slots.stop()
        self._minutes.stop()
        self.center.close()
        self._selector.close()
        self.bell.close()

    def died(self, thread: str, error: BaseException) -> None:
        """Have the pipeline leave and begin anew: a thread of ours has failed."""
        log.critical("thread_died", thread=thread, exc_info=error)
        for life in list(self._children.values()):
            life.worker.end_for(f"its thread {thread} has failed")

    def _spawn(self, index: int) -> None:
        name = self._slots.name(f"{self.settings.host}-embedded")
        try:
            self._add(_Life(self.center, self._member(name), self._threads, self._identity))
        except Exception as exc:  # a server is away, or nothing more can be opened
            log.warning("worker_not_started", error=str(exc))
            self._start_in(index, RESTART_CAP_SECONDS)

    def _kill(self, child: _Life, why: str) -> None:
        if not child.killed:
            child.killed = True
            child.worker.end_for(why)

    def _wait(self) -> None:
        if not self._slots.missing and any(life.member for life in self._children.values()):
            self._ready.set()
        super()._wait()

    def _hear(self, child: _Life, message: Mapping[str, Any]) -> None:
        super()._hear(child, message)
        if message["kind"] == "suspects" and self._complains():
            log.warning("suspects_wait", tasks=len(message["suspects"]), reason="they run alone, in a daemon")

    def _listen(self, child: _Life) -> None:
        super()._listen(child)
        if not child.link.closed:
            return
        # The pipeline is over. Not known dead even so: a handler of it may still run, under a lease that ends
        # by itself.
        del self._children[child.worker_id]
        self._slots.take_out(child, known_dead=False)
        child.close()
        if self._stop_at is None and not self._succeeded(child):
            self._start_in(0, self._backoff(child) or 0.0)

    def _lost_threads(self) -> int:
        own = [life.worker.dispatcher for life in self._children.values()]
        calls = {one.event_loop.call_threads for one in own}
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith(HANDLERS[0])]
        handlers = sum(name.rpartition("_")[0] not in calls for name in names)
        return max(handlers - sum(len(one.handler_threads.threads) for one in own), 0)


class EmbeddedWorker:
    """Runs the handlers of a center in this process, between ``start`` and ``stop``, or as a context manager.

    ``threads`` run handlers that are plain functions, by default TOC_THREADS; coroutines run on an event loop
    of the worker's own.
    Handlers must be registered before. Each process of a web server that has one is a member of its own: they
    share the work. Tasks that several workers in a row have not survived wait for a daemon.
    """

    def __init__(self, center: TimeoutCenter, *, threads: int | None = None) -> None:
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise InvalidInput(f"a worker has 1 to {MAX_THREADS} threads, not {threads}", "threads")
        self._of = center
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._stopping = threading.Event()
        self._keeper: _Keeper | None = None
        self._complains = RateLimit(Clock())
        self.ready = threading.Event()
        """Set once it has been given slots, or there are none to give."""

    # --- for the application

    def start(self) -> Self:
        """Begin. While a server is away, this is tried again, and each failure logged.

        Raises what ``toc worker`` raises, such as ConfigError, UnknownTopic or SchemaBehind; StoreUnavailable
        if the account is refused; InvalidInput after a fork, or if it runs already.
        """
        if self._thread is not None and self._pid != os.getpid():
            raise InvalidInput("this worker was started before a fork: start one in each process, after it")
        if self._of.stands_in is not None:  # a test, which runs what is due itself
            self.ready.set()
            return self
        if self._of.settings.zookeeper:
            raise ConfigError("a cluster with TOC_ZOOKEEPER has one daemon per host: start it, `toc worker`")
        mine = object()
        if _working.setdefault(os.getpid(), mine) is not mine:
            raise InvalidInput("this process has a worker already; it may serve all topics of its center")
        self._stopping.clear()
        self.ready.clear()
        keeper = None
        try:
            keeper = self._open(first=True)
            thread = threading.Thread(target=self._run, args=[keeper], name="toc-embedded", daemon=True)
            thread.start()
        except BaseException:
            del _working[os.getpid()]
            if keeper is not None:
                keeper.close()
            raise
        self._pid, self._thread = os.getpid(), thread
        return self

    def _open(self, *, first: bool) -> _Keeper | None:
        """Connect to the servers. Returns None to try again: if one is away, and whatever else is wrong after
        the ``first`` try, which raises that."""
        opened: TimeoutCenter | _Keeper | None = None
        try:
            opened = center = apart(self._of)
            check_servers(center)
            center.handlers = traced(center.handlers, center.tracing)
            opened = keeper = self._keeper = _Keeper(center, self._threads, self.ready, self._stopping)
            embedded(keeper.died)
            keeper.start()
        except Exception as exc:
            if opened is not None:
                opened.close()
            if first and (isinstance(exc, (Denied, Refused)) or not isinstance(exc, Unavailable)):
                raise
            if self._complains() or first:
                log.warning("worker_not_started", error=str(exc))
            return None
        guards.end_copies()
        return keeper

    def _run(self, keeper: _Keeper | None) -> None:
        try:
            while keeper is None and not self._stopping.wait(OPEN_AGAIN_SECONDS):
                keeper = self._open(first=False)
            if keeper is not None:
                keeper.run()
        finally:
            del _working[os.getpid()]

    def stop(self) -> None:
        """Take nothing more, and wait for running handlers until the shutdown deadline. May be called
        twice, not by a handler: InvalidInput."""
        if self._thread is not None and threading.current_thread().name.startswith(HANDLERS):
            raise InvalidInput("stop() waits for handlers: call it outside of them, such as after an event")
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._stopping.set()
        if self._keeper is not None:
            self._keeper.bell()
        thread.join(self._of.settings.shutdown_deadline + LATE_SECONDS)
        if thread.is_alive():
            log.error("worker_not_stopped", reason="a server or a handler hangs")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.to_thread(self.stop)
