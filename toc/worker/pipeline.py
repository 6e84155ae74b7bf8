"""The path of a task through a worker process, in one direction:

    take             check             run                    settle
    poll.Poller  ─▶  check.Checker ─▶  dispatch.Dispatcher ─▶ finish.Finisher
    adopt.Adopter                      (bodies.BodyReader)
                                       quarantine.Quarantine

Each stage is constructed with the stages after it. Information flows back through objects that are built
before all of them: ``early`` holds entries not yet due by this machine's clock, ``inbox`` tells the poller
where tasks may be due, ``pressure`` carries back-pressure, a ``Wake`` ends the sleep of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toc.index.takes import Takes
from toc.loop import Loop, Reactor, Wake
from toc.model.topic import Slot
from toc.worker.check import Checker
from toc.worker.control import Suspect
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.quarantine import Quarantine
from toc.worker.run.bodies import BodyReader
from toc.worker.run.dispatch import Dispatcher
from toc.worker.settle.finish import Finisher
from toc.worker.take.adopt import Adopter
from toc.worker.take.agenda import Agenda
from toc.worker.take.early import EarlyEntries
from toc.worker.take.feedback import Inbox, Pressure
from toc.worker.take.poll import Poller
from toc.worker.tools import Tools


class Pipeline:
    """The stages of one process, and the objects that they share.

    ``on_room`` wake who takes by rows, as the poller, when there is room for more. ``recycle`` asks, with a
    reason, for a successor of this process; ``name_suspects`` tells the daemon which tasks run only alone.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        threads: int,
        async_limit: int,
        on_room: Sequence[Wake],
        recycle: Callable[[str], None],
        name_suspects: Callable[[Sequence[Suspect]], None],
    ) -> None:
        wake = Reactor()
        takes = Takes(tools.queues, wake)
        self.inbox = Inbox(wake)
        self.early = EarlyEntries(wake)
        self.pressure = Pressure()
        self.inflight = tools.inflight
        self.finisher = Finisher(tools, self.pressure)
        self.bodies = BodyReader(tools, self.finisher)
        self.dispatcher = Dispatcher(
            tools=tools,
            finisher=self.finisher,
            threads=threads,
            async_limit=async_limit,
            early=self.early,
            bodies=self.bodies,
            on_room=(wake, *on_room),
            recycle=recycle,
        )
        self.quarantine = Quarantine(tools, self.finisher, name_suspects)
        self.leases = LeaseKeeper(tools, self.finisher)
        self.checker = Checker(
            tools=tools,
            finisher=self.finisher,
            dispatcher=self.dispatcher,
            quarantine=self.quarantine,
            leases=self.leases,
            early=self.early,
            reactor=wake,
        )
        self.adopter = Adopter(tools, self.finisher, self.checker)
        agenda = Agenda(
            tools=tools,
            finisher=self.finisher,
            dispatcher=self.dispatcher,
            pressure=self.pressure,
            takes=takes,
        )
        self.poller = Poller(
            tools=tools,
            takes=takes,
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
        # In this order: an entry that is adopted is held, and a held entry leaves only inside a flush, which
        # makes the finisher busy. Leases are requested for held entries only.
        taken = self.poller.settled and self.adopter.settled and not len(self.inflight)
        return taken and self.finisher.idle and self.leases.settled
