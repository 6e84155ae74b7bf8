"""Daemons share slots through rows of a real table: joins, handovers, deaths, a table out of reach."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.clocks import PushedClock
from harness.coordination import Driven

from toc.coordination.assignment import DEAD_FOR_MS, Member
from toc.coordination.rows import RowsCoordinator
from toc.model.clock import Clock
from toc.model.errors import StoreUnavailable
from toc.model.topic import Delivery, Slot
from toc.store.migrate import Migrator
from toc.store.records.cluster import MemberTable
from toc.store.store import Store

TOPICS = {"order.close": 8, "~tables": 4}
EVERY = {Slot(topic, number) for topic, slots in TOPICS.items() for number in range(slots)}
TIMEOUT = 1.5


class Line:
    """A daemon's way to the table, which a test may cut."""

    def __init__(self, table: MemberTable) -> None:
        self.table = table
        self.cut = False
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        if self.cut:
            raise StoreUnavailable("the test has cut it")
        self.writes += 1
        return getattr(self.table, name)


class Daemon(Driven):
    def __init__(
        self, table: MemberTable, host: str, workers: int, timeout: float = TIMEOUT, **member: Any
    ) -> None:
        self.line: Any = Line(table)
        self.clock = PushedClock()
        self.member = member
        more: dict[str, Any] = {"clock": self.clock, "on_change": lambda: None}
        super().__init__(RowsCoordinator(self.line, host=host, timeout=timeout, **more), host)
        self.coordinator.start()
        self.coordinator.set_topics(TOPICS)
        for number in range(workers):
            self.join(f"{host}-{number}")

    def join(self, worker_id: str) -> None:
        self.held[worker_id] = set()
        self.coordinator.join(Member(worker_id, self.host, **self.member))

    def leave(self, worker_id: str, *, died: bool) -> None:
        self.held.pop(worker_id, None)
        self.coordinator.leave(worker_id, known_dead=died)

    @property
    def sure(self) -> bool:
        return self.clock.monotonic() < self.coordinator.sure_until()


class Daemons:
    """Several daemons, driven in turn by the test's thread."""

    def __init__(self, table: MemberTable) -> None:
        self.table = table
        self.all: list[Daemon] = []

    def start(self, host: str, workers: int = 1, **member: Any) -> Daemon:
        self.all.append(Daemon(self.table, host, workers, **member))
        return self.all[-1]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Let all daemons work until it holds; no two may be sure of one slot meanwhile."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, what
            for daemon in self.all:
                daemon.align()
                sure = [one.slots for one in self.all if one.sure]
                assert sum(map(len, sure)) == len(set().union(*sure)), "two are sure of a slot"
            time.sleep(0.01)

    def calm(self, *hosts: str) -> Callable[[], bool]:
        """Whether these share everything, each with what is assigned to it."""

        def holds() -> bool:
            some = [one for one in self.all if one.host in hosts]
            return sum(len(one.slots) for one in some) == len(EVERY) and all(
                one.held == one.coordinator.desired() and one.sure for one in some
            )

        return holds


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    url = f"sqlite:///{tmp_path}/toc.db"
    Migrator([url], databases=1, tables=4).upgrade()
    store = Store([url], databases=1, tables=4, clock=Clock())
    made = Daemons(store.members)
    yield made
    for daemon in made.all:
        daemon.line.cut = False
        daemon.coordinator.stop()
        daemon.coordinator.stop()
    assert store.members.list() == [], "each has removed its row"
    store.close()


def test_a_process_that_dies_leaves_its_slots_to_its_siblings_and_all_learn_of_it(daemons: Daemons) -> None:
    a, b = daemons.start("a", 2), daemons.start("b")
    daemons.until(daemons.calm("a", "b"), "two share")
    a.leave("a-1", died=True)
    a.leave("stranger", died=True)
    a.join("a-2")
    daemons.until(daemons.calm("a", "b"), "they share again")
    told = {"a-1", "stranger"}
    daemons.until(lambda: a.coordinator.dead_workers() == b.coordinator.dead_workers() == told, "all know")
    a.clock.ahead_ms += DEAD_FOR_MS + 60_000
    daemons.until(lambda: not a.coordinator.dead_workers(), "the first has forgotten it")
    writes = a.line.writes, b.line.writes
    daemons.until(lambda: a.line.writes > writes[0] + 1 and b.line.writes > writes[1] + 1, "it tells no more")
    b.clock.ahead_ms += DEAD_FOR_MS + 60_000
    daemons.until(lambda: not b.coordinator.dead_workers(), "the other has forgotten it")
    a.leave("a-0", died=False)
    daemons.until(daemons.calm("a", "b"), "they share again")
    assert not b.coordinator.dead_workers(), "one that left is not called dead"


def test_what_a_daemon_whose_only_process_leaves_has_goes_to_others_at_once(daemons: Daemons) -> None:
    """As at a stop with handlers that run: the daemon is there until they have ended."""
    a = daemons.start("a", timeout=3600.0)
    daemons.start("b")
    daemons.until(daemons.calm("a", "b"), "two share")
    a.leave("a-0", died=False)
    daemons.until(daemons.calm("b"), "the other has everything")


