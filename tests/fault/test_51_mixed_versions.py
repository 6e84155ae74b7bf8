"""Fault 51: members of two protocol versions are mixed: those that must be upgraded are named."""

from __future__ import annotations

import json

from fault.conftest import Build
from harness import secured

from benchmarks.local import ZooKeeper
from toc.coordination.assignment import PROTOCOL
from toc.operate import doctor


def test_a_member_that_announces_a_lower_protocol_is_named_until_it_is_gone(
    build: Build, zookeeper: ZooKeeper, zookeeper_root: str
) -> None:
    system = build(hosts=True)
    system.start("new-host", processes=1)
    workers = f"/toc/{zookeeper_root}/workers"
    onlooker = secured.zookeeper_client(zookeeper)
    onlooker.start()

    def named() -> set[str]:
        return {line.of for line in doctor.examine(system.center) if f"others have {PROTOCOL}" in line.what}

    try:
        (ours,) = system.wait(
            lambda: onlooker.exists(workers) and onlooker.get_children(workers), "its worker registers", 20
        )
        announced = json.loads(onlooker.get(f"{workers}/{ours}")[0])
        assert announced["protocol"] == PROTOCOL
        assert not named()
        older = announced | {"host": "old-host", "topics": [], "protocol": PROTOCOL - 1}
        onlooker.create(f"{workers}/old-host-0", json.dumps(older).encode(), ephemeral=True)
        system.wait(lambda: named() == {"old-host"}, "it is named", 20)
        onlooker.delete(f"{workers}/old-host-0")
        assert not named()
    finally:
        onlooker.stop()
        onlooker.close()
