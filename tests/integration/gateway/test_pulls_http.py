"""Consumers that pull over HTTP: what they are handed, how it ends, and who leaves or dies in between."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from harness.dialect import arrived
from harness.gateway import Gateway, Reply, lose_body
from harness.metrics import ANY_ADDRESS, samples
from harness.patience import until
from harness.rows import change
from harness.system import System

from toc import NewTask, TaskStatus, Topic
from toc.model.pull import PullLease
from toc.model.topic import Backoff, Delivery
from toc.operate.tokens import revoke_token

TOPIC = "test.pulled"


@pytest.fixture
def pulled(system: System) -> System:
    """A topic of two tries that is pulled, one of a single try, and one for handlers."""
    pulled = {"backoff": Backoff.IMMEDIATE, "delivery": Delivery.PULL, "max_runtime": 40}
    system.center.store.topics.create(Topic(TOPIC, 90, 4, retries=2, **pulled))  # type: ignore[arg-type]
    system.center.store.topics.create(Topic("test.once", 91, 2, retries=1, **pulled))  # type: ignore[arg-type]
    system.center.catalog.refresh()
    return system


@pytest.fixture
def gateway(pulled: System) -> Iterator[Gateway]:
    one = Gateway(pulled)
    yield one
    assert one.stop() == 0


def pull(gateway: Gateway, topics: str = TOPIC, *, token: str = "all", **wanted: Any) -> Reply:
    return gateway.call("POST", f"/v1/topics/{topics}:pull", {"wait": 20, **wanted}, token=token)


def one(gateway: Gateway, topics: str = TOPIC, **wanted: Any) -> dict[str, Any]:
    answer = pull(gateway, topics, **wanted)
    assert answer.status == 200, answer
    (task,) = answer.body["tasks"]
    found: dict[str, Any] = task
    return found


def end(gateway: Gateway, how: str, lease: str, *, token: str = "all", **wanted: Any) -> Reply:
    return gateway.call("POST", f"/v1/leases:{how}", {"lease": lease, **wanted}, token=token)


def test_a_task_is_pulled_when_it_is_due_and_ends_by_its_ack(gateway: Gateway) -> None:
    assert pull(gateway, wait=0).body == {"tasks": []}
    made = gateway.submit(TOPIC, biz_id="order-1", delay=0.3, attribute={"a": 1}).body["job_id"]
    task = one(gateway, ttr=30)
    lease, until_then = task.pop("lease"), datetime.fromisoformat(task.pop("lease_until"))
    assert datetime.fromisoformat(task.pop("action_time")) <= datetime.now(UTC)
    assert 0 < (until_then - datetime.now(UTC)).total_seconds() <= 30
    assert task == {
        "job_id": made, "topic": TOPIC, "biz_id": "order-1", "status": "pending", "attribute": {"a": 1},
        "version": 0, "tries": 0, "expires_at": None, "failed_tries": 0, "attempt": 1, "last": False,
    }  # fmt: skip
    assert pull(gateway, wait=0).body == {"tasks": []}, "somebody has it"
    longer = end(gateway, "extend", lease, ttr=35)
    assert longer.body["outcome"] == "extended"
    assert datetime.fromisoformat(longer.body["lease_until"]) > until_then
    assert end(gateway, "ack", lease).body == {"lease": lease, "outcome": "acked", "late": False}
    assert end(gateway, "ack", lease).body == {"lease": lease, "outcome": "already", "late": False}
    assert gateway.call("GET", f"/v1/tasks/{made}").body["status"] == "processed"


def test_bodies_come_with_their_tasks(gateway: Gateway) -> None:
    center = gateway.system.center
    center.submit(TOPIC, biz_id=1, delay=0.01, body=b'{"a": 1}', content_type="application/json")
    task = one(gateway)
    assert (task["body"], task["content_type"]) == ('{"a": 1}', "application/json")
    center.submit(TOPIC, biz_id=2, delay=0.01, body=b"\xff\x00")
    task = one(gateway)
    assert (task["body_base64"], task["content_type"]) == ("/wA=", "application/octet-stream")
    assert "body" not in task


def test_a_task_whose_body_is_missing_is_dead_once_it_is_pulled(gateway: Gateway) -> None:
    job_id = int(gateway.submit(TOPIC, delay=0.01, body="lost").body["job_id"])
    lose_body(gateway.system.center.store, job_id)
    assert pull(gateway, wait=5).body == {"tasks": []}
    row = gateway.system.row(job_id)
    assert row.status == TaskStatus.DEAD
    assert "its body is missing" in (row.last_error or "")
    gateway.submit(TOPIC, delay=0.01, body="there")
    assert one(gateway)["body"] == "there"


def test_many_are_pulled_and_answered_at_once_each_with_its_own_outcome(gateway: Gateway) -> None:
    center = gateway.system.center
    job_ids = center.submit_many([NewTask(TOPIC, n, 0.01) for n in range(30)])
    got: list[dict[str, Any]] = []
    while len(got) < 30:
        got += pull(gateway, f"test.once,{TOPIC}", max=100).body["tasks"]
    assert sorted(int(task["job_id"]) for task in got) == sorted(job_ids)
    center.cancel(int(got[0]["job_id"]))
    leases = [task["lease"] for task in got] + ["nonsense"]
    answer = gateway.call("POST", "/v1/leases:ack", {"leases": leases})
    assert answer.status == 200
    outcomes = answer.body["leases"]
    assert [each["lease"] for each in outcomes] == leases
    assert [each["outcome"] for each in outcomes] == ["cancelled", *["acked"] * 29, "unknown"]
    assert outcomes[0]["problem"]["type"] == "/docs#lease-ended"
    assert outcomes[0]["problem"]["status"] == 409
    assert outcomes[-1]["problem"]["status"] == 404


def test_a_nack_waits_and_the_last_one_is_dead(gateway: Gateway) -> None:
    gateway.submit(TOPIC, delay=0.01)
    began = time.monotonic()
    assert (
        end(gateway, "nack", one(gateway)["lease"], delay=0.5, error="no stock").body["outcome"] == "nacked"
    )
    second = one(gateway)
    assert time.monotonic() - began >= 0.5
    assert (second["attempt"], second["last"], second["failed_tries"]) == (2, True, 1)
    long = b'{"lease":"%s","error":"\\ud800%s"}' % (second["lease"].encode(), b"x" * 5000)
    assert gateway.call("POST", "/v1/leases:nack", long).body["outcome"] == "buried", "it is cut"
    gone = end(gateway, "nack", second["lease"])
    assert (gone.status, gone.body["outcome"], gone.body["type"]) == (409, "gone", "/docs#lease-ended")
    row = gateway.system.row(int(second["job_id"]))
    assert (row.status, row.last_error) == (TaskStatus.DEAD, "\ufffd" + "x" * 1023)


def test_once_a_pause_is_answered_no_pull_gets_a_task_and_acks_go_on(gateway: Gateway) -> None:
    gateway.submit(TOPIC, delay=0.01)
    lease = one(gateway)["lease"]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pull, gateway, wait=5)
        assert until(lambda: arrived(gateway.port, 2), 10)
        assert gateway.call("POST", f"/v1/topics/{TOPIC}:pause").body["paused"]
        gateway.submit(TOPIC, delay=0.01)
        assert waiting.result().body == {"tasks": []}
    assert end(gateway, "ack", lease).body["outcome"] == "acked"
    assert gateway.call("POST", f"/v1/topics/{TOPIC}:resume").status == 200
    assert end(gateway, "ack", one(gateway)["lease"]).status == 200


def test_tokens_bind_pulls_by_topic_and_answers_by_lease(gateway: Gateway) -> None:
    gateway.make_token("consumer", "consume", topics=("test.p*",))
    gateway.make_token("other", "consume", topics=("test.o*",))
    gateway.make_token("producer", "produce")
    assert gateway.submit(TOPIC, delay=0.01).status == 201
    assert pull(gateway, token="producer").status == 403
    assert pull(gateway, token="other").status == 404
    assert pull(gateway, f"{TOPIC},test.once", token="consumer").status == 404, "one of them is outside"
    (task,) = pull(gateway, token="consumer").body["tasks"]
    for how in ("ack", "nack", "extend"):
        more = {"ttr": 5} if how == "extend" else {}
        assert end(gateway, how, task["lease"], token="other", **more).status == 404
        many = gateway.call("POST", f"/v1/leases:{how}", {"leases": [task["lease"]], **more}, token="other")
        assert many.body["leases"][0]["outcome"] == "unknown"
        assert end(gateway, how, task["lease"], token="producer", **more).status == 403
    assert end(gateway, "ack", task["lease"], token="consumer").body["outcome"] == "acked"


def test_there_is_no_lease_of_a_topic_that_is_not_pulled(gateway: Gateway) -> None:
    """Its delivery may have been changed since the hand-out."""
    store = gateway.system.center.store
    gateway.submit(TOPIC, delay=0.01)
    between = int(gateway.submit("test.sync", delay=60).body["job_id"])
    change(store, between, "attempts=1")
    before, secret = store.read([between]), store.identity.lease_secret()
    handed = PullLease.parse(one(gateway)["lease"], secret)
    biz_type = gateway.system.center.catalog.get("test.sync").biz_type
    made_up = handed._replace(job_id=between, biz_type=biz_type).text(secret)
    for how, more in (("ack", {}), ("nack", {"dead": True}), ("extend", {"ttr": 5})):
        answer = end(gateway, how, made_up, **more)
        assert (answer.status, answer.body["type"]) == (404, "/docs#unknown-lease")
    assert store.read([between]) == before


def test_a_token_that_is_revoked_while_its_pull_waits_gets_nothing(gateway: Gateway) -> None:
    gateway.make_token("leaver", "consume")
    center = gateway.system.center
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(pull, gateway, token="leaver")
        assert until(lambda: arrived(gateway.port, 2), 10)
        revoke_token(center.store, "leaver")
        assert until(lambda: gateway.call("GET", "/v1/tasks/1", token="leaver").status == 401, 10)
        gateway.submit(TOPIC, delay=0.01)
        assert answer.result(60).status == 401
    assert one(gateway)["attempt"] == 1


def test_clients_that_left_while_they_waited_get_and_cost_nothing(gateway: Gateway) -> None:
    """Also as here, where the process finds both at once: that they have left, and that tasks are due."""
    asked = [_ask(gateway) for _ in range(40)]
    assert until(lambda: arrived(gateway.port, len(asked)), 10)
    (pid,) = gateway.children()
    os.kill(pid, signal.SIGSTOP)
    for client in asked:
        client.close()
    job_ids = gateway.system.center.submit_many([NewTask("test.once", n, 0.01) for n in range(40)])
    due = max(row.next_time for row in gateway.system.center.store.read(job_ids).values())
    assert until(lambda: time.time() * 1000 > due)
    os.kill(pid, signal.SIGCONT)
    got: dict[int, int] = {}
    deadline = time.monotonic() + 20  # far less than their ttr
    while len(got) < len(job_ids) and time.monotonic() < deadline:
        for task in pull(gateway, "test.once", max=10, wait=1).body["tasks"]:
            got[int(task["job_id"])] = task["attempt"]
    assert got == dict.fromkeys(job_ids, 1)


# --- raw clients


def _ask(gateway: Gateway) -> socket.socket:
    """Send a pull for test.once, and do not read the answer."""
    client = socket.create_connection(("127.0.0.1", gateway.port), 60)
    if gateway.tls is not None:
        client = gateway.tls.wrap_socket(client, server_hostname="127.0.0.1")
    client.sendall(_request(gateway, wait=30, ttr=40))
    return client


def _request(gateway: Gateway, **wanted: Any) -> bytes:
    """A pull of test.once, as it is sent."""
    body = json.dumps(wanted).encode()
    return (
        b"POST /v1/topics/test.once:pull HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer "
        + gateway.tokens["all"].encode()
        + b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )


def test_metrics_tell_what_came_of_what_was_pulled(pulled: System) -> None:
    """The alerts and the console go by them: to them a task that a consumer buried had not died."""
    gateway = Gateway(pulled, env=ANY_ADDRESS)

    def shown(sample: str) -> float:
        return samples(gateway.told()).get(sample, 0)

    def told(topic: str, outcome: str) -> float:
        return shown(f'toc_tries_total{{outcome="{outcome}",topic="{topic}"}}')

    def pulled_one(topic: str, **wanted: Any) -> str:
        gateway.submit(topic, delay=0.01)
        return str(one(gateway, topic, **wanted)["lease"])

    assert until(lambda: shown(f'toc_topic_pulled{{topic="{TOPIC}"}}') == 1, 20)
    assert until(lambda: shown("toc_ready_gateways") == 1, 20)
    lease = pulled_one(TOPIC)
    end(gateway, "ack", lease)
    end(gateway, "ack", lease)
    assert end(gateway, "nack", pulled_one(TOPIC), delay=100).status == 200
    assert end(gateway, "nack", pulled_one(TOPIC), dead=True).status == 200
    assert [told(TOPIC, outcome) for outcome in ("processed", "failed", "dead")] == [1, 1, 1]
    assert shown(f'toc_handed_out_tasks_total{{topic="{TOPIC}"}}') == 3
    pulled_one("test.once", ttr=1)
    assert pull(gateway, "test.once", wait=3).body == {"tasks": []}
    assert until(lambda: told("test.once", "dead") == 1, 20), "the end of the last ttr"
    assert gateway.stop() == 0
