"""The path of a task through a worker process, in one direction:

    take             check             run                    settle
    poll.Poller  ─▶  check.Checker ─▶  dispatch.Dispatcher ─▶ finish.Finisher
    adopt.Adopter                      (bodies.BodyReader)
                                       quarantine.Quarantine

Each stage is constructed with the stages after it. Information flows back through objects that are built
before all of them: ``early`` holds entries not yet due by this machine's clock, ``inbox`` tells the poller
where tasks may be due, ``let_go`` tells the adopter what did not start, ``pressure`` carries back-pressure, a
``Wake`` ends the sleep of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from toc.index.queues import Queues
from toc.index.takes import Takes
from toc.loop import Loop, Reactor, Wake
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.topic import Slot
from toc.store.store import Store
from toc.worker.check import Checker
from toc.worker.control import Suspect
from toc.worker.entry import Inflight
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.quarantine import Quarantine
from toc.worker.run.bodies import BodyReader
from toc.worker.run.dispatch import Dispatcher
from toc.worker.settle.finish import Finisher
from toc.worker.slots import SlotBook
from toc.worker.take.adopt import Adopter
from toc.worker.take.agenda import Agenda
from toc.worker.take.early import EarlyEntries
from toc.worker.take.feedback import Inbox, LetGo, Pressure, Returned
from toc.worker.take.poll import Poller


class Pipeline:
    """The stages of one process, and the objects that they share.

    ``on_room`` wake who takes by rows, by database server: like the poller, when there is room for more, and
    when a task is due again. ``recycle`` asks, with a reason, for
    a successor of this process; ``name_suspects`` tells the daemon which tasks may run only alone.
    """

    def __init__(
        self,
        *,
        store: Store,
        queues: Queues,
        catalog: TopicCatalog,
        clock: Clock,
        handlers: Mapping[str, Handler],
        book: SlotBook,
        threads: int,
        async_limit: int,
        max_crashes: int,
        on_room: Sequence[Wake],
        recycle: Callable[[str], None],
        name_suspects: Callable[[Sequence[Suspect]], None],
    ) -> None:
        wake = Reactor()
        takes = Takes(queues, wake)
        self.inbox = Inbox(wake)
        self.let_go = LetGo(Wake())
        self.early = EarlyEntries(wake)
        self.pressure = Pressure()
        self.inflight = Inflight()
        self.returned = Returned(store.server_of, on_room)
        self.finisher = Finisher(
            store=store,
            queues=queues,
            inflight=self.inflight,
            clock=clock,
            pressure=self.pressure,
            returned=self.returned.put,
        )
        self.bodies = BodyReader(store, self.finisher, self.inflight, clock)
        self.dispatcher = Dispatcher(
            handlers=handlers,
            inflight=self.inflight,
            finisher=self.finisher,
            catalog=catalog,
            clock=clock,
            threads=threads,
            async_limit=async_limit,
            early=self.early,
            let_go=self.let_go,
            bodies=self.bodies,
            on_room=(wake, *on_room),
            recycle=recycle,
        )
        self.quarantine = Quarantine(
            limit=max_crashes,
            store=store,
            finisher=self.finisher,
            clock=clock,
            name=name_suspects,
        )
        self.leases = LeaseKeeper(
            store=store,
            clock=clock,
            inflight=self.inflight,
            finisher=self.finisher,
            max_crashes=max_crashes,
        )
        self.checker = Checker(
            store=store,
            clock=clock,
            inflight=self.inflight,
            finisher=self.finisher,
            dispatcher=self.dispatcher,
            quarantine=self.quarantine,
            leases=self.leases,
            early=self.early,
            reactor=wake,
        )
        self.adopter = Adopter(
            queues=queues,
            catalog=catalog,
            clock=clock,
            handlers=handlers,
            book=book,
            inflight=self.inflight,
            finisher=self.finisher,
            checker=self.checker,
            let_go=self.let_go,
        )
        agenda = Agenda(
            catalog=catalog,
            clock=clock,
            handlers=handlers,
            book=book,
            inflight=self.inflight,
            let_go=self.let_go,
            finisher=self.finisher,
            dispatcher=self.dispatcher,
            pressure=self.pressure,
            takes=takes,
        )
        self.poller = Poller(
            takes=takes,
            clock=clock,
            book=book,
            agenda=agenda,
            checker=self.checker,
            adopter=self.adopter,
            early=self.early,
            inbox=self.inbox,
            reactor=wake,
        )
        self.loops: list[Loop] = [
            *self.finisher.loops,
            *self.bodies.loops,
            self.poller.loop,
            self.adopter.loop,
            self.quarantine.loop,
            *self.leases.loops,
        ]

    def withdraw(self, slots: set[Slot] | None = None) -> None:
        """Give back the entries of these slots (None: all) that wait here and have not started.

        Entries in the row check are not included; they run here under our claim.
        """
        self.finisher.give_back(self.dispatcher.withdraw(slots) + self.early.withdraw(slots))

    @property
    def settled(self) -> bool:
        """Whether nothing is held, and everything that was held is written and moved."""
        # In this order: an entry that was let go is held again, and a held entry leaves only inside a flush,
        # which makes the finisher busy. Leases are requested for held entries only.
        taken = self.poller.settled and self.adopter.settled and not len(self.inflight)
        return taken and self.finisher.idle and self.leases.settled
