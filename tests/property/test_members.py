"""Members without ZooKeeper: of two daemons never both may take a slot, whatever stops, hangs or comes late.

The Ledgers are the product's. The table, the clocks and the delays are played here: a write may be lost, or
take effect long after its sender has given it up; any daemon may stand still; no clock but its own is asked.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toc.coordination import ledger
from toc.coordination.assignment import Member
from toc.coordination.ledger import Daemon, Ledger, assign_rows
from toc.model.member import MemberRow
from toc.model.topic import Slot

SLOTS = [Slot("order.close", number) for number in range(4)]
TIMEOUT = 6.0
CALM_SECONDS = 120.0
"""How long the daemons have to settle once nothing goes wrong any more."""


@dataclass
class Table:
    """The rows, and the guards of MemberTable's statements."""

    rows: dict[str, MemberRow] = field(default_factory=dict)

    def beat(self, row: MemberRow) -> bool:
        there = self.rows.get(row.name)
        if there is None or there.dead or there.beat > row.beat:
            return False
        self.rows[row.name] = row
        return True

    def join(self, row: MemberRow) -> None:
        there = self.rows.get(row.name)
        if there is None or there.beat < row.beat:
            self.rows[row.name] = row

    def bury(self, row: MemberRow) -> None:
        there = self.rows.get(row.name)
        if there is not None and not there.dead and there.beat == row.beat:
            self.rows[row.name] = there._replace(dead=True, data="{}")

    def living(self) -> list[MemberRow]:
        return [row for row in self.rows.values() if not row.dead]


class Play:
    """Daemons, and what happens to them, in the order of one true time."""

    def __init__(self, seed: int, daemons: int = 3) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.faulty = True
        self.table = Table()
        self.order = count()
        self.coming: list[tuple[float, int, Callable[[], None]]] = []
        self.daemons = [Played(self, f"h{number}") for number in range(daemons)]
        for daemon in self.daemons:
            self.after(self.random.uniform(0, 2), daemon.begin)

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.coming, (self.now + seconds, next(self.order), then))

    def delay(self) -> float:
        """How long a message takes: mostly a moment, sometimes as long as one likes."""
        if self.faulty and self.random.random() < 0.15:
            return self.random.uniform(0, 3 * TIMEOUT)
        return self.random.uniform(0, 0.1)

    def lost(self) -> bool:
        return self.faulty and self.random.random() < 0.1

    def run(self, until: float) -> None:
        while self.coming and self.coming[0][0] <= until:
            self.now, _, then = heapq.heappop(self.coming)
            then()
            for slot in SLOTS:
                takers = [daemon.name for daemon in self.daemons if daemon.may_take(slot)]
                assert len(takers) < 2, f"{slot} at {self.now}: {takers}"
        self.now = until


