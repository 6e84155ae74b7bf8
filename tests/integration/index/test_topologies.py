"""Clusters whose slots move and whose masters die, and masters behind sentinels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Launch
from fault.kit.servers import Reshard, Sentinel, caught_up
from harness.patience import until

from benchmarks.local import RedisCluster, RedisServer
from toc.index.messages import ExpiredRequest, Prepared, PrepareRequest
from toc.index.queues import Queues
from toc.index.takes import Takes
from toc.loop import Reactor
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot

SLOTS = [Slot("order.close", number) for number in range(64)]


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


def test_keys_are_sent_to_their_node_without_a_redirection(
    cluster: Queues, clean_cluster: RedisCluster
) -> None:
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


def test_after_a_failover_the_new_master_is_asked_of_the_sentinels(launch: Launch, tmp_path: Path) -> None:
    master = launch(RedisServer)
    replica = launch(RedisServer, config=[f"replicaof 127.0.0.1 {master.port}"])
    assert until(lambda: "master_link_status:up" in str(replica.call("INFO", "replication")), 60)
    with Sentinel(tmp_path / "sentinel", master=master) as sentinel:
        assert until(lambda: "slaves=1" in str(sentinel.call("INFO", "sentinel")), 60)
        queues = Queues(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main")
        assert queues.add({SLOTS[0]: [(1, 1.0)]}) == {SLOTS[0]: 1}
        assert [node.address.port for node in queues.nodes.masters()] == [master.port]
        assert until(lambda: caught_up(replica, master), 60)
        master.kill()
        assert until(lambda: queues.add({SLOTS[0]: [(2, 2.0)]})[SLOTS[0]] == 1, 60)
        assert [node.address.port for node in queues.nodes.masters()] == [replica.port]
        reply = queues.prepare([PrepareRequest(SLOTS[0], 9, 16, 7)])[SLOTS[0]]
        assert not isinstance(reply, IndexUnavailable)
        assert [job_id for job_id, _ in reply.entries] == [1, 2]
        wrong = Queues(f"redis+sentinel://127.0.0.1:{sentinel.port}/other")
        refused = wrong.peek(SLOTS[:1])[SLOTS[0]]
        assert isinstance(refused, IndexUnavailable)
        assert "do not know the service 'other'" in str(refused)
        for one in (queues, wrong):
            one.close()


def test_a_server_that_is_no_cluster_is_named_as_such(clean_redis: RedisServer) -> None:
    queues = Queues(f"redis+cluster://127.0.0.1:{clean_redis.port}")
    results = queues.expired([ExpiredRequest(slot, 30) for slot in SLOTS])
    assert all("part of a cluster" in str(result) for result in results.values())
    queues.close()


def test_a_master_that_hangs_holds_up_no_take_of_the_others_and_its_answer_comes_late(launch: Launch) -> None:
    servers = launch(RedisCluster)
    queues = Queues(servers.url)
    queues.add({slot: [(1, 1.0)] for slot in SLOTS})
    peeked = queues.peek(SLOTS)
    assert not any(isinstance(peek, IndexUnavailable) for peek in peeked.values())
    requests = [PrepareRequest(slot, 9, 16, 7) for slot in SLOTS]
    hung = servers.nodes[1]
    own = {slot for slot in SLOTS if _port(queues, slot) == hung.port}
    reactor, answers = Reactor(), dict[Slot, object]()
    takes = Takes(queues, reactor)

    def heard() -> set[Slot]:
        reactor.sleep(0.1)
        reactor.hear()
        answers.update((request.slot, answer) for request, answer, _ in takes.answers())
        return set(answers)

    hung.pause()
    try:
        takes.begin(requests)
        assert until(lambda: heard() >= set(SLOTS) - own, 30)
        assert heard() == set(SLOTS) - own
        assert list(takes.under_way) == [takes.node(slot) for slot in own][:1]
    finally:
        hung.resume()
    assert until(lambda: heard() == set(SLOTS), 30)
    assert all(isinstance(answer, Prepared) and len(answer.entries) == 1 for answer in answers.values())
    assert not takes.under_way
    assert until(lambda: not any(isinstance(one, IndexUnavailable) for one in queues.peek(own).values()), 30)
    queues.close()


def _port(queues: Queues, slot: Slot) -> int:
    return queues.nodes.master(queues.keys(slot).hash_slot).address.port
