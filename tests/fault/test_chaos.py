"""The soak of random faults, and the page that it and the fault tests end on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fault.kit import table
from fault.kit.table import Line

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_half_a_minute_of_chaos_ends_with_a_clean_verdict() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fault.chaos", "--seed", "26193", "--minutes", "0.5"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert lines[0].startswith("seed 26193, 30 s: ")
    for fault in ("kill gateway", "kill consumer", "ack twice", "kill host", "pause MySQL"):
        assert fault in done.stdout, "another seed has it"
    assert re.search(r" pulled [1-9]", done.stdout), done.stdout
    assert lines[-1].startswith("CLEAN: seed 26193, 30 s, "), done.stdout


def test_lines_replace_their_former_selves_and_the_page_holds_them_between_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    for name in ("LINES", "SOAKS", "PAGE"):
        monkeypatch.setattr(table, name, tmp_path / name)
    table.PAGE.write_text(
        "before\n"
        "<!-- faults: written by `make faults-page` -->\nold\n<!-- end of faults -->\n"
        "between\n"
        "<!-- soaks: written by `make faults-page` -->\n<!-- end of soaks -->\n"
        "<!-- total: written by `make faults-page` -->\n<!-- end of total -->\n"
        "after\n"
    )
    table.write([Line(2, "b", tasks=1), Line(1, "a | c", "slow", "seen", tasks=1000)])
    table.write([Line(2, "b", proof="bit", tasks=2, settle=0.5, verdict="held")])
    soak = {"seed": 7, "seconds": 90, "faults": 5, "tasks": 1000, "lost": 0, "early": 0, "after_cancel": 0}
    soaks = [
        {**soak, "unexplained": 0, "duplicates": {"kill": 2}, "dead": 1, "settled": 1.5, "clean": True},
        {**soak, "unexplained": 1, "duplicates": {}, "dead": 0, "settled": 0.5, "clean": False},
    ]
    table.SOAKS.write_text("".join(json.dumps(line) + "\n" for line in soaks))
    for _ in range(2):  # writing it again changes nothing
        table.publish()
        page = table.PAGE.read_text().splitlines()
        assert (page[0], page[-1]) == ("before", "after")
        assert page[4:6] == [
            "| 1 | a \\| c (slow) | seen | 1,000 | 0 | 0 | 0 | 0 | 0 | - | failed |",
            "| 2 | b | bit | 2 | 0 | 0 | 0 | 0 | 0 | 0.5 s | held |",
        ]
        assert page[-8:-5] == [
            "| 7 | 1.5 min | 5 | 1,000 | 0 | 0 | 0 | 2: 2 by kill | 1.5 s | clean |",
            "| 7 | 1.5 min | 5 | 1,000 | 0 | 0 | 0 | 1 | 0.5 s | broken |",
            "| all | 3 min | 10 | 2,000 | 0 | 0 | 0 | 3 | 1.5 s | broken |",
        ]
        assert page[-3] == (
            "Both tables together: 3,002 tasks; 0 lost, 0 early, 0 after a cancel, "
            "1 run again without a cause; 2 of these runs failed."
        )
    assert "not held: a | c" in capsys.readouterr().out
