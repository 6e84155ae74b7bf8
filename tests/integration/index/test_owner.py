"""Whose index it is, and whether a server is fit to hold it:
what is wrong is told from what earns a warning."""

from contextlib import closing

import pytest
import redis
from conftest import Launch
from harness.rows import known
from harness.secured import PASSWORDS, acl_lines, login

from benchmarks.local import RedisCluster, RedisServer
from toc.index import preflight
from toc.index.messages import Peek
from toc.index.preflight import examine
from toc.index.queues import OWNER_LAPSE_SECONDS, Queues
from toc.index.url import Topology
from toc.model.errors import IndexUnavailable
from toc.model.finding import Level
from toc.model.topic import Slot

# Whose index it is: that of the task table that asked first, for as long as it goes on asking.

OURS, THEIRS = "a" * 32, "b" * 32
SLOT = Slot("order.close", 3)


def test_the_first_that_asks_has_it(queues: Queues) -> None:
    assert queues.owner() is None
    assert queues.own(OURS, "ours")[:3] == (OURS, "ours", 0)
    assert queues.own(THEIRS, "theirs")[:2] == (OURS, "ours")
    owner = queues.own(OURS, "ours")
    assert owner.identity == OURS
    assert queues.owner() == owner


def test_workers_are_members_until_they_leave_or_stay_silent(queues: Queues, server: RedisServer) -> None:
    for member in ("a-0", "b-0", "c-0"):
        queues.own(OURS, "ours", member)
    now = int(str(server.call("HGET", "toc_owner", "at")))
    server.call("HSET", "toc_owner", "member b-0", str(now - 60), "member c-0", str(now - 3700))
    assert queues.own(THEIRS, "theirs", "d-0").members.keys() == {"a-0", "b-0"}, "d-0 is no member"
    owner = queues.own(OURS, "ours", "e-0")
    assert owner.members.keys() == {"a-0", "b-0", "e-0"}
    assert owner.alive == {"a-0", "e-0"}
    assert known(queues.owner()).members.keys() == owner.members.keys()
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


def test_a_redis_clock_set_back_costs_an_owner_that_asks_no_more(queues: Queues, server: RedisServer) -> None:
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


def test_what_is_no_owner_is_written_over_what_is_no_hash_fails(queues: Queues, server: RedisServer) -> None:
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
        queues.reschedule(SLOT, 1, 1.0)
    assert server.call("ZCARD", "order.close_3") == 1
    queues.refuse(None)
    peek = queues.peek([SLOT])[SLOT]
    assert isinstance(peek, Peek)
    assert peek.store == 1


# What makes a server unfit is found, named and told apart from what is merely worth a warning.


def findings(url: str) -> list[tuple[Level, str]]:
    with closing(Queues(url)) as queues:
        found = [finding for finding in examine(queues) if finding.level is not Level.OK]
    assert all(finding.do and "127.0.0.1" in finding.server for finding in found)
    return [(finding.level, finding.what) for finding in found]


def test_a_fit_server_has_no_findings(server: RedisServer) -> None:
    assert findings(server.url) == []


def test_a_fit_cluster_has_no_findings(clean_cluster: RedisCluster) -> None:
    assert findings(clean_cluster.url) == []


def test_eviction_is_refused_also_where_config_is_forbidden(launch: Launch) -> None:
    server = launch(RedisServer, config=["maxmemory-policy allkeys-lru", 'rename-command CONFIG ""'])
    ((level, what),) = findings(server.url)
    assert level is Level.REFUSE
    assert "allkeys-lru" in what


def test_one_evicting_master_of_a_cluster_is_enough(launch: Launch) -> None:
    servers = launch(RedisCluster)
    servers.nodes[2].call("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    queues = Queues(servers.url)
    (finding,) = [one for one in examine(queues) if one.level is not Level.OK]
    queues.close()
    assert (finding.level, finding.server) == (Level.REFUSE, f"127.0.0.1:{servers.nodes[2].port}")


def test_a_channel_that_is_not_granted_is_told_as_no_script_does(launch: Launch) -> None:
    server = launch(RedisServer, config=acl_lines())
    with redis.Redis("127.0.0.1", server.port, username="admin", password=PASSWORDS["admin"]) as admin:
        admin.execute_command("ACL", "SETUSER", "toc", "resetchannels")
    queues = Queues(f"redis://{login('toc')}@127.0.0.1:{server.port}")
    told = [(finding.level, finding.what) for finding in examine(queues) if "ACL" in finding.what]
    queues.close()
    assert [level for level, what in told if "PUBLISH" in what] == [Level.WARN]


def test_a_replica_is_refused(launch: Launch) -> None:
    master = launch(RedisServer)
    replica = launch(RedisServer, config=[f"replicaof 127.0.0.1 {master.port}"])
    assert [(level, "slave" in what) for level, what in findings(replica.url)] == [(Level.REFUSE, True)]


def test_no_persistence_is_a_warning_and_snapshots_are_enough(launch: Launch) -> None:
    server = launch(RedisServer, aof=False)
    ((level, what),) = findings(server.url)
    assert level is Level.WARN
    assert "append-only" in what
    server.call("CONFIG", "SET", "save", "3600 1")
    assert findings(server.url) == []


def test_a_cluster_node_alone_is_a_warning(clean_cluster: RedisCluster) -> None:
    ((level, what),) = findings(clean_cluster.nodes[0].url)
    assert level is Level.WARN
    assert "cluster" in what


def test_a_server_that_refuses_the_password_is_an_error_that_says_so(launch: Launch) -> None:
    server = launch(RedisServer, config=["requirepass right"])
    with pytest.raises(IndexUnavailable, match="check the user and password in TOC_REDIS_URL") as caught:
        findings(f"redis://:canary@127.0.0.1:{server.port}")
    assert f"127.0.0.1:{server.port}" in str(caught.value)
    assert "canary" not in str(caught.value)


def test_a_cluster_that_stops_with_one_node_is_warned_of(launch: Launch) -> None:
    servers = launch(RedisCluster)
    servers.nodes[1].call("CONFIG", "SET", "cluster-require-full-coverage", "yes")
    ((level, what),) = findings(servers.url)
    assert level is Level.WARN
    assert "cluster-require-full-coverage" in what


@pytest.mark.parametrize(("facts", "fit"), [
    ({"redis_version": "7.0.0"}, True),
    ({"redis_version": "6.2.14"}, False),
    ({"redis_version": "10.1"}, True),
    ({"redis_version": "7.2.4", "valkey_version": "8.0.1"}, True),
    ({}, False),
])  # fmt: skip
def test_servers_older_than_7_are_refused(facts: dict[str, str], fit: bool) -> None:
    fine = {"role": "master", "maxmemory_policy": "noeviction", "aof_enabled": "1"}
    found = list(preflight.unfit(fine | facts, None, None, None, Topology.SINGLE))
    assert [level for level, _, _ in found] == ([] if fit else [Level.REFUSE])
