"""The worker of a process: composes the loops, obeys the daemon, and leaves in good order."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from toc.coordination.assignment import PROTOCOL
from toc.loop import Bell, Loop, Wake, watched_thread
from toc.maintenance.dead_entries import DeadQueueCheck
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.sdk.parts import open_queues
from toc.store.records.cluster import episode_writer
from toc.store.records.targets import key_mark
from toc.worker.beat import Beat
from toc.worker.control import ControlPipe, Suspect, unpack
from toc.worker.deliveries import Deliveries, WebhookHandlers
from toc.worker.entry import Entry, Inflight
from toc.worker.guards.silence import BEAT_SECONDS
from toc.worker.handover import Handover
from toc.worker.index_watch import IndexWatch
from toc.worker.late_starts import LateStarts
from toc.worker.pipeline import Pipeline
from toc.worker.quarantine import RunsAlone
from toc.worker.reclaim import Reclaimer
from toc.worker.run.heartbeat import Heartbeat
from toc.worker.slots import SlotBook
from toc.worker.table_services import TableServices
from toc.worker.take.by_rows import OWNED_SECONDS, RowTaker
from toc.worker.tools import Tools

log = get_logger(__name__)

BUSY_TICK_SECONDS = 0.05
FORCED_SECONDS = 3.0
"""How long a forced stop may take to give entries back."""
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
        webhooks: WebhookHandlers | None = None,
    ) -> None:
        settings, clock = center.settings, center.clock
        self._clock = clock
        self._link = link
        self._deadline = settings.shutdown_deadline
        self._keys = [key_mark(key.get_secret_value()) for key in settings.secret_key]
        self._turn_at = clock.monotonic()
        """When the main thread was last active (monotonic)."""
        self._signals = 0
        self._stopping = False
        self._stop_by = float("inf")
        self._forced = False
        self._recycling = ""
        """Why it wants a successor. Empty while it does not."""
        queues = center.queues
        self._indexed = queues.present
        self.worker_id = worker_id
        self.book = SlotBook(queues, worker_id)
        wakes = [Wake() for _ in center.store.tables_of_server()]
        tools = Tools(
            store=center.store,
            queues=queues,
            catalog=center.catalog,
            clock=clock,
            handlers=center.handlers,
            died=center.hooks.died,
            book=self.book,
            inflight=Inflight(),
            late=LateStarts(clock, center.catalog, self.book),
            max_crashes=settings.max_crashes,
        )
        self._late = tools.late
        self.pipeline = Pipeline(
            tools,
            threads=threads,
            async_limit=settings.async_limit,
            on_room=wakes,
            recycle=self._recycle,
            name_suspects=lambda found: link.send("suspects", suspects=found),
        )
        finisher, dispatcher = self.pipeline.finisher, self.pipeline.dispatcher
        self.alone = RunsAlone(tools, finisher, self.pipeline.leases, dispatcher, link.send)
        self._webhooks = webhooks
        self._leases = center.store.leases
        self._leases.identify(worker_id)
        self.heartbeat = Heartbeat(tools, dispatcher, finisher, self._recycle)
        self.reclaimer = Reclaimer(tools, self.pipeline.inbox)
        self.dead_check = DeadQueueCheck(center.store, queues, clock, self.book.buried)
        self.services = TableServices(center, queues, self.pipeline.pressure)
        deliveries = Deliveries(tools, dispatcher, webhooks, self.pipeline.inbox.look_at)
        self._catalog = Loop("catalog", deliveries.run_once)
        self.watch = IndexWatch(
            tools=tools,
            queues=open_queues(settings, PROBE_TIMEOUT_SECONDS),
            on_loss=self.services.refill,
            refilled=self.services.refilled,
            identity=identity or center.store.identity.get(),
            name=f"{settings.cluster} with its tables on {center.store.identity.place}",
            refuse=center.queues.refuse,
            on_change=self._index_changed,
        )
        self.rows = RowTaker(
            tools=tools,
            finisher=finisher,
            dispatcher=dispatcher,
            leases=self.pipeline.leases,
            watch=self.watch if self._indexed else None,
            checker=self.pipeline.checker,
            wakes=wakes,
        )
        self._listener = center.queues.listener()
        self._listening = watched_thread(
            "wake", lambda: self._listener.run(self._woken), lambda: self._stopping or bool(self._recycling)
        )
        self.handover = Handover(
            tools=tools,
            link=link,
            listener=self._listener,
            pipeline=self.pipeline,
            reclaimer=self.reclaimer,
            services=self.services,
        )
        # Without an index, what looks after one does not run.
        of_index = [self.reclaimer.loop, Loop("dead", self.dead_check.run_once), self.watch.loop]
        self.loops = [
            *self.pipeline.loops,
            self.alone.loop,
            self.heartbeat.loop,
            *(of_index if self._indexed else []),
            *self.services.loops,
            *self.rows.loops,
            self._catalog,
            episode_writer(center.store.episodes, self._late),
            *([Loop("targets", webhooks.run_once)] if webhooks is not None else []),
        ]
        self.beat = Beat(
            tools=tools,
            link=link,
            pipeline=self.pipeline,
            rows=self.rows,
            watch=self.watch,
            loops=self.loops,
            turn_at=lambda: self._turn_at,
            recycle=self._recycle,
            stood_still=lambda: tools.inflight.share(clock.monotonic() + OWNED_SECONDS),
        )
        self._bell = Bell()

    # --- called by signals and other threads

    def on_signal(self, number: int, frame: object) -> None:  # noqa: ARG002 - the signature of signal handlers
        """Count SIGTERM. The daemon never sends it: an operator or a handler did."""
        self._signals += 1

    def end_for(self, reason: str) -> None:
        """Leave without waiting for running handlers, as something of ours has failed. Any thread may call
        it."""
        self._forced = True
        self._recycle(reason)

    def _recycle(self, reason: str) -> None:
        """Leave, let running tries end, and be replaced: a handler has damaged this process beyond repair.

        The main thread does it, so the caller does not wait.
        """
        if not self._recycling:
            self._recycling = reason
            self._bell()

    def _index_changed(self) -> None:
        """React to a node that is out of reach or back. Another may serve its slots now."""
        self._listener.set_slots(self.book.owned)
        self.rows.look_now()
        self.reclaimer.look_now()

    def _woken(self, slot: Slot | None, due_ms: int | None) -> None:
        if slot is None or due_ms is None:
            self.reclaimer.look_now()  # a new connection: messages may have been missed
            self.watch.look_now()
        else:
            self.pipeline.inbox.look_at(slot, due_ms)

    # --- main thread

    def run(self, *, own_process: bool = True) -> None:
        """Work until told to stop. ``own_process``: the process has no other purpose."""
        if own_process:
            signal.set_wakeup_fd(self._bell.rope)
            signal.signal(signal.SIGTERM, self.on_signal)
            # Ctrl-C, and a terminal that closes, reach all processes; the daemon decides. Not ignored: what
            # handlers start inherits that.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda *_: None)
        self.pipeline.dispatcher.start()
        self.watch.ask_owner()
        for loop in self.loops:
            loop.start()
        if self._indexed:
            self._listening.start()
        release = {"version": version("timeout-center"), "protocol": PROTOCOL}
        self._link.send("ready", worker_id=self.worker_id, keys=self._keys, **release)
        beat = Loop("beat", self.beat.run_once)
        beat.start()
        with selectors.DefaultSelector() as selector:
            self.serve(selector, lambda: self._stopping or bool(self._recycling))
            self._leave(selector)
        self._link.send("left")
        if not own_process:  # else it goes on until the process ends, which may take long
            beat.stop(1.0)

    def serve(self, selector: selectors.BaseSelector, until: Callable[[], bool]) -> None:
        """Obey the daemon and advance handovers, until ``until``. Sleeps in ``selector``."""
        if not selector.get_map():
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
        while not until():
            self._turn_at = now = self._clock.monotonic()
            self.handover.step(now)
            sent = self._link.flush()
            leaving = self._stopping or bool(self._recycling)
            busy = self.handover.under_way or leaving or not sent
            ready = selector.select(BUSY_TICK_SECONDS if busy else BEAT_SECONDS)
            self._turn_at = self._clock.monotonic()
            for key, _ in ready:
                if key.fileobj is self._bell:
                    self._bell.clear()
                else:
                    for message in self._link.receive():
                        self._obey(message)
                    if self._link.closed:
                        selector.unregister(self._link)
                        self._stopping = True
                        self.pipeline.inflight.share(float("inf"))
                        log.warning("daemon_gone")
            if self._signals and not self._stopping:
                self._recycle("SIGTERM was sent to it")

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "dead":
            self._leases.set_dead(message["workers"])
            self.book.dead = frozenset(message["workers"])
            self._late.died(message["workers"])
            self.reclaimer.look_now()
            self.rows.look_now()
        elif kind == "sure":
            self.pipeline.inflight.sure_until = message["until"]
            if self._webhooks is not None and message["senders"]:
                self._webhooks.members = message["senders"]
        elif kind == "take":
            self.handover.take(unpack(message["slots"]))
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
        """Close what a worker that was never run holds open. A worker that has run ends with its
        process."""
        self.pipeline.dispatcher.close()
        self.watch.queues.close()
        self._link.close()
        self._bell.close()

    def _leave(self, selector: selectors.BaseSelector) -> None:
        """Take nothing more; give back what has not started; let running tries finish; leave.

        In this order, so that no other process waits for us: other workers can own our slots as soon as the
        daemon receives ``leaving``, while our last handlers still run under our claims.
        """
        self.book.leave()
        self.pipeline.poller.await_round()
        self.rows.look_now()
        self.services.end()
        self.handover.drop_all()
        self._link.send("leaving", recycle=self._recycling)
        self.serve(selector, lambda: self.settled or self._forced or self._overdue())
        # Entries that have not started, or are settled, are with the finisher already.
        inflight = self.pipeline.inflight
        running = [e for e in inflight.snapshot() if e.started and inflight.settle(e)]
        if running:
            log.warning("handlers_abandoned", tasks=len(running))
            self.alone.take_back(running)
            self._give_back_running(running)
        self.pipeline.finisher.stop(FORCED_SECONDS)
        for loop in self.loops:
            loop.stop(1.0)
        self.watch.leave()
        self._listener.stop()
        self.pipeline.dispatcher.close()
        if self._webhooks is not None:
            self._webhooks.leave()

    @property
    def settled(self) -> bool:
        """Whether nothing is held nor being taken, so that this process may end."""
        # In this order: once no row is being taken, the entries that were are held.
        return self.rows.settled and self.pipeline.settled

    def _overdue(self) -> bool:
        """Whether the shutdown deadline is over. A process that is only recycled has none."""
        if self._stopping and self._stop_by == float("inf"):
            self._stop_by = self._clock.monotonic() + self._deadline
        return self._clock.monotonic() >= self._stop_by

    def _give_back_running(self, running: Sequence[Entry]) -> None:
        """Give running tries back without charging them, and mark their rows. The tasks will run
        again elsewhere."""
        finisher = self.pipeline.finisher
        finisher.give_back_running(running)
        until = self._clock.monotonic() + FORCED_SECONDS
        while not finisher.idle and self._clock.monotonic() < until:
            time.sleep(BUSY_TICK_SECONDS)
