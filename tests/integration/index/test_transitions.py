"""Each transition: the whole state before, the call, the whole state after;
and what can be no entry of a queue."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from integration.index.conftest import Seed, answered
from structlog.typing import EventDict

from benchmarks.local import RedisServer
from toc.index import queues as transitions
from toc.index.messages import ExpiredRequest, Peek, Prepared, PrepareRequest
from toc.index.queues import Queues
from toc.model.errors import IndexUnavailable
from toc.model.scores import fence
from toc.model.topic import Slot

# Each transition: the whole state before, the call, the whole state after.

SLOT = Slot("order.close", 3)
OTHER = Slot("order.close", 4)
STORE, PREPARE, DEAD = "order.close_3", "prepare_{order.close_3}", "dead_{order.close_3}"
BIG = 2**63 - 1
"""An id of 63 bits, next to which lies BIG - 1: a float64 cannot tell them apart."""
FAR = 4_000_000_000_000.0
"""A score long after now, in which the fraction of a claim does not fit: it is for StoreQueues only."""
STATE = Callable[[], dict[str, Any]]
NOW = Callable[[], int]


def held(seconds: int, remaining: int, claim: int) -> float:
    return seconds * 1000 + remaining + claim / 4096


# --- add -------------------------------------------------------------------------------------------------


def test_add_adds_and_moves_earlier_but_never_later(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, store={1: 100.0, 2: 100.0})
    assert queues.add({SLOT: [(1, 50.5), (2, 150.0), (BIG, 1e12), (BIG - 1, 2e12)]}) == {SLOT: 3}
    assert state() == {STORE: {1: 50.5, 2: 100.0, BIG: 1e12, BIG - 1: 2e12}}


def test_add_leaves_alone_what_is_prepared(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, prepare={1: held(5, 3, 7)})
    assert queues.add({SLOT: [(1, 50.0), (2, 60.0)]}) == {SLOT: 1}
    assert queues.add({SLOT: [(1, 50.0)]}) == {SLOT: 0}
    assert state() == {STORE: {2: 60.0}, PREPARE: {1: held(5, 3, 7)}}


def test_an_empty_batch_is_no_call(queues: Queues, state: STATE) -> None:
    assert queues.add({SLOT: []}) == {SLOT: 0}
    assert queues.commit({SLOT: []}) == {SLOT: []}
    assert queues.prepare([]) == {}
    assert state() == {}


@pytest.mark.parametrize("name", ["add", "commit", "rollback"])
def test_a_script_refuses_more_ids_than_its_bound_and_does_nothing(
    queues: Queues, seed: Seed, state: STATE, name: str
) -> None:
    seed(SLOT, prepare={1: held(5, 3, 7)})
    before, words = state(), {"add": 2, "commit": 2, "rollback": 3}[name]
    call = getattr(transitions, f"_{name.upper()}").of(queues.keys(SLOT), *[1] * 501 * words)
    queues.run([call])
    assert isinstance(call.result, IndexUnavailable)
    assert "more than 500 in one call" in str(call.result)
    assert state() == before


def test_thousands_of_ids_go_through_in_chunks(queues: Queues, state: STATE) -> None:
    ids = range(BIG - 2_345, BIG)
    assert queues.add({SLOT: [(job_id, 1.0) for job_id in ids]}) == {SLOT: 2_345}
    taken: list[tuple[int, float]] = []
    while (prepared := queues.prepare([PrepareRequest(SLOT, 10_000, 31, 4095)])[SLOT]).entries:  # type: ignore[union-attr]
        assert not isinstance(prepared, IndexUnavailable)
        assert len(prepared.entries) <= 500
        taken += prepared.entries
    assert sorted(job_id for job_id, _ in taken) == list(ids)
    assert queues.extend({SLOT: taken}) == {SLOT: [True] * 2_345}
    assert queues.rollback({SLOT: [(j, f, 7.0) for j, f in taken[:1_111]]}) == {SLOT: [True] * 1_111}
    assert queues.commit({SLOT: taken}) == {SLOT: [False] * 1_111 + [True] * 1_234}
    assert state() == {STORE: {job_id: 7.0 for job_id, _ in taken[:1_111]}}


# --- prepare ---------------------------------------------------------------------------------------------


def test_prepare_takes_what_is_due_soonest_first_and_tells_the_next(
    queues: Queues, seed: Seed, state: STATE, now_ms: NOW
) -> None:
    before = now_ms()
    seed(SLOT, store={BIG: before - 5.0, BIG - 1: before - 9.0, 3: before - 1.0, 4: FAR})
    reply = answered(queues.prepare([PrepareRequest(SLOT, 2, 16, 4095)])[SLOT])
    assert reply.entries == [(BIG - 1, fence(16, 4095)), (BIG, fence(16, 4095))]
    assert reply.next_due == before - 1
    assert before <= reply.redis_now_ms <= now_ms()
    score = held(reply.redis_now_ms // 1000, 16, 4095)
    assert state() == {STORE: {3: before - 1.0, 4: FAR}, PREPARE: {BIG: score, BIG - 1: score}}


def test_prepare_takes_nothing_that_came_due_later_than_it_is_to_take(
    queues: Queues, seed: Seed, state: STATE, now_ms: NOW
) -> None:
    due = now_ms() - 1_000
    seed(SLOT, store={1: due + 3 / 32, 2: due + 1.0})
    reply = answered(queues.prepare([PrepareRequest(SLOT, 9, 16, 7, due - 1)])[SLOT])
    assert (reply.entries, reply.next_due, reply.left) == ([], due, 2)
    reply = answered(queues.prepare([PrepareRequest(SLOT, 9, 16, 7, due)])[SLOT])
    assert (reply.entries, reply.next_due, reply.left) == ([(1, fence(3, 7))], due + 1, 1)
    assert state() == {STORE: {2: due + 1.0}, PREPARE: {1: held(reply.redis_now_ms // 1000, 3, 7)}}


def test_an_entry_is_due_in_the_very_millisecond_of_its_floor(queues: Queues, now_ms: NOW) -> None:
    due = now_ms() + 30
    queues.add({SLOT: [(1, due + 31 / 32)]})
    while True:
        reply = answered(queues.prepare([PrepareRequest(SLOT, 9, 16, 1)])[SLOT])
        assert bool(reply.entries) == (reply.redis_now_ms >= due)
        if reply.entries:
            break


@pytest.mark.parametrize("remaining", [1, 2, 15, 30, 31])
def test_prepare_carries_the_tries_left_from_the_fraction_of_the_score(
    queues: Queues, seed: Seed, state: STATE, now_ms: NOW, remaining: int
) -> None:
    seed(SLOT, store={1: now_ms() - 1_000 + remaining / 32})
    reply = answered(queues.prepare([PrepareRequest(SLOT, 9, 16, 4095)])[SLOT])
    assert reply.entries == [(1, fence(remaining, 4095))]
    assert reply.next_due is None
    assert state() == {PREPARE: {1: held(reply.redis_now_ms // 1000, remaining, 4095)}}


def test_an_id_that_is_prepared_keeps_its_entry_untaken(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, store={1: 10.0, 2: 20.0}, prepare={1: held(5, 3, 7)})
    reply = answered(queues.prepare([PrepareRequest(SLOT, 9, 16, 8)])[SLOT])
    assert reply.entries == [(2, fence(16, 8))]
    assert state() == {PREPARE: {1: held(5, 3, 7), 2: held(reply.redis_now_ms // 1000, 16, 8)}}


def test_prepare_of_many_slots_answers_for_each(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, store={1: 10.0})
    seed(OTHER, store={2: FAR})
    replies = queues.prepare([PrepareRequest(SLOT, 9, 16, 1), PrepareRequest(OTHER, 9, 16, 2)])
    first, second = replies[SLOT], replies[OTHER]
    assert not isinstance(first, IndexUnavailable)
    assert not isinstance(second, IndexUnavailable)
    assert (first.entries, first.next_due) == ([(1, fence(16, 1))], None)
    assert (second.entries, second.next_due) == ([], FAR)
    assert set(state()) == {PREPARE, "order.close_4"}


# --- what acts under the fence ---------------------------------------------------------------------------


def test_extend_sets_the_seconds_to_now_alone(queues: Queues, seed: Seed, state: STATE, now_ms: NOW) -> None:
    seed(SLOT, prepare={BIG: held(5, 31, 4095), BIG - 1: held(5, 1, 0)})
    before = now_ms() // 1000
    assert queues.extend({SLOT: [(BIG, fence(31, 4095)), (BIG - 1, fence(1, 0))]}) == {SLOT: [True, True]}
    found = state()[PREPARE]
    assert before <= found[BIG] // 1000 <= now_ms() // 1000
    assert found == {BIG: found[BIG] // 1000 * 1000 + fence(31, 4095), BIG - 1: found[BIG] // 1000 * 1000 + 1}


@pytest.mark.parametrize("stale", [fence(3, 8), fence(2, 7), fence(4, 7), fence(3, 6)])
def test_a_stale_fence_touches_nothing(queues: Queues, seed: Seed, state: STATE, stale: float) -> None:
    seed(SLOT, store={9: 1.0}, prepare={1: held(5, 3, 7)}, dead={8: 2.0})
    before = state()
    assert queues.extend({SLOT: [(1, stale)]}) == {SLOT: [False]}
    assert queues.commit({SLOT: [(1, stale)]}) == {SLOT: [False]}
    assert queues.rollback({SLOT: [(1, stale, 10.0)]}) == {SLOT: [False]}
    assert queues.bury({SLOT: [(1, stale, 10)]}) == {SLOT: [False]}
    assert state() == before


def test_a_whole_score_stands_while_nobody_keeps_it_alive(queues: Queues, seed: Seed, state: STATE) -> None:
    scores = {1: held(5, 3, 7), 2: held(6, 3, 7), 3: held(7, 1, 0), 4: held(8, 3, 7)}
    seed(SLOT, prepare=scores)
    queues.extend({SLOT: [(4, fence(3, 7))]})
    kept = state()[PREPARE][4]
    assert queues.commit({SLOT: [(1, scores[1]), (4, scores[4])]}) == {SLOT: [True, False]}
    assert queues.rollback({SLOT: [(2, scores[2], 90.0), (4, scores[4], 90.0)]}) == {SLOT: [True, False]}
    assert queues.bury({SLOT: [(3, scores[3], 70), (4, scores[4], 70)]}) == {SLOT: [True, False]}
    assert state() == {STORE: {2: 90.0}, DEAD: {3: 70.0}, PREPARE: {4: kept}}


def test_rollback_keeps_the_fraction_and_an_earlier_time(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, store={2: 10.0}, prepare={1: held(5, 3, 7), 2: held(5, 3, 7)})
    target = 1_800_000_000_123 + 31 / 32
    queues.rollback({SLOT: [(1, fence(3, 7), target), (2, fence(3, 7), target)]})
    assert state() == {STORE: {1: target, 2: 10.0}}


# --- cancel, reschedule ----------------------------------------------------------------------------------


def test_cancel_removes_what_is_stored_and_tells_of_what_is_prepared(
    queues: Queues, seed: Seed, state: STATE, now_ms: NOW
) -> None:
    seed(SLOT, store={1: 10.0, 2: 20.0}, prepare={3: held(5, 3, 7)})
    before = now_ms()
    found = queues.cancel(dict.fromkeys((1, 3, 99), SLOT))
    replies = {job_id: answered(reply) for job_id, reply in found.items()}
    assert {job_id: reply.prepared for job_id, reply in replies.items()} == {1: False, 3: True, 99: False}
    assert before <= replies[3].redis_now_ms <= now_ms()
    assert state() == {STORE: {2: 20.0}, PREPARE: {3: held(5, 3, 7)}}


def test_reschedule_moves_earlier_and_later_and_adds(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, store={1: 10.0, 2: 20.5}, prepare={3: held(5, 3, 7)})
    assert not queues.reschedule(SLOT, 1, 100.0).prepared
    assert not queues.reschedule(SLOT, 2, 5.0).prepared
    assert queues.reschedule(SLOT, 3, 5.0).prepared
    assert not queues.reschedule(SLOT, BIG, 7.0).prepared
    assert state() == {STORE: {1: 100.0, 2: 5.0, BIG: 7.0}, PREPARE: {3: held(5, 3, 7)}}


# --- the dead --------------------------------------------------------------------------------------------


def test_restore_dead_leaves_what_is_prepared_or_there(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, store={1: 10.0, 4: 40.0}, prepare={2: held(5, 3, 7)}, dead={3: 33.0})
    assert queues.restore_dead({SLOT: [(1, 11), (2, 22), (3, 99)]}) == {SLOT: 1}
    assert queues.restore_dead({SLOT: [(2, 22)]}) == {SLOT: 0}
    assert state() == {STORE: {4: 40.0}, PREPARE: {2: held(5, 3, 7)}, DEAD: {1: 11.0, 3: 33.0}}


def test_redrive_moves_the_dead_and_adds_what_was_lost(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, prepare={2: held(5, 3, 7)}, dead={1: 11.0, 2: 22.0, 4: 44.0})
    assert queues.redrive({SLOT: [(1, 100.0), (2, 100.0), (3, 100.0)]}) == {SLOT: 2}
    assert state() == {STORE: {1: 100.0, 3: 100.0}, PREPARE: {2: held(5, 3, 7)}, DEAD: {4: 44.0}}


def test_the_dead_are_listed_first_death_first_and_purged(queues: Queues, seed: Seed, state: STATE) -> None:
    seed(SLOT, dead={1: 11.0, BIG: 1_800_000_000_123.0, 3: 33.0})
    assert queues.ids("dead", {SLOT: 0}, 2) == {SLOT: [1, 3]}
    assert queues.ids("dead", {SLOT: 2}, 2) == {SLOT: [BIG]}
    assert queues.purge_dead({SLOT: [1, BIG, 99]}) == {SLOT: 2}
    assert state() == {DEAD: {3: 33.0}}


# --- trim ------------------------------------------------------------------------------------------------


def test_trim_removes_the_farthest_of_what_is_scheduled_and_nothing_else(
    queues: Queues, seed: Seed, state: STATE, now_ms: NOW
) -> None:
    now = now_ms()
    taken, dead = {5: held(now // 1000, 3, 7)}, {6: now + 9e6}
    near = {1: 10.0, 2: now + 60_000.0, 3: now + 60_000.5}
    seed(SLOT, store=near | {BIG: now + 60_001.0, BIG - 1: FAR}, prepare=taken, dead=dead)
    seed(OTHER, store={7: FAR})
    assert queues.standing([SLOT, OTHER], now, now + 60_000) == 1
    assert queues.standing([SLOT, OTHER], now, int(FAR)) == 5
    assert queues.trim([SLOT, OTHER], now + 60_000) == 4, (
        "also the one whose tries were used up, half a ms later"
    )
    del near[3]
    assert state() == {STORE: near, PREPARE: taken, DEAD: dead}
    assert queues.trim([SLOT, OTHER], now + 60_000) == 0


def test_trim_leaves_what_is_due_or_due_within_30_seconds_whatever_it_is_asked(
    queues: Queues, seed: Seed, state: STATE, now_ms: NOW
) -> None:
    now = now_ms()
    near = {1: 10.0, 2: now + 29_000.0}
    seed(SLOT, store=near | {3: now + 120_000.0})
    assert queues.trim([SLOT], 0) == 1
    assert state() == {STORE: near}


def test_trim_goes_through_thousands_in_batches(queues: Queues, state: STATE) -> None:
    assert queues.add({SLOT: [(n, FAR + n) for n in range(1, 2_346)]}) == {SLOT: 2_345}
    assert queues.trim([SLOT], int(FAR) + 45) == 2_300
    assert state() == {STORE: {n: FAR + n for n in range(1, 46)}}


def test_trim_leaves_the_rest_for_later_once_its_time_is_over(
    queues: Queues, state: STATE, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues.add({SLOT: [(n, FAR + n) for n in range(1, 1_201)]})
    monkeypatch.setattr("toc.index.queues.TRIM_SECONDS", 0.0)
    assert [queues.trim([SLOT], int(FAR)) for _ in range(4)] == [500, 500, 200, 0]
    assert state() == {}


# --- expired, peek ---------------------------------------------------------------------------------------


def test_an_entry_is_expired_after_more_than_the_timeout(queues: Queues, seed: Seed, now_ms: NOW) -> None:
    seconds = now_ms() // 1000
    fresh, old = held(seconds - 25, 31, 4095), held(seconds - 35, 31, 4095)
    seed(SLOT, prepare={1: fresh, 2: old, BIG: held(5, 1, 0)})
    assert queues.expired([ExpiredRequest(SLOT, 30)]) == {SLOT: [(BIG, held(5, 1, 0)), (2, old)]}
    assert queues.expired([ExpiredRequest(SLOT, 30, limit=1)]) == {SLOT: [(BIG, held(5, 1, 0))]}
    assert queues.expired([ExpiredRequest(SLOT, 36)]) == {SLOT: [(BIG, held(5, 1, 0))]}


def test_what_was_kept_alive_in_the_future_counts_as_kept_alive_now(
    queues: Queues, seed: Seed, state: STATE, now_ms: NOW
) -> None:
    """The server's clock was ahead and has been set back."""
    seconds = now_ms() // 1000
    kept = {1: held(seconds - 25, 31, 4095), 2: held(seconds, 1, 0), 3: held(seconds + 1, 2, 1)}
    ahead = {BIG: fence(31, 4095), BIG - 1: fence(1, 0), 7: fence(16, 2049), 8: fence(0, 4095)}
    seed(SLOT, store={9: FAR}, prepare=kept | {n: (seconds + 600) * 1000 + own for n, own in ahead.items()})
    seed(OTHER, prepare={7: held(seconds + 600, 3, 7)})
    other = state()[queues.keys(OTHER).prepare]
    for _ in range(2):  # the second look changes nothing
        assert queues.expired([ExpiredRequest(SLOT, 30)]) == {SLOT: []}
        after = state()
        now = int(after[PREPARE][BIG] // 1000)
        assert seconds <= now <= now_ms() // 1000
        assert after == {
            STORE: {9: FAR},
            PREPARE: kept | {n: now * 1000 + own for n, own in ahead.items()},
            queues.keys(OTHER).prepare: other,
        }
    assert queues.extend({SLOT: list(ahead.items())}) == {SLOT: [True] * 4}, "its worker still holds each"


def test_many_entries_of_the_future_are_mended_some_at_a_time(
    queues: Queues, seed: Seed, state: STATE, now_ms: NOW
) -> None:
    seconds = now_ms() // 1000
    seed(SLOT, prepare={n: held(seconds + 600, 3, n) for n in range(1, 121)})
    left = []
    for _ in range(3):
        assert queues.expired([ExpiredRequest(SLOT, 30)]) == {SLOT: []}
        left.append(sum(score >= (seconds + 600) * 1000 for score in state()[PREPARE].values()))
    assert left == [70, 20, 0]


def test_entries_under_a_claim_are_listed_however_fresh(queues: Queues, seed: Seed, now_ms: NOW) -> None:
    seconds = now_ms() // 1000
    entries = {number: held(seconds, 1 + number % 31, number % 4096) for number in range(6_000, 7_300)}
    seed(SLOT, prepare=entries)
    seed(OTHER, prepare={1: held(seconds, 3, 2_000)})
    reply = queues.expired([ExpiredRequest(SLOT, 30, (2_000, 3_203)), ExpiredRequest(OTHER, 30)])
    assert sorted(answered(reply[SLOT])) == [(6_096, entries[6_096]), (7_299, entries[7_299])]
    assert reply[OTHER] == []


@pytest.mark.parametrize("claim", [0, 1, 2047, 2048, 4094, 4095])
def test_claims_beside_each_other_are_told_apart(queues: Queues, seed: Seed, now_ms: NOW, claim: int) -> None:
    seconds = now_ms() // 1000
    near = {BIG - 1: (claim - 1) % 4096, BIG: claim, BIG - 2: (claim + 1) % 4096}
    seed(SLOT, prepare={job_id: held(seconds, 31, number) for job_id, number in near.items()})
    assert queues.expired([ExpiredRequest(SLOT, 30, (claim,))]) == {SLOT: [(BIG, held(seconds, 31, claim))]}


def test_an_entry_that_is_expired_and_under_a_claim_is_listed_once(queues: Queues, seed: Seed) -> None:
    seed(SLOT, prepare={1: held(5, 3, 7)})
    assert queues.expired([ExpiredRequest(SLOT, 30, (7,))]) == {SLOT: [(1, held(5, 3, 7))]}


def test_peek_tells_the_next_time_and_the_counts(queues: Queues, seed: Seed, now_ms: NOW) -> None:
    seed(SLOT, store={1: 1_800_000_000_123.5, 2: FAR}, prepare={3: 5.0}, dead={4: 1.0, 5: 2.0, 6: 3.0})
    before = now_ms()
    replies = queues.peek([SLOT, OTHER])
    first, second = replies[SLOT], replies[OTHER]
    assert not isinstance(first, IndexUnavailable)
    assert not isinstance(second, IndexUnavailable)
    assert first[:4] == (1_800_000_000_123, 2, 1, 3)
    assert second[:4] == (None, 0, 0, 0)
    assert before <= first.redis_now_ms <= now_ms()


def test_claims_count_up_and_show_the_others(queues: Queues, state: STATE) -> None:
    first = queues.claim([SLOT], "one")[SLOT]
    second = queues.claim([SLOT], "two")[SLOT]
    assert not isinstance(first, IndexUnavailable)
    assert not isinstance(second, IndexUnavailable)
    assert second.number == (first.number + 1) % 4096
    assert (first.others, second.others) == ({}, {first.number: "one"})
    assert queues.claim([SLOT], "one")[SLOT] == (first.number, {second.number: "two"})
    assert queues.unclaim({SLOT: [first.number]}) == {SLOT: 1}
    assert queues.unclaim({SLOT: [first.number]}) == {SLOT: 0}
    counter = str((second.number + 1) % 4096)
    assert state() == {"claims_{order.close_3}": {"next": counter, str(second.number): "two"}}


def test_a_held_number_is_passed_over_and_the_counter_goes_round(queues: Queues, server: RedisServer) -> None:
    key = queues.keys(SLOT).claims
    server.call("HSET", key, "next", 4095, "4095", "a", "0", "b", "1", "c")
    assert queues.claim([SLOT], "me")[SLOT] == (2, {4095: "a", 0: "b", 1: "c"})
    assert server.call("HGET", key, "next") == "3"


def test_several_numbers_of_several_slots_are_given_back_in_one_call(
    queues: Queues, server: RedisServer, state: STATE
) -> None:
    server.call("HSET", queues.keys(SLOT).claims, "next", 9, "4", "a", "5", "b", "6", "c")
    server.call("HSET", queues.keys(OTHER).claims, "next", 9, "4", "d")
    assert queues.unclaim({SLOT: [4, 6, 8], OTHER: [4]}) == {SLOT: 2, OTHER: 1}
    assert state() == {
        "claims_{order.close_3}": {"next": "9", "5": "b"},
        "claims_{order.close_4}": {"next": "9"},
    }


def test_a_field_of_the_claims_that_is_no_number_stops_no_one(queues: Queues, server: RedisServer) -> None:
    key = queues.keys(SLOT).claims
    for field in ("", "x", "-1", "1.5", "0x10", "nan", "9" * 30):
        server.call("HSET", key, field, "stranger")
    server.call("HSET", key, "next", "soon", "7", "a")
    claim = answered(queues.claim([SLOT], "me")[SLOT])
    assert 0 <= claim.number <= 4095
    assert claim.others == {7: "a"}
    assert queues.claim([SLOT], "me")[SLOT] == claim


@pytest.mark.parametrize("drawn", [256, 257, 4096])
def test_numbers_that_pile_up_are_released_by_age(queues: Queues, server: RedisServer, drawn: int) -> None:
    key = queues.keys(SLOT).claims
    numbers = [number % 4096 for number in range(4000, 4000 + drawn)]
    pairs = [word for number in numbers for word in (str(number), f"w{number}")]
    server.call("HSET", key, "next", (4000 + drawn) % 4096, "stranger", "x", *pairs)
    claim = queues.claim([SLOT], "me")[SLOT]
    last = {number: f"w{number}" for number in numbers[-256:]}
    assert claim == ((4000 + drawn) % 4096, last)
    assert server.call("HLEN", key) == 256 + 3
    assert queues.claim([SLOT], "me")[SLOT] == claim


def test_generations_tell_where_a_slot_was_rebuilt(queues: Queues, server: RedisServer, state: STATE) -> None:
    serving = str(server.call("INFO", "server")).split("run_id:")[1].split()[0]
    assert queues.generations([SLOT]) == {SLOT: (None, serving)}
    assert queues.set_generations({SLOT: serving}) == {SLOT: True}
    assert queues.generations([SLOT, OTHER]) == {SLOT: (serving, serving), OTHER: (None, serving)}
    assert state() == {"gen_{order.close_3}": serving}


# What can be no entry of a queue: it is removed with an alarm, reaches no worker and holds nobody up.

STRAYS = [
    "", "not-a-number", "-5", "+5", "0", "007", " 7", "7\n", "1_0", "1.5", "1e3", "\u0663", "\u00b2",
    str(2**63), "9" * 30, "9" * 5000, "{7}", "\x00",
]  # fmt: skip


def members(server: RedisServer, key: str) -> list[str]:
    return cast(list[str], server.call("ZRANGE", key, 0, -1))


def take(queues: Queues, limit: int = 9) -> Prepared:
    return answered(queues.prepare([PrepareRequest(SLOT, limit, 16, 7)])[SLOT])


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
    assert queues.ids("dead", {SLOT: 0}, 9) == {SLOT: [1]}
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
    assert peek.next_due == 1
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
