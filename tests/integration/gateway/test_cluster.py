"""Hosts are drained and weighed, and slots pinned, over HTTP as at the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.gateway import Gateway
from harness.patience import until
from harness.system import System

from benchmarks.local import MariaDB, RedisServer, ZooKeeper
from toc import Topic
from toc.coordination.operator import Operator
from toc.model.topic import Delivery, Slot


@pytest.fixture
def cluster(
    tmp_path: Path,
    clean_redis: RedisServer,
    mariadb: MariaDB,
    database_prefix: str,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
) -> Iterator[System]:
    one = System(
        tmp_path,
        database_urls=[mariadb.url],
        databases=1,
        tables=4,
        database_prefix=database_prefix,
        redis_url=clean_redis.url,
        zookeeper=zookeeper.url,
        cluster=zookeeper_root,
        session_timeout=2,
    )
    one.center.store.topics.create(Topic("mail.send", 70, 4, delivery=Delivery.PULL))
    yield one
    one.stop()


def test_hosts_are_drained_and_weighed_and_slots_pinned(cluster: System) -> None:
    here = Gateway(cluster)
    there = Gateway(cluster, host="away", beside=here)
    try:

        def owners() -> list[str]:
            slots = here.call("GET", "/v1/slots?topic=mail.send").body["slots"]
            return [str(slot["owner"]).partition("-")[0] for slot in slots]

        assert until(lambda: sorted(owners()) == ["away", "away", "gate", "gate"], 60)
        drained = here.call("POST", "/v1/hosts/away:drain", {})
        assert (drained.status, drained.body["present"]) == (200, True), drained
        assert until(lambda: owners() == ["gate"] * 4, 60)
        assert here.call("POST", "/v1/hosts/away:undrain").body["changed"] is True
        assert here.call("POST", "/v1/hosts/away:undrain").body["changed"] is False
        pinned = here.call("POST", "/v1/slots/mail.send_3:pin", {"target": "away"})
        assert pinned.body == {"slot": "mail.send_3", "target": "away"}
        assert here.call("POST", "/v1/hosts/gate:weight", {"weight": 2}).body["weight"] == 2
        assert until(lambda: owners()[3] == "away", 60)
        intents = here.call("GET", "/v1/intents").body["intents"]
        assert [(one["what"], one["of"], one["to"], one["by"]) for one in intents] == [
            ("weight", "gate", "2", "all"),
            ("pin", "mail.send_3", "away", "all"),
        ]
        assert here.call("POST", "/v1/cluster:rebalance", {"dry_run": True}).status == 200
        assert here.call("POST", "/v1/cluster:rebalance", {}).status == 200
        assert here.call("POST", "/v1/slots/mail.send_3:unpin").body["changed"] is True
        assert here.call("POST", "/v1/hosts/gate:unweight").body["changed"] is True
        assert here.call("GET", "/v1/intents").body["intents"] == []
        assert here.call("POST", "/v1/hosts/later:drain", {"absent": True}).body["present"] is False
        worker = here.call("GET", "/v1/slots?topic=mail.send").body["slots"][0]["owner"]
        for change, wish in (("drain", {"absent": True}), ("weight", {"weight": 2}), ("undrain", {})):
            refused = here.call("POST", f"/v1/hosts/{worker}:{change}", wish)
            assert refused.status == 404, "it would do nothing"
            assert f"give its host, {worker.partition('-')[0]}" in refused.body["detail"]
        pinned = here.call("POST", "/v1/slots/mail.send_3:pin", {"target": worker})
        assert pinned.body == {"slot": "mail.send_3", "target": worker}
        with Operator(cluster.settings.zookeeper or "", cluster=cluster.settings.cluster) as operator:
            operator.pin(Slot("deleted", 7), "gate", by="ann")
        for slot in ("mail.send_3", "deleted_7"):
            assert here.call("POST", f"/v1/slots/{slot}:unpin").body["changed"] is True
        for path, body, status, field in (
            ("/v1/hosts/nobody:drain", {}, 404, None),
            ("/v1/hosts/gate:weight", {"weight": 0}, 422, "weight"),
            ("/v1/slots/mail.send_9:pin", {"target": "gate"}, 422, "slot"),
            ("/v1/slots/mail:pin", {"target": "gate"}, 422, "slot"),
            ("/v1/slots/mail.send_1:pin", {"target": "a/b"}, 422, "target"),
            ("/v1/slots/none_1:pin", {"target": "gate"}, 404, None),
        ):
            refused = here.call("POST", path, body)
            assert (refused.status, refused.body.get("field")) == (status, field), refused
        actions = [one["action"] for one in here.call("GET", "/v1/audit").body["actions"]]
        assert {"host.drain", "host.undrain", "host.weight", "host.unweight"} <= set(actions)
        assert {"slot.pin", "slot.unpin", "cluster.rebalance"} <= set(actions)
    finally:
        there.stop()
        here.stop()
