"""Rows of tries as a server prints them: what is damaged is told from what is no instant."""

from __future__ import annotations

import pytest

from toc.store.servers.server import Result, Transient
from toc.store.tasks.rows import NO_INSTANT
from toc.store.tasks.tries import try_rows

AT = "2026-11-25 22:27:19.280"
MS = 1_795_645_639_280


def text(action: str = AT, following: str = AT, expires: str = "") -> str:
    return f"7,42,{action},{following},3;0;0;0;0;0;0;{expires};0;-1;0,-,{{}}"


def test_instants_are_read_as_servers_print_them() -> None:
    mysql, sqlite = try_rows([Result([(text(),), (text(str(MS), str(MS + 1), str(MS + 2)),)], 2)])
    assert (mysql.action_time, mysql.next_time, mysql.expires_at) == (MS, MS, 0)
    assert (sqlite.action_time, sqlite.next_time, sqlite.expires_at) == (MS, MS + 1, MS + 2)


def test_what_is_no_instant_is_one_that_no_calendar_has_and_nothing_expires_then() -> None:
    (row,) = try_rows([Result([(text("0000-00-00 00:00:00.000", AT, "0000-00-00 00:00:00.000"),)], 1)])
    assert (row.action_time, row.next_time, row.expires_at) == (NO_INSTANT, MS, 0)


@pytest.mark.parametrize("place", [0, 4, 5, 8, 11, 12, 14, 17, 18, 21])
def test_an_instant_with_a_damaged_byte_is_a_damaged_answer(place: int) -> None:
    damaged = AT[:place] + chr(ord(AT[place]) ^ 0x40) + AT[place + 1 :]
    with pytest.raises(Transient):
        try_rows([Result([(text(damaged),)], 1)])
