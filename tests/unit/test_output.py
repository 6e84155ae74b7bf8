"""Tables on terminals of any width and height."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from toc.cli.output import show, show_one, table
from toc.coordination.assignment import Member
from toc.operate.daemons import addresses

SLOTS: list[dict[str, Any]] = [
    {
        "slot": f"order.confirmation_{number}",
        "state": "owned",
        "owner": f"host1-{number % 2}-1a2b3c4d",
        "since": "12 min ago",
        "why": "balance" if number else "no undrained worker handles this topic",
        "scheduled": 1000 + number,
        "prepared": 12,
        "next_due": "in 3 s",
        "overdue_seconds": None if number else 61.234,
    }
    for number in range(12)
]
SPARE = ("state", "since", "next_due")


def printed(drawn: object, width: int, height: int = 24) -> list[str]:
    to = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    to.print(drawn)
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "left_out"), [(200, ()), (80, SPARE)])
def test_a_table_tears_no_id_apart_and_leaves_out_what_can_be_spared(
    width: int, left_out: tuple[str, ...]
) -> None:
    drawn, lacks = table(SLOTS, width, SPARE)
    lines = printed(drawn, width)
    assert tuple(lacks) == left_out
    assert max(map(len, lines)) <= width
    for record in SLOTS:
        [line] = [line for line in lines if f"{record['slot']} " in line]
        assert record["owner"] in line
        assert str(record["scheduled"]) in line
    assert "61.234" in "".join(lines)


@pytest.mark.parametrize(
    ("metrics", "machine", "address"),
    [
        ("0.0.0.0:9464", "here", "127.0.0.1:9464"),
        ("0.0.0.0:9464", "there", "host7:9464"),
        ("[::]:9464", "there", "host7:9464"),
        ("127.0.0.1:9464", "here", "127.0.0.1:9464"),
        ("127.0.0.1:9464", "there", "host7:9464"),
        ("10.0.0.7:9464", "here", "10.0.0.7:9464"),
        ("10.0.0.7:9464", "there", "10.0.0.7:9464"),
    ],
)
def test_a_daemon_is_asked_where_it_can_be_reached_from_here(
    metrics: str, machine: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    worker = Member("host7-0-1", "host7", 1, metrics=metrics, machine=machine)
    assert addresses([worker]) == [address]


def test_what_others_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = "a\x1b[2Jb\x07c\x9b31md\re\x7f\r\n\tgrün"
    show_one({"last_error": error, "history": [{"error": error}], "list": [error]}, as_json=False)
    show([{"last_error": error}], as_json=False, empty="none")
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\x07\x9b\x7f"), ascii(said)
    assert "\r" not in said.replace("\r\n", "")
    assert said.count("a\ufffd[2Jb\ufffdc\ufffd31md\ufffde\ufffd") == 3
    assert said.count("\tgrün") == 2, "lines of a text are shown as they are"
