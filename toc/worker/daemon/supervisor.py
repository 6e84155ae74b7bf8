"""The daemon: starts worker processes, listens to them, and notices their deaths.

One thread does everything: it waits for its worker processes (messages, deaths), for signals and for the
coordinator, then aligns the slots of each worker with the assignment (``toc.worker.daemon.slots``). It never
touches a task.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from toc.config import Settings
from toc.coordination.assignment import TABLES, Member
from toc.coordination.coordinator import Coordinator
from toc.coordination.presence import LocalNames
from toc.coordination.rows import Members, RowsCoordinator
from toc.coordination.zookeeper import ZooKeeperCoordinator
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger
from toc.observe.metrics import WORKER_EXITS
from toc.worker.control import Suspect, texts, unpack
from toc.worker.daemon.alone import Alone
from toc.worker.daemon.monitor import Monitor
from toc.worker.daemon.processes import SideProcesses, WorkerProcess, doing, start
from toc.worker.daemon.slots import WorkerSlots
from toc.worker.daemon.state import State
from toc.worker.daemon.successors import RESTART_CAP_SECONDS, Successors
from toc.worker.daemon.topics import Topics
from toc.worker.guards.silence import SILENT_SECONDS

log = get_logger(__name__)

TICK_SECONDS = 1.0
CLAIM_RETRY_SECONDS = 0.25
"""Pause before slots are claimed again whose former owner has not released them."""
KILL_AFTER_SECONDS = 10.0
"""How long after the shutdown deadline a worker process is killed."""


@dataclass(eq=False)
class Daemon:
    """Keeps the configured number of workers running, and their slots in line with the assignment."""

    app: str
    settings: Settings
    catalog: TopicCatalog
    topics_state: Callable[[], object]
    """Returns another value when a topic has changed."""
    identity: str
    """The identity of the task table."""
    lease_secret: bytes
    """The secret that seals the leases of its consumers."""
    topics: frozenset[str]
    """The topics that the application has handlers for."""
    monitor: Monitor
    members: Members
    """The table of members, for a cluster without ZooKeeper."""
    beside: SideProcesses | None = None
    webhooks: bool = False
    """Whether its workers send webhooks."""

    def __post_init__(self) -> None:
        self._processes = self.settings.processes + (self.beside.processes if self.beside else 0)
        """How many processes there should be: the workers, and after them the processes of
        ``beside``."""
        self._reported_at = float("-inf")
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._topics = Topics(
            self.catalog, self.topics_state, tables=self.settings.tables, on_change=self._wake
        )
        self._coordinator = _coordinator(self.settings, self.members, self._wake)
        self._children: dict[str, WorkerProcess] = {}
        self._local_names = LocalNames.of(self.settings.host)
        self._slots = WorkerSlots(self._coordinator, self._topics, self._local_names)
        self._successors = Successors(self._processes)
        self._alone = Alone(Clock())
        self._signals = 0
        self._forced = False
        self._stop_at: float | None = None
        self._exit_code = 0

    def run(self) -> int:
        """Supervise until SIGTERM, SIGINT or SIGHUP. Returns the exit code."""
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._on_signal)
        self._coordinator.start()
        self._coordinator.set_topics(*self._topics.assigned())
        self._topics.loop.start()
        self.monitor.start()
        log.info(
            "daemon_started", host=self.settings.host, processes=self.settings.processes, pid=os.getpid()
        )
        try:
            while not (self._stop_at is not None and not self._children):
                self._start_missing()
                self._run_alone()
                self._slots.reconcile(self._children.values(), stopping=self._stop_at is not None)
                self._slots.assure(self._children.values())
                self._tell()
                self._wait()
                self._look_after()
        finally:
            for child in list(self._children.values()):
                child.process.kill()
                child.process.wait()
            self._topics.loop.stop(1.0)
            self._coordinator.stop()
            self.monitor.stop()
            signal.set_wakeup_fd(-1)
        log.info("daemon_stopped", exit_code=self._exit_code)
        return self._exit_code

    # --- waiting

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: awake anyway; closed: over
            self._wake_sender.send(b"\0")

    def _on_signal(self, number: int, frame: object) -> None:  # noqa: ARG002 - the signature of signal handlers
        self._signals += 1

    def _wait(self) -> None:
        timeout = CLAIM_RETRY_SECONDS if self._slots.incomplete else TICK_SECONDS
        if [child for child in self._children.values() if not child.link.flush()]:
            timeout = CLAIM_RETRY_SECONDS
        until = min(self._slots.step_at, self._successors.next_at())
        timeout = max(0.0, min(timeout, until - time.monotonic()))
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
                self._slots.changed = True
                continue
            child, what = key.data
            if child.worker_id not in self._children:
                continue
            if what == "death":
                self._bury(child)
            else:
                self._listen(child)
                if child.link.closed:
                    self._selector.unregister(child.link)  # it will die, or count as silent

    def _listen(self, child: WorkerProcess) -> None:
        try:
            for message in child.link.receive():
                self._hear(child, message)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:  # as a handler may write
            self._kill(child, f"it sent a malformed message ({type(exc).__name__})")

    def _hear(self, child: WorkerProcess, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "unfit":
            child.unfit = {name: message[name] for name in ("error", "exit_code", "wrong")}
            return
        child.beat = time.monotonic()
        child.silence.broken()
        if not child.heard:
            child.heard, child.born = True, child.beat
        if kind == "beat":
            self._on_beat(child, message)
        elif kind == "ready":
            self._successors.loaded = True
            child.version, child.protocol = message["version"], message["protocol"]
            child.keys = frozenset(texts(message.get("keys", ())))
            log.info("worker_ready", worker=child.worker_id, pid=child.process.pid)
        elif kind == "met":
            self._slots.meet(texts(message["workers"]))
        elif kind == "suspects":
            self._alone.add(Suspect.of(each) for each in message["suspects"])
        elif kind == "begun":
            self._alone.begun(int(message["crashes"]))
        elif kind == "ran":
            self._alone.ran()
        elif kind == "dropped":
            self._slots.dropped(child, unpack(message["slots"]))
        elif kind == "leaving":
            self._on_leaving(child, message["recycle"])
        elif kind == "left":
            child.left = True
        may_join = not (child.member or child.leaving)
        if may_join and self._consumes(child) and self._stop_at is None:
            child.member = self._slots.changed = True
            self._join(child)

    def _on_beat(self, child: WorkerProcess, message: Mapping[str, Any]) -> None:
        child.stuck = message["stuck"]
        if child.stuck:
            self._kill(child, f"hanging: {', '.join(texts(child.stuck))}")
        before = child.out_of_reach
        child.out_of_reach = frozenset(texts(message.get("out_of_reach", ())))
        if child.member and child.out_of_reach != before:
            self._join(child)

    def _on_leaving(self, child: WorkerProcess, recycle: str) -> None:
        """Note that a process leaves. ``recycle``: why it wants a successor, or empty."""
        child.leaving = True
        self._slots.give_up(child)
        if recycle:
            child.recycled = True
            log.warning("worker_recycled", worker=child.worker_id, reason=recycle)
            if child.index != self._alone_index:
                self._successors.start_in(child.index, 0.0)

    def _join(self, child: WorkerProcess) -> None:
        """Add a worker to the cluster, or update what is known of it."""
        settings = self.settings
        self._coordinator.join(
            Member(
                child.worker_id,
                settings.host,
                weight=settings.weight,
                topics=self.topics,
                pid=child.process.pid,
                metrics=self.monitor.address,
                machine=socket.gethostname(),
                serves=self._serves,
                version=child.version,
                protocol=child.protocol,
                keys=child.keys,
                out_of_reach=child.out_of_reach,
            )
        )

    @property
    def _serves(self) -> frozenset[str]:
        """The deliveries of topics that this daemon's workers serve."""
        served = {Delivery.HANDLER.value}
        if self.webhooks:
            served.add(Delivery.WEBHOOK.value)
        return frozenset(served) | (self.beside.deliveries if self.beside else frozenset())

    # --- what the monitor shows

    def _tell(self) -> None:
        """Report the state to the monitor, about once a second, if it has an address."""
        now = time.monotonic()
        if self.monitor.address is None or now - self._reported_at < TICK_SECONDS / 2:
            return
        self._reported_at = now
        children = list(self._children.values())
        held = {slot for child in children for slot in child.held - child.dropping}
        moving = {slot for child in children for slot in child.dropping} | self._slots.missing
        owned = _without_tables(held)
        self.monitor.tell(
            State(
                now,
                self._processes,
                workers=Counter(doing(one) for one in children if one.index != self._alone_index),
                stuck={child.worker_id: child.stuck for child in children if child.stuck},
                owned=owned,
                moving=_without_tables(moving),
                unowned=_without_tables(self._coordinator.unowned()),
                tables=len(held) - len(owned),
                missing=len(self._slots.missing),
                zookeeper=self._coordinator.connected() if self.settings.zookeeper else None,
                drained=self._coordinator.drained(),
                stopping=self._stop_at is not None,
            )
        )

    # --- processes

    def _start_missing(self) -> None:
        if self._stop_at is not None:
            self._successors.none()
        for index in self._successors.take_due():
            self._spawn(index)

    def _run_alone(self) -> None:
        """Have one suspect after the other run in a process of their own, which ends when none is left."""
        child = next((one for one in self._children.values() if one.index == self._alone_index), None)
        if self._stop_at is not None:
            return
        if child is None:
            if self._alone.starts():
                self._spawn(self._alone_index)
        elif child.heard and not child.leaving:
            if (passed := self._alone.next()) is not None:
                child.link.send("dead", workers=sorted(self._slots.dead))
                child.link.send("run", suspect=passed[0], how=passed[1])
            elif self._alone.idle():
                child.leaving = True
                child.link.send("stop")

    @property
    def _alone_index(self) -> int:
        """The index of the process that runs suspects alone: after those of all others."""
        return self._processes

    def _consumes(self, child: WorkerProcess) -> bool:
        """Whether the process is a worker, not one beside the workers."""
        return child.index < self.settings.processes

    def _spawn(self, index: int) -> None:
        number, alone = index - self.settings.processes, index == self._alone_index
        name = f"{self.beside.name}{number}" if self.beside and number >= 0 else str(index)
        worker_id = self._local_names.name(f"{self.settings.host}-{'alone' if alone else name}")
        if self.beside and number >= 0 and not alone:
            command, inherited = [*self.beside.command], self.beside.descriptors
        else:
            command, inherited = [sys.executable, "-m", "toc.worker.process", "--app", self.app], ()
            command += ["--threads", "1" if alone else str(self.settings.threads)]
            command += ["--webhooks"] if self.webhooks and not alone else []
        try:
            with self.monitor.board(worker_id) as board:
                command += ["--worker-id", worker_id, "--board", str(board)]
                # The process gets these from us, because the server may be away when it starts.
                topics = [topic.values() for topic in self.catalog.known().values()]
                known = {
                    "identity": self.identity,
                    "lease_secret": self.lease_secret.hex(),
                    "topics": topics,
                }
                child = start(command, [board, *inherited], known, worker_id, index)
        except OSError as exc:  # no memory, no more processes or files: running workers continue
            self.monitor.ended(worker_id)
            log.warning("worker_not_started", error=str(exc))
            if not alone:
                self._successors.start_in(index, RESTART_CAP_SECONDS)
            return
        self._children[worker_id] = child
        self._selector.register(child.link, selectors.EVENT_READ, (child, "message"))
        self._selector.register(child.pidfd, selectors.EVENT_READ, (child, "death"))

    def _bury(self, child: WorkerProcess) -> None:
        """Handle the end of a process. Kill its group and publish its death unless it left in good order."""
        del self._children[child.worker_id]
        self.monitor.ended(child.worker_id)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        if not child.link.closed:
            self._selector.unregister(child.link)
            self._listen(child)  # its last messages
        child.link.close()
        if not child.left:
            # Before wait(): until then, the number cannot belong to another process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        code = child.process.wait()
        if self._stop_at is not None and not child.heard and child.unfit is None:
            child.left = True  # it was told to stop while it started
        alone = child.index == self._alone_index
        if child.heard and not child.left and (alone or self._consumes(child)):
            child.member = True  # publish the death even if it was leaving
        self._slots.take_out(child, known_dead=not child.left)
        if alone:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._alone.ended(how, by_task=not (child.left or child.stuck))
            about = {"worker": child.worker_id, "pid": child.process.pid}
            log.info("alone_ended", how="left" if child.left else how, unfit=child.unfit, **about)
            return
        WORKER_EXITS.of("died" if not child.left else "recycled" if child.recycled else "left").add()
        succeeded = any(other.index == child.index for other in self._children.values())
        again = 0.0 if succeeded or self._stop_at is not None else self._successors.backoff(child)
        about = {"worker": child.worker_id, "pid": child.process.pid}
        if child.left:
            log.info("worker_left", **about)
        elif child.unfit is None:
            log.error("worker_died", exit_code=code, again_in_seconds=again, **about)
        else:
            log.error("worker_unfit", error=child.unfit["error"], again_in_seconds=again, **about)
        if self._stop_at is not None:
            if not child.left:
                self._exit_code = self._exit_code or 1
        elif again is None:
            assert child.unfit is not None  # noqa: S101 - only then there is no successor
            self._exit_code = child.unfit["exit_code"]
            self._stop()
        elif not succeeded:
            self._successors.start_in(child.index, again)

    def _look_after(self) -> None:
        """Handle signals, silence and deadlines."""
        now = time.monotonic()
        if self._signals and self._stop_at is None:
            self._stop()
        if self._signals > 1 and not self._forced:
            self._forced = True
            log.warning("stop_forced")
            for child in self._children.values():
                child.link.send("force")
        late = self._stop_at is not None and now > self._stop_at + KILL_AFTER_SECONDS
        for child in self._children.values():
            silent = child.silence.look() if child.heard else 0.0  # not yet heard: it loads the application
            if late:
                self._kill(child, "it did not end in time")
            elif silent > SILENT_SECONDS:
                self._kill(child, f"it was silent for {silent:.0f} s")
        self._slots.find_gone(self._children)

    def _kill(self, child: WorkerProcess, why: str) -> None:
        if not child.killed:
            child.killed = True
            log.error("worker_killed", worker=child.worker_id, pid=child.process.pid, reason=why)
            child.process.kill()

    def _stop(self) -> None:
        log.info("daemon_stopping", workers=len(self._children))
        self._stop_at = time.monotonic() + self.settings.shutdown_deadline
        for descriptor in self.beside.descriptors if self.beside else ():
            os.close(descriptor)  # a listening socket left open here would accept clients that nobody serves
        for child in self._children.values():
            child.link.send("stop")
            if not child.heard:
                # A process reads the link only after its start, which may take too long, so it gets
                # SIGTERM too. A process that has just started leaves in good order after either of
                # them.
                os.kill(child.process.pid, signal.SIGTERM)


def _coordinator(settings: Settings, members: Members, on_change: Callable[[], None]) -> Coordinator:
    """Return the coordinator of these settings, which is not connected yet."""
    if not settings.zookeeper:
        return RowsCoordinator(
            members, host=settings.host, timeout=settings.session_timeout, on_change=on_change
        )
    return ZooKeeperCoordinator(
        settings.zookeeper,
        cluster=settings.cluster,
        host=settings.host,
        session_timeout=settings.session_timeout,
        on_change=on_change,
    )


def _without_tables(slots: Collection[Slot]) -> frozenset[Slot]:
    return frozenset(slot for slot in slots if slot.topic != TABLES)
