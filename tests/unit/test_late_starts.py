"""Which cause a worker finds for a late start, of its own times and of what it has noted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from toc.index.queues import NoIndex
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.lateness import Cause, late_starts
from toc.model.raised import Delivered, Raised, Sent
from toc.model.sharding import JOB_ID_EPOCH_MS
from toc.model.task import TryRow
from toc.model.topic import Slot, Topic
from toc.observe.holdups import EVERYWHERE, LINES_A_SECOND
from toc.worker.entry import Entry
from toc.worker.late_starts import LateStarts
from toc.worker.slots import SlotBook

DUE = 1_800_000_000_000
TOPIC = Topic("order.close", 1, 4)
SLOT = Slot("order.close", 0)
SERVER = 0


class Fixed(Clock):
    """10 s after DUE; the monotonic clock says 110 then."""

    def __init__(self) -> None:
        self.wall, self.mono = DUE / 1000 + 10, 110.0
        self.time = lambda: self.wall
        self.monotonic = lambda: self.mono

    def now_ms(self) -> int:
        return round(self.wall * 1000)


@dataclass
class Scene:
    late: LateStarts
    entry: Entry
    topics: list[Topic]
    book: SlotBook
    clock: Fixed
    error: Raised | None = None

    def topic(self, **changes: Any) -> None:
        self.topics[:] = [replace(TOPIC, **changes)]

    def found(self) -> Any:
        return self.late.of([(self.entry, self.error)], SERVER)


def ms(seconds: float) -> int:
    return DUE + round(seconds * 1000)


@pytest.fixture
def scene() -> Scene:
    """A task that was due 8 s before it was taken, and started at once."""
    clock, topics = Fixed(), [TOPIC]
    catalog = TopicCatalog(lambda: topics, clock)
    book = SlotBook(NoIndex(), "host-1")
    book.want([SLOT], 50.0)
    job_id = (DUE - JOB_ID_EPOCH_MS - 60_000) << 22
    entry = Entry(job_id, SLOT, 5.0, TOPIC, Handler("order.close", print, None, is_async=False), ms(8), 108.0)
    entry.row = TryRow(job_id, 1, 1, 0, DUE, DUE, 0, 0, 0, 0, None, "{}")
    entry.read, entry.started, entry.ended = 108.01, 108.02, 109.0
    return Scene(LateStarts(clock, catalog, book), entry, topics, book, clock)


def stored_late(scene: Scene) -> None:
    scene.entry.job_id = (ms(7) - JOB_ID_EPOCH_MS) << 22


def paused(scene: Scene) -> None:
    scene.topic(paused_at=ms(-60), resumed_at=ms(7))


def resume_rate(scene: Scene) -> None:
    scene.topic(paused_at=ms(-60), resumed_at=ms(1), resume_rate=5)


def no_owner(scene: Scene) -> None:
    scene.book.give_up([SLOT])
    scene.book.want([SLOT], 107.0)


def worker_killed(scene: Scene) -> None:
    no_owner(scene)
    scene.clock.wall -= 4
    scene.late.died(["host-2"])
    scene.clock.wall += 4


def redis(scene: Scene) -> None:
    scene.late.note(Cause.REDIS, SLOT, ms(-3), ms(2), "no answer; look at it")
    scene.late.note(Cause.REDIS, SLOT, ms(2.5), ms(7), "no answer")
    scene.late.note(Cause.REDIS, Slot("order.close", 1), ms(0), ms(8), "of another slot")


def database(scene: Scene) -> None:
    scene.late.note(Cause.DATABASE, SERVER, ms(1), ms(7), "away")


def database_reads(scene: Scene) -> None:
    scene.entry.held, scene.entry.taken = 101.0, ms(1)


def clock_behind(scene: Scene) -> None:
    scene.entry.behind = 30_000


def clock_ahead(scene: Scene) -> None:
    scene.entry.taken = ms(2)


def clock_set(scene: Scene) -> None:
    scene.clock.wall -= 9
    scene.late.look_at_clock()
    scene.clock.wall += 9


def halted(scene: Scene) -> None:
    scene.clock.wall -= 2
    scene.late.slow(Cause.HALTED, EVERYWHERE, 7.5, "what takes a second")
    scene.clock.wall += 2


def target(scene: Scene) -> None:
    scene.error = Raised("Postponed", "target shop: paused", until=ms(60))


def misfit(scene: Scene) -> None:
    scene.error = Raised("Misfit", "the payload does not fit P", until=ms(60), misfit=True)


def target_waits(scene: Scene) -> None:
    scene.entry.started, scene.entry.ended = 101.0, 109.0
    scene.entry.delivered = Delivered(Sent(200, 500), "")


CASES: dict[Callable[[Scene], None], Cause] = {
    lambda _: None: Cause.BACKLOG, stored_late: Cause.STORED_LATE, paused: Cause.PAUSED,
    resume_rate: Cause.RESUME_RATE, no_owner: Cause.NO_OWNER, worker_killed: Cause.WORKER_KILLED,
    redis: Cause.REDIS, database: Cause.DATABASE, database_reads: Cause.DATABASE,
    clock_behind: Cause.CLOCK, clock_ahead: Cause.CLOCK, clock_set: Cause.CLOCK, halted: Cause.HALTED,
    target: Cause.TARGET, misfit: Cause.BACKOFF, target_waits: Cause.TARGET,
}  # fmt: skip


@pytest.mark.parametrize(("inject", "cause"), CASES.items(), ids=[one.__name__ for one in CASES])
def test_each_cause_is_found(scene: Scene, inject: Callable[[Scene], None], cause: Cause) -> None:
    inject(scene)
    scene.late._catalog.refresh()
    (late,) = scene.found().values()
    assert late.cause is cause, late
    assert sum(span.until - span.since for span in late.spans) == late.started - late.due
    (kept,) = late_starts(late.line(), 0)
    assert kept.cause is cause


def test_what_started_in_time_is_not_late_unless_it_was_tried_before(scene: Scene) -> None:
    scene.late._catalog.refresh()
    scene.entry.row = scene.entry.row._replace(next_time=ms(7.5))
    assert scene.found() == {}
    scene.entry.row = scene.entry.row._replace(attempts=1)
    (again,) = scene.found().values()
    assert again.started == ms(8.02)
    scene.error = Raised("ValueError", "no")
    assert scene.found() == {}, "a failure is in the history"
    scene.entry.started = 0.0
    assert scene.found() == {}, "it has not started"


def test_beyond_a_number_a_second_late_starts_are_counted_only(scene: Scene) -> None:
    scene.late._catalog.refresh()
    assert all(scene.found()[scene.entry.job_id].spans for _ in range(LINES_A_SECOND))
    (counted,) = scene.found().values()
    assert not counted.spans
    written = counted._replace(spans=[])
    scene.clock.mono += 1
    scene.clock.wall += 1
    (late,) = scene.found().values()
    scene.late.count("order.close", [(1, late), (2, written), (3, written)])
    (episode,) = scene.late.take_episodes()
    assert (episode.tasks, episode.unwritten, episode.cause) == (3, 2, Cause.BACKLOG)
    assert episode.since == DUE
    assert scene.late.take_episodes() == []
