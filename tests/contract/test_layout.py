"""What other tools read: tables, columns, ids, keys, scores and znodes, as the contract spells them."""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from contract.system import TOPICS, Contract
from contract.test_life import ms
from harness import secured
from harness.rows import known
from kazoo.client import KazooClient  # type: ignore[import-untyped]  # it ships no types

from benchmarks.local import MariaDB, ZooKeeper
from toc import DedupConflict, NewTask, TaskStatus

# What other tools read: tables, columns, ids, keys and scores, as the contract spells them.

EPOCH_2020 = datetime(2020, 1, 1, tzinfo=UTC)


def crc(text: str) -> int:
    return zlib.crc32(text.encode())


def test_tables_are_spread_over_databases_by_number_and_topics_live_in_the_first(contract: Contract) -> None:
    found = {
        (row["s"], row["t"])
        for row in contract.query(
            "SELECT table_schema AS s, table_name AS t FROM information_schema.tables "
            "WHERE table_schema LIKE %s AND table_name LIKE %s",
            contract.prefix.replace("_", r"\_") + "%",
            r"timeout\_%",
        )
    }
    kinds = ("task", "body", "schedule")
    expected = {(f"{contract.prefix}{n % 2}", f"timeout_{kind}_{n:04d}") for n in range(8) for kind in kinds}
    assert expected <= found
    assert {name for name in found - expected if re.search(r"\d$", name[1])} == set(), "a table too many"
    assert (f"{contract.prefix}0", "timeout_topic") in found
    assert (f"{contract.prefix}1", "timeout_topic") not in found


def test_columns_have_the_types_of_the_contract(contract: Contract) -> None:
    columns = {
        row["n"]: (row["t"], row["k"], row["l"])
        for row in contract.query(
            "SELECT column_name AS n, column_type AS t, column_key AS k, character_maximum_length AS l "
            "FROM information_schema.columns WHERE table_schema = %s AND table_name = 'timeout_task_0003'",
            f"{contract.prefix}1",
        )
    }
    for name, kind in {
        "job_id": "bigint.* unsigned", "biz_id": "bigint.* unsigned", "biz_type": "bigint.* unsigned",
        "gmt_create": r"datetime\(3\)", "gmt_modified": r"datetime\(3\)", "action_time": r"datetime\(3\)",
        "status": "tinyint.*", "attribute": "varchar.*", "version": ".*", "attempts": ".*", "slot_crc": ".*",
        "slot_amount": ".*", "biz_key": ".*", "dedup_key": ".*", "last_error": ".*",
    }.items():  # fmt: skip
        assert re.fullmatch(kind, columns[name][0]), name
    assert columns["job_id"][1] == "PRI"
    assert columns["attribute"][2] >= 4096


@pytest.mark.parametrize("biz_id", [0, 1, 42, 2**63 - 1, "order-42", "Grüße ☃", "42"])
def test_a_task_is_stored_and_indexed_where_the_contract_says(contract: Contract, biz_id: int | str) -> None:
    before = datetime.now(UTC)
    job_id = contract.center.submit("c.plain", biz_id=biz_id, delay=3600, attribute={"a": "ä"})
    after = datetime.now(UTC)
    code = crc(str(biz_id))
    made = EPOCH_2020 + timedelta(milliseconds=job_id >> 22)
    assert before - timedelta(milliseconds=1) <= made <= after + timedelta(seconds=1)
    assert job_id >> 12 & 1023 == code & 1023
    row = contract.row(job_id)  # looks in table CRC32(str(biz_id)) mod 8, database mod 2
    assert (job_id >> 12 & 1023) % 8 == code % 8
    if isinstance(biz_id, str):
        assert row["biz_id"] == int.from_bytes(hashlib.sha256(biz_id.encode()).digest()[:8], "big") >> 1
        assert bytes(row["biz_key"]).decode() == biz_id
    else:
        assert row["biz_id"] == biz_id
        assert row["biz_key"] is None
    assert (row["biz_type"], row["status"]) == (1, 0)
    assert (row["slot_crc"], row["slot_amount"]) == (code, 4)
    score = contract.scores(job_id)
    assert score == {f"c.plain_{code % 4}": float(ms(row["action_time"]))}
    task = known(contract.center.get(job_id))
    assert ms(task.action_time) == ms(row["action_time"])
    assert task.biz_id == biz_id
    assert task.attribute == {"a": "ä"}
    assert (task.attempt, task.version, task.status) == (1, 0, TaskStatus.PENDING)
    assert [found.job_id for found in contract.center.find(biz_id=biz_id)] == [job_id]


@pytest.mark.parametrize("micro", [0, 1, 499, 500, 999])
def test_action_time_is_rounded_up_to_a_millisecond_in_row_score_and_task(idle: Contract, micro: int) -> None:
    asked = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=123_000 + micro)
    zoned = asked.astimezone(timezone(timedelta(hours=5, minutes=45)))
    job_id = idle.center.submit("c.plain", biz_id=1000 + micro, action_time=zoned)
    expected = ms(asked) + (1 if micro else 0)
    task = known(idle.center.get(job_id))
    assert task.action_time.utcoffset() == timedelta(0)
    assert ms(task.action_time) == expected
    assert task.action_time.microsecond % 1000 == 0
    assert ms(idle.row(job_id)["action_time"]) == expected
    assert list(idle.scores(job_id).values()) == [float(expected)] * idle.has_index


