"""Leases: a long try records its worker on the row, and other workers wait while this record is
valid.

The index arbitrates who has a task as long as every worker can reach it and it loses nothing. A worker that
has lost its node takes tasks by leases on their rows (``take/by_rows``). So that it does not take what
another worker runs, every try that is held for longer than a moment has a lease too. The loop here uses only
the task table, so it continues when Redis hangs, or where there is none.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from toc.loop import Loop
from toc.model.clock import RateLimit
from toc.model.verdict import Failure, after_crash
from toc.observe.log import get_logger
from toc.observe.metrics import TRIES
from toc.store.servers.server import Locked
from toc.store.servers.shards import OF_TABLES, Trouble
from toc.store.tasks.batch import Guard
from toc.store.tasks.leases import RAN_OUT
from toc.worker.entry import NO_FENCE, NO_LEASE, Entry, Lease
from toc.worker.settle.finish import Finisher
from toc.worker.settle.moves import tell_crashed, tell_unwritten
from toc.worker.tools import Tools

log = get_logger(__name__)

TICK_SECONDS = 0.25
IDLE_SECONDS = 0.5
"""Pause while nothing is held. Shorter than the time after which a new entry needs a lease."""
LEASE_AFTER_SECONDS = 0.75
"""How long after it was taken an entry gets a lease. Most tries have ended by then and cost nothing."""
AGAIN_SECONDS = 1.0
"""Pause before an entry that got no lease asks again: the current holder may be about to give it up."""


class LeaseKeeper:
    """The loop that takes leases for held entries and renews them every third of prepare_timeout."""

    def __init__(self, tools: Tools, finisher: Finisher) -> None:
        self._tools = tools
        self._finisher = finisher
        self._complains = RateLimit(tools.clock)
        servers = range(len(tools.store.tables_of_server()))
        self._asked: list[dict[Entry, None]] = [{} for _ in servers]
        """By server, the entries for which leases were requested, until they are no longer held and
        have no lease."""
        self.loops = [Loop(f"leases-{number}", partial(self.look, number)) for number in servers]
        """One loop per database server: a server that hangs must not delay the renewals of others."""

    @property
    def settled(self) -> bool:
        """Whether no lease is being requested, and no entry that asked for one may still have
        it."""
        possible = (entry.lease.possible for entries in self._asked for entry in list(entries))
        return not (any(loop.at_work for loop in self.loops) or any(possible))

    def look(self, number: int) -> float:
        """Request the due leases of one server. Returns the seconds until the next look."""
        now = self._tools.clock.monotonic()
        self._release_gone(number)
        if refused := self._tools.inflight.refused(now):  # of all servers: that of one may hang
            # They are still there if no other worker has taken them. One that has needs the lease, which the
            # finisher gives up before it moves the entry.
            self._finisher.give_back(refused)
        # Ended tries that are not written yet count too: no other worker may begin them meanwhile.
        held, server_of = self._tools.inflight.snapshot(), self._tools.store.server_of
        due = [entry for entry in held if _asks(entry, now) and server_of(entry.job_id) == number]
        if due:
            self._complain(self.take(due))
        return TICK_SECONDS if len(self._tools.inflight) else IDLE_SECONDS

    def _release_gone(self, number: int) -> None:
        """Release leases requested for entries that left meanwhile: running out would look like a crash."""
        asked = self._asked[number]
        gone: dict[int, Entry] = {}
        for entry in list(asked):
            held = self._tools.inflight.get(entry.job_id)
            if held is entry:
                continue
            del asked[entry]
            if held is None and entry.lease.possible:
                gone[entry.job_id] = entry
            elif held is not None and entry.lease.possible:  # the lease serves what was taken anew
                held.lease = held.lease._replace(possible=True)
                asked[held] = None
        if not gone:
            return
        failed = self._tools.store.leases.release(gone)
        for job_id, entry in gone.items():
            if job_id in failed:
                asked[entry] = None
            else:
                entry.lease = NO_LEASE
        self._complain(failed)

    def _complain(self, failed: Mapping[int, Trouble]) -> None:
        if failed and self._complains():
            log.warning("leases_not_kept", tasks=len(failed), error=str(next(iter(failed.values()))))

    def take(self, entries: Sequence[Entry], due_by: int | None = None) -> Mapping[int, Trouble]:
        """Take or renew leases on the rows of entries. ``lease`` says which have one afterwards: none that is
        not due by ``due_by`` (ms).

        Returns the job_ids whose rows could not be written, with the reason. If the server did not say so
        itself, they may have a lease; it is requested again.
        """
        asked = self._tools.clock.monotonic()
        checked = [entry for entry in entries if entry.checked]
        before = {entry.job_id: entry.lease for entry in entries}
        waiting = {entry.job_id for entry in entries if not entry.started}
        for entry in entries:
            entry.lease = entry.lease._replace(possible=True)
            self._asked[self._tools.store.server_of(entry.job_id)][entry] = None
        ours = self._tools.store.leases.take(
            {entry.job_id: entry.topic.prepare_timeout for entry in entries},
            # The finisher may write the outcome at the same time: a lease after that would look like a crash.
            {entry.job_id: entry.row for entry in checked},
            {entry.job_id for entry in checked if not _in_time(entry, asked)},
            due_by,
            waiting,
        )
        for entry in entries:
            error = ours.unanswered.get(entry.job_id)
            if isinstance(error, OF_TABLES) and not before[entry.job_id].possible:  # it surely has no lease
                if isinstance(error, Locked):  # which passes
                    del ours.unanswered[entry.job_id]
                ours[entry.job_id] = False
            elif error is not None:
                continue
            timeout = entry.topic.prepare_timeout
            if ours[entry.job_id]:
                told = entry.job_id not in waiting
                entry.lease = Lease(asked + timeout, asked + timeout / 3, possible=True, told=told)
            else:
                entry.lease = NO_LEASE._replace(ask_at=asked + AGAIN_SECONDS)  # [rule: asked-again]
        return ours.unanswered

    def uncovered(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of the entries that may not start without a lease, and have none."""
        now = self._tools.clock.monotonic()
        shared, long_ago = self._tools.inflight.shared(now), now - LEASE_AFTER_SECONDS
        return [entry for entry in entries if (shared or entry.held < long_ago) and not entry.lease.until]

    def cover(self, entries: Sequence[Entry]) -> Collection[int]:
        """Take leases for entries that may not start without one: those whose row check took too long, or all
        while other workers may own our slots too.

        An entry that gets no lease is refused its start and given back.
        Returns the job_ids for which other workers may own our slots and no answer came: checking those at
        once would only loop.
        """
        now = self._tools.clock.monotonic()
        shared = self._tools.inflight.shared(now)
        late = [entry for entry in self.uncovered(entries) if _in_time(entry, now)]
        failed = self.take(late) if late else {}
        self._complain(failed)
        return failed if shared else ()

    def judge(self, entries: Sequence[Entry]) -> list[Entry]:
        """Decide about entries on whose rows another worker has or had a lease. Returns those that may start.

        While the lease lasts the entry waits and nothing is charged: a worker that has lost Redis runs the
        task. If the holder is dead or let it run out, the try ended with its worker.
        """
        now = self._tools.clock.now_ms()
        # [rule: leased-elsewhere]
        waiting = [(entry, now + entry.row.lease) for entry in entries if entry.row.lease > 0]
        if waiting:
            self._finisher.give_back_until(waiting)
        crashed: list[tuple[Entry, Failure]] = []
        start: list[Entry] = []
        for entry in entries:
            if entry.row.lease == RAN_OUT:  # [rule: lease-ran-out]
                left = entry.topic.remaining(entry.row.attempts)
                at = max(now, entry.row.next_time)  # it may be due only in a moment
                crash = after_crash(entry.row, entry.topic, left, at, self._tools.max_crashes, dead=False)
                if crash is None:
                    start.append(entry)  # to quarantine, which counts its runs itself
                else:
                    crashed.append((entry, crash))
        if crashed:  # written to their rows, which then say where the entries go
            guards = self._tools.store.crash([crash for _, crash in crashed])
            tell_crashed(guards)
            tell_unwritten(guards.unanswered)  # they are checked again when they come back
            for entry, crash in crashed:
                if guards.get(entry.job_id) is Guard.APPLIED:
                    TRIES.of(entry.topic.name, "crashed").add()
                    attempts, crashes, at = crash.new_attempts, crash.new_crashes, crash.next_time
                    entry.row = entry.row._replace(attempts=attempts, crashes=crashes, next_time=at, lease=0)
            self._finisher.give_back(entry for entry, _ in crashed)
        return start


def _asks(entry: Entry, now: float) -> bool:
    """Whether it is time for a lease of the entry, or for a longer one."""
    lease = entry.lease
    if not entry.checked or not (entry.started or now < lease.until or _in_time(entry, now)):
        return False  # [rule: lease-of-held]
    # One that got the lease before it started, and runs on: its row says so.
    untold = lease.until and not lease.told and entry.started
    return now >= (lease.ask_at or entry.held + LEASE_AFTER_SECONDS) or bool(
        untold and now >= entry.started + LEASE_AFTER_SECONDS
    )


def _in_time(entry: Entry, now: float) -> bool:
    """Whether the entry may get a first lease. A lease that it has may be renewed in any case.

    Not without a timely heartbeat: another worker may run it by now, has no lease yet, and would be refused
    one. And an entry taken without Redis may be in a slot that has moved to another worker. Only who takes by
    rows checks that, so only it takes the first lease.
    """
    # [rule: first-lease]
    return entry.fence != NO_FENCE and entry.in_time(now)
