"""What comes due when, as operators see it: at the command line, over HTTP, with and without an index."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest
from harness import forks
from harness.gateway import Gateway
from harness.system import System

from toc import NewTask, TimeoutCenter
from toc.model.minute import MINUTE_MS
from toc.operate.lateness import hour, lateness_record
from toc.operate.operation import Doing, Record
from toc.operate.operations import due

SYNC, ASYNC = "test.sync", "test.async"


def told(center: TimeoutCenter, **values: Any) -> Record:
    """What an operator of the host is told."""
    record: Record = due.show.perform(Doing(center, "test", due.show.right), values)
    return record


def last_hour(system: System) -> Record:
    """What is told of the last hour when the present minute is over."""
    found = hour(system.center.store.minutes, system.center.clock.now_ms() + MINUTE_MS)
    return lateness_record(found, lambda _: True, whole=True)


def submit(system: System, topic: str, *delays: float) -> None:
    tasks = [NewTask(topic, biz_id=number, delay=delay) for number, delay in enumerate(delays)]
    system.center.submit_many(tasks)


@pytest.mark.parametrize("kind", ["system", "alone"])
def test_a_running_worker_counts_what_is_pending(kind: str, request: pytest.FixtureRequest) -> None:
    system: System = request.getfixturevalue(kind)
    system.create_topics()
    submit(system, SYNC, 1800, 1800, 5400, 3 * 86400, 30 * 86400)
    submit(system, ASYNC, 1800)
    found = told(system.center)
    assert len(found["missing"]) == system.settings.tables
    assert {one["error"] for one in found["missing"]} == {"no worker has counted it yet"}
    system.start("h1")
    system.wait(lambda: not told(system.center)["missing"], "every table is counted", 60)
    found = told(system.center)
    assert [(one["topic"], *(one[key] for key in KEYS)) for one in found["topics"]] == [
        (SYNC, 0, 2, 3, 4, 1),
        (ASYNC, 0, 1, 1, 1, 0),
    ]
    assert tuple(found["total"][key] for key in KEYS) == (0, 3, 4, 5, 1)
    assert sum(found["total"]["minutes"]) == 3
    assert sum(found["total"]["hours"]) == 5
    assert {part: 0 <= age["oldest"] < 600 for part, age in found["ages"].items()} == {
        "minutes": True, "hours": True,
    }  # fmt: skip
    one = told(system.center, topic=ASYNC)
    assert [each["topic"] for each in one["topics"]] == [ASYNC]
    assert one["total"]["hour"] == 1


KEYS = ("overdue", "hour", "day", "week", "later")


def test_whoever_may_see_one_topic_is_told_of_no_other(system: System) -> None:
    system.create_topics()
    submit(system, SYNC, 1800)
    submit(system, ASYNC, 1800, 1800)
    with Gateway(system) as gateway:
        gateway.make_token("one", "read", topics=(SYNC,))
        system.wait(
            lambda: not gateway.call("GET", "/v1/due").body["missing"], "its worker has counted all", 60
        )
        all_ = gateway.call("GET", "/v1/due").body
        assert {one["topic"]: one["hour"] for one in all_["topics"]} == {SYNC: 1, ASYNC: 2}
        assert all_["others"]["hour"] == 0
        first = datetime.fromisoformat(all_["minutes_from"])
        assert first.second == first.microsecond == 0
        assert len(all_["total"]["minutes"]) == 60
        mine = gateway.call("GET", "/v1/due", token="one").body
        assert [one["topic"] for one in mine["topics"]] == [SYNC]
        assert mine["others"] is None
        assert mine["total"]["hour"] == 1
        assert gateway.call("GET", f"/v1/due?topic={SYNC}", token="one").body["total"]["hour"] == 1
        hidden = gateway.call("GET", f"/v1/due?topic={ASYNC}", token="one")
        assert (hidden.status, hidden.body["type"]) == (404, "/docs#unknown-topic")
        shown = forks.run(["due"], env=system.env, directory=system.directory)
        assert shown.returncode == 0, shown.stderr
        assert [line.split()[:3] for line in shown.stdout.splitlines()[:3]] == [
            ["topic", "overdue", "hour"], [ASYNC, "0", "2"], [SYNC, "0", "1"],
        ]  # fmt: skip
        assert "next hour (UTC)" in shown.stdout
        assert "minutes were counted at most" in shown.stderr
        asked = forks.run(["due", SYNC, "--json"], env=system.env, directory=system.directory)
        assert json.loads(asked.stdout)["total"]["hour"] == 1
        what_if = gateway.call("GET", "/v1/due:what-if?pause=3600&rate=10", token="one").body
        assert (what_if["waiting"], what_if["capacity"]) == (1, None), "of its own topic alone"
        assert 0 < what_if["drain_seconds"] < 1
        hidden = gateway.call("GET", f"/v1/due:what-if?topic={ASYNC}&pause=60", token="one")
        assert (hidden.status, hidden.body["type"]) == (404, "/docs#unknown-topic")
        for pause in (0, 7 * 86_400 + 1):
            refused = gateway.call("GET", f"/v1/due:what-if?pause={pause}")
            assert (refused.status, refused.body["field"]) == (422, "pause")
        piled = forks.run(
            ["due", ASYNC, "--what-if", "1h", "--rate", "1"], env=system.env, directory=system.directory
        )
        assert re.search(r"^waiting +2$", piled.stdout, re.MULTILINE), piled.stderr
        assert re.search(r"^drain seconds +2.0$", piled.stdout, re.MULTILINE)
        for words in (["--rate", "1"], ["--what-if", "0"], ["--what-if", "8d"]):
            wrong = forks.run(["due", *words], env=system.env, directory=system.directory)
            assert (wrong.returncode, wrong.stdout) == (2, ""), words
        unknown = forks.run(["due", "no.topic"], env=system.env, directory=system.directory)
        assert unknown.returncode == 2
        assert "there is no topic 'no.topic'" in unknown.stderr


@pytest.mark.parametrize("kind", ["system", "alone"])
def test_a_daemon_tells_of_each_minute_what_its_processes_did(
    kind: str, request: pytest.FixtureRequest
) -> None:
    system: System = request.getfixturevalue(kind)
    system.create_topics()
    daemon = system.start("h1")
    ids = system.center.submit_many([NewTask(SYNC, biz_id=number, delay=0.1) for number in range(20)])
    system.wait(lambda: not system.pending(ids), "all have run", 60)
    daemon.stop()
    record = last_hour(system)
    assert [(one["topic"], one["starts"], one["processed"]) for one in record["topics"]] == [(SYNC, 20, 20)]
    assert sum(map(sum, record["total"]["lateness"])) == 20
    assert record["capacity"] in range(10, 21), "in one minute or two"
    assert [one["member"].partition(".")[0] for one in record["members"]] == ["h1"]
    shown = forks.run(["lateness"], env=system.env, directory=system.directory)
    assert shown.returncode == 0, shown.stderr
    assert "wrote its numbers" in shown.stderr
