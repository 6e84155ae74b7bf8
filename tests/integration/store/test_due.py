"""What comes due when is counted from the rows, whatever they hold, and kept beside their tables."""

from collections import Counter
from contextlib import closing
from random import Random

import pytest
from fault.kit.proxy import Proxy, through
from harness.rows import NewRow, insert_many, known
from integration.store import conftest

from toc.maintenance import due_walk
from toc.maintenance.due_walk import PERIOD_SECONDS, SHARE, DueWalk
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.due import FAR, HOURS, MINUTES, MOST_TOPICS, NEAR, OTHERS, Part, total
from toc.model.sharding import BizId, table_of_job
from toc.model.task import TaskRow, TaskStatus
from toc.model.topic import Topic
from toc.observe.board import own_board
from toc.observe.metrics import PENDING
from toc.operate.due import OLD_MS, Due
from toc.store.store import Store
from toc.store.tasks.scan import Place, Position

NOW = 1_800_000_000_000 + 17_500
"""Within a minute and an hour."""
MINUTE, HOUR = NEAR.length, FAR.length
TOPICS = (7, 8, 9)
UNKNOWN = 4711


class StepClock(Clock):
    """Moves only when a test says so, or by ``each`` whenever it is read: a step then takes some time."""

    def __init__(self) -> None:
        self.ahead = self.each = 0.0

    def now_ms(self) -> int:
        return NOW + int(self.ahead * 1000)

    def monotonic(self) -> float:
        self.ahead += self.each
        return self.ahead


class Walking:
    """The walk over all tables of a store, of the topics 7 to 9."""

    def __init__(self, store: Store, *topics: int) -> None:
        self.store, self.clock = store, StepClock()
        known = [Topic(f"t{number}", number, 1) for number in topics or TOPICS]
        catalog = TopicCatalog(lambda: known, self.clock)
        catalog.refresh()
        self.mine = frozenset(store.tables)
        self.walk = DueWalk(store, catalog, self.clock, lambda: self.mine)

    def go(self, seconds: float = 1.0) -> None:
        """Take all steps that come within so many seconds of its clock."""
        until = self.clock.ahead + seconds
        while self.clock.ahead < until:
            self.clock.ahead += self.walk.run_once()

    def round(self) -> None:
        """Count both parts of everything once; its clock stands still."""
        for _ in range(200):
            if self.walk.run_once() > 0:
                return
        raise AssertionError("the walk does not end")

    def sums(self, part: Part, away: frozenset[int] = frozenset()) -> dict[int, Counter[int]]:
        """What is kept of all tables: by biz_type, the numbers that are not 0, by their place."""
        kept = self.store.due_counts.kept(self.store.tables)
        assert kept.unanswered.keys() == away
        counts = [one.counts for table in kept.values() for one in table if one.part == part.name]
        found = total(part, counts, self.clock.now_ms(), MINUTES if part is NEAR else HOURS)
        return {
            biz_type: Counter({place: count for place, count in enumerate(spans) if count})
            for biz_type, spans in found.items()
        }


def expected(rows: list[TaskRow], part: Part, now: int = NOW, known: tuple[int, ...] = TOPICS) -> object:
    """What the walk should find, counted row by row."""
    found: dict[int, Counter[int]] = {}
    spans = MINUTES if part is NEAR else HOURS
    for row in rows:
        place = row.next_time // part.length - now // part.length + 1
        outside = row.next_time < now if part is NEAR else place > spans
        if row.status == TaskStatus.PENDING and (outside or (row.next_time >= now and place <= spans)):
            biz_type = row.biz_type if row.biz_type in known else OTHERS
            found.setdefault(biz_type, Counter())[0 if outside else place] += 1
    return found


def some_rows(new_row: NewRow, seed: int, count: int) -> list[TaskRow]:
    """Rows of all kinds: many due at one instant, on edges of spans, long ago, in years."""
    random = Random(seed)
    edges = [
        NOW, NOW - 1, NOW + 1, NOW - NOW % MINUTE, NOW - NOW % MINUTE + MINUTE, NOW - NOW % HOUR,
        NOW - NOW % MINUTE + MINUTES * MINUTE, NOW - NOW % HOUR + HOURS * HOUR, NOW + 3 * 365 * 24 * HOUR,
    ]  # fmt: skip
    edges += [edge - 1 for edge in edges]

    def due() -> int:
        kind = random.random()
        if kind < 0.3:
            return NOW + 20 * MINUTE  # a burst
        if kind < 0.5:
            return random.choice(edges)
        return NOW + int(random.choice([-HOUR, 2 * HOUR, 9 * 24 * HOUR]) * random.random())

    return [
        new_row(
            next_time=due(),
            status=random.choice([0, 0, 0, 2, 3, 4]),
            biz_type=random.choice([*TOPICS, UNKNOWN, UNKNOWN + 1]),
        )
        for _ in range(count)
    ]


