"""The worker of a process: composes the loops, obeys the daemon, gains and loses slots and tables, tells each
second how it is, and leaves in good order.

The path of a task through a worker process, in one direction:

    take             check             run                    settle
    poll.Poller  ─▶  check.Checker ─▶  dispatch.Dispatcher ─▶ finish.Finisher
    adopt.Adopter                      (bodies.BodyReader)
                                       quarantine.Quarantine

Each stage is constructed with the stages after it. Information flows back through the ``Tools`` that all
have: ``early`` holds entries not yet due by this machine's clock, ``inbox`` tells the poller where tasks may
be due, ``backlogged`` is back-pressure, ``wake`` ends the poller's sleep.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from toc.coordination.assignment import PROTOCOL
from toc.index.takes import Takes
from toc.loop import Bell, Loop, watched_thread
from toc.maintenance.dead_entries import DeadQueueCheck
from toc.model.lateness import LATE_MS
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.sdk.parts import open_queues
from toc.store.records.cluster import episode_writer
from toc.worker.beat import Beat
from toc.worker.check import Checker
from toc.worker.control import BEAT_SECONDS, ControlPipe, Suspect, unpack
from toc.worker.entry import State
from toc.worker.handover import Handover
from toc.worker.index_watch import IndexWatch
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.quarantine import Quarantine, RunsAlone
from toc.worker.reclaim import Reclaimer
from toc.worker.run.bodies import BodyReader
from toc.worker.run.dispatch import Dispatcher
from toc.worker.run.heartbeat import Heartbeat
from toc.worker.settle.finish import Finisher
from toc.worker.table_services import TableServices
from toc.worker.take.adopt import Adopter
from toc.worker.take.by_rows import RowTaker
from toc.worker.take.poll import Agenda, Poller
from toc.worker.tools import Tools

if TYPE_CHECKING:
    from toc.webhooks.handlers import Webhooks  # its HTTP client is an extra

log = get_logger(__name__)

BUSY_TICK_SECONDS = 0.05
FORCED_SECONDS = 3.0
"""How long a forced stop may take to give entries back, and the loops to end: a server may hang."""
PROBE_TIMEOUT_SECONDS = 0.5
"""How long a Redis node may take to answer a probe."""


class Worker:
    """The loops of one process around one TimeoutCenter. ``identity`` is that of its task table, if known."""

    def __init__(
        self,
        center: TimeoutCenter,
        worker_id: str,
        link: ControlPipe,
        *,
        threads: int,
        identity: str | None = None,
        webhooks: Webhooks | None = None,
    ) -> None:
        settings, clock = center.settings, center.clock
        self._clock = clock
        self._link = link
        self._deadline = settings.shutdown_deadline
        self._stopping = False
        self._stop_by = float("inf")
        self._failed = self._forced = False
        self._recycling = ""
        """Why it wants a successor. Empty while it does not."""
        self._indexed = center.queues.present
        self._webhooks = webhooks
        tools = self.tools = Tools(
            store=center.store,
            queues=center.queues,
            catalog=center.catalog,
            clock=clock,
            worker_id=worker_id,
            handlers=center.handlers,
            max_crashes=settings.max_crashes,
            died=center.hooks.died,
            recycle=self._recycle,
            tell=link.send,
        )
        self.book = tools.book
        takes = Takes(tools.queues, tools.wake)
        self.finisher = finisher = Finisher(tools)
        self.bodies = BodyReader(tools, finisher)
        limits, webhook = (threads, settings.async_limit), None if webhooks is None else webhooks.handler
        self.dispatcher = dispatcher = Dispatcher(tools, finisher, self.bodies, *limits, webhook)
        quarantine = Quarantine(tools, finisher)
        self.leases = leases = LeaseKeeper(tools, finisher)
        self.checker = Checker(tools, finisher, dispatcher, quarantine, leases)
        self.adopter = Adopter(tools, finisher, self.checker)
        agenda = Agenda(tools, finisher, dispatcher, takes)
        self.poller = Poller(tools, takes, agenda, self.checker, self.adopter)
        self.alone = RunsAlone(tools, finisher, dispatcher, leases)
        tools.store.leases.identify(worker_id)
        self.heartbeat = Heartbeat(tools, finisher, dispatcher)
        self.reclaimer = Reclaimer(tools)
        self.dead_check = DeadQueueCheck(tools.store, tools.queues, clock, self.book.buried)
        self.services = TableServices(center, tools)
        self._catalog = Loop("catalog", dispatcher.follow_topics)
        place = tools.store.identity.place
        self.watch = IndexWatch(
            tools,
            open_queues(settings, PROBE_TIMEOUT_SECONDS),
            self.services,
            identity=identity or tools.store.identity.get(),
            name=f"{settings.cluster} with its tables on {place}",
            on_change=self._index_changed,
        )
        watch = self.watch if self._indexed else None
        self.rows = RowTaker(tools, finisher, dispatcher, leases, self.checker, watch)
        self.listener = tools.queues.listener()
        self._listening = watched_thread(
            "wake", lambda: self.listener.run(self._woken), lambda: self._stopping or bool(self._recycling)
        )
        self.handover = Handover(self)
        # Without an index, what looks after one does not run.
        of_index = [self.reclaimer.loop, Loop("dead", self.dead_check.run_once), self.watch.loop]
        self.loops = [
            *finisher.loops,
            *self.bodies.loops,
            self.poller.loop,
            self.adopter.loop,
            quarantine.loop,
            *leases.loops,
            self.alone.loop,
            self.heartbeat.loop,
            *(of_index if self._indexed else []),
            *self.services.loops,
            *self.rows.loops,
            self._catalog,
            episode_writer(tools.store.episodes, tools.late),
        ]
        if webhooks is not None:
            self.loops.append(Loop("targets", webhooks.run_once))
        self.beat = Beat(self)
        self._beating = Loop("beat", self.beat.run_once)
        self._bell = Bell()

    # --- called by signals and other threads

    def end_for(self, reason: str) -> None:
        """Leave, as something of ours has failed, and wait for running handlers as at a stop. Any thread may
        call it."""
        self._failed = True
        self._recycle(reason)

    def _recycle(self, reason: str) -> None:
        """Leave, let running tries end, and be replaced: a handler has damaged this process beyond repair.

        The main thread does it, so the caller does not wait.
        """
        if not (self._recycling or self._stopping):
            self._recycling = reason
            self._bell()

    def _index_changed(self) -> None:
        """React to a node that is out of reach or back. Another may serve its slots now."""
        self.listener.set_slots(self.book.owned)
        self.rows.look_now()
        self.reclaimer.look_now()

    def _woken(self, slot: Slot | None, due_ms: int | None) -> None:
        if slot is None or due_ms is None:
            self.reclaimer.look_now()  # a new connection: messages may have been missed
            self.watch.look_now()
        else:
            now = self._clock.now_ms()
            if due_ms < now - LATE_MS and self.poller.agenda.had_nothing(slot, due_ms, now):
                self.tools.late.came(slot)
            self.tools.inbox.look_at(slot, due_ms)

    # --- main thread

    def run(self, *, own_process: bool = True) -> None:
        """Work until told to stop. ``own_process``: the process has no other purpose."""
        if own_process:
            signal.set_wakeup_fd(self._bell.rope)
            # The daemon never sends it: an operator or a handler did.
            signal.signal(signal.SIGTERM, lambda *_: self._recycle("SIGTERM was sent to it"))
            # Ctrl-C, and a terminal that closes, reach all processes; the daemon decides. Not ignored: what
            # handlers start inherits that.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda *_: None)
        self.dispatcher.start()
        self.watch.ask_owner()
        for loop in self.loops:
            loop.start()
        if self._indexed:
            self._listening.start()
        release = {"version": version("timeout-center"), "protocol": PROTOCOL}
        self._link.send("ready", worker_id=self.tools.worker_id, **release)
        self._beating.start()  # until the process ends, which may take long
        with selectors.DefaultSelector() as selector:
            self.serve(selector, lambda: self._stopping or bool(self._recycling))
            self._leave(selector)
        self._link.send("left")

    def withdraw(self, slots: set[Slot] | None = None) -> None:
        """Give back the entries of these slots (None: all) that wait here and have not started.

        Entries in the row check are not included; they run here under our claim.
        """
        self.finisher.give_back(self.dispatcher.withdraw(slots) + self.tools.early.withdraw(slots))

    def serve(self, selector: selectors.BaseSelector, until: Callable[[], bool]) -> None:
        """Obey the daemon and advance handovers, until ``until``. Sleeps in ``selector``."""
        if not selector.get_map():
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
        while not until():
            self.beat.turned()
            self.handover.step(self._clock.monotonic())
            sent = self._link.flush()
            leaving = self._stopping or bool(self._recycling)
            busy = self.handover.under_way or leaving or not sent
            ready = selector.select(BUSY_TICK_SECONDS if busy else BEAT_SECONDS)
            self.beat.turned()
            for key, _ in ready:
                if key.fileobj is self._bell:
                    self._bell.clear()
                else:
                    for message in self._link.receive():
                        self._obey(message)
                    if self._link.closed:
                        selector.unregister(self._link)
                        self._stopping = True
                        self.tools.inflight.share(float("inf"))
                        log.warning("daemon_gone")

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "dead":
            dead = frozenset(message["workers"])
            self.tools.store.leases.set_dead(dead)
            self.tools.late.died(dead - self.book.dead)
            self.book.dead = dead
            self.reclaimer.look_now()
            self.rows.look_now()
        elif kind == "sure":
            self.tools.inflight.sure_until = message["until"]
            if self._webhooks is not None and message["senders"]:
                self._webhooks.members = message["senders"]
        elif kind == "take":
            self.handover.take(unpack(message["slots"]), unpack(message["handed"]))
            self.rows.look_now()
            self._catalog.wake()  # their topic may be new
        elif kind == "drop":
            self.handover.drop(unpack(message["slots"]))
        elif kind == "run":
            self.alone.take(Suspect.of(message["suspect"]), message["how"])
        elif kind == "stop":
            self._stopping = True
        elif kind == "force":
            self._stopping = self._forced = True

    # --- the end

    def close(self) -> None:
        """Stop what still works, whatever has ended the main thread, and close what is open. In a process of
        its own a worker that has run ends with that."""
        self._stopping = True
        self._stop_threads([*self.loops, self._beating])
        self.watch.queues.close()
        self._link.close()
        self._bell.close()

    def _stop_threads(self, loops: Sequence[Loop]) -> None:
        until = self._clock.monotonic() + FORCED_SECONDS
        for loop in loops:
            loop.stop(0.0)
        for loop in loops:
            loop.stop(max(until - self._clock.monotonic(), 0.0))
        self.listener.stop()
        self.dispatcher.close()

    def _leave(self, selector: selectors.BaseSelector) -> None:
        """Take nothing more; give back what has not started; let running tries finish; leave.

        In this order, so that no other process waits for us: other workers can own our slots as soon as the
        daemon receives ``leaving``, while our last handlers still run under our claims.
        """
        self.book.leave()
        self.poller.await_round()
        self.rows.look_now()
        self.services.end()
        self.handover.drop_all()
        self._link.send("leaving", recycle=self._recycling)
        self.serve(selector, lambda: self.settled or self._forced or self._overdue() or self._has_failed())
        # Entries that have not started, or are settled, are with the finisher already.
        inflight = self.tools.inflight
        running = [e for e in inflight.snapshot() if e.started and inflight.settle(e)]
        if running:
            some = [entry.job_id for entry in running[:10]]
            log.warning("handlers_abandoned", tasks=len(running), job_ids=some)
            self.alone.take_back(running)
            self.finisher.give_back_running(running)
        until = self._clock.monotonic() + FORCED_SECONDS
        while not self.finisher.idle and self._clock.monotonic() < until:
            time.sleep(BUSY_TICK_SECONDS)
        self._stop_threads(self.loops)
        self.watch.leave()

    @property
    def settled(self) -> bool:
        """Whether nothing is held nor being taken, and everything that was held is written and moved, so that
        this process may end."""
        # In this order: once no row is being taken, the entries that were are held; an entry that is adopted
        # is held, and a held entry leaves only inside a flush, which makes the finisher busy. Leases are
        # requested for held entries only.
        taken = self.rows.settled and self.poller.settled and self.adopter.settled
        return taken and not len(self.tools.inflight) and self.finisher.idle and self.leases.settled

    def _has_failed(self) -> bool:
        """Whether only what has failed here may keep us from being settled: no try runs."""
        return self._failed and not any(one.state is State.RUNS for one in self.tools.inflight.snapshot())

    def _overdue(self) -> bool:
        """Whether the shutdown deadline is over. A process that is only recycled has none."""
        if (self._stopping or self._failed) and self._stop_by == float("inf"):
            self._stop_by = self._clock.monotonic() + self._deadline
        return self._clock.monotonic() >= self._stop_by
