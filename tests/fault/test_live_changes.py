"""An operator changes everything that can be changed while it runs, in one run under load.

By the commands of ``toc``, on a cluster of three hosts. Nothing is lost or run twice, and no try is burned.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fault.kit.load import TOPICS, Load
from fault.kit.operated import OperatedCluster
from fault.kit.table import lateness, left, overdue

from toc import TaskStatus

HOSTS = ("host1", "host2", "host3")
RATE = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OperatedCluster]:
    one = OperatedCluster(tmp_path)
    try:
        yield one
    finally:
        one.stop()


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_all_that_can_be_changed_is_changed_under_load_and_nothing_is_lost_doubled_or_burned(
    cluster: OperatedCluster,
) -> None:
    run, wait = cluster.run, cluster.wait
    system, client = cluster.system, cluster.system.client
    for host in HOSTS:
        run(f"ssh {host} systemctl start toc-worker")
    wait(cluster.even, "all hosts have their slots")
    took: dict[str, float] = {}

    def timed(what: str, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        wait(condition, what)
        took[what] = time.monotonic() - began

    def consumed(amount: int) -> bool:
        """Whether so many slots of each topic are owned, and no more."""
        owned = [row["slot"] for row in cluster.json("toc slots") if row["owner"]]
        return all(sum(slot.startswith(f"{name}_") for slot in owned) == amount for name in TOPICS)

    with Load(client, rate=RATE, ahead=(0.2, 2.0), fail=0.1) as load:

        def more(count: int = 2 * RATE) -> None:
            """Let the load go on for a while under what was changed."""
            until = len(load.job_ids) + count
            wait(lambda: len(load.job_ids) >= until, "the load goes on")

        more()
        for amount in (16, 32):
            for name in TOPICS:
                said = json.loads(run(f"toc topic alter {name} --slots {amount} --json"))
                assert said["slot_amount"] == amount
            timed(f"{amount} slots each, and no others", partial(consumed, amount))
            more()

        for name in TOPICS:
            run(
                f"toc topic alter {name} --retries 8 --backoff-base 100ms --backoff-cap 300ms "
                f"--prepare-timeout 5 --max-runtime 60 --concurrency 2"
            )
        stubborn = [
            client.submit(name, biz_id=n, delay=5, attribute={"fail": 6}) for n, name in enumerate(TOPICS)
        ]  # more than there were tries before; once every process has seen the change
        timed("six tries failed, the seventh did not", lambda: _all(cluster, stubborn, TaskStatus.PROCESSED))
        more()
        for name in TOPICS:
            run(f"toc topic alter {name} --concurrency 0")

        topic, rate = TOPICS[0], 40
        with system.recorder.fault("other", note="paused"):
            run(f"toc topic pause {topic}")
            wait(lambda: _paused(cluster, topic), "nothing of it starts any more")
            more(6 * RATE)
            resumed = time.time()
            run(f"toc topic resume {topic} --rate {rate}")
            wait(lambda: cluster.most_overdue() < 1000, "what waited has run")
        backlog = _backlog(cluster, resumed)
        spread = backlog[-1][0] - backlog[0][0]
        assert len(backlog) > 60
        assert spread > 0.7 * len(backlog) / rate, (
            f"{len(backlog)} tasks that waited started within {spread:.1f} s"
        )
        half = len(backlog) // 2
        assert sum(due for _, due in backlog[:half]) < sum(due for _, due in backlog[-half:]), "oldest first"
        more()

        before = time.time()
        run("toc drain host2")
        timed("host2 drained", lambda: cluster.owned("host2") == 0)
        run("toc undrain host2")
        timed("host2 has its share again", lambda: cluster.even() and cluster.owned("host2") > 0)
        slot = f"{topic}_0"
        for host in HOSTS:
            run(f"toc pin {slot} {host}")
            timed(f"{slot} pinned to {host}", partial(_owned_by, cluster, slot, host))
        run(f"toc unpin {slot}")
        run("toc weight host1 3")
        timed("host1 weighs three times as much", lambda: cluster.owned("host1") > cluster.owned("host2") * 2)
        run("toc unweight host1")
        assert isinstance(cluster.json("toc rebalance --dry-run"), list)
        run("toc rebalance")
        timed("rebalanced", lambda: cluster.even() and cluster.json("toc rebalance --dry-run") == [])
        assert run("toc intents --json").strip() == "[]"
        moving = lateness(system, before, time.time() - 1)
        more()

        for host in HOSTS:
            run(f"ssh {host} systemctl restart toc-worker")
            timed(f"{host} restarted", cluster.even)
        more()

    assert not load.errors, load.said
    wait(lambda: not overdue(system, 10), f"all has ended: {left(system)}")
    verdict = system.verdict(settle=5)
    print(verdict)
    print("; ".join(f"{what} after {seconds:.1f} s" for what, seconds in took.items()))
    print("while slots moved, ms late: p50 {:.0f} p99 {:.0f} max {:.0f}".format(*moving))
    assert verdict.clean, f"{verdict}\n{system.logs()}"
    assert not verdict.duplicates, verdict
    rows = system.center.store.read([*load.job_ids, *stubborn]).values()
    burned = [
        row.job_id
        for row in rows
        if row.status == TaskStatus.PROCESSED
        and (row.crashes or row.attempts != json.loads(row.attribute).get("fail", 0))
    ]
    assert not burned
    assert moving.p99 < 1000


def _all(cluster: OperatedCluster, job_ids: list[int], status: TaskStatus) -> bool:
    rows = cluster.system.center.store.read(job_ids)
    return all(row.status == status for row in rows.values())


def _paused(cluster: OperatedCluster, topic: str) -> bool:
    slots = cluster.json(f"toc slots --topic {topic}")
    return any((row["overdue_seconds"] or 0) > 1 for row in slots) and not any(
        row["prepared"] for row in slots
    )


def _backlog(cluster: OperatedCluster, resumed: float) -> list[tuple[float, float]]:
    """When each task that waited at ``resumed`` started, in this order, and when it had been due."""
    rows = cluster.system.center.store.read([*{event.job_id for event in cluster.system.history()}])
    due = {job_id: row.action_time / 1000 for job_id, row in rows.items() if row.biz_type == 1}
    return sorted(
        (event.at / 1e9, due[event.job_id])
        for event in cluster.system.history()
        if event.event == "start" and event.attempt == 1 and event.at / 1e9 > resumed
        if due.get(event.job_id, resumed) < resumed
    )


def _owned_by(cluster: OperatedCluster, slot: str, host: str) -> bool:
    [row] = [row for row in cluster.json("toc slots") if row["slot"] == slot]
    return str(row["owner"]).startswith(f"{host}-")
