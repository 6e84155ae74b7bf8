"""Tables on terminals of any width and height."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from toc.cli.output import ago, show, show_one, show_pages, table
from toc.cli.top import _drawn
from toc.cli.worker import WATCH_SPARE, _in_one_line
from toc.config import Settings
from toc.model.errors import StoreUnavailable
from toc.operate.daemons import addresses
from toc.operate.top import Picture, TopicNow, WorkerNow

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


MOVING: list[dict[str, Any]] = [
    record
    | {
        "moving_to": None if number % 3 else "host2-0-5e6f7a8b",
        "why": "pinned to host2-0-5e6f7a8b by somebody@a-machine-with-a-long-name"
        if number % 2
        else "balance",
        "prepared": 12,
        "error": None if number % 4 else "127.0.0.1:24257: no connection: Connection refused",
    }
    for number, record in enumerate(SLOTS)
]


@pytest.mark.parametrize("name", ["order.close", "order.confirmation", "order.confirmation.reminder.of.x"])
@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_watched_slot_takes_one_line_and_its_ids_and_lateness_are_whole(width: int, name: str) -> None:
    records = [record | {"slot": f"{name}_{number}"} for number, record in enumerate(MOVING)]
    drawn, _ = table([_in_one_line(record) for record in records], width, WATCH_SPARE, cut="why")
    lines = printed(drawn, width)
    assert max(map(len, lines)) <= width
    found = [[line for line in lines if f"{record['slot']} " in line] for record in records]
    assert [len(each) for each in found] == [1] * len(records)
    assert len(lines) <= len(records) + (2 if width == 80 else 4)
    for [line], record in zip(found, records, strict=True):
        assert record["owner"] in line
    assert "61.234" in found[0][0]
    assert "127.0.0.1:2" in found[0][0]  # as much of it as there is room for
    assert name != "order.close" or "1000" in found[0][0]
    if width == 200:
        assert "to host2-0-5e6f7a8b: balance" in found[6][0]


def picture(topics: int, workers: int) -> Picture:
    return Picture(
        2.0,
        [
            TopicNow(
                f"order.topic-{number:02}", False, 1000.0, 2.5, 0.0012, 0.034, 0.25, 12, 3, 100_000 + number,
                17, 16, 4, 2.5 if number == topics - 1 else 0.0,
            )
            for number in range(topics)
        ],
        [
            WorkerNow(f"host{number}-0-1a2b3c4d", f"host{number}", 40, 40 + (number == workers - 1))
            for number in range(workers)
        ],
        workers,
        ["127.0.0.1:9464: no answer (Connection refused)"],
    )  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (80, 60)])
@pytest.mark.parametrize(("topics", "workers"), [(2, 3), (30, 40), (1, 60), (60, 1), (0, 0)])
def test_top_is_no_larger_than_the_screen_and_shows_what_is_urgent(
    width: int, height: int, topics: int, workers: int
) -> None:
    to = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    lines = printed(_drawn(picture(topics, workers), "local", to, cut=True), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    seen = "\n".join(lines)
    assert "no answer" in seen
    if topics:
        [late] = [line for line in lines if f"order.topic-{topics - 1:02}" in line]
        assert "2.5 s" in late
        assert "34 ms" in late
        assert f"{100_000 + topics - 1:,}" in late
        assert ("more topics" in seen) == (topics > sum("order.topic" in line for line in lines))
        assert "slots are moving" in seen


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
    worker = WorkerNow("host7-0-1", "host7", 1, metrics=metrics, machine=machine)
    assert addresses(Settings(zookeeper="z:2181"), [worker]) == [address]


def test_what_others_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = "a\x1b[2Jb\x07c\x9b31md\re\x7f\r\n\tgrün"
    show_one({"last_error": error, "history": [{"error": error}], "list": [error]}, as_json=False)
    show([{"last_error": error}], as_json=False, empty="none")
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\x07\x9b\x7f"), ascii(said)
    assert "\r" not in said.replace("\r\n", "")
    assert said.count("a\ufffd[2Jb\ufffdc\ufffd31md\ufffde\ufffd") == 3
    assert said.count("\tgrün") == 2, "lines of a text are shown as they are"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s ago"), (119, "119 s ago"), (180, "3 min ago"), (-90, "in 90 s"), (-7 * 86_400, "in 7 d")],
)
def test_an_instant_is_told_by_its_distance(seconds: float, text: str) -> None:
    assert ago(1_000_000_000 - seconds * 1000, 1_000_000_000) == text


@pytest.mark.parametrize("as_json", [True, False])
def test_a_list_that_breaks_off_is_not_taken_for_the_whole(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def pages(*, whole: bool) -> Iterator[list[dict[str, int]]]:
        yield [{"job_id": 1}, {"job_id": 2}]
        yield [{"job_id": 3}]
        if not whole:
            raise StoreUnavailable("a server is away")

    show_pages(pages(whole=True), as_json=as_json, empty="none")
    out, err = capsys.readouterr()
    assert err == ""
    if as_json:
        assert json.loads(out) == [{"job_id": "1"}, {"job_id": "2"}, {"job_id": "3"}]
    with pytest.raises(StoreUnavailable):
        show_pages(pages(whole=False), as_json=as_json, empty="none")
    out, err = capsys.readouterr()
    assert "incomplete: only the first 3 could be read" in err
    assert "3" in out
    assert out.endswith("\n"), "the error begins a line"
    if as_json:
        with pytest.raises(json.JSONDecodeError):
            json.loads(out)