def test_the_counts_are_those_of_the_rows(
    fresh_store: Store, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_walk, "ROWS", 40)  # so that tables have many pages, and instants too
    monkeypatch.setattr(due_walk, "LEAST_PAGE", 7)
    rows = some_rows(new_row, 1, 900)
    insert_many(fresh_store, rows)
    walking = Walking(fresh_store)
    walking.round()
    for part in (NEAR, FAR):
        assert walking.sums(part) == expected(rows, part), part.name


def test_each_part_is_counted_again_after_its_period(fresh_store: Store, new_row: NewRow) -> None:
    walking = Walking(fresh_store)
    walking.go(PERIOD_SECONDS[NEAR] / 2)
    rows = [new_row(next_time=NOW + 30 * MINUTE, biz_type=7) for _ in range(5)]
    insert_many(fresh_store, rows)
    walking.go(PERIOD_SECONDS[NEAR])
    now = walking.clock.now_ms()
    assert walking.sums(NEAR) == expected(rows, NEAR, now)
    assert walking.sums(FAR) == {}, "the hours are counted less often"
    walking.go(PERIOD_SECONDS[FAR])
    assert walking.sums(FAR) == expected(rows, FAR, walking.clock.now_ms())


def test_of_many_topics_the_largest_are_told_apart(fresh_store: Store, new_row: NewRow) -> None:
    known = tuple(range(1000, 1000 + MOST_TOPICS + 2))
    # All in one table: each table tells its own largest apart.
    biz_id = 42
    rows = [
        new_row(biz_id, next_time=NOW + MINUTE, biz_type=biz_type)
        for biz_type in known
        for _ in range(1 if biz_type in (1001, 1003) else 2)
    ]
    insert_many(fresh_store, rows)
    walking = Walking(fresh_store, *known)
    walking.round()
    sums = walking.sums(NEAR)
    assert sums.keys() == {*known, OTHERS} - {1001, 1003}
    assert sums[OTHERS].total() == 2


def test_a_table_that_is_away_keeps_its_counts_and_holds_up_no_other(
    place: conftest.Place, fresh_store: Store, new_row: NewRow
) -> None:
    walking = Walking(fresh_store)
    walking.round()
    rows = [new_row(next_time=NOW + 30 * MINUTE, biz_type=7) for _ in range(40)]
    insert_many(fresh_store, rows)
    table = table_of_job(rows[0].job_id, place.tables)
    away = f"{place.prefix}{table % place.databases}." * (place.databases > 1) + f"timeout_task_{table:04d}"
    with place.without(away):
        walking.go(PERIOD_SECONDS[NEAR] + 5)
        there = [row for row in rows if table_of_job(row.job_id, place.tables) != table]
        assert walking.sums(NEAR, frozenset([table])) == expected(there, NEAR, walking.clock.now_ms())


def test_tables_of_another_are_left_and_new_ones_counted_at_once(fresh_store: Store, new_row: NewRow) -> None:
    rows = [new_row(next_time=NOW + 30 * MINUTE, biz_type=7) for _ in range(40)]
    insert_many(fresh_store, rows)
    walking = Walking(fresh_store)
    everything = walking.mine
    walking.mine = frozenset()
    walking.round()
    assert walking.sums(NEAR) == {}
    assert {one["error"] for one in Due(fresh_store, NOW).missing} == {"no worker has counted it yet"}
    walking.mine = everything
    walking.go(2.0)
    assert walking.sums(NEAR) == expected(rows, NEAR, walking.clock.now_ms())


def test_the_walk_takes_a_small_share_of_a_connection(fresh_store: Store, new_row: NewRow) -> None:
    insert_many(fresh_store, [new_row(next_time=NOW + 30 * MINUTE) for _ in range(3000)])
    walking = Walking(fresh_store)
    walking.clock.each = 0.001
    servers = len(fresh_store.tables_of_server())
    for mine in (walking.mine, frozenset([0])):
        walking.mine = mine
        busy = began = walking.clock.ahead
        rested = 0.0
        while walking.clock.ahead < began + 2 * PERIOD_SECONDS[FAR]:
            rest = walking.walk.run_once()
            walking.clock.ahead += rest
            rested += rest
        busy = walking.clock.ahead - began - rested
        part = min(1.0, servers * len(mine) / len(fresh_store.tables))
        assert busy <= 1.1 * SHARE * part * (walking.clock.ahead - began)


