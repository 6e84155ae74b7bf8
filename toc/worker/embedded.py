"""A worker within the application's own process: ``with center.worker():``.

It is a member of the cluster as a daemon is: one thread keeps its row and its slots, another one runs the
pipeline. The process belongs to the application. So this never ends it, handles its signals or tunes it, and
replaces no more than itself: where a worker process would be replaced, the pipeline takes nothing more, gives
back what has not started, and begins anew under another name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from toc.coordination.assignment import Member
from toc.coordination.presence import LocalNames, Presence
from toc.coordination.rows import RowsCoordinator
from toc.loop import PREFIX, embedded
from toc.model.clock import Clock, RateLimit
from toc.model.errors import ConfigError, InvalidInput
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter, apart
from toc.worker.control import ControlPipe, texts, unpack
from toc.worker.daemon.slots import WorkerSlots
from toc.worker.daemon.start import check_servers
from toc.worker.daemon.topics import Topics
from toc.worker.guards import copies
from toc.worker.worker import Worker

log = get_logger(__name__)

TICK_SECONDS = 1.0
CLAIM_RETRY_SECONDS = 0.25
"""Pause before slots are claimed again whose former owner has not released them."""
AGAIN_SECONDS, MAX_AGAIN_SECONDS = 1.0, 60.0
"""Pause before the pipeline begins anew after a failure of ours: doubled each time, up to the second."""
WELL_SECONDS = 60.0
"""A pipeline that worked for longer than this has not failed at its start."""
LATE_SECONDS = 10.0
"""How long after the shutdown deadline ``stop`` waits."""
COMPLAIN_SECONDS = 60.0


_working: dict[int, object] = {}
"""The worker of this process, by its pid: a forked child has none."""


class _Life:
    """One pipeline from its begin to its end, as what assigns slots sees it."""

    def __init__(self, center: TimeoutCenter, name: str, threads: int, identity: str) -> None:
        self.worker_id = name
        self.member = self.leaving = False
        self.held: set[Slot] = set()
        self.dropping: set[Slot] = set()
        self.born = time.monotonic()
        self.presence = Presence(name)
        handlers = f"{PREFIX}handler-"
        self.lost_threads = sum(thread.name.startswith(handlers) for thread in threading.enumerate())
        """How many threads of pipelines before it are in handlers that have not ended."""
        ours, theirs = socket.socketpair()
        self.link = ControlPipe(ours)
        self._theirs = theirs
        self.worker = Worker(center, name, ControlPipe(theirs), threads=threads, identity=identity)
        self.thread = threading.Thread(target=self._run, name="toc-worker", daemon=True)

    def _run(self) -> None:
        try:
            self.worker.run(own_process=False)
        except Exception as exc:
            log.critical("worker_failed", worker=self.worker_id, exc_info=exc)
        finally:
            with contextlib.suppress(OSError):  # a child of the application may hold its descriptor
                self._theirs.shutdown(socket.SHUT_WR)
            self.worker.close()

    def close(self) -> None:
        """Close what it held open."""
        self.link.close()
        self.presence.close()


class EmbeddedWorker:
    """Runs the handlers of a center in this process, between ``start`` and ``stop``, or as a context manager.

    ``threads`` run handlers that are plain functions; coroutines run on an event loop of the worker's own.
    Handlers must be registered before. Each process of a web server that has one is a member of its own: they
    share the work. Tasks that several workers in a row have not survived wait for a daemon.
    """

    def __init__(self, center: TimeoutCenter, *, threads: int = 4) -> None:
        self._of = center
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._stopping = threading.Event()
        self._complains = RateLimit(Clock(), COMPLAIN_SECONDS)
        self._life: _Life | None = None
        self._begin_at = 0.0
        """When the next pipeline begins (monotonic)."""
        self._pause = AGAIN_SECONDS
        self.ready = threading.Event()
        """Set once it has been given slots, or there are none to give."""

    # --- for the application

    def start(self) -> Self:
        """Begin. Raises what ``toc worker`` raises, such as ConfigError, UnknownTopic, SchemaBehind or
        Unavailable; InvalidInput after a fork, or if it runs already."""
        if self._thread is not None and self._pid != os.getpid():
            raise InvalidInput("this worker was started before a fork: start one in each process, after it")
        if _working.get(os.getpid()) is not None:
            raise InvalidInput("this process has a worker already; it may serve all topics of its center")
        if self._of.stands_in is not None:  # a test, which runs what is due itself
            self.ready.set()
            return self
        settings = self._of.settings
        if settings.zookeeper:
            raise ConfigError("a cluster with TOC_ZOOKEEPER has one daemon per host: start it, `toc worker`")
        self._center = center = apart(self._of)
        try:
            check_servers(center, handlers=True)
            self._identity = center.store.identity.get()
        except BaseException:
            center.close()
            raise
        self._names = LocalNames.of(settings.host)
        self._coordinator = RowsCoordinator(
            center.store.members, host=settings.host, timeout=settings.session_timeout, on_change=self._wake
        )
        self._topics = Topics(
            center.catalog, center.store.topics.state, tables=settings.tables, on_change=self._wake
        )
        self._slots = WorkerSlots(self._coordinator, self._topics, self._names)
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._pid = os.getpid()
        copies.end_them()
        _working[self._pid] = self
        self._stopping.clear()
        embedded(self._died)
        self._thread = threading.Thread(target=self._run, name="toc-embedded", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take nothing more, and wait for running handlers until the shutdown deadline. May be called
        twice."""
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._stopping.set()
        self._wake()
        thread.join(self._of.settings.shutdown_deadline + LATE_SECONDS)
        if thread.is_alive():
            log.error("worker_not_stopped", reason="a server or a handler hangs")
        _working.pop(self._pid, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.to_thread(self.stop)

    # --- called by other threads

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: awake anyway; closed: over
            self._sender.send(b"\0")

    def _died(self, thread: str, error: BaseException) -> None:
        """A thread of ours has failed: the pipeline leaves and begins anew."""
        log.critical("thread_died", thread=thread, exc_info=error)
        if (life := self._life) is not None:
            life.worker.end_for(f"its thread {thread} has failed")

    # --- the thread that keeps the row and the slots

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._receiver, selectors.EVENT_READ)
                self._coordinator.start()
                self._coordinator.set_topics(*self._topics.assigned())
                self._topics.loop.start()
                while not (self._stopping.is_set() and self._life is None):
                    try:
                        self._turn(selector)
                    except Exception as exc:  # without this thread the row would go, and the pipeline run on
                        log.critical("worker_failed", exc_info=exc)
                        self._stopping.wait(AGAIN_SECONDS)
        finally:
            self._topics.loop.stop(1.0)
            self._coordinator.stop()
            self._center.close()
            self._receiver.close()
            self._sender.close()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        now, life = time.monotonic(), self._life
        if life is None and not self._stopping.is_set() and now >= self._begin_at:
            life = self._begin(selector)
        elif life is not None and self._stopping.is_set() and not life.leaving:
            life.link.send("stop")
        members = [] if life is None else [life]
        self._slots.reconcile(members, stopping=self._stopping.is_set())
        self._slots.assure(members)
        if life is not None and life.member and not self._slots.incomplete:
            self.ready.set()
        timeout = CLAIM_RETRY_SECONDS if self._slots.incomplete or life is None else TICK_SECONDS
        for key, _ in selector.select(max(0.0, min(timeout, self._slots.step_at - time.monotonic()))):
            if key.fileobj is self._receiver:
                self._receiver.recv(4096)
                self._slots.changed = True
            elif life is not None:
                self._listen(selector, life)
        self._slots.find_gone([each.worker_id for each in members])

    def _begin(self, selector: selectors.BaseSelector) -> _Life | None:
        name = self._names.name(f"{self._of.settings.host}-embedded")
        try:
            life = _Life(self._center, name, self._threads, self._identity)
        except Exception as exc:  # a server is away, or nothing more can be opened
            log.warning("worker_not_started", error=str(exc))
            self._fail()
            return None
        selector.register(life.link, selectors.EVENT_READ)
        self._life = life
        life.thread.start()
        return life

    def _fail(self) -> None:
        self._begin_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, MAX_AGAIN_SECONDS)

    def _listen(self, selector: selectors.BaseSelector, life: _Life) -> None:
        for message in life.link.receive():
            self._hear(life, message)
        if life.link.closed:
            self._end(selector, life)

    def _hear(self, life: _Life, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ready":
            self._join(life, message)
        elif kind == "dropped":
            self._slots.dropped(life, unpack(message["slots"]))
        elif kind == "met":
            self._slots.meet(texts(message["workers"]))
        elif kind == "suspects" and self._complains(kind):
            log.warning("suspects_wait", tasks=len(message["suspects"]), reason="they run alone, in a daemon")
        elif kind == "beat" and message["stuck"] and self._complains(kind):
            log.error("worker_hangs", loops=sorted(texts(message["stuck"])))
        elif kind == "leaving":
            life.leaving = True
            self._slots.give_up(life)
            if message["recycle"]:
                log.warning("worker_replaced", worker=life.worker_id, reason=message["recycle"])

    def _join(self, life: _Life, ready: Mapping[str, Any]) -> None:
        settings = self._of.settings
        life.member = self._slots.changed = True
        log.info("worker_ready", worker=life.worker_id, pid=self._pid)
        self._coordinator.join(
            Member(
                life.worker_id,
                settings.host,
                weight=settings.weight,
                topics=frozenset(self._center.handlers),
                pid=self._pid,
                machine=socket.gethostname(),
                serves=frozenset({Delivery.HANDLER.value}),
                version=ready["version"],
                protocol=ready["protocol"],
                lost_threads=life.lost_threads,
            )
        )

    def _end(self, selector: selectors.BaseSelector, life: _Life) -> None:
        """A pipeline is over. If it left in good order, nothing of it runs but tries that were given up."""
        selector.unregister(life.link)
        self._life = None
        if time.monotonic() - life.born > WELL_SECONDS:
            self._pause = AGAIN_SECONDS
        # Not known dead even then: a handler of it may still run, under a lease that ends by itself.
        self._slots.take_out(life, known_dead=False)
        life.close()
        if not self._stopping.is_set():
            self._fail()
