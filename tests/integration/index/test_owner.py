"""Whose index it is: that of the task table that asked first, for as long as it goes on asking."""

from __future__ import annotations

import pytest

from benchmarks.local import RedisServer
from toc.index import preflight
from toc.index.messages import Peek
from toc.index.queues import OWNER_LAPSE_SECONDS, Queues
from toc.model.errors import IndexUnavailable
from toc.model.finding import Level
from toc.model.topic import Slot

OURS, THEIRS = "a" * 32, "b" * 32
SLOT = Slot("order.close", 3)


def test_the_first_that_asks_has_it(queues: Queues) -> None:
    assert queues.owner() is None
    assert queues.own(OURS, "ours")[:3] == (OURS, "ours", 0)
    assert queues.own(THEIRS, "theirs")[:2] == (OURS, "ours")
    owner = queues.own(OURS, "ours")
    assert owner.identity == OURS
    assert queues.owner() == owner


def test_workers_are_members_until_they_leave_or_have_not_asked_for_an_hour(
    queues: Queues, server: RedisServer
) -> None:
    for member in ("a-0", "b-0", "c-0"):
        queues.own(OURS, "ours", member)
    now = int(str(server.call("HGET", "toc_owner", "at")))
    server.call("HSET", "toc_owner", "member b-0", str(now - 60), "member c-0", str(now - 3700))
    assert queues.own(THEIRS, "theirs", "d-0").members.keys() == {"a-0", "b-0"}, "d-0 is no member"
    owner = queues.own(OURS, "ours", "e-0")
    assert owner.members.keys() == {"a-0", "b-0", "e-0"}
    assert owner.alive == {"a-0", "e-0"}
    seen = queues.owner()
    assert seen is not None
    assert seen.members.keys() == owner.members.keys()
    assert queues.own(OURS, "ours", "a-0", leaves=True).members.keys() == {"b-0", "e-0"}
    server.call("HSET", "toc_owner", "at", str(now - OWNER_LAPSE_SECONDS - 1))
    assert queues.own(THEIRS, "theirs", "d-0").members.keys() == {"d-0"}


def test_who_asks_no_more_has_it_no_more(queues: Queues, server: RedisServer) -> None:
    queues.own(OURS, "ours")
    at = server.call("HGET", "toc_owner", "at")
    server.call("HSET", "toc_owner", "at", str(int(str(at)) - OWNER_LAPSE_SECONDS - 1))
    (found,) = preflight.owner(queues, THEIRS)
    assert (found.level, found.what.rpartition(": ")[2]) == (Level.WARN, "ours")
    assert queues.own(THEIRS, "theirs")[:2] == (THEIRS, "theirs")
    assert preflight.owner(queues, THEIRS) == []
    assert queues.own(OURS, "ours")[:2] == (THEIRS, "theirs")


def test_after_the_clock_of_redis_was_set_back_an_owner_that_asks_no_more_loses_it(
    queues: Queues, server: RedisServer
) -> None:
    queues.own(OURS, "ours")
    now = int(str(server.call("HGET", "toc_owner", "at")))
    server.call("HSET", "toc_owner", "at", str(now + 3600))
    assert queues.own(THEIRS, "theirs").identity == OURS
    assert 0 <= int(str(server.call("HGET", "toc_owner", "at"))) - now < 60, "its time runs from now on"


def test_namespaces_have_owners_of_their_own(queues: Queues, server: RedisServer) -> None:
    stage = Queues(server.url, namespace="stage")
    queues.own(OURS, "ours")
    assert stage.own(THEIRS, "theirs").identity == THEIRS
    stage.close()


def test_what_is_no_owner_is_written_over_and_what_is_no_hash_is_an_error(
    queues: Queues, server: RedisServer
) -> None:
    server.call("HSET", "toc_owner", "at", "soon", "name", "\xff")
    assert queues.owner() is None
    assert queues.own(OURS, "ours").identity == OURS
    server.call("SET", "toc_owner", "what is this")
    with pytest.raises(IndexUnavailable, match="WRONGTYPE"):
        queues.own(OURS, "ours")


def test_an_index_that_must_not_be_used_is_sent_nothing(queues: Queues, server: RedisServer) -> None:
    queues.add({SLOT: [(1, 1.0)]})
    queues.refuse("it belongs to others")
    refused = queues.add({SLOT: [(2, 2.0)]})[SLOT]
    assert isinstance(refused, IndexUnavailable)
    assert "it belongs to others" in str(refused)
    with pytest.raises(IndexUnavailable, match="others"):
        queues.cancel(SLOT, 1)
    assert server.call("ZCARD", "order.close_3") == 1
    queues.refuse(None)
    peek = queues.peek([SLOT])[SLOT]
    assert isinstance(peek, Peek)
    assert peek.store == 1
