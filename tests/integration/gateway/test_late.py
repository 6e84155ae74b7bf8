"""Why a task is late, over HTTP and at the command line; which tasks were, by topic and cause."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stdout
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from harness.gateway import Gateway
from harness.system import System

from toc import Topic
from toc.cli.main import main
from toc.model.topic import Delivery, TopicType
from toc.operate.operation import Doing
from toc.operate.operations.topics import pause, resume


@pytest.fixture
def gateway(system: System) -> Any:
    with Gateway(system) as one:
        yield one


def by_command(system: System, job_id: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``toc get`` says of it."""
    for name, value in system.env.items():
        if name.startswith("TOC_") and name not in os.environ:
            monkeypatch.setenv(name, value)
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["get", job_id, "--json"]) == 0
    return json.loads(out.getvalue())["late"]


def test_a_task_says_why_it_is_late_so_far_and_why_it_was_alike_by_both_doors(
    system: System, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    operate = {"topic": "test.sync"}
    pause.perform(Doing(system.center, "ann@ops", pause.right), operate)
    at = datetime.now(UTC) + timedelta(seconds=0.5)
    made = gateway.submit(action_time=at.isoformat(), delay=None).body["job_id"]
    assert gateway.call("GET", f"/v1/tasks/{made}").body["late"] is None

    def late(token: str = "all") -> Any:
        return gateway.call("GET", f"/v1/tasks/{made}", token=token).body["late"]

    system.wait(late, "it is late", 10)
    so_far = late()
    assert so_far["started"] is None
    assert so_far["sentence"].startswith("It has not started, ")
    assert "because its topic was paused (since" in so_far["sentence"]
    gateway.make_token("reads", "read")
    assert "paused" in late("reads")["sentence"]

    resume.perform(Doing(system.center, "ann@ops", resume.right), {**operate, "rate": 0})
    system.start(processes=1)
    system.wait(lambda: not system.pending([int(made)]), "it has run", 10)
    told = late()
    assert told["cause"] == "paused"
    assert told["sentence"].startswith("It started ")
    assert told["seconds"] == pytest.approx(sum(one["seconds"] for one in told["shares"]))
    assert datetime.fromisoformat(told["started"]) > at + timedelta(seconds=1)
    assert by_command(system, made, monkeypatch) == told


def test_what_made_tasks_late_is_counted_by_topic_and_cause_and_a_token_sees_its_topics(
    system: System, gateway: Gateway
) -> None:
    system.center.store.topics.create(Topic("late.now", 90, 4, TopicType.INSTANT, delivery=Delivery.PULL))
    past = (datetime.now(UTC) - timedelta(seconds=5)).isoformat()
    for n in range(3):
        made = gateway.call("POST", "/v1/topics/late.now/tasks", {"biz_id": n, "action_time": past})
        assert made.status == 201, made.body
    got: list[Any] = []
    while len(got) < 3:
        got += gateway.call("POST", "/v1/topics/late.now:pull", {"max": 3, "wait": 10}).body["tasks"]
    job_id = got[0]["job_id"]

    def causes(query: str = "", token: str = "all") -> Any:
        answer = gateway.call("GET", f"/v1/late{query}", token=token)
        assert answer.status == 200, answer.body
        return answer.body["causes"]

    system.wait(causes, "it is counted", 20)
    (one,) = causes()
    assert (one["topic"], one["cause"], one["tasks"]) == ("late.now", "stored_late", 3)
    assert one["worst_seconds"] > 4
    assert one["remedy"]
    assert causes("?cause=backlog") == []
    assert causes("?topic=test.sync") == []
    gateway.make_token("others", "read", topics=("test.*",))
    assert causes(token="others") == []
    assert gateway.call("GET", "/v1/late?topic=late.now", token="others").status == 404
    gateway.make_token("its", "read", topics=("late.*",))
    assert len(causes(token="its")) == 1

    def workers(token: str) -> set[str | None]:
        episodes = gateway.call("GET", "/v1/late", token=token).body["episodes"]
        return {one["worker"] for one in episodes if one["topic"] == "late.now"}

    assert (workers("its"), None in workers("all")) == ({None}, False), "a host is named to who sees it"
    told = gateway.call("GET", f"/v1/tasks/{job_id}").body["late"]
    assert told["sentence"].startswith("It started 5."), told
    assert "because it was stored after its time" in told["sentence"]


def test_a_pulled_task_that_nobody_asks_for_says_so(system: System, gateway: Gateway) -> None:
    system.center.store.topics.create(Topic("late.pulled", 91, 4, delivery=Delivery.PULL))
    made = gateway.submit("late.pulled", delay=0.1).body["job_id"]
    system.wait(lambda: gateway.call("GET", f"/v1/tasks/{made}").body["late"], "it is late", 10)
    assert gateway.call("GET", f"/v1/tasks/{made}").body["late"]["cause"] == "no_consumer"
    (got,) = gateway.call("POST", "/v1/topics/late.pulled:pull", {"max": 1, "wait": 10}).body["tasks"]
    assert got["job_id"] == made
    assert gateway.call("GET", f"/v1/tasks/{made}").body["late"]["cause"] == "no_consumer"
