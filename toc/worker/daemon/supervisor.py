"""``toc worker``: checks whether the application can run here, then is the daemon, which starts worker
processes, watches them, and notices their deaths.

Suspects run alone, in a process of their own:

    suspects    a worker names them     -> they wait in a line, each once
    run         to the process          one at a time
    begun       from it                 the run is counted on the row
    ran         from it                 the row is written; the next may run
"""

import contextlib
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from toc.config import Settings
from toc.coordination.assignment import TABLES
from toc.loop import watch_threads
from toc.model.clock import RateLimit
from toc.model.errors import ConfigError
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger
from toc.observe.metrics import WORKER_EXITS
from toc.sdk.client import TimeoutCenter
from toc.worker.app import check_servers, load_app
from toc.worker.control import Suspect
from toc.worker.daemon import processes
from toc.worker.daemon.keeper import RESTART_CAP_SECONDS, TICK_SECONDS, Keeper
from toc.worker.daemon.monitor import Monitor, State
from toc.worker.daemon.processes import SideProcesses, WorkerProcess

log = get_logger(__name__)

_PLACES = ("database_urls", "databases", "tables", "database_prefix", "redis_url", "namespace")
"""The settings that say where tasks are stored."""
KILL_AFTER_SECONDS = 10.0
"""How long after the shutdown deadline a worker process is killed."""


AGAIN_SECONDS = 10.0
"""Pause before the process is started again if it has run nothing: no memory, or the app does not load."""


class Alone:
    """What the daemon's thread knows of the runs alone. It starts the process and sends the messages."""

    def __init__(self) -> None:
        self._line: dict[int, tuple[Suspect, str]] = {}
        """job_id -> the suspect, and how it has ended the process in which it ran alone ("": it has not)."""
        self.passed: Suspect | None = None
        """What the process runs, if it runs anything."""
        self._begun = False
        """Whether the run of it is counted."""
        self._runs = 0
        """How many runs have begun in the present process."""
        self._start_at = 0.0

    def add(self, suspects: Iterable[Suspect]) -> None:
        """Note suspects that a worker has named."""
        for one in suspects:
            if not (self.passed and self.passed.job_id == one.job_id):
                self._line.setdefault(one.job_id, (one, ""))

    def starts(self) -> bool:
        """Whether to start the process now. Call it while there is none."""
        now = time.monotonic()
        if not self._line or now < self._start_at:
            return False
        self._start_at = now + AGAIN_SECONDS
        return True

    def next(self) -> tuple[Suspect, str] | None:
        """What the process is to run next. None while it is not to: it runs one, or none waits."""
        if self.passed is not None or not self._line:
            return None
        job_id = next(iter(self._line))
        suspect, how = self._line.pop(job_id)
        self.passed, self._begun = suspect, False
        return suspect, how

    def begun(self, crashes: int) -> None:
        """Note that the run is counted on the row, which now has so many ``crashes``.

        It is logged here: the process may not live to write its own line.
        """
        if (run := self.passed) is not None:
            log.warning("task_quarantined", job_id=run.job_id, topic=run.slot.topic, crashes=run.crashes)
            self.passed, self._begun = run._replace(crashes=crashes), True
            self._runs += 1

    def ran(self) -> None:
        """Note that the process has nothing to run any more."""
        self.passed = None
        self._start_at = 0.0

    def ended(self, how: str, *, by_task: bool) -> None:
        """Note that the process has ended. ``by_task``: it died, and nothing but its task can be the cause.

        If nothing else had run there, the task is guilty, which the next process writes; otherwise it runs
        first there.
        """
        if self.passed is not None and self._begun and by_task:
            guilty = how if self._runs == 1 else ""
            self._line = {self.passed.job_id: (self.passed, guilty), **self._line}
            self._start_at = 0.0
        self.passed, self._runs = None, 0


