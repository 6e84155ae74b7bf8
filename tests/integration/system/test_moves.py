"""Operators move slots under load: nothing is lost or run twice, no try is burned."""

from __future__ import annotations

from fault.kit.load import Load
from harness.system import System

from toc.coordination.coordinator import SlotState
from toc.coordination.operator import Operator
from toc.model.topic import Slot


def test_a_host_is_drained_and_comes_back_and_slots_are_pinned_and_weighed_under_load(
    cluster: System,
) -> None:
    cluster.create_topics(slots=16, backoff_base=0.2)
    for host in ("host-a", "host-b"):
        cluster.start(host, processes=1)
    settings = cluster.settings
    operator = Operator(settings.zookeeper or "", cluster=settings.cluster, connect_timeout=5)
    with operator, Load(cluster.client, rate=150, ahead=(0.2, 1.0), fail=0.0) as load:

        def owned(host: str) -> int:
            rows = operator.slots()
            settled = all(row.state is SlotState.OWNED for row in rows)
            return sum((row.owner or "").startswith(host) for row in rows) if settled else -1

        def until(what: str, host: str, low: int, high: int) -> None:
            cluster.wait(lambda: low <= owned(host) <= high, what, 20)

        slots = 4 * 16 + settings.tables
        until("both hosts have their share", "host-b", slots // 2, slots // 2)
        count = len(load.job_ids)
        cluster.wait(lambda: len(load.job_ids) > count + 150, "the load runs", 20)
        operator.drain("host-b", by="ann")
        until("drained: nothing is left", "host-b", 0, 0)
        operator.undrain("host-b")
        until("undrained: its share is back", "host-b", slots // 2, slots // 2)
        operator.weigh("host-a", 3, by="ann")
        until("three times as heavy", "host-a", slots * 3 // 4, slots * 3 // 4)
        operator.unweigh("host-a")
        operator.pin(Slot("test.sync", 0), "host-b", by="ann")
        until("pinned", "host-b", slots // 2, slots // 2)
        [row] = [row for row in operator.slots() if (row.topic, row.number) == ("test.sync", 0)]
        assert (row.owner or "").startswith("host-b")
        count = len(load.job_ids)
        cluster.wait(lambda: len(load.job_ids) > count + 150, "the load goes on", 20)
    cluster.wait(lambda: not cluster.pending(load.job_ids), "everything has ended", 20)
    verdict = cluster.verdict()
    assert verdict.clean, f"{verdict}\n{cluster.logs()}"
    assert not verdict.duplicates, verdict
    rows = cluster.center.store.read(load.job_ids).values()
    assert not any(row.attempts or row.crashes for row in rows if row.status == 2)
