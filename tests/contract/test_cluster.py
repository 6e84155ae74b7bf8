"""Several daemons on Redis Cluster and ZooKeeper: znodes, hand-over, known and silent deaths, secrets."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.system import TOPICS, Contract
from harness import secured
from kazoo.client import KazooClient  # type: ignore[import-untyped]  # it ships no types

from benchmarks.local import MariaDB, ZooKeeper


@pytest.fixture
def cluster(
    tmp_path: Path, mariadb: MariaDB, database_prefix: str, zookeeper: ZooKeeper, zookeeper_root: str
) -> Iterator[tuple[Contract, KazooClient]]:
    """A system under ZooKeeper, and a client that looks at its znodes."""
    with secured.redis_server(tmp_path / "redis") as own:
        one = Contract(
            tmp_path, own, mariadb, database_prefix, zookeeper=zookeeper.url, cluster=zookeeper_root
        )
        client = secured.zookeeper_client(zookeeper)
        client.start(10)
        try:
            one.create_topics()
            yield one, client
        finally:
            one.stop()
            client.stop()
            client.close()


def _slots(client: KazooClient, root: str) -> dict[str, str]:
    """Slot -> worker_id, by the ephemeral claims."""
    if not client.exists(f"{root}/slots"):
        return {}
    found = {}
    for name in client.get_children(f"{root}/slots"):
        try:
            data, stat = client.get(f"{root}/slots/{name}")
        except Exception:  # it went between the two questions
            continue
        assert stat.ephemeralOwner
        found[name] = json.loads(data)["worker_id"]
    return found


HANDLED = TOPICS.keys() - {"c.expires"}
TASK_SLOTS = sum(int(TOPICS[name][TOPICS[name].index("--slots") + 1]) for name in HANDLED)
TABLES = 8


def test_znodes_are_where_the_contract_says_and_follow_daemons(cluster: tuple[Contract, KazooClient]) -> None:
    contract, client = cluster
    root = f"/toc/{contract.env['TOC_CLUSTER']}"
    first = contract.start("host-a", processes=2)
    contract.wait(lambda: _task_slots(client, root) == TASK_SLOTS, "every slot is claimed")
    contract.wait(lambda: len(client.get_children(f"{root}/workers")) == 2, "both workers are registered")
    for worker in client.get_children(f"{root}/workers"):
        data, stat = client.get(f"{root}/workers/{worker}")
        assert stat.ephemeralOwner
        facts = json.loads(data)
        assert facts["host"] == "host-a"
        assert {"pid", "weight", "topics"} <= set(facts)
        assert "c.plain" in facts["topics"]
        assert not [name for name in facts["topics"] if name.startswith("~")], "topics, and nothing else"
        os.kill(facts["pid"], 0)
    tables = int(contract.env["TOC_TABLES"])
    contract.wait(
        lambda: sum("~" in name for name in _slots(client, root)) == tables, "every table is swept", 20
    )
    assert "c.plain" in client.get_children(f"{root}/assignment")
    assert not client.get(f"{root}/assignment/c.plain")[1].ephemeralOwner

    second = contract.start("host-b", processes=2)
    contract.wait(
        lambda: (
            len({w for w in _slots(client, root).values() if "host-b" in w}) == 2
            and _task_slots(client, root) == TASK_SLOTS
            and _balanced(client, root)
        ),
        "host-b takes its share",
    )
    listed = contract.json("workers")
    assert {row["host"] for row in listed} == {"host-a", "host-b"}
    slots = contract.json("slots")
    assert len([row for row in slots if str(row.get("slot", row)).find("~") < 0]) >= TASK_SLOTS

    refused = contract.toc("drain", listed[0]["worker"])
    assert refused.returncode == 1, "it would do nothing"
    assert f"give its host, {listed[0]['host']}" in refused.stderr
    assert contract.toc("drain", "host-a").returncode == 0
    contract.wait(
        lambda: (
            all("host-b" in w for w in _slots(client, root).values())
            and _task_slots(client, root) == TASK_SLOTS
        ),
        "host-a is drained",
    )
    assert client.exists(f"{root}/drain/host-a")
    job_id = contract.center.submit("c.plain", biz_id=1, delay=0.05)
    contract.wait(lambda: contract.status(job_id) == 2, "tasks run meanwhile")
    assert contract.toc("undrain", "host-a").returncode == 0
    contract.wait(lambda: any("host-a" in w for w in _slots(client, root).values()), "host-a is back")

    second.terminate()
    assert second.wait(60) == 0
    contract.wait(
        lambda: (
            all("host-a" in w for w in _slots(client, root).values())
            and _task_slots(client, root) == TASK_SLOTS
        ),
        "host-a has all",
    )
    first.terminate()
    assert first.wait(60) == 0
    assert client.get_children(f"{root}/workers") == []
    assert _slots(client, root) == {}


def _balanced(client: KazooClient, root: str) -> bool:
    """Whether both hosts own about as many slots, those of the tables too, all of which are claimed."""
    shares = list(_slots(client, root).values())
    on_a = sum("host-a" in worker for worker in shares)
    return len(shares) == TASK_SLOTS + TABLES and abs(on_a - (len(shares) - on_a)) <= 3


def _task_slots(client: KazooClient, root: str) -> int:
    return sum("~" not in name for name in _slots(client, root))
