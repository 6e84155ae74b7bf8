"""What can be no entry of a queue: it is removed with an alarm, reaches no worker and holds nobody up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from integration.index.conftest import Seed
from structlog.typing import EventDict

from benchmarks.local import RedisServer
from toc.index.messages import ExpiredRequest, Peek, Prepared, PrepareRequest
from toc.index.queues import Queues
from toc.model.errors import IndexUnavailable
from toc.model.scores import fence
from toc.model.topic import Slot

SLOT, OTHER = Slot("order.close", 3), Slot("order.close", 4)
STORE, PREPARE, DEAD = "order.close_3", "prepare_{order.close_3}", "dead_{order.close_3}"
BIG = 2**63 - 1
STATE = Callable[[], dict[str, Any]]
STRAYS = [
    "",
    "not-a-number",
    "-5",
    "+5",
    "0",
    "007",
    " 7",
    "7\n",
    "1_0",
    "1.5",
    "1e3",
    "\u0663",
    "\u00b2",
    str(2**63),
    "9" * 30,
    "9" * 5000,
    "{7}",
    "\x00",
]


def members(server: RedisServer, key: str) -> list[str]:
    return cast(list[str], server.call("ZRANGE", key, 0, -1))


def take(queues: Queues, limit: int = 9) -> Prepared:
    reply = queues.prepare([PrepareRequest(SLOT, limit, 16, 7)])[SLOT]
    assert not isinstance(reply, IndexUnavailable)
    return reply


def alarms(logged: list[EventDict]) -> list[EventDict]:
    return [event for event in logged if event["event"] == "orphan_dropped"]


@pytest.mark.parametrize("stray", STRAYS)
def test_prepare_takes_a_stray_out_of_both_queues_and_its_neighbours_all_the_same(
    queues: Queues, server: RedisServer, logged: list[EventDict], stray: str
) -> None:
    server.call("ZADD", STORE, 5, stray, 6, 1, 7, BIG, 4 * 10**12, 3)
    reply = take(queues)
    assert reply.entries == [(1, fence(16, 7)), (BIG, fence(16, 7))]
    assert reply.next_due == 4e12
    assert members(server, STORE) == ["3"]
    assert sorted(members(server, PREPARE)) == sorted(["1", str(BIG)])
    (alarm,) = alarms(logged)
    assert (alarm["log_level"], alarm["slot"], alarm["members"]) == ("error", str(SLOT), 1)
    assert len(alarm["member"]) <= 40
    assert alarm["member"].isascii()
    assert alarm["member"].isprintable()
    assert take(queues).entries == []
    assert len(alarms(logged)) == 1


def test_thousands_of_strays_leave_with_one_alarm_per_batch_and_slot(
    queues: Queues, server: RedisServer, seed: Seed, logged: list[EventDict]
) -> None:
    seed(OTHER, prepare={1: 5 * 1000 + fence(16, 7)})
    score = f"{5 * 1000 + fence(16, 7):.17g}"
    for start in range(0, 3_000, 1_000):
        words = [word for n in range(start, start + 1_000) for word in (score, f"x{n}")]
        server.call("ZADD", PREPARE, *words)
        server.call("ZADD", STORE, *words)
    requests = [ExpiredRequest(SLOT, 30, (7,)), ExpiredRequest(OTHER, 30, (7,))]
    assert queues.expired(requests) == {SLOT: [], OTHER: [(1, 5 * 1000 + fence(16, 7))]}
    assert members(server, PREPARE) == []
    assert [(alarm["slot"], alarm["members"]) for alarm in alarms(logged)] == [(str(SLOT), 3_000)]
    batches = 0
    while take(queues, 500).next_due is not None:
        batches += 1
    assert batches == 5
    assert members(server, STORE) == members(server, PREPARE) == []


def test_strays_among_the_dead_are_not_listed_and_go(
    queues: Queues, server: RedisServer, logged: list[EventDict]
) -> None:
    server.call("ZADD", DEAD, 5, "x", 6, "1", "+inf", "2")
    assert queues.dead_pages({SLOT: 0}, 9) == {SLOT: [1]}
    assert members(server, DEAD) == ["1"]
    assert len(alarms(logged)) == 1


# --- scores that no task can have ------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["-inf", "-1e300", "-5.5", "0"])
def test_a_score_before_all_time_is_due_now_and_holds_nobody_up(
    queues: Queues, server: RedisServer, state: STATE, score: str
) -> None:
    server.call("ZADD", STORE, score, 1, 6, 2)
    peek = queues.peek([SLOT])[SLOT]
    assert isinstance(peek, Peek)
    assert peek.next_due == 0.0
    assert {job_id for job_id, _ in take(queues).entries} == {1, 2}
    assert list(state()) == [PREPARE]


@pytest.mark.parametrize("score", ["+inf", "1e300", "1e17"])
def test_a_score_after_all_time_is_never_due_and_yields_to_an_earlier_one(
    queues: Queues, server: RedisServer, score: str
) -> None:
    server.call("ZADD", STORE, score, 1)
    peek = queues.peek([SLOT])[SLOT]
    assert isinstance(peek, Peek)
    assert (peek.next_due, peek.store) == (None, 1)
    assert take(queues)[:2] == ([], None)
    assert queues.add({SLOT: [(1, 5.0)]}) == {SLOT: 1}
    assert [job_id for job_id, _ in take(queues).entries] == [1]


@pytest.mark.parametrize("score", ["-inf", "-1e300", "-1", "+inf", "1e300", "9007199254740992"])
def test_an_entry_whose_score_was_never_a_prepare_score_goes_so_that_the_sweep_can_bring_it_back(
    queues: Queues, server: RedisServer, logged: list[EventDict], score: str
) -> None:
    server.call("ZADD", PREPARE, score, 1)
    assert queues.add({SLOT: [(1, 5.0)]}) == {SLOT: 0}
    assert queues.expired([ExpiredRequest(SLOT, 30, (7,))]) == {SLOT: []}
    assert [(alarm["members"], alarm["member"]) for alarm in alarms(logged)] == [(1, "1")]
    assert queues.add({SLOT: [(1, 5.0)]}) == {SLOT: 1}