def test_after_a_step_that_hung_the_walk_rests_for_a_period_at_most(fresh_store: Store) -> None:
    walking = Walking(fresh_store)
    walking.mine = frozenset([0])
    walking.clock.each = 10.0
    assert [walking.walk.run_once() for _ in (NEAR, FAR)] == [PERIOD_SECONDS[NEAR], PERIOD_SECONDS[FAR]]


def test_a_metric_has_the_same_numbers_of_the_tables_swept_here(fresh_store: Store, new_row: NewRow) -> None:
    delays = [-HOUR, 30 * MINUTE, 2 * HOUR, 3 * 24 * HOUR, 30 * 24 * HOUR]
    rows = [
        new_row(next_time=NOW + delay, biz_type=biz_type)
        for delay in delays
        for biz_type in (8, 8, 9, UNKNOWN)
    ]
    insert_many(fresh_store, rows)
    walking = Walking(fresh_store)

    def told(topic: str) -> list[float]:
        found = own_board().read()
        keys = [(PENDING.metric.name, topic, due) for due in ("overdue", "hour", "day", "week", "later")]
        return [found.get(key, [0.0])[0] for key in keys]

    walking.round()
    assert (told("t8"), told("t9"), told("?")) == (
        [2, 2, 4, 6, 2], [1, 1, 2, 3, 1], [1, 1, 2, 3, 1],
    )  # fmt: skip
    walking.clock.ahead += PERIOD_SECONDS[NEAR]
    walking.round()
    assert told("t8") == [2, 2, 4, 6, 2], "counted again, and not twice"
    walking.mine = frozenset()
    walking.round()
    assert told("t8") == told("?") == [0] * 5


def test_a_page_of_one_instant_reads_no_more_than_its_rows(
    mysql_store: Store, new_row: NewRow, sent: list[str], reads: conftest.Reads
) -> None:
    table = BizId.of(42).crc % len(mysql_store.tables)
    insert_many(mysql_store, [new_row(42, next_time=NOW + MINUTE) for _ in range(3000)])
    place, limit, found = Place(Position(0), NOW), 50, 0
    sent.clear()
    while True:
        page = mysql_store.due_counts.page({table: place}, NEAR, limit)[table]
        found += sum(page.groups.values())
        if page.following is None:
            break
        place = place._replace(at=page.following)
    assert found >= 3000
    assert max(reads(table, statement) for statement in sent) <= 3 * limit


def test_what_a_server_that_is_away_holds_is_missing_by_name_and_the_rest_stands(
    mysql_place: conftest.Place, mysql_store: Store, new_row: NewRow, proxy: Proxy
) -> None:
    rows = [new_row(next_time=NOW + 30 * MINUTE, biz_type=7) for _ in range(60)]
    insert_many(mysql_store, rows)
    walking = Walking(mysql_store)
    walking.round()
    before = Due(mysql_store, NOW)
    assert before.missing == []
    urls = [mysql_place.urls[0], through(proxy, mysql_place.urls[1])]
    proxy.close()
    with closing(mysql_place.open(urls=urls)) as store:
        found = Due(store, NOW)
        own = store.tables_of_server()
        assert [one["table"] for one in found.missing] == sorted(map(store.name_of, own[1]))
        assert {one["age"] for one in found.missing} == {None}
        there = mysql_store.due_counts.kept(own[0])
        counts = [one.counts for kept in there.values() for one in kept if one.part == NEAR.name]
        assert found._minutes == total(NEAR, counts, NOW, MINUTES)
        assert sum(found._minutes[7]) < sum(before._minutes[7])


def test_counts_that_are_old_or_not_understood_are_named(fresh_store: Store) -> None:
    walking = Walking(fresh_store)
    walking.round()
    kept = fresh_store.due_counts.keep
    assert kept(NEAR, {0: ('{"first":1,"topics":{}}', OLD_MS + 60_000), 1: ("nonsense", 0)}) == {}
    assert kept(FAR, {2: ('{"first":1,"topics":{"7":["x"]}}', 0)}) == {}
    assert kept(FAR, {3: ('{"first":1,"topics":{"7":[1e308,1e308]}}', 0)}) == {}
    found = Due(fresh_store, NOW)
    old, *others = sorted(found.missing, key=lambda one: one["table"][-4:])
    assert old["table"] == fresh_store.name_of(0)
    assert (old["error"], old["age"] > OLD_MS / 1000) == ("old", True)
    assert [one["table"] for one in others] == [fresh_store.name_of(table) for table in (1, 2, 3)]
    assert known(found.oldest[NEAR.name])[1] == fresh_store.name_of(0)