class Played:
    """One daemon with one worker."""

    def __init__(self, play: Play, host: str) -> None:
        self.play = play
        self.name = f"{host}-daemon"
        self.member = Member(f"{host}-0", host)
        self.ahead = play.random.uniform(-1000, 1000)
        self.number = 0
        self.turn = 0
        """Only what belongs to this turn is heard: it has given up waiting for the rest."""
        self.stands_until = 0.0
        self.ledger = Ledger(self.name, TIMEOUT, self.clock)
        self.held: set[Slot] = set()

    def clock(self) -> float:
        return self.play.now + self.ahead

    def may_take(self, slot: Slot) -> bool:
        return slot in self.held and self.clock() < self.ledger.sure_until

    def own(self, wanted: set[Slot]) -> Daemon:
        kept = self.ledger.listed & wanted
        return Daemon(
            {self.member.worker_id: self.member},
            {self.member.worker_id: frozenset(kept)},
            frozenset(self.ledger.listed - kept),
        )

    def wanted(self) -> set[Slot]:
        """What it should own; amid faults also whatever it may fancy: safety rests on no agreement."""
        if self.play.faulty and self.play.random.random() < 0.3:
            return set(self.play.random.sample(SLOTS, self.play.random.randint(0, 4)))
        owners = assign_rows([*self.ledger.others.values(), self.own(self.ledger.listed)], SLOTS)
        return {slot for slot, owner in owners.items() if owner == self.member.worker_id}

    def when_awake(self, then: Callable[[], None]) -> Callable[[], None]:
        """What this daemon itself does waits until it moves again."""

        def run() -> None:
            if self.play.now < self.stands_until:
                self.play.after(self.stands_until - self.play.now, run)
            else:
                then()

        return run

    def begin(self) -> None:
        play, ledger = self.play, self.ledger
        if play.faulty and play.random.random() < 0.05:
            self.stands_until = play.now + play.random.uniform(0, 4 * TIMEOUT)
            play.after(0, self.when_awake(self.begin))
            return
        wanted = self.wanted()
        self.held &= wanted if play.random.random() < 0.8 else self.held  # it lets go, at once or later
        ledger.want(wanted, self.held)
        self.number += 1
        self.turn += 1
        turn, number, began, sent = self.turn, self.number, self.clock(), set(ledger.listed)
        row = MemberRow(
            self.name, self.member.host, number, 0, round(TIMEOUT * 1000), False, self.own(wanted).data()
        )

        def write() -> None:
            if play.table.beat(row):
                play.after(play.delay() if not play.lost() else 1e9, read)
            else:
                play.after(play.delay(), self.when_awake(lambda: self.refused(turn)))

        def read() -> None:
            rows = play.table.living()
            play.after(
                play.delay() if not play.lost() else 1e9,
                self.when_awake(lambda: self.hear(turn, rows, sent, began)),
            )

        play.after(play.delay() if not play.lost() else 1e9, write)
        play.after(2.0, self.when_awake(lambda: self.give_up(turn)))

    def give_up(self, turn: int) -> None:
        if turn == self.turn:
            self.begin()

    def refused(self, turn: int) -> None:
        if turn != self.turn:
            return
        self.ledger.lost()
        self.held.clear()
        row = MemberRow(self.name, self.member.host, self.number, 0, round(TIMEOUT * 1000), False, "{}")
        self.play.after(self.play.delay() if not self.play.lost() else 1e9, lambda: self.play.table.join(row))
        self.turn += 1
        self.play.after(0.2, self.when_awake(self.begin))

    def hear(self, turn: int, rows: list[MemberRow], sent: set[Slot], began: float) -> None:
        if turn != self.turn:
            return
        self.turn += 1
        self.ledger.read(rows, sent, began)
        self.held |= self.ledger.granted
        for row in self.ledger.over(lambda _: False):
            self.play.after(self.play.delay(), lambda row=row: self.play.table.bury(row))  # type: ignore[misc]
        self.play.after(self.play.random.uniform(0, 1), self.when_awake(self.begin))


def play(seed: int) -> Play:
    """Two minutes in which everything goes wrong, then a time in which nothing does."""
    made = Play(seed)
    made.run(120.0)
    made.faulty = False
    made.run(120.0 + CALM_SECONDS)
    return made


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_no_two_daemons_may_take_a_slot_and_in_the_end_one_may(seed: int) -> None:
    made = play(seed)
    for slot in SLOTS:
        assert sum(daemon.may_take(slot) for daemon in made.daemons) == 1, f"nobody may take {slot}"
    assert max(len(daemon.held) for daemon in made.daemons) == 2, "not balanced"


def _granted_unread(patch: pytest.MonkeyPatch) -> None:
    """What is listed is granted before the rows were read after it."""
    read = Ledger.read
    patch.setattr(
        Ledger, "read", lambda self, rows, _sent, began: read(self, rows, self.listed | set(SLOTS), began)
    )
    want = Ledger.want

    def at_once(self: Ledger, wanted: set[Slot], held: set[Slot]) -> None:
        want(self, wanted, held)
        self.granted |= self.listed

    patch.setattr(Ledger, "want", at_once)


def _sure_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger, "MARGIN", -10)


def _buried_at_once(patch: pytest.MonkeyPatch) -> None:
    """A row is called dead as soon as it is seen."""
    patch.setattr(Ledger, "over", lambda self, _gone: [row for row, _ in self._seen.values()])


def _late_writes_count(patch: pytest.MonkeyPatch) -> None:
    """A write that was given up changes the row of a later one."""

    def beat(self: Table, row: MemberRow) -> bool:
        there = self.rows.get(row.name)
        if there is None or there.dead:
            return False
        self.rows[row.name] = row
        return True

    patch.setattr(Table, "beat", beat)


@pytest.mark.parametrize("broken", [_granted_unread, _sure_for_ever, _buried_at_once, _late_writes_count])
def test_each_guard_is_needed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(200):
        try:
            play(seed)
        except AssertionError:
            return
    pytest.fail("nobody noticed")