def test_while_the_table_is_away_nothing_moves_and_successors_take_up_slots(daemons: Daemons) -> None:
    a, b = daemons.start("a", 2), daemons.start("b")
    daemons.until(daemons.calm("a", "b"), "two share")
    before, writes = (a.slots, b.slots), a.line.writes
    daemons.until(lambda: a.line.writes > writes + 1, "it has read what the other has")
    for one in (a, b):
        one.line.cut = True
    a.leave("a-0", died=True)
    a.join("a-2")
    away = time.monotonic() + 2 * TIMEOUT
    daemons.until(lambda: time.monotonic() > away and not a.sure and not b.sure, "none is sure")
    assert (a.slots, b.slots) == before
    assert a.held["a-2"], "the successor has what its predecessor had"
    a.line.cut = False
    daemons.until(lambda: a.sure, "the first is back")
    daemons.until(lambda: a.slots >= before[0], "it keeps what it has")
    b.line.cut = False
    daemons.until(daemons.calm("a", "b"), "two share")


def test_what_a_process_that_dies_while_the_table_is_away_had_stays_with_its_daemon(daemons: Daemons) -> None:
    """Also while it is still sure of its slots: others cannot take them, as nobody can tell them."""
    daemons.start("b")
    a = daemons.start("a", 2, timeout=3600.0)
    daemons.until(daemons.calm("a", "b"), "two share")
    before = a.slots
    a.line.cut = True
    a.leave("stranger", died=True)
    daemons.until(lambda: not a.coordinator.connected(), "it could not tell of that")
    assert a.sure
    a.leave("a-0", died=True)
    a.align()
    a.join("a-2")
    a.align()
    assert a.slots == before
    assert a.held["a-2"], "the successor has what its predecessor had"


def test_a_daemon_that_was_killed_is_followed_at_once_on_its_host(daemons: Daemons) -> None:
    """Its processes are proved gone: no name of theirs is held any more."""
    a = daemons.start("a", 2)
    daemons.until(daemons.calm("a"), "one daemon has everything")
    (row,) = daemons.table.list()
    a.coordinator.stop()
    daemons.all.remove(a)
    name = row.name.replace("a-daemon", "a-0")
    data = json.loads(row.data)
    data["workers"] = {name: data["workers"]["a-0"]}
    daemons.table.join(row.name, "a", row.beat, 3_600_000, json.dumps(data))
    b = daemons.start("a", 1)
    daemons.until(daemons.calm("a"), "the next one has everything")
    daemons.until(lambda: b.coordinator.dead_workers() == {name}, "its worker is known to be dead")
    assert [one.dead for one in daemons.table.list()].count(True) == 1
    daemons.table.leave(row.name, row.host)


def test_who_cannot_handle_a_topic_gets_none_of_it_and_senders_are_counted(daemons: Daemons) -> None:
    a = daemons.start("a", 1, topics=frozenset({"other"}), serves=frozenset({"handler", "webhook"}))
    daemons.until(lambda: len(a.slots) == 4, "it has the tables")
    assert {slot.topic for slot in a.coordinator.unowned()} == {"order.close"}
    b = daemons.start("b", 1)
    daemons.until(daemons.calm("a", "b"), "they share")
    assert {slot.topic for slot in a.slots} == {"~tables"}
    b.coordinator.set_topics(TOPICS, {"order.close": Delivery.WEBHOOK.value})
    a.coordinator.set_topics(TOPICS, {"order.close": Delivery.WEBHOOK.value})
    daemons.until(lambda: len(a.slots) == 8, "the other sends no webhooks")
    assert a.coordinator.senders() == b.coordinator.senders() == 1


def test_rows_that_make_no_sense_harm_nobody(daemons: Daemons) -> None:
    odd = ["", "null", "[" * 300, '{"workers": [1], "leaving": 3, "dead": {}}', '{"workers": {"x": 3}}']
    odd += ['{"workers": {"x": {"host": "h", "weight": "heavy"}}}', '{"leaving": {"order.close": "zz"}}']
    odd += ['{"leaving": {"order.close": 7, "~tables": "g"}, "dead": [1]}']
    for number, data in enumerate(odd):
        daemons.table.join(f"odd-{number}", "h", 1, 3_600_000, data)
    daemons.start("a")
    daemons.until(daemons.calm("a"), "one daemon has everything")
    for number in range(len(odd)):
        daemons.table.leave(f"odd-{number}", "h")


def test_who_did_not_join_gets_nothing_and_nobody_is_woken_for_nothing(daemons: Daemons) -> None:
    a = daemons.start("a")
    daemons.until(daemons.calm("a"), "one daemon has everything")
    assert a.coordinator.claim("stranger", EVERY) == set()
    a.coordinator.release("stranger", EVERY)
    a.leave("a-0", died=False)
    assert a.coordinator.claimed() == {}
    assert not a.coordinator.drained()
    assert a.coordinator.step() is None


def test_a_row_is_gone_though_a_write_hangs_while_its_daemon_stops(daemons: Daemons) -> None:
    a = daemons.start("a")
    daemons.until(daemons.calm("a"), "one daemon has everything")
    began, held = threading.Event(), threading.Event()

    def beat(*given: Any) -> Any:
        began.set()
        assert held.wait(60)
        return daemons.table.beat(*given)

    a.line.beat = beat
    a.leave("stranger", died=True)
    assert began.wait(60)
    a.coordinator.stop()
    held.set()
    daemons.all.remove(a)
    daemons.until(lambda: not daemons.table.list(), "its row is gone")
