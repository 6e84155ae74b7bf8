"""What holds up tasks in this process, and which of its tasks started late: for ``toc.model.lateness``.

Whoever notices that tasks are held up notes it. Whoever starts tasks asks which notes fill a late start, and
counts it. What was counted in some seconds becomes episodes: one for each topic and cause.
"""

import secrets
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence

from toc.model.clock import Clock
from toc.model.lateness import CAUSES, LATE_MS, Cause, Episode, LateStart, Span, clock_time, fill
from toc.model.topic import Slot, Topic
from toc.observe.metrics import LATE_TASKS

SLOW_SECONDS = 0.3
"""A server that takes longer for an answer holds up tasks."""
JOIN_MS = 1500
"""Two notes of one cause are one if no more lies between them."""
NOTES = 20
"""Most notes kept of a place."""
LINES_A_SECOND = 200
"""Most late starts whose causes are written to rows in a second: each costs a tenth of its task again."""
LEARN_MS = 1000
"""By when each process has learned that a topic was resumed."""
EPISODES = 200
"""Most episodes at a time. What exceeds them is counted without its topic."""
EVERYWHERE = None
"""The place of what holds up the whole process."""
_ORDER = {cause: place for place, cause in enumerate(CAUSES)}


class Holdups:
    """The notes and late starts of one process, whose name ``who`` is. Thread-safe.

    A place is a slot, the number of a database server, or EVERYWHERE.
    """

    def __init__(self, clock: Clock, who: str) -> None:
        self._clock = clock
        self._who = who
        self._notes: dict[Hashable, tuple[Span, ...]] = {}
        """By place. The tuples are replaced, never changed in place."""
        self._came: dict[Slot, tuple[int, ...]] = {}
        """When tasks came to a slot after their time (ms)."""
        self._wall = self._offset()
        """The wall clock minus the monotonic one (ms)."""
        self._second = self._lines = 0
        self._episodes: dict[tuple[str, Cause], Episode] = {}
        self._last: dict[str, Cause] = {}
        """By topic, the cause of the latest late start."""
        self._lock = threading.Lock()

    # --- what is noticed

    def note(self, cause: Cause, place: Hashable, since: int, until: int, evidence: str) -> None:
        """Note what held up tasks at a place, from then to then (ms)."""
        with self._lock:
            notes = self._notes.get(place, ())
            for index, one in enumerate(notes):
                if one.cause is cause and one.since - JOIN_MS <= until and since <= one.until + JOIN_MS:
                    whole = one._replace(since=min(one.since, since), until=max(one.until, until))
                    self._notes[place] = (*notes[:index], whole, *notes[index + 1 :])
                    return
            about = evidence.partition("; ")[0]  # the rest of an error says what to do
            self._notes[place] = (*notes, Span(cause, since, until, about))[-NOTES:]

    def slow(self, cause: Cause, place: Hashable, seconds: float, what: str) -> None:
        """Note that something which has just ended has taken so long, if that was long."""
        if seconds > SLOW_SECONDS:
            now = self._clock.now_ms()
            self.note(cause, place, now - round(seconds * 1000), now, f"{what} took {seconds:.1f} s")

    def came(self, slot: Slot) -> None:
        """Note that tasks have just come to a slot after their time: it had nothing due before."""
        with self._lock:
            self._came[slot] = (*self._came.get(slot, ()), self._clock.now_ms())[-NOTES:]

    def came_late(self, slot: Slot, due: int, held: int) -> list[Span]:
        """Return the span until a task came to its slot that was due then, and taken at ``held`` (ms)."""
        times = [at for at in self._came.get(slot, ()) if due < at <= held]
        return [Span(Cause.STORED_LATE, due, at, f"it came at {clock_time(at)} UTC") for at in times[-1:]]

    def look_at_clock(self) -> None:
        """Note if this host's clock was set forward since the last call: what was due in between is late."""
        with self._lock:
            before, self._wall = self._wall, self._offset()
        if (step := self._wall - before) > LATE_MS:
            now = self._clock.now_ms()
            self.note(Cause.CLOCK, EVERYWHERE, now - step, now, f"set forward by {step / 1000:.1f} s")

    def _offset(self) -> int:
        return self._clock.now_ms() - round(self._clock.monotonic() * 1000)

    # --- which of it explains a start

    def fill(
        self, due: int, started: int, places: Iterable[Hashable], spans: Iterable[Span], rest: Span,
        last: Sequence[Span] = (),
    ) -> list[Span]:  # fmt: skip
        """Return what fills the time from ``due`` to ``started`` (ms): the notes of these places, and these
        spans; then the ``last``; what they leave is ``rest``."""
        found = list(spans)
        for place in (EVERYWHERE, *places):
            found += [span for span in self._notes.get(place, ()) if span.until > due]
        found.sort(key=lambda span: _ORDER[span.cause])
        return fill(due, started, [*found, *last], rest)

    def of_topic(self, topic: Topic, due: int, held: int) -> Iterator[Span]:
        """Return what its topic's pause and resume explain of a task taken at ``held`` (ms)."""
        if not topic.paused_at or topic.resumed_at <= due:
            return
        until = topic.resumed_at + LEARN_MS
        about = f"{clock_time(topic.paused_at)} to {clock_time(topic.resumed_at)} UTC"
        yield Span(Cause.PAUSED, topic.paused_at, until, about)
        if topic.resume_rate:
            yield Span(Cause.RESUME_RATE, until, held, f"{topic.resume_rate} tasks a second")

    def may_write(self) -> bool:
        """Whether the causes of one more start may be written in this second."""
        with self._lock:
            second = int(self._clock.monotonic())
            if second != self._second:
                self._second, self._lines = second, 0
            self._lines += 1
            return self._lines <= LINES_A_SECOND

    # --- episodes

    def count(self, topic: str, starts: Iterable[tuple[int, LateStart]]) -> None:
        """Count late starts of a topic, given with their job_ids. Those without spans have the cause of the
        one before."""
        by_cause: dict[Cause, list[tuple[int, LateStart]]] = {}
        # A row keeps the start of a later try also if that was in time.
        starts = [one for one in starts if one[1].started - one[1].due > LATE_MS]
        with self._lock:
            cause = self._last.get(topic, Cause.UNKNOWN)
            for start in starts:
                cause = start[1].spans[0].cause if start[1].spans else cause
                by_cause.setdefault(cause, []).append(start)
            self._last[topic] = cause
            for cause, some in by_cause.items():
                key = topic, cause
                if key not in self._episodes and len(self._episodes) >= EPISODES:
                    key = "", cause
                one = self._episodes.get(key)
                if one is None:
                    first = some[0][1]
                    number = secrets.randbits(62)
                    one = Episode(number, *key, self._who, first.due, first.started, first.started)
                self._episodes[key] = one.with_tasks(some)
        for cause, some in by_cause.items():
            LATE_TASKS.of(topic, cause.value).add(len(some))

    def take_episodes(self) -> list[Episode]:
        """Return what was counted since the last call."""
        with self._lock:
            taken, self._episodes = self._episodes, {}
        return list(taken.values())
