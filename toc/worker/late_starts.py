"""Why tries started late in this process: their own times, and what held up tasks, fill each late start.

The causes are written with the outcome of the try, so that no task costs a statement more. In a second with
many late starts the others are only counted.
"""

from collections.abc import Iterable

from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.lateness import LATE_MS, Cause, LateStart, Span, clock_time, fill, stored_late
from toc.model.raised import Raised
from toc.model.sharding import created_ms
from toc.model.topic import Slot
from toc.observe.holdups import JOIN_MS, NOTES, Holdups
from toc.worker.entry import NO_FENCE, Entry
from toc.worker.slots import SlotBook

READ_SECONDS = 0.1
"""What takes less from its taking until its row is read is not the database's fault."""
DEATH_MS = 60_000
"""How long before we got a slot a worker may have died that had it."""
MOVE_MS = 2000
"""What a slot's move from a living worker to this one takes at most, of which each knows only its part."""


class LateStarts(Holdups):
    """What this worker knows of late starts. Thread-safe."""

    def __init__(self, clock: Clock, catalog: TopicCatalog, book: SlotBook) -> None:
        super().__init__(clock, book.worker_id)
        self._catalog = catalog
        self._book = book
        self._deaths: list[tuple[int, str]] = []
        """When it learned that a worker had died (ms)."""

    def died(self, workers: Iterable[str]) -> None:
        """Note workers that have died."""
        now = self._clock.now_ms()
        self._deaths = [*self._deaths, *((now, worker) for worker in workers)][-NOTES:]

    def of(self, ended: Iterable[tuple[Entry, Raised | None]], server: int) -> dict[int, LateStart]:
        """Return the late starts among ended tries of one database server, by job_id; without spans those
        that are only counted."""
        self.look_at_clock()
        wall = self._clock.time() - self._clock.monotonic()
        found: dict[int, LateStart] = {}
        for entry, error in ended:
            if not entry.started:
                continue
            row, until = entry.row, None if error is None else error.until
            began = entry.started
            sent = entry.delivered.sent if entry.delivered else None if error is None else error.sent
            if sent is not None:  # a webhook starts with its request
                began = max(began, entry.ended - sent.ms / 1000)
            started = int((began + wall) * 1000) + entry.behind
            # The last start is kept of a task that was tried before: its row has only its end.
            again = error is None and row.attempts and started - row.action_time > LATE_MS
            if started - row.next_time <= LATE_MS and until is None and not again:
                continue
            late = LateStart(row.version, row.next_time, max(started, until or 0), ())
            if self.may_write():
                spans = self._spans(entry, started, wall, server)
                if until is not None and error is not None:
                    put_off = Cause.MISFIT if error.misfit else Cause.TARGET
                    about = error.misfit or error.text
                    spans = fill(late.due, late.started, spans, Span(put_off, 0, 0, about))
                times = [
                    int((at + wall) * 1000) + entry.behind if at else 0 for at in (entry.held, entry.read)
                ]
                late = late._replace(spans=spans, taken=times[0], read=times[1])
            found[row.job_id] = late
        return found

    def _spans(self, entry: Entry, started: int, wall: float, server: int) -> list[Span]:
        """Return what fills the time from when a try was due to its start (ms)."""
        due, held = entry.row.next_time, int((entry.held + wall) * 1000)
        topic = self._catalog.known().get(entry.topic.name, entry.topic)
        spans = [*self.of_topic(topic, due, held), *stored_late(entry.job_id, entry.row.version, due)]
        since = self._book.wanted.get(entry.slot)
        if since is not None and (owned := int((since + wall) * 1000)) > due:
            spans.append(self._unowned(entry.slot, due, owned, created_ms(entry.job_id)))
        if entry.read - entry.held > READ_SECONDS:
            spans.append(Span(Cause.DATABASE, held, int((entry.read + wall) * 1000), "reading its row"))
        ahead = held - entry.taken if entry.fence != NO_FENCE else 0
        if (skew := max(ahead, entry.behind)) > LATE_MS:
            which = "behind that of" if entry.behind else "ahead of that of"
            about = f"this host's is {skew / 1000:.1f} s {which} Redis"
            spans.append(Span(Cause.CLOCK, due, due + skew, about))
        begun = int((entry.started + wall) * 1000)
        if started - entry.behind > begun:
            spans.append(Span(Cause.TARGET, begun, started, "it waited for its turn at its target"))
        rest = Span(entry.crowd[0], 0, 0, entry.crowd[1])
        came = self.came_late(entry.slot, due, held)
        return self.fill(due, started, (server, entry.slot), spans, rest, came)

    def _unowned(self, slot: Slot, due: int, owned: int, stored: int) -> Span:
        """Return the span until this worker got a slot: only a move, if a living worker had it before."""
        for at, worker in reversed(self._deaths):
            if max(due - DEATH_MS, stored) < at <= owned + JOIN_MS:
                return Span(Cause.WORKER_KILLED, due, owned, worker)
        if slot in self._book.handed and (one := self._book.owned.get(slot)) is not None and one.others:
            return Span(Cause.NO_OWNER, max(due, owned - MOVE_MS), owned, "while its slot moved")
        return Span(Cause.NO_OWNER, due, owned, f"until {clock_time(owned)} UTC")
