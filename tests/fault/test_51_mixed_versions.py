"""Fault 51: members of two versions are mixed: new features are refused by name until all know them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from fault.kit.table import ROOT
from harness.gateway import Gateway, Reply

from toc import TaskStatus
from toc.dev.local.servers import RedisServer, ZooKeeper


@pytest.fixture
def earlier(tmp_path: Path) -> dict[str, str]:
    """The environment of an earlier version: a copy of this one that neither knows features nor says so."""
    copy = tmp_path / "earlier"
    shutil.copytree(ROOT / "toc", copy / "toc", ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "toc/model/features.py"
    text = path.read_text()
    known = "KNOWN: frozenset[str] = frozenset(Feature)"
    assert text.count(known) == 1
    path.write_text(text.replace(known, "KNOWN: frozenset[str] = frozenset()"))
    return {"PYTHONPATH": f"{copy}:{ROOT / 'tests'}", "PYTHONSAFEPATH": "1"}


@pytest.mark.slow
def test_new_features_are_refused_by_name_while_members_of_an_earlier_version_run(
    build: Build,
    clean_redis: RedisServer,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
    earlier: dict[str, str],
    verdict: Verdict,
) -> None:
    line = verdict(51, "members of two versions mixed", "under load, the old one leaves and comes again")
    system = build(clean_redis.url, zookeeper=zookeeper.url, cluster=zookeeper_root, session_timeout=2)
    system.start("new-host", processes=1)
    old = system.start("old-host", processes=1, env=earlier)
    gateway = Gateway(system)
    wishes: dict[str, dict[str, Any]] = {
        "bodies": {"body": "b"},
        "tries": {"tries": 3},
        "expires_at": {"expires_at": "2100-01-01T00:00:00Z"},
    }
    used: list[int] = []
    refusals = 0

    def use(feature: str) -> Reply:
        return gateway.submit("test.sync", biz_id=1, delay=1, **wishes[feature])

    def refused(reply: Reply) -> bool:
        nonlocal refusals
        if reply.status in (200, 201):
            used.append(int(reply.body["job_id"]))
            return False
        assert (reply.status, reply.body["type"]) == (503, "/docs#feature-not-ready"), reply
        refusals += "old-host" in reply.body["detail"]
        return "old-host" in str(reply.body["detail"])

    try:
        with Load(system.client, rate=40, ahead=(0.2, 1.0)) as load:
            for feature in wishes:
                system.wait(lambda: refused(use(feature)), f"{feature} is refused", 20)  # noqa: B023
            used.clear()
            assert all(refused(use(feature)) for feature in wishes)
            topic = {"name": "of-pulls", "biz_type": 99, "slot_amount": 2, "delivery": "pull"}
            made = gateway.call("POST", "/v1/topics", topic)
            assert (made.status, made.body["type"]) == (503, "/docs#feature-not-ready"), made
            assert "old-host" in made.body["detail"]
            assert not used
            with system.recorder.fault("stop", note="the old member leaves"):
                old.terminate()
                assert old.process.wait(60) == 0, system.logs()
            for feature in wishes:
                system.wait(lambda: not refused(use(feature)), f"{feature} is accepted", 20)  # noqa: B023
            system.wait(lambda: not system.pending(used), "what uses them runs", 20)
            rows = system.center.store.read(used).values()
            assert {row.status for row in rows} == {TaskStatus.PROCESSED}
            accepted = len(used)
            old = system.start("old-host", processes=1, env=earlier)  # somebody goes back
            for feature in wishes:
                system.wait(lambda: refused(use(feature)), f"{feature} is refused again", 20)  # noqa: B023
            count = len(load.job_ids)
            system.wait(lambda: len(load.job_ids) > count + 40, "the load goes on", 20)
        both = {event.pid for event in system.history() if event.event == "start"}
        line.prove(
            refusals > 2 * len(wishes) and accepted >= len(wishes) and len(both) >= 2,
            f"{refusals} uses refused with the old host's name, {accepted} accepted while it was away",
        )
        assert not set(load.errors) - {"NotInFuture"}, load.said
        system.wait(lambda: not system.pending(used), "all have ended", 20)
    finally:
        code = gateway.stop()
    assert code == 0
    # What the gateway was asked for is in no history: only the load is judged by it.
    line.judge(system, within=10, but="U")
