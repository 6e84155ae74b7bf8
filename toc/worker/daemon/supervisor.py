"""The daemon: starts worker processes, watches them, and notices their deaths."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from toc.config import Settings
from toc.coordination.assignment import TABLES
from toc.model.clock import Clock
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger
from toc.observe.metrics import WORKER_EXITS
from toc.sdk.client import TimeoutCenter
from toc.worker.control import Suspect
from toc.worker.daemon.alone import Alone
from toc.worker.daemon.keeper import TICK_SECONDS, Keeper
from toc.worker.daemon.monitor import Monitor
from toc.worker.daemon.processes import SideProcesses, WorkerProcess, doing, start
from toc.worker.daemon.state import State
from toc.worker.daemon.successors import RESTART_CAP_SECONDS
from toc.worker.guards.silence import SILENT_SECONDS

log = get_logger(__name__)

KILL_AFTER_SECONDS = 10.0
"""How long after the shutdown deadline a worker process is killed."""


class Daemon(Keeper[WorkerProcess]):
    """Keeps the configured number of worker processes running, which load ``app``.

    ``beside``: further processes. ``webhooks``: whether the workers send webhooks; ``tell``: tell a
    developer what becomes of each task.
    """

    def __init__(
        self,
        app: str,
        center: TimeoutCenter,
        settings: Settings,
        *,
        monitor: Monitor,
        beside: SideProcesses | None = None,
        webhooks: bool = False,
        tell: bool = False,
    ) -> None:
        served = {Delivery.HANDLER.value} | ({Delivery.WEBHOOK.value} if webhooks else set())
        self._processes = settings.processes + (beside.processes if beside else 0)
        """How many processes there should be: the workers, and after them the processes of
        ``beside``."""
        super().__init__(
            center,
            settings,
            workers=self._processes,
            serves=frozenset(served) | (beside.deliveries if beside else frozenset()),
            metrics=monitor.address,
        )
        self.app = app
        self.monitor = monitor
        self.beside = beside
        self.webhooks = webhooks
        self.tell = tell
        store = center.store
        # The processes get these from us, because the server may be away when they start.
        self._known = {"identity": store.identity.get(), "lease_secret": store.identity.lease_secret().hex()}
        self._reported_at = float("-inf")
        self._alone = Alone(Clock())
        self._signals = 0
        self._forced = False
        self._exit_code = 0

    def run(self) -> int:
        """Supervise until SIGTERM, SIGINT or SIGHUP. Returns the exit code."""
        signal.set_wakeup_fd(self._bell.rope, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._on_signal)
        self._slots.start()
        self.monitor.start()
        log.info(
            "daemon_started", host=self.settings.host, processes=self.settings.processes, pid=os.getpid()
        )
        try:
            while not self.over:
                self._run_alone()
                self._tell()
                self._turn()
                self._look_after()
        finally:
            for child in list(self._children.values()):
                child.process.kill()
                child.process.wait()
            self._slots.stop()
            self.monitor.stop()
            signal.set_wakeup_fd(-1)
        log.info("daemon_stopped", exit_code=self._exit_code)
        return self._exit_code

    def _on_signal(self, number: int, frame: object) -> None:  # noqa: ARG002 - the signature of signal handlers
        self._signals += 1

    def _hear(self, child: WorkerProcess, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "unfit":
            child.unfit = {name: message[name] for name in ("error", "exit_code", "wrong")}
            return
        super()._hear(child, message)
        if kind == "suspects":
            self._alone.add(Suspect.of(each) for each in message["suspects"])
        elif kind == "begun":
            self._alone.begun(int(message["crashes"]))
        elif kind == "ran":
            self._alone.ran()
        elif kind == "leaving" and child.recycled and child.index != self._alone_index:
            self._successors.start_in(child.index, 0.0)

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
        self.monitor.tell(
            State(
                now,
                self._processes,
                workers=Counter(doing(one) for one in children if one.index != self._alone_index),
                owned=_without_tables(held),
                moving=_without_tables(moving),
                unowned=_without_tables(self._slots.coordinator.unowned()),
                missing=len(self._slots.missing),
                zookeeper=self._slots.coordinator.connected() if self.settings.zookeeper else None,
                drained=self._slots.coordinator.drained(),
                stopping=self._stop_at is not None,
            )
        )

    # --- processes

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
        worker_id = self._slots.name(f"{self.settings.host}-{'alone' if alone else name}")
        if self.beside and number >= 0 and not alone:
            command, inherited = [*self.beside.command], self.beside.descriptors
        else:
            command, inherited = [sys.executable, "-m", "toc.worker.process", "--app", self.app], ()
            command += ["--threads", "1" if alone else str(self.settings.threads)]
            command += ["--webhooks"] if self.webhooks and not alone else []
            command += ["--tell"] if self.tell and not alone else []
        try:
            with self.monitor.board(worker_id) as board:
                command += ["--worker-id", worker_id, "--board", str(board)]
                topics = [topic.values() for topic in self.center.catalog.known().values()]
                known = {**self._known, "topics": topics}
                child = start(command, [board, *inherited], known, worker_id, index)
        except OSError as exc:  # no memory, no more processes or files: running workers continue
            self.monitor.ended(worker_id)
            log.warning("worker_not_started", error=str(exc))
            if not alone:
                self._successors.start_in(index, RESTART_CAP_SECONDS)
            return
        self._add(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, (child, self._bury))

    def _bury(self, child: WorkerProcess) -> None:
        """Handle the end of a process. Kill its group and publish its death unless it left in good order."""
        del self._children[child.worker_id]
        self.monitor.ended(child.worker_id)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        if not child.link.closed:
            self._listen(child)  # its last messages
        if not child.link.closed:
            self._selector.unregister(child.link)
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

    def _kill(self, child: WorkerProcess, why: str) -> None:
        if not child.killed:
            child.killed = True
            log.error("worker_killed", worker=child.worker_id, pid=child.process.pid, reason=why)
            child.process.kill()

    def _stop(self) -> None:
        log.info("daemon_stopping", workers=len(self._children))
        for descriptor in self.beside.descriptors if self.beside else ():
            os.close(descriptor)  # a listening socket left open here would accept clients that nobody serves
        super()._stop()
        for child in self._children.values():
            if not child.heard:
                # A process reads the link only after its start, which may take too long, so it gets
                # SIGTERM too. A process that has just started leaves in good order after either of
                # them.
                os.kill(child.process.pid, signal.SIGTERM)


def _without_tables(slots: Collection[Slot]) -> frozenset[Slot]:
    return frozenset(slot for slot in slots if slot.topic != TABLES)
