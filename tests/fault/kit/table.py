"""The table of faults: one line per test, with the proof that the fault bit and what the checker found."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.checker import Limits, Verdict
from harness.final import read_final
from harness.machine import Machine
from harness.patience import until
from harness.system import Lateness, System

from toc import TaskStatus

ROOT = Path(__file__).parents[3]
LINES = ROOT / ".faults" / "lines.jsonl"
SOAKS = ROOT / ".faults" / "soaks.jsonl"
"""One line for each run of ``make chaos``."""
PAGE = ROOT / "evidence" / "faults.md"
FAULTS = 58
"""How many the catalogue has."""
PROPERTY = "fault"
"""Under this name the report of a test carries its lines, as dicts."""
BUSY = 10.0
"""Seconds that a machine with other things to do keeps a process from its next step."""


@dataclass
class Line:
    """What became of one fault. ``verdict`` turns from "failed" to "held" when its test passes."""

    fault: int
    """The row of the catalogue of faults."""
    name: str
    variant: str = ""
    proof: str = ""
    """What showed that the fault bit: a counter, a log line, an error seen."""
    tasks: int = 0
    lost: int = 0
    early: int = 0
    after_cancel: int = 0
    duplicates: int = 0
    explained: str = ""
    """Why each duplicate may be, for example ``6 in flight on the killed worker``."""
    dead: int = 0
    settle: float | None = None
    """Seconds from the end of the fault until everything due was handled."""
    seconds: float = 0.0
    """How long the test took."""
    verdict: str = "failed"
    machine: Machine | None = field(default=None, repr=False)
    """What the machine takes of the time that is promised; not part of the table."""

    @property
    def slack(self) -> float:
        """Seconds by which the machine alone may have made this test's tasks late.

        Infinite in a run that does not measure.
        """
        return self.machine.slack if self.machine else 0.0

    def prove(self, bit: object, proof: str) -> None:
        """Assert that the fault bit and note the proof; several are joined."""
        assert bit, f"the fault did not bite: {proof}"
        self.proof = f"{self.proof}; {proof}" if self.proof else proof

    def judge(
        self, system: System, *, within: float, at_most: int = 0, wait: float = 60.0,
        retries_within: float = 15.0, but: str = "", **limits: float | None,
    ) -> Verdict:  # fmt: skip
        """Wait for the end of every task that is due, ask the checker, and assert what was promised.

        ``within``: seconds in which everything due was handled once the fault had gone, in a run that
        measures. ``at_most``: how many duplicates the fault explains. ``wait``: seconds until the test gives
        up. ``retries_within``: how far ahead the next try of a failed one may be and is waited for. ``but``:
        letters of invariants that the fault may breach. ``limits``: the checker's.
        """
        assert until(lambda: not overdue(system, retries_within), wait), (
            f"not ended: {left(system)}{system.logs()}"
        )
        assert until(lambda: not prepared(system), wait), f"left prepared: {left(system)}{system.logs()}"
        usual, busy = Limits(), min(self.slack, BUSY)
        late = {"write": usual.write + busy, "hold": usual.hold + busy}
        verdict = system.verdict(settle=within + self.slack, **{**late, **limits})
        self.tasks += verdict.counts["acknowledged"] + verdict.counts["unacknowledged but stored"]
        self.lost += verdict.breaches["L"]
        self.early += verdict.breaches["E"]
        self.after_cancel += verdict.breaches["C"]
        self.duplicates += sum(verdict.duplicates.values()) + verdict.breaches["D"]
        self.explained = ", ".join(f"{count} by {kind}" for kind, count in sorted(verdict.duplicates.items()))
        self.dead += verdict.counts["dead"]
        self.settle = round(max(verdict.settled_s, self.settle or 0.0), 2)
        print(f"{self.fault} {self.name}: {verdict}")  # pytest shows it when the test fails, or with -s
        assert not verdict.breaches.keys() - set(but), f"{verdict}\n{system.logs()}"
        assert sum(verdict.duplicates.values()) <= at_most, verdict
        return verdict

    def within(self, seconds: float, bound: float) -> None:
        """Assert that something took no longer than is promised, in a run that measures."""
        assert seconds < bound + self.slack, f"{seconds:.2f} s, promised are {bound:g} s"

    def on_time(
        self, late: Lateness, *, p50: float | None = None, p99: float | None = None, most: float | None = None
    ) -> None:
        """Assert that tasks were at most so many milliseconds late, in a run that measures."""
        for found, bound in ((late.p50, p50), (late.p99, p99), (late.most, most)):
            assert bound is None or found < bound + 1000 * self.slack, f"{late}; promised are {bound:g} ms"

    def cells(self) -> list[object]:
        """The line of the table."""
        doubles = f"{self.duplicates}: {self.explained}" if self.explained else self.duplicates
        return [
            *(self.fault, f"{self.name} ({self.variant})" if self.variant else self.name, self.proof or "-"),
            *(f"{self.tasks:,}", self.lost, self.early, self.after_cancel, doubles, self.dead),
            *("-" if self.settle is None else f"{self.settle:.1f} s", self.verdict),
        ]


def overdue(system: System, retries_within: float) -> int:
    """In how many tables tasks are pending that are due, or will be in so many seconds."""
    store, now = system.center.store, system.center.clock.now_ms()
    tables = [table for tables in store.tables_of_server() for table in tables]
    return len(store.scans.scan(tables, {}, 0, now + int(retries_within * 1000), 1).with_due_rows)


def left(system: System) -> str:
    """A few tasks that have not ended, and where they stand: for a message."""
    final = read_final(system.center)
    pending = [row for row in final.rows if row.status == TaskStatus.PENDING]
    shown = [
        f"{row.job_id} due {row.next_time - final.now_ms:+} ms from now, tries used {row.attempts}, "
        f"in {final.index.get(row.job_id, 'no queue')}\n"
        for row in sorted(pending, key=lambda row: row.next_time)[:5]
    ]
    return f"{len(pending)} tasks\n{''.join(shown)}"


def prepared(system: System) -> int:
    """How many entries stand in PrepareQueues."""
    places = read_final(system.center).index.values()
    return sum(place.queue == "prepare" for found in places for place in found)


def write(lines: Iterable[Line]) -> None:
    """Keep the lines. They replace those of the same names from earlier runs, which else stay."""
    kept = {_order(line): line for line in [*read(), *lines]}
    LINES.parent.mkdir(exist_ok=True)
    LINES.write_text("".join(json.dumps(asdict(kept[key])) + "\n" for key in sorted(kept)))


def read() -> list[Line]:
    """The lines that were kept, in order."""
    return [Line(**json.loads(line)) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def _order(line: Line) -> tuple[int, str, str]:
    return line.fault, line.name, line.variant


def publish() -> None:
    """Put what was kept, of faults and of soaks, into the page, each between its two marks."""
    lines = read()
    soaks = [json.loads(line) for line in SOAKS.read_text().splitlines()] if SOAKS.exists() else []
    text = _between(PAGE.read_text(), "faults", map(_row, (line.cells() for line in lines)))
    text = _between(text, "soaks", map(_row, map(_soak_cells, soaks)))
    both: list[Mapping[str, Any]] = [*map(asdict, lines), *soaks]
    sums = {name: sum(one[name] for one in both) for name in ("tasks", "lost", "early", "after_cancel")}
    failed = sum(line.verdict != "held" for line in lines) + sum(not soak["clean"] for soak in soaks)
    total = (
        f"Both tables together: {sums['tasks']:,} tasks; {sums['lost']} lost, {sums['early']} early, "
        f"{sums['after_cancel']} after a cancel, {sum(soak['unexplained'] for soak in soaks)} run again "
        f"without a cause; {failed} of these runs failed.\n"
    )
    PAGE.write_text(_between(text, "total", [total], heads=0))
    rows = {line.fault for line in lines}
    print("no line for:", ", ".join(str(n) for n in range(1, FAULTS + 1) if n not in rows) or "none")
    print("not held:", ", ".join(line.name for line in lines if line.verdict != "held") or "none")


def _between(text: str, name: str, content: Iterable[str], heads: int = 2) -> str:
    """The text with other content between two marks, but for so many lines at its head."""
    before, begin, rest = text.partition(f"<!-- {name}: written by `make faults-page` -->\n")
    found, end, after = rest.partition(f"<!-- end of {name} -->\n")
    assert begin, f"no mark of {name} in {PAGE}"
    assert end, f"no mark of the end of {name} in {PAGE}"
    return "".join([before, begin, *found.splitlines(keepends=True)[:heads], *content, end, after])


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def _soak_cells(soak: Mapping[str, Any]) -> list[object]:
    doubles = ", ".join(f"{count} by {kind}" for kind, count in sorted(soak["duplicates"].items()))
    count = sum(soak["duplicates"].values()) + soak["unexplained"]
    return [
        *(soak["seed"], f"{soak['seconds'] / 60:g} min", soak["faults"], f"{soak['tasks']:,}"),
        *(soak["lost"], soak["early"], soak["after_cancel"], f"{count}: {doubles}" if doubles else count),
        *(f"{soak['settled']} s", "clean" if soak["clean"] else "broken"),
    ]


if __name__ == "__main__":
    publish()
