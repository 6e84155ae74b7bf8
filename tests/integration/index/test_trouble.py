"""Servers that forget, fill up, hang, refuse or vanish; clusters whose slots move and whose masters die."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
from conftest import Launch
from fault.kit.proxy import Proxy
from fault.kit.servers import Reshard

from benchmarks.local import RedisCluster, RedisServer
from benchmarks.private import free_port
from toc.index.calls import IndexBroken, ReplyLost
from toc.index.messages import ExpiredRequest, Prepared, PrepareRequest
from toc.index.nodes import FRESH_SECONDS, RedisNode, Timeouts
from toc.index.queues import Queues
from toc.index.takes import Takes
from toc.index.wire import Disconnected, Wire
from toc.loop import Reactor
from toc.model.errors import IndexUnavailable
from toc.model.scores import fence
from toc.model.topic import Slot

# Servers that forget, fill up, hang, hang up, refuse or vanish.

SLOT = Slot("order.close", 3)
SLOTS = [Slot("order.close", number) for number in range(64)]
STORE, PREPARE = "order.close_3", "prepare_{order.close_3}"


def take(queues: Queues, slot: Slot = SLOT, limit: int = 500) -> Prepared:
    reply = queues.prepare([PrepareRequest(slot, limit, 16, 7)])[slot]
    if isinstance(reply, IndexUnavailable):
        raise reply
    return reply


# --- forgetting and filling up ---------------------------------------------------------------------------


def test_scripts_that_the_server_forgot_are_loaded_again_midway(queues: Queues, server: RedisServer) -> None:
    done = threading.Event()

    def flush() -> None:
        while not done.is_set():
            server.call("SCRIPT", "FLUSH")

    flusher = threading.Thread(target=flush)
    flusher.start()
    try:
        for turn in range(1, 31):
            added = queues.add({slot: [(turn * 64 + slot.number, 1.0)] for slot in SLOTS})
            assert added == dict.fromkeys(SLOTS, 1)
            taken = queues.prepare([PrepareRequest(slot, 9, 16, 7) for slot in SLOTS])
            for slot, reply in taken.items():
                assert not isinstance(reply, IndexUnavailable)
                assert reply.entries == [(turn * 64 + slot.number, fence(16, 7))]
            committed = queues.commit({slot: [(turn * 64 + slot.number, fence(16, 7))] for slot in SLOTS})
            assert committed == {slot: [True] for slot in SLOTS}
    finally:
        done.set()
        flusher.join()


def test_a_key_of_another_type_is_the_trouble_of_its_slot_alone(queues: Queues, server: RedisServer) -> None:
    slots = [Slot("order.close", number) for number in range(4)]
    queues.add({slot: [(1, 1.0)] for slot in slots})
    server.call("SET", queues.keys(slots[1]).dead, "what is this")
    server.call("LPUSH", queues.keys(slots[2]).generation, "and this")
    peeks, generations = queues.peek(slots), queues.generations(slots)
    refused = [isinstance(peeks[slot], IndexUnavailable) for slot in slots]
    assert refused == [False, True, False, False]
    assert "WRONGTYPE" in str(peeks[slots[1]])
    refused = [isinstance(generations[slot], IndexBroken) for slot in slots]
    assert refused == [False, True, True, False]
    assert str(generations[slots[1]]).startswith("dead_{order.close_1}: ")
    server.call("SET", queues.keys(slots[2]).claims, "and that")
    both = queues.generations(slots)[slots[2]]
    assert str(both).startswith("gen_{order.close_2} and claims_{order.close_2}: ")


# --- restarts and broken connections ---------------------------------------------------------------------


def test_connections_that_the_server_closed_when_idle_are_hidden(queues: Queues, server: RedisServer) -> None:
    queues.add({SLOT: [(1, 1.0)]})
    server.call("CLIENT", "KILL", "TYPE", "normal")
    time.sleep(2 * FRESH_SECONDS)
    assert [job_id for job_id, _ in take(queues).entries] == [1]


def test_a_connection_that_is_given_back_after_the_end_is_closed(queues: Queues) -> None:
    node = queues.nodes.master(0)
    lent = node.take()
    queues.close()
    node.give(lent)
    with pytest.raises(Disconnected):
        lent.ask("PING")
    again = node.take()  # the object stays usable, and keeps what is opened from now on
    node.give(again)
    assert node.take() is again
    node.give(again)


def test_after_a_switchover_nobody_goes_on_with_the_old_master(launch: Launch) -> None:
    """Behind one address: it lives on, as a replica, and keeps its connections."""
    old, new = launch(RedisServer, aof=False), launch(RedisServer, aof=False)
    with Proxy(old.port) as address, closing(Queues(f"redis://127.0.0.1:{address.port}")) as queues:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(queues.peek, [SLOTS] * 200))  # over many connections
        address.target = new.port
        old.call("REPLICAOF", "127.0.0.1", new.port)
        assert queues.add({SLOT: [(1, 1.0)]}) == {SLOT: 1}
        assert new.call("ZCARD", STORE) == 1
        assert take(queues).entries == [(1, fence(16, 7))]


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def test_what_may_be_repeated_is_sent_once_more_when_its_reply_is_lost(
    proxy: Proxy, state: Callable[[], dict[str, Any]]
) -> None:
    through = Queues(f"redis://127.0.0.1:{proxy.port}")
    through.add({SLOT: [(1, 1.0)]})
    proxy.eat(b"EVALSHA")
    assert through.add({SLOT: [(2, 2.0)]}) == {SLOT: 0}  # the first send had added it
    assert proxy.stats.eaten == 1
    proxy.eat(b"EVALSHA")
    first = through.claim([SLOT], "me")[SLOT]
    assert proxy.stats.eaten == 2
    assert through.claim([SLOT], "me")[SLOT] == first
    through.close()
    assert state()[STORE] == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize("first", [True, False])
def test_a_reply_that_comes_byte_by_byte_is_not_waited_for_longer_than_any(proxy: Proxy, first: bool) -> None:
    with closing(Queues(f"redis://127.0.0.1:{proxy.port}", timeouts=Timeouts(1.5, 0.5))) as through:
        if not first:
            through.add({slot: [(1, 1.0)] for slot in SLOTS})
        proxy.drip(0.01)
        found = through.peek(SLOTS)
        assert all(isinstance(peek, IndexUnavailable) for peek in found.values())
        assert "AttributeError" not in str(found)


def test_a_server_that_hangs_costs_its_timeouts_once_and_is_sent_nothing_more(launch: Launch) -> None:
    server = launch(RedisServer)
    queues = Queues(server.url, timeouts=Timeouts(1.5, 1.5))
    queues.add({SLOT: [(1, 1.0)]})
    take(queues)
    server.pause()
    lost = queues.prepare([PrepareRequest(SLOT, 9, 16, 7)])[SLOT]
    assert isinstance(lost, ReplyLost)
    queues.peek([SLOT])
    for _ in range(3):
        refused = queues.prepare([PrepareRequest(SLOT, 9, 16, 7)])[SLOT]
        assert isinstance(refused, IndexUnavailable)
        assert not isinstance(refused, ReplyLost)  # it was never sent
    server.resume()
    deadline = time.monotonic() + 60
    while isinstance(queues.peek([SLOT])[SLOT], IndexUnavailable):
        assert time.monotonic() < deadline
    queues.close()


# --- refusals --------------------------------------------------------------------------------------------


def test_a_publish_that_is_refused_does_not_fail_the_script(launch: Launch) -> None:
    server = launch(RedisServer)
    server.call("ACL", "SETUSER", "toc", "on", ">x", "+@all", "~*", "resetchannels")
    queues = Queues(f"redis://toc:x@127.0.0.1:{server.port}")
    assert queues.add({SLOT: [(1, 1.0)]}) == {SLOT: 1}
    assert "wake_{order.close_3}" in str(server.call("ACL", "LOG"))
    queues.close()


def test_a_call_that_must_not_be_sent_any_more_ends_with_the_reason_and_raises_nothing(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused_meanwhile(node: RedisNode, _patience: float | None = None) -> Wire:
        queues.refuse("it belongs to another task table")
        raise IndexUnavailable(f"{node.address} is away")

    monkeypatch.setattr(RedisNode, "take", refused_meanwhile)
    assert "another task table" in str(queues.peek([SLOT])[SLOT])


# --- threads and processes -------------------------------------------------------------------------------


def test_a_forked_child_does_not_wait_for_what_a_thread_of_its_parent_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a sentinel that never answers
        port = silent.getsockname()[1]
        queues = Queues(f"redis+sentinel://127.0.0.1:{port}/main")
        asking = threading.Thread(target=queues.peek, args=[[SLOT]])
        asking.start()
        connection, _ = silent.accept()  # so the thread reads the map
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            queues.close()
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        connection.close()
    asking.join()
    queues.close()
    assert ended == 0, "it waits for a lock"


def taking(queues: Queues) -> tuple[Takes, Reactor]:
    reactor = Reactor()
    return Takes(queues, reactor), reactor


def answers(takes: Takes, reactor: Reactor, count: int = 1) -> list[tuple[PrepareRequest, object, float]]:
    """What so many requests are answered."""
    found: list[tuple[PrepareRequest, object, float]] = []
    while len(found) < count:
        reactor.sleep(0.1)
        reactor.hear()
        found += takes.answers()
    return found


def test_without_threads_a_take_that_needs_one_is_refused_and_the_next_one_works(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queues.add({SLOT: [(1, 1.0)]})
    takes, reactor = taking(queues)
    queues.close()
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        takes.begin([PrepareRequest(SLOT, 500, 16, 7)])
        ((_, refused, at),) = answers(takes, reactor)
    assert isinstance(refused, IndexUnavailable)
    assert "no thread" in str(refused)
    assert began <= at <= time.monotonic(), "what it held up is told by when it began"
    takes.begin([PrepareRequest(SLOT, 500, 16, 7)])
    ((_, taken, _),) = answers(takes, reactor)
    assert isinstance(taken, Prepared)
    assert [job_id for job_id, _ in taken.entries] == [1]


def test_a_slot_that_has_just_moved_to_a_node_with_a_take_under_way_is_refused_until_that_has_ended(
    launch: Launch,
) -> None:
    server = launch(RedisServer)
    with closing(Queues(server.url, timeouts=Timeouts(60.0, 60.0))) as queues:
        queues.add({slot: [(slot.number + 1, 1.0)] for slot in SLOTS[:2]})
        takes, reactor = taking(queues)
        server.pause()
        for slot in SLOTS[:2]:  # the second is on this node since the caller has looked
            takes.begin([PrepareRequest(slot, 500, 16, 7)])
        server.resume()
        found = {request.slot: result for request, result, _ in answers(takes, reactor, 2)}
        first, second = (found[slot] for slot in SLOTS[:2])
        assert isinstance(first, Prepared)
        assert [job_id for job_id, _ in first.entries] == [1]
        assert isinstance(second, IndexUnavailable)
        assert not isinstance(second, ReplyLost)
        takes.begin([PrepareRequest(SLOTS[1], 500, 16, 7)])
        ((_, again, _),) = answers(takes, reactor)
        assert isinstance(again, Prepared)
        assert [job_id for job_id, _ in again.entries] == [2]


def test_a_server_with_all_the_clients_it_takes_is_used_over_open_connections(launch: Launch) -> None:
    server = launch(RedisServer)
    queues, late = Queues(server.url), Queues(server.url)
    with closing(queues), closing(late), ExitStack() as stack:
        assert not isinstance(queues.add({SLOT: [(1, 1.0)]})[SLOT], IndexUnavailable)  # one is open
        server.call("CONFIG", "SET", "maxclients", 4)
        while True:
            other = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            other.sendall(b"PING\r\n")
            if b"max number of clients" in other.recv(100):
                break
        with ThreadPoolExecutor(3) as threads:  # each waits its turn for half a second at most
            replies = list(threads.map(lambda n: queues.add({SLOT: [(n, 1.0)]})[SLOT], range(2, 100)))
        assert not [reply for reply in replies if isinstance(reply, IndexUnavailable)]
        refused = late.add({SLOT: [(400, 1.0)]})[SLOT]
        assert isinstance(refused, IndexUnavailable)
        assert 'said "max number of clients reached": raise its maxclients' in str(refused)


# Clusters whose slots move and whose masters die, and masters behind sentinels.


@pytest.fixture
def cluster(clean_cluster: RedisCluster) -> Iterator[Queues]:
    with closing(Queues(clean_cluster.url)) as queues:
        yield queues


def test_the_slots_of_a_topic_are_on_all_masters(
    cluster: Queues, clean_cluster: RedisCluster, state_of: Callable[[RedisServer], dict[str, Any]]
) -> None:
    assert len(cluster.nodes.masters()) == 3
    assert cluster.add({slot: [(slot.number + 1, 1.0)] for slot in SLOTS}) == dict.fromkeys(SLOTS, 1)
    for slot, reply in cluster.prepare([PrepareRequest(slot, 9, 16, 7) for slot in SLOTS]).items():
        assert not isinstance(reply, IndexUnavailable)
        assert [job_id for job_id, _ in reply.entries] == [slot.number + 1]
    held = [state_of(node) for node in clean_cluster.nodes]
    assert all(held)
    assert sum(map(len, held)) == 64


def test_keys_are_sent_to_their_node_not_redirected(cluster: Queues, clean_cluster: RedisCluster) -> None:
    cluster.peek(SLOTS)

    def redirected() -> int:
        return sum(
            str(node.call("INFO", "errorstats")).count("errorstat_MOVED") for node in clean_cluster.nodes
        )

    for node in clean_cluster.nodes:
        node.call("CONFIG", "RESETSTAT")
    cluster.add({slot: [(1, 1.0)] for slot in SLOTS})
    assert redirected() == 0


def test_an_unfinished_move_is_followed_by_ask_and_its_end_by_moved(
    cluster: Queues, clean_cluster: RedisCluster
) -> None:
    slot = SLOTS[0]
    cluster.add({slot: [(1, 1.0)]})
    hash_slot = cluster.keys(slot).hash_slot
    mover = Reshard(clean_cluster)
    home = mover.owner(hash_slot)
    away = (home + 1) % 3
    source = clean_cluster.nodes[home]
    assert mover.begin(hash_slot, away) == home
    for node in clean_cluster.nodes:
        node.call("CONFIG", "RESETSTAT")
    mover.carry(hash_slot, home, away)
    # One key, so that the target can serve it alone; what needs a key that is not there is refused.
    assert cluster.purge_dead({slot: [7]}) == {slot: 0}
    assert "errorstat_ASK" in str(source.call("INFO", "errorstats"))
    refused = cluster.add({slot: [(2, 1.0)]})[slot]
    assert isinstance(refused, IndexUnavailable)
    assert "being moved" in str(refused)
    mover.end(hash_slot, home, away)
    assert cluster.add({slot: [(2, 1.0)]}) == {slot: 1}
    assert "errorstat_MOVED" in str(source.call("INFO", "errorstats"))
    mover.move(hash_slot, home)


def test_a_server_that_is_no_cluster_is_named_as_such(clean_redis: RedisServer) -> None:
    queues = Queues(f"redis+cluster://127.0.0.1:{clean_redis.port}")
    results = queues.expired([ExpiredRequest(slot, 30) for slot in SLOTS])
    assert all("part of a cluster" in str(result) for result in results.values())
    queues.close()


def test_a_node_that_has_left_a_cluster_or_is_not_in_it_yet_hides_no_other(
    clean_cluster: RedisCluster, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.shuffle", lambda _: None)  # it is asked first
    gone = launch(RedisServer, config=["cluster-enabled yes", f"cluster-port {free_port()}"])
    with closing(Queues(f"redis+cluster://127.0.0.1:{gone.port},{clean_cluster.url[16:]}")) as queues:
        assert queues.add({slot: [(1, 1.0)] for slot in SLOTS}) == dict.fromkeys(SLOTS, 1)
