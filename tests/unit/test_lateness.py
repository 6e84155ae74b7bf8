"""Why a task is late: shares, the sentence, the line of a row, and which cause a worker finds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness.rows import known
from hypothesis import given
from hypothesis import strategies as st

from toc.index.queues import NoIndex
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.lateness import (
    MAX_LATE_CHARS,
    Cause,
    LateStart,
    Span,
    Tried,
    explain,
    fill,
    late_starts,
)
from toc.model.raised import Delivered, Raised, Sent
from toc.model.sharding import JOB_ID_EPOCH_MS
from toc.model.task import TryRow
from toc.model.topic import Slot, Topic
from toc.observe.holdups import EVERYWHERE, LINES_A_SECOND
from toc.worker.entry import Entry
from toc.worker.late_starts import MOVE_MS, LateStarts
from toc.worker.run.handler_calls import Line
from toc.worker.slots import OwnedSlot, SlotBook

# Why a task is late: shares, the sentence, the line of a row. Pure.

DUE = 1_700_000_000_000
REST = Span(Cause.BACKLOG, 0, 0, "9 waited")


def at(seconds: float) -> int:
    return DUE + round(seconds * 1000)


def span(cause: Cause, since: float, until: float, evidence: str = "") -> Span:
    return Span(cause, at(since), at(until), evidence)


spans = st.lists(
    st.builds(
        lambda cause, since, length: span(cause, since, since + length),
        st.sampled_from(list(Cause)),
        st.floats(-50, 50),
        st.floats(0, 50),
    )
)


@given(spans, st.floats(0.001, 60))
def test_shares_add_up_to_how_late_it_was_each_within_that_time(found: list[Span], seconds: float) -> None:
    filled = fill(DUE, at(seconds), found, REST)
    assert sum(one.until - one.since for one in filled) == at(seconds) - DUE
    lengths = [one.until - one.since for one in filled]
    assert lengths == sorted(lengths, reverse=True)
    assert all(lengths)
    assert len({one.cause for one in filled}) == len(filled)
    assert all(DUE <= one.since < at(seconds) for one in filled)


@given(spans, st.floats(0.001, 60))
def test_where_causes_overlap_the_first_counts(found: list[Span], seconds: float) -> None:
    whole = span(Cause.PAUSED, -1, seconds + 1)
    assert fill(DUE, at(seconds), [whole, *found], REST) == [span(Cause.PAUSED, 0, seconds)]


@given(spans, st.floats(0.001, 60), st.integers(0, 9), st.sampled_from([(), (at(1.5), at(1.75))]))
def test_a_row_keeps_the_largest_shares_of_a_version(
    found: list[Span], seconds: float, version: int, stages: tuple[int, ...]
) -> None:
    filled = fill(DUE, at(seconds), found, REST)
    start = LateStart(version, DUE, at(seconds), filled, *stages)
    assert late_starts(start.line(), version) == [start._replace(spans=filled[:3])]
    assert late_starts(start.line(), version + 1) == []
    assert len(start.line()) * 2 < MAX_LATE_CHARS


def test_shares_that_another_divides_stay_told_in_full() -> None:
    """Joined, they must not lie over it."""
    filled = fill(DUE, at(6), [span(Cause.NO_OWNER, 2, 4)], REST)
    found = known(explain(DUE, [LateStart(0, DUE, at(6), filled)], [], at(7), at(60)))
    assert [(one.cause, one.until - one.since) for one in found.spans] == [
        (Cause.BACKLOG, 4000),
        (Cause.NO_OWNER, 2000),
    ]


def test_lines_that_are_cut_off_foreign_or_of_a_later_version_are_left_out() -> None:
    line = LateStart(0, DUE, at(2), [span(Cause.REDIS, 0, 2)]).line()
    later = line.replace("redis", "solar flare")
    foreign = ["", "x", "[1]", "null", '[0,"a",1,[]]', "[0,1e300,1,[]]", "[0,1,1,[[1]]]", "[0,NaN,1,[]]"]
    text = line[9:] + later + "\n".join(foreign) + "\n" + line
    assert [one.cause for one in late_starts(text, 0)] == [Cause.REDIS]
    assert late_starts(None, 0) == []


CASES = {
    "paused": (
        [LateStart(0, DUE, at(41), [span(Cause.PAUSED, 0, 41, "by ann")])],
        "It started 41.0 s late because its topic was paused (by ann).",
    ),
    "a second cause of a quarter": (
        [LateStart(0, DUE, at(40), [span(Cause.PAUSED, 0, 30), span(Cause.BACKLOG, 30, 40)])],
        (
            "It started 40.0 s late: 30.0 s because its topic was paused, "
            "10.0 s because more was due than could start at once."
        ),
    ),
    "a second cause of less": (
        [LateStart(0, DUE, at(40), [span(Cause.PAUSED, 0, 31), span(Cause.BACKLOG, 31, 40)])],
        "It started 40.0 s late because its topic was paused.",
    ),
    "a payload that did not fit": (
        [LateStart(0, DUE, at(40), [span(Cause.MISFIT, 0, 40, "order, total")])],
        "It started 40.0 s late because it was given back, as its payload did not fit (order, total).",
    ),
    "a time that nothing explains": (
        [LateStart(0, at(6), at(8), [span(Cause.REDIS, 6, 8)])],
        (
            "It started 8.0 s late: 6.0 s because of something that nobody recorded, "
            "2.0 s because Redis did not answer."
        ),
    ),
    "lines that were cut off before": (
        [LateStart(0, at(6), at(8), [span(Cause.TARGET, 6, 8, "target t: paused")])],
        "It started 8.0 s late because its target could not take it (target t: paused).",
    ),
}


@pytest.mark.parametrize(("starts", "sentence"), CASES.values(), ids=CASES.keys())
def test_the_sentence(starts: list[LateStart], sentence: str) -> None:
    found = known(explain(DUE, starts, [], at(50), at(60)))
    assert found.sentence() == sentence
    shown = found.shown("a.b")
    assert shown["cause"] == found.spans[0].cause
    if found.spans[0].cause is Cause.PAUSED:
        assert shown["remedy"] == "if still: toc topic resume a.b", "with the name, to be copied"
    assert sum(share["seconds"] for share in shown["shares"]) == pytest.approx(shown["seconds"])


def test_tries_that_failed_explain_a_later_start() -> None:
    tries = [Tried(at(1), False, "no"), Tried(at(4), False, "no again")]
    last = LateStart(0, at(9), at(9.1), [])
    found = known(explain(DUE, [last], tries, at(12), at(60)))
    assert found.sentence() == (
        "It started 9.1 s late because earlier tries had failed (2 tries, the last with no again)."
    )
    waits = known(explain(DUE, [], tries, None, at(7)))
    assert waits.sentence().startswith("It waits for another try, 7.0 s late so far because earlier tries")


def test_a_crash_explains_the_time_from_the_start_that_it_ended() -> None:
    first = LateStart(0, DUE, at(2), [span(Cause.NO_OWNER, 0, 2)])
    found = known(explain(DUE, [first], [Tried(at(8), True, "it died")], at(8.2), at(60)))
    assert [(one.cause, one.until - one.since) for one in found.spans] == [
        (Cause.WORKER_KILLED, 6000),
        (Cause.NO_OWNER, 2000),
        (Cause.BACKOFF, 200),
    ]


@pytest.mark.parametrize("seconds", [0, 0.5, 1.0])
def test_what_started_within_a_second_is_not_late(seconds: float) -> None:
    assert explain(DUE, [LateStart(0, DUE, at(seconds), [])], [], at(2), at(60)) is None
    assert explain(DUE, [], [], at(2), at(60)) is None


def test_evidence_has_the_time_that_a_call_took_and_no_average() -> None:
    line = Line("order.close")
    assert line.crowd(2, 2) == (Cause.CONCURRENCY, "2 at once")
    line.note_run(0.1)
    line.note_run(1.5, tasks=3)
    assert line.crowd(2, 2) == (Cause.CONCURRENCY, "2 at once, the last took 1.5 s")


# Which cause a worker finds for a late start, of its own times and of what it has noted.

STARTED_DUE = 1_800_000_000_000
TOPIC = Topic("order.close", 1, 4)
SLOT = Slot("order.close", 0)
SERVER = 0


class Fixed(Clock):
    """10 s after DUE; the monotonic clock says 110 then."""

    def __init__(self) -> None:
        self.wall, self.mono = STARTED_DUE / 1000 + 10, 110.0
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
    return STARTED_DUE + round(seconds * 1000)


@pytest.fixture
def scene() -> Scene:
    """A task that was due 8 s before it was taken, and started at once."""
    clock, topics = Fixed(), [TOPIC]
    catalog = TopicCatalog(lambda: topics, clock)
    book = SlotBook(NoIndex(), "host-1")
    book.want([SLOT], 50.0)
    job_id = (STARTED_DUE - JOB_ID_EPOCH_MS - 60_000) << 22
    entry = Entry(job_id, SLOT, 5.0, TOPIC, Handler("order.close", print, None, is_async=False), ms(8), 108.0)
    entry.row = TryRow(job_id, 1, 1, 0, STARTED_DUE, STARTED_DUE, 0, 0, 0, 0, None, "{}")
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


def moved(scene: Scene) -> None:
    """From another worker, which lives, 3 s after it was due."""
    scene.book.give_up([SLOT])
    scene.book.want([SLOT], 103.0, handed=[SLOT])
    scene.book.owned = {SLOT: OwnedSlot(SLOT, 1, {0: "host-2"})}


def moved_in_between(scene: Scene) -> None:
    """It came due while the slot moved."""
    moved(scene)
    scene.entry.row = scene.entry.row._replace(next_time=ms(2))
    scene.entry.held, scene.entry.taken = 103.1, ms(3.1)
    scene.entry.read, scene.entry.started = 103.11, 103.12


def moved_as_its_owner_died(scene: Scene) -> None:
    worker_killed(scene)
    scene.book.handed = frozenset([SLOT])


def killed_before_it_was_stored(scene: Scene) -> None:
    scene.entry.job_id = (ms(-20) - JOB_ID_EPOCH_MS) << 22
    no_owner(scene)
    scene.clock.wall -= 40
    scene.late.died(["host-2"])
    scene.clock.wall += 40


def committed_late(scene: Scene) -> None:
    scene.clock.wall -= 3
    scene.late.came(SLOT)
    scene.clock.wall += 3


def others_committed_late(scene: Scene) -> None:
    """After it was taken: it waited for its turn."""
    scene.entry.held, scene.entry.taken = 100.1, ms(0.1)
    scene.entry.read = 100.11
    committed_late(scene)


def redis_and_refilled(scene: Scene) -> None:
    redis(scene)
    committed_late(scene)


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
    scene.error = Raised("Misfit", "the payload does not fit P", until=ms(60), misfit="order")


def target_waits(scene: Scene) -> None:
    scene.entry.started, scene.entry.ended = 101.0, 109.0
    scene.entry.delivered = Delivered(Sent(200, 500), "")


SCENES: dict[Callable[[Scene], None], Cause] = {
    lambda _: None: Cause.BACKLOG, stored_late: Cause.STORED_LATE, paused: Cause.PAUSED,
    resume_rate: Cause.RESUME_RATE, no_owner: Cause.NO_OWNER, worker_killed: Cause.WORKER_KILLED,
    redis: Cause.REDIS, database: Cause.DATABASE, database_reads: Cause.DATABASE,
    clock_behind: Cause.CLOCK, clock_ahead: Cause.CLOCK, clock_set: Cause.CLOCK, halted: Cause.HALTED,
    target: Cause.TARGET, misfit: Cause.MISFIT, target_waits: Cause.TARGET,
    killed_before_it_was_stored: Cause.NO_OWNER, committed_late: Cause.STORED_LATE,
    others_committed_late: Cause.BACKLOG,
    redis_and_refilled: Cause.REDIS, moved: Cause.BACKLOG, moved_in_between: Cause.NO_OWNER,
    moved_as_its_owner_died: Cause.WORKER_KILLED,
}  # fmt: skip


@pytest.mark.parametrize(("inject", "cause"), SCENES.items(), ids=[one.__name__ for one in SCENES])
def test_each_cause_is_found(scene: Scene, inject: Callable[[Scene], None], cause: Cause) -> None:
    inject(scene)
    scene.late._catalog.refresh()
    (late,) = scene.found().values()
    assert late.cause is cause, late
    assert sum(span.until - span.since for span in late.spans) == late.started - late.due
    (kept,) = late_starts(late.line(), 0)
    assert kept.cause is cause


def test_of_a_move_only_its_own_time_counts_as_without_an_owner(scene: Scene) -> None:
    moved(scene)
    scene.late._catalog.refresh()
    (late,) = scene.found().values()
    shares = {one.cause: one.until - one.since for one in late.spans}
    assert shares == {Cause.BACKLOG: 6020, Cause.NO_OWNER: MOVE_MS}


def test_a_slot_that_was_free_this_time_has_not_moved() -> None:
    book = SlotBook(NoIndex(), "host-1")
    book.want([SLOT], handed=[SLOT])
    assert book.handed == {SLOT}
    book.give_up([SLOT])
    book.want([SLOT])
    assert not book.handed


def test_what_started_in_time_is_not_late_unless_it_was_tried_before(scene: Scene) -> None:
    scene.late._catalog.refresh()
    scene.entry.row = scene.entry.row._replace(next_time=ms(7.5))
    assert scene.found() == {}
    scene.entry.row = scene.entry.row._replace(attempts=1)
    (again,) = scene.found().values()
    assert again.started == ms(8.02)
    scene.late.count("order.close", [(1, again)])
    assert scene.late.take_episodes() == [], "its row keeps it; it was not late"
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
    assert (episode.tasks, episode.cause) == (3, Cause.BACKLOG)
    assert episode.since == STARTED_DUE
    assert scene.late.take_episodes() == []