class Daemon(Keeper[WorkerProcess]):
    """Keeps the configured number of worker processes running. Its parameters are those of ``run_daemon``."""

    def __init__(
        self, center: TimeoutCenter, settings: Settings, beside: SideProcesses, command: list[str], cwd: str,
        *, webhooks: bool,
    ) -> None:  # fmt: skip
        self.monitor = Monitor(center, settings)
        self.beside = beside
        self._alone_index = settings.processes + self.beside.processes
        """The index of the process that runs suspects alone. There are as many others: the workers, and
        after them the processes of ``beside``."""
        serves = self.beside.deliveries | {Delivery.HANDLER.value}
        serves |= {Delivery.WEBHOOK.value} if webhooks else set()
        super().__init__(center, settings, workers=self._alone_index, serves=serves)
        self._metrics = self.monitor.address
        self._command, self._cwd = command, cwd
        self._options = ["--webhooks"] if webhooks else []
        identity = center.store.identity
        # The processes get these from us, because the server may be away when they start.
        self._known = {"identity": identity.get(), "lease_secret": identity.lease_secret().hex()}
        self._reports = RateLimit(center.clock, TICK_SECONDS / 2)
        self._looked_at = float("-inf")
        self._alone = Alone()
        self._signals = 0
        self._exit_code = 0

    def run(self) -> int:
        """Supervise until SIGTERM, SIGINT or SIGHUP. Returns the exit code."""
        signal.set_wakeup_fd(self.bell.rope, warn_on_full_buffer=False)
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

    # --- what the monitor shows

    def _tell(self) -> None:
        """Report the state to the monitor, about once a second, if it has an address."""
        if self.monitor.address is None or not self._reports():
            return
        children = list(self._children.values())
        held = {slot for child in children for slot in child.held - child.dropping}
        moving = {slot for child in children for slot in child.dropping} | self._slots.missing
        self.monitor.tell(
            State(
                time.monotonic(),
                self._alone_index,
                workers=Counter(one.doing for one in children if one.index != self._alone_index),
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
        if self._stop_at is not None:
            return
        child = next((one for one in self._children.values() if one.index == self._alone_index), None)
        drained = self._slots.coordinator.drained()
        if child is None:
            if not drained and self._alone.starts():
                self._spawn(self._alone_index)
        elif child.heard and not child.leaving:
            if not drained and (passed := self._alone.next()) is not None:
                child.link.send("dead", workers=sorted(self._slots.dead))
                child.link.send("run", suspect=passed[0], how=passed[1])
            elif self._alone.passed is None:
                child.leaving = True
                child.link.send("stop")

    def _consumes(self, child: WorkerProcess) -> bool:
        """Whether the process is a worker, not one beside the workers."""
        return child.index < self.settings.processes

    def _spawn(self, index: int) -> None:
        number, alone = index - self.settings.processes, index == self._alone_index
        threads = "1" if alone else str(self.settings.threads)
        command = [*self._command, "--threads", threads]
        inherited: tuple[int, ...] = ()
        if alone:
            name = "alone"
        elif number < 0:
            name = str(index)
            command += self._options
        else:
            name, command = f"{self.beside.name}{number}", [*self.beside.command]
            inherited = self.beside.descriptors
        worker_id = self._slots.name(f"{self.settings.host}-{name}")
        try:
            with self.monitor.board(worker_id) as board:
                command += [f"--worker-id={worker_id}", "--board", str(board)]
                topics = [topic.values() for topic in self.center.catalog.known().values()]
                known = {**self._known, "topics": topics}
                about = known, self._member(worker_id), index
                child = processes.start(command, [board, *inherited], *about, self._cwd)
        except OSError as exc:  # no memory, no more processes or files: running workers continue
            self.monitor.ended(worker_id)
            log.warning("worker_not_started", error=str(exc))
            if not alone:
                self._start_in(index, RESTART_CAP_SECONDS)
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
                os.killpg(child.pid, signal.SIGKILL)
        code = child.process.wait()
        alone = child.index == self._alone_index
        if child.heard and not child.left and (alone or self._consumes(child)):
            child.member = True  # publish the death even if it was leaving
        self._slots.take_out(child, known_dead=not child.left)
        about = {"worker": child.worker_id, "pid": child.pid}
        if alone:
            how = "left" if child.left else f"signal {-code}" if code < 0 else f"exit code {code}"
            self._alone.ended(how, by_task=not (child.left or child.stuck))
            log.info("alone_ended", how=how, unfit=child.unfit, **about)
            return
        WORKER_EXITS.of("died" if not child.left else "recycled" if child.recycled else "left").add()
        succeeded = self._succeeded(child)
        again = 0.0 if succeeded or self._stop_at is not None else self._backoff(child)
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
            self._start_in(child.index, again)

    def _look_after(self) -> None:
        """Handle signals, silence and deadlines."""
        now = time.monotonic()
        since_look, self._looked_at = now - self._looked_at, now
        if self._signals and self._stop_at is None:
            self._stop()
        if self._signals > 1:
            self._signals = 1
            log.warning("stop_forced")
            for child in self._children.values():
                child.link.send("force")
        late = self._stop_at is not None and now > self._stop_at + KILL_AFTER_SECONDS
        for child in self._children.values():
            child.look(since_look)
            if late:
                self._kill(child, "it did not end in time")
            elif child.heard and child.silent > processes.SILENT_SECONDS:  # else it loads the application
                self._kill(child, f"it was silent for {child.silent:.0f} s")

    def _kill(self, child: WorkerProcess, why: str) -> None:
        if not child.killed:
            child.killed = True
            log.error("worker_killed", worker=child.worker_id, pid=child.pid, reason=why)
            child.process.kill()

    def _stop(self) -> None:
        log.info("daemon_stopping", workers=len(self._children))
        for descriptor in self.beside.descriptors:
            os.close(descriptor)  # a listening socket left open here would accept clients that nobody serves
        super()._stop()
        for child in self._children.values():
            if not child.heard:  # it loads the application, which may take long, and has nothing yet
                child.left = True
                child.process.kill()


def run_daemon(
    app: str, settings: Settings, beside: SideProcesses | None, *, webhooks: bool = False, tell: bool = False
) -> int:
    """Run the daemon for ``app`` until it is told to stop. Returns the exit code.

    ``beside``: further processes that it keeps running. ``webhooks``: its workers also send webhooks.
    ``tell``: they tell a developer what becomes of each task.

    Raises, before it starts anything: AppNotFound, UnknownTopic, SchemaBehind, UnfitServer, Unavailable, or
    ConfigError, also for an address at which it cannot listen.
    """
    here = os.getcwd()  # noqa: PTH109 - where the application is found: it may go elsewhere when imported
    center = load_app(app)
    try:
        other = [name for name in _PLACES if getattr(center.settings, name) != getattr(settings, name)]
        if other:
            raise ConfigError(
                f"--app {app!r}: its TimeoutCenter and this command differ in {', '.join(other)}; give both "
                f"the same, best with TOC_* variables or toc.toml, which TimeoutCenter() reads"
            )
        check_servers(center, app)
        if webhooks and not settings.secret_key:
            log.warning("webhooks_without_key")
        command = [sys.executable, "-m", "toc.worker.process", "--app", app, *(["--tell"] if tell else [])]
        beside = beside or SideProcesses("", 0, ())
        daemon = Daemon(center, settings, beside, command, here, webhooks=webhooks)
        watch_threads()
        return daemon.run()
    finally:
        center.close()


def _without_tables(slots: Collection[Slot]) -> frozenset[Slot]:
    return frozenset(slot for slot in slots if slot.topic != TABLES)