def test_slot_basis_decides_the_slot_and_never_the_table(contract: Contract) -> None:
    for basis in ("warehouse-1", "warehouse-2", "ä"):
        job_id = contract.center.submit("c.plain", biz_id=77, delay=3600, slot_basis=basis)
        row = contract.row(job_id)
        assert job_id >> 12 & 1023 == crc("77") & 1023
        assert row["slot_crc"] == crc(basis)
        assert list(contract.scores(job_id)) == [f"c.plain_{crc(basis) % 4}"]


def test_text_and_number_of_the_same_digits_are_two_biz_ids(idle: Contract) -> None:
    number = idle.center.submit("c.plain", biz_id=987, delay=3600)
    text = idle.center.submit("c.plain", biz_id="987", delay=3600)
    hashed = int.from_bytes(hashlib.sha256(b"987").digest()[:8], "big") >> 1
    assert [task.job_id for task in idle.center.find(biz_id=987)] == [number]
    assert [task.job_id for task in idle.center.find(biz_id="987")] == [text]
    assert idle.center.find(biz_id=hashed) == []
    assert list(idle.center.cancel_by_biz("c.plain", biz_id="987")) == [text]
    assert idle.status(number) == 0


def test_submit_many_is_as_submit_in_the_order_given(idle: Contract) -> None:
    tasks = [NewTask("c.plain", biz_id=5000 + n, delay=timedelta(hours=1)) for n in range(300)]
    tasks += [NewTask("c.thrice", biz_id=f"many-{n}", delay=3600.5) for n in range(300)]
    job_ids = idle.center.submit_many(tasks)
    assert len(set(job_ids)) == 600
    for task, job_id in list(zip(tasks, job_ids, strict=True))[::37]:
        assert job_id >> 12 & 1023 == crc(str(task.biz_id)) & 1023
        found = known(idle.center.get(job_id))
        assert (found.biz_id, found.topic) == (task.biz_id, task.topic)
        amount = 4 if task.topic == "c.plain" else 2
        slot = crc(str(task.biz_id)) % amount
        assert list(idle.scores(job_id)) == [idle.slot(task.topic, slot)] * idle.has_index


def test_a_dedup_key_is_compared_byte_for_byte(idle: Contract) -> None:
    keys = ["Key", "key", "key ", " key", "kéy", "ke\u0301y", "KEY", "key\u200b", "k"]
    ids = [
        idle.center.submit("c.plain", biz_id=4242, delay=3600, dedup_key=key, attribute={"k": 1})
        for key in keys
    ]
    assert len(set(ids)) == len(keys)
    again = [
        idle.center.submit("c.plain", biz_id=4242, delay=7200, dedup_key=key, attribute={"k": 1})
        for key in keys
    ]
    assert again == ids
    with pytest.raises(DedupConflict):
        idle.center.submit("c.plain", biz_id=4242, delay=3600, dedup_key="key", attribute={"k": 2})
    other = idle.center.submit("c.thrice", biz_id=4242, delay=3600, dedup_key="key")
    assert other not in ids
    idle.center.cancel(ids[0])
    assert idle.center.submit("c.plain", biz_id=4242, delay=1, dedup_key="Key", attribute={"k": 1}) == ids[0]
    assert idle.status(ids[0]) == 3


def test_after_a_change_of_slot_amount_a_task_stays_in_the_slot_of_its_row(contract: Contract) -> None:
    assert contract.toc("topic", "create", "c.grow", "--biz-type", "50", "--slots", "2").returncode == 0
    biz = next(n for n in range(100) if crc(str(n)) % 8 >= 2)
    old = contract.center.submit("c.grow", biz_id=biz, delay=3600)
    assert contract.toc("topic", "alter", "c.grow", "--slots", "8").returncode == 0
    from toc import TimeoutCenter

    with TimeoutCenter(contract.settings) as fresh:
        new = fresh.submit("c.grow", biz_id=biz, delay=3600)
        assert contract.row(old)["slot_amount"] == 2
        assert contract.row(new)["slot_amount"] == 8
        assert list(contract.scores(new)) == [f"c.grow_{crc(str(biz)) % 8}"]
        later = datetime.now(UTC) + timedelta(hours=2)
        fresh.reschedule(old, action_time=later)
        assert list(contract.scores(old)) == [f"c.grow_{crc(str(biz)) % 2}"]
        fresh.cancel(old)
        assert contract.scores(old) == {}


# Several daemons on Redis Cluster and ZooKeeper: znodes, hand-over, known and silent deaths, secrets.


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
    slots, workers = contract.json("slots"), contract.json("workers")
    assert len([row for row in slots if str(row.get("slot", row)).find("~") < 0]) >= TASK_SLOTS
    refused = contract.toc("drain", workers[0]["worker"])
    assert refused.returncode == 1, "it would do nothing"
    assert "give its host, host-a" in refused.stderr
    assert contract.toc("drain", "host-a").returncode == 0
    assert client.exists(f"{root}/drain/host-a")
    assert contract.toc("undrain", "host-a").returncode == 0
    assert not client.exists(f"{root}/drain/host-a")

    first.terminate()
    assert first.wait(60) == 0
    assert client.get_children(f"{root}/workers") == []
    assert _slots(client, root) == {}


def _task_slots(client: KazooClient, root: str) -> int:
    return sum("~" not in name for name in _slots(client, root))
