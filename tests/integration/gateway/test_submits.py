"""Submits over HTTP: bodies both ways, names, repetitions; why a task is late;
the programs of examples/gateway."""

import base64
import io
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from harness.console import Browser
from harness.gateway import Gateway, Reply
from harness.patience import until
from harness.programs import need
from harness.rows import known
from harness.system import System

from toc import NewTask, TaskStatus, Topic
from toc.cli.main import main
from toc.model.clock import to_ms
from toc.model.documents import instant as shown
from toc.model.errors import CoordinationUnavailable, StoreUnavailable
from toc.model.lateness import Cause, Episode
from toc.model.sharding import BizId
from toc.model.topic import Delivery, TopicType
from toc.operate.late import late, why
from toc.operate.operation import Doing, Place
from toc.operate.topics import pause, resume
from toc.store.tasks.scan import ROWS_READ

# Submits over HTTP: bodies both ways, names kept, refused or replaced, requests that are repeated.

TASKS = "/v1/topics/test.sync/tasks"
numbers = itertools.count(1_000_000, 1000)


@pytest.fixture
def biz() -> int:
    """A biz_id of the test's own."""
    return next(numbers)


def submit(gateway: Gateway, key: str | None = None, **task: Any) -> Reply:
    headers = {} if key is None else {"Idempotency-Key": key}
    return gateway.call("POST", TASKS, {"delay": 3600, **task}, headers=headers)


def instant(at: datetime) -> str:
    return shown(to_ms(at))


def body_of(gateway: Gateway, job_id: str) -> tuple[Any, str]:
    reply = gateway.call("GET", f"/v1/tasks/{job_id}/body")
    assert reply.status == 200, reply
    return reply.body, reply.headers["content-type"]


# --- bodies


def test_a_body_comes_back_as_it_was_sent_in_each_way(shared: Gateway, biz: int) -> None:
    data = bytes(range(256)) * 300
    text = submit(shared, biz_id=biz, body="grüße \0 \U0001f600")
    assert body_of(shared, text.body["job_id"]) == (
        "grüße \0 \U0001f600".encode(),
        "text/plain; charset=utf-8",
    )
    encoded = base64.b64encode(data).decode()
    binary = submit(shared, biz_id=biz, body_base64=encoded, content_type="image/x")
    assert body_of(shared, binary.body["job_id"]) == (data, "image/x")
    raw = shared.call(
        "POST",
        f"{TASKS}?biz_id=a%2Fb{biz}&delay=60&attribute=%7B%22a%22%3A1%7D&dedup_key=k&tries=3",
        data,
        headers={"Content-Type": "application/x-thing"},
    )
    assert raw.status == 201, raw
    assert body_of(shared, raw.body["job_id"]) == (data, "application/x-thing")
    shown = shared.call("GET", f"/v1/tasks/{raw.body['job_id']}").body
    assert (shown["biz_id"], shown["attribute"], shown["tries"]) == (f"a/b{biz}", {"a": 1}, 3)
    assert shown["body_length"] == len(data)
    page = b'{"a": "<script>alert(1)</script>"}'
    json_body = shared.call("POST", f"{TASKS}?raw=1&biz_id={biz}&delay=60", page)
    assert body_of(shared, json_body.body["job_id"]) == (json.loads(page), "application/json")
    empty = shared.call("POST", f"{TASKS}?biz_id={biz}&delay=60", b"", headers={"Content-Type": "text/html"})
    assert shared.call("GET", f"/v1/tasks/{empty.body['job_id']}").body["body_length"] == 0
    reply = shared.call("GET", f"/v1/tasks/{empty.body['job_id']}/body")
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"", "text/html")
    assert reply.headers["content-disposition"] == "attachment"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in reply.headers["content-security-policy"]


def test_a_body_of_the_largest_size_is_taken_and_a_larger_one_refused(shared: Gateway, biz: int) -> None:
    data = secrets.token_bytes(1 << 20)
    for part in (data, data + b"x"):
        encoded = base64.b64encode(part).decode()
        replies = [
            submit(shared, biz_id=biz, body_base64=encoded),
            shared.call(
                "POST", f"{TASKS}?biz_id={biz}&delay=60", part, headers={"Content-Type": "image/png"}
            ),
            submit(shared, biz_id=biz, body="\n" * len(part)),
            submit(shared, biz_id=biz, body="\x01" * len(part)),  # six bytes of JSON for each
        ]
        if len(part) == 1 << 20:
            assert [reply.status for reply in replies] == [201, 201, 201, 201]
            assert body_of(shared, replies[0].body["job_id"])[0] == part
        else:
            assert {(reply.status, reply.body["field"]) for reply in replies} == {(413, "body")}
    batch = shared.call(
        "POST", f"{TASKS}:batch", {"tasks": [{"biz_id": biz, "delay": 60, "body": "é" * 600_000}]}
    )
    assert (batch.status, batch.body["field"]) == (413, "tasks.0.body")


REFUSED: dict[str, dict[str, Any]] = {
    "biz_id": {"biz_id": -1}, "delay": {"delay": 1e18},
    "action_time": {"delay": None, "action_time": "2020-01-01T00:00:00Z"}, "no-time": {"delay": None},
    "now": {"delay": 0},  # of what the template makes: a timed topic
    "target": {"target": "shop"},  # of what the template makes: a pulled topic
    "tries": {"tries": 70_000}, "attribute": {"attribute": {"a": "x" * 5000}},
    "reserved": {"attribute": {"toc-webhook": 1}}, "dedup_key": {"dedup_key": ""},
    "expires_at": {"expires_at": "2020-01-01T00:00:00Z"}, "body": {"body": "x" * ((1 << 20) + 1)},
    "base64": {"body_base64": "a*"}, "content_type": {"content_type": "a/b"},
}  # fmt: skip


def test_a_refused_submit_creates_no_topic_and_a_valid_one_does(shared: Gateway, biz: int) -> None:
    policies = {"slot_amount": 1, "topic_type": "timed", "delivery": "pull"}
    template = {"pattern": "made.*", "policies": policies, "most_topics": 3}
    assert shared.call("POST", "/v1/templates", template).status == 201
    task = {"biz_id": biz, "delay": 60}
    for name, wrong in REFUSED.items():
        path = f"/v1/topics/made.{name}/tasks"
        single = shared.call("POST", path, task | wrong, token="produce")
        batch = shared.call("POST", f"{path}:batch", {"tasks": [task, task | wrong]}, token="produce")
        assert single.status == batch.status, (name, single, batch)
        assert single.status in (413, 422), (name, single)
        assert batch.body["field"] == f"tasks.1.{single.body['field']}"
    raw = {"Content-Type": "text/plain"}
    assert shared.call("POST", "/v1/topics/made.raw/tasks?biz_id=1", b"x", headers=raw).status == 422
    names = [one["name"] for one in shared.call("GET", "/v1/topics").body["topics"]]
    assert not [name for name in names if name.startswith("made.")]
    made = [
        shared.call("POST", "/v1/topics/made.single/tasks", task),
        shared.call("POST", "/v1/topics/made.batch/tasks:batch", {"tasks": [task]}),
        shared.call("POST", "/v1/topics/made.raw/tasks?biz_id=1&delay=60", b"x", headers=raw),
    ]
    assert [one.status for one in made] == [201, 200, 201]
    job_ids = [made[0].body["job_id"], made[1].body["tasks"][0]["job_id"], made[2].body["job_id"]]
    topics = [shared.call("GET", f"/v1/tasks/{job_id}").body["topic"] for job_id in job_ids]
    assert topics == ["made.single", "made.batch", "made.raw"]
    full = shared.call("POST", "/v1/topics/made.fourth/tasks", task)
    assert (full.status, full.body["type"]) == (409, "/docs#in-use")


def test_what_has_no_body_or_a_wrong_one_is_answered_by_name(shared: Gateway, biz: int) -> None:
    plain = submit(shared, biz_id=biz)
    assert shared.call("GET", f"/v1/tasks/{plain.body['job_id']}").body["body_length"] is None
    reply = shared.call("GET", f"/v1/tasks/{plain.body['job_id']}/body")
    assert (reply.status, reply.body["type"]) == (404, "/docs#no-body")
    assert shared.call("GET", "/v1/tasks/1/body").body["type"] == "/docs#unknown-task"
    other = shared.submit("test.async", biz_id=biz, body="secret").body["job_id"]
    assert (
        shared.call("GET", f"/v1/tasks/{other}/body", token="sync-only").body["type"] == "/docs#unknown-task"
    )
    for task, field in (
        ({"body": "a", "body_base64": "YQ=="}, "body_base64"),
        ({"body_base64": "a*"}, "body_base64"),
        ({"content_type": "text/plain"}, "content_type"),
        ({"body": "a", "content_type": "a\r\nset-cookie: x"}, "content_type"),
        ({"body": 1}, "body"),
        ({"on_conflict": "replace"}, "dedup_key"),
        ({"on_conflict": "other", "dedup_key": "k"}, "on_conflict"),
        ({"past": "other"}, "past"),
    ):
        refused = submit(shared, biz_id=biz, **task)
        assert (refused.status, refused.body["field"]) == (422, field), refused
    for path, field in ((f"{TASKS}?delay=1", "biz_id"), (f"{TASKS}?biz_id=1&delay=x", "delay")):
        refused = shared.call("POST", path, b"x", headers={"Content-Type": "text/plain"})
        assert (refused.status, refused.body["field"]) == (422, field), refused
    mixed = shared.call("POST", f"{TASKS}?biz_id=1", {"biz_id": 1, "delay": 1})
    assert (mixed.status, mixed.body["field"]) == (422, "raw")


# --- names


def test_a_taken_name_is_kept_refused_or_replaced(shared: Gateway, biz: int) -> None:
    def named(**task: Any) -> Reply:
        return submit(shared, biz_id=biz, dedup_key="k", **task)

    first = named(on_conflict="error", body="1")
    job_id = first.body["job_id"]
    assert (first.status, first.body) == (201, {"job_id": job_id})
    refused = named(on_conflict="error", body="1")
    assert (refused.status, refused.body["type"], refused.body["job_id"]) == (
        409,
        "/docs#task-exists",
        job_id,
    )
    kept = named(body="1")
    assert (kept.status, kept.body) == (201, {"job_id": job_id})
    other = named(body="2")
    assert (other.status, other.body["type"], other.body["job_id"]) == (409, "/docs#dedup-conflict", job_id)
    replaced = named(on_conflict="replace", body="2", attribute={"n": 2}, delay=7200)
    assert (replaced.status, replaced.body) == (200, {"job_id": job_id, "outcome": "replaced"})
    shown = shared.call("GET", f"/v1/tasks/{job_id}").body
    assert (shown["attribute"], shown["version"]) == ({"n": 2}, 1)
    assert body_of(shared, job_id)[0] == b"2"
    shared.call("DELETE", f"/v1/tasks/{job_id}")
    again = named(on_conflict="replace", body="3")
    assert (again.status, again.body["outcome"]) == (201, "new")
    assert again.body["job_id"] != job_id


# --- requests


def test_a_repeated_request_gets_the_first_answer_another_payload_none(shared: Gateway, biz: int) -> None:
    key = secrets.token_hex()
    task: dict[str, Any] = {"biz_id": biz, "dedup_key": "k", "on_conflict": "replace"}
    first = submit(shared, **task)
    replies = [submit(shared, key, **task) for _ in range(3)]
    assert {(reply.status, str(reply.body)) for reply in replies} == {
        (200, str({"job_id": first.body["job_id"], "outcome": "replaced"}))
    }
    assert shared.call("GET", f"/v1/tasks/{first.body['job_id']}").body["version"] == 1
    for other in range(20):  # its task may be in another database
        reused = submit(shared, key, **{**task, "biz_id": biz + other, "attribute": {"n": 1}})
        assert (reused.status, reused.body["type"]) == (422, "/docs#idempotency-key-reused"), reused
    produced = shared.call(
        "POST", TASKS, {"delay": 3600, **task}, token="produce", headers={"Idempotency-Key": key}
    )
    assert produced.body["job_id"] == first.body["job_id"]
    assert shared.call("GET", f"/v1/tasks/{first.body['job_id']}").body["version"] == 2, "another's key"
    for bad in ("", "x" * 256, "é"):
        assert submit(shared, bad, **task).body["field"] == "Idempotency-Key"


def test_a_repeated_batch_stores_nothing_twice(shared: Gateway, biz: int) -> None:
    key = {"Idempotency-Key": secrets.token_hex()}
    tasks = [{"biz_id": biz + n, "delay": 60, "body": str(n)} for n in range(30)]
    first = shared.call("POST", f"{TASKS}:batch", {"tasks": tasks}, headers=key)
    again = shared.call("POST", f"{TASKS}:batch", {"tasks": tasks}, headers=key)
    assert (first.status, again.status) == (200, 200)
    assert first.body == again.body
    other = shared.call("POST", f"{TASKS}:batch", {"tasks": [*tasks, tasks[0]]}, headers=key)
    assert (other.status, other.body["type"]) == (422, "/docs#idempotency-key-reused")
    assert len({one["job_id"] for one in first.body["tasks"]}) == 30
    found = shared.call("GET", f"/v1/tasks?biz_id={biz}").body["tasks"]
    assert len(found) == 1


# Why a task is late, over HTTP and at the command line; which tasks were, by topic and cause.


@pytest.fixture
def gateway(system: System) -> Any:
    with Gateway(system) as one:
        yield one


def test_what_made_tasks_late_is_counted_as_far_as_a_token_sees_it(system: System, gateway: Gateway) -> None:
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
    ran, now = "1 of 2 ran test.secret, 4 s each", system.center.clock.now_ms()
    for number, cause, seen in ((90, Cause.THREADS, ran), (91, Cause.CONCURRENCY, "")):
        system.center.store.episodes.write(
            Episode(number, "late.now", cause, "w", now - 9000, now, now, 1, 9000, 4711, seen)
        )
    assert causes("?cause=concurrency")[0]["remedy"] == "toc topic alter late.now --concurrency N"
    assert ran in str(gateway.call("GET", "/v1/late").body)
    assert ran not in str(gateway.call("GET", "/v1/late", token="its").body), "another topic's name"

    told = gateway.call("GET", f"/v1/tasks/{job_id}").body["late"]
    assert told["sentence"].startswith("It started 5."), told
    assert "because it was stored after its time" in told["sentence"]


# The programs of examples/gateway, run as their readers run them.

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    "curl": ["sh", "mailer.sh"],
    "python": [sys.executable, "mailer.py"],
    "node": ["node", "mailer.mjs"],
    "php": ["php", "mailer.php"],
}


@pytest.mark.parametrize("language", PROGRAMS)
def test_a_producer_and_a_consumer_get_each_mail_sent(system: System, tmp_path: Path, language: str) -> None:
    """The gateway dies after it has stored the first task and before it answers: that is repeated."""
    need("curl")
    need(PROGRAMS[language][0])
    system.center.store.topics.create(Topic("mail.send", 70, 4, delivery=Delivery.PULL))
    once = tmp_path / "once"
    gateway = Gateway(system, env={"TOC_FAILPOINT": "batch.rows-stored", "TOC_FAILPOINT_ONCE": str(once)})
    log = tmp_path / "consumer.log"
    env = {**os.environ, "TOC": f"http://127.0.0.1:{gateway.port}", "TOKEN": gateway.tokens["all"]}
    directory = ROOT / "examples" / "gateway"
    try:
        for _ in range(2):
            subprocess.run(
                [*PROGRAMS[language], "produce", "ada", "grace"],
                cwd=directory,
                env=env,
                check=True,
                timeout=120,
            )
        assert once.exists()
        with log.open("wb") as output:
            consumer = subprocess.Popen(
                [*PROGRAMS[language], "consume"], cwd=directory, env=env, stdout=output, stderr=output
            )
        try:
            rows = [system.center.store.find(BizId.of(name)) for name in ("ada", "grace")]
            assert [len(found) for found in rows] == [1, 1]
            job_ids = [found[0].job_id for found in rows]
            assert until(lambda: not system.pending(job_ids), 60), log.read_text()
            consumer.send_signal(signal.SIGTERM)
            assert consumer.wait(60) == 0, log.read_text()
        finally:
            consumer.kill()
            consumer.wait()
        sent = sorted(line.split()[1] for line in log.read_text().splitlines() if line.startswith("sent "))
        assert sent == ["ada", "grace"], log.read_text()
        assert {system.row(job_id).status for job_id in job_ids} == {TaskStatus.PROCESSED}
    finally:
        gateway.stop()


def by_command(system: System, job_id: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``toc get`` says of it."""
    for name, value in system.env.items():
        if name.startswith("TOC_") and name not in os.environ:
            monkeypatch.setenv(name, value)
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["get", job_id, "--json"]) == 0
    return json.loads(out.getvalue())["late"]


def test_the_workers_are_asked_for_once_however_many_topics_are_late(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert late.place is Place.ALL, "it asks every server: on its threads nothing else may wait"
    asked: list[object] = []

    def workers(center: object) -> Any:
        asked.append(center)
        raise CoordinationUnavailable("it hangs")

    monkeypatch.setattr("toc.operate.late.living_workers", workers)
    topics = ("test.sync", "test.async", "test.doomed")
    system.center.submit_many([NewTask(topic, 1, delay=0.01) for topic in topics])

    def waiting() -> Any:
        asked.clear()
        return late.perform(Doing(system.center, "ann@ops", late.right), {"limit": 10})["waiting"]

    system.wait(lambda: {one["topic"] for one in waiting()} == {*topics}, "all are late", 20)
    assert len(asked) == 1


def test_a_backlog_hides_no_other_topic_of_its_tables_that_is_late(system: System) -> None:
    begins = datetime.now(UTC) + timedelta(seconds=2)
    counts = {"test.async": ROWS_READ + 50, "test.doomed": ROWS_READ + 1, "test.sync": 1}
    due = {topic: begins + timedelta(seconds=second) for second, topic in enumerate(counts)}
    system.center.submit_many(
        [NewTask(topic, 1, action_time=due[topic]) for topic, count in counts.items() for _ in range(count)]
    )

    def shown() -> Any:
        return late.perform(Doing(system.center, "ann@ops", late.right), {"limit": 10})

    system.wait(lambda: {one["topic"] for one in shown()["waiting"]} == {*counts}, "all are late", 20)
    found = shown()
    assert [one["topic"] for one in found["waiting"]] == [*counts], "the latest first"
    assert [one["tasks"] for one in found["waiting"]] == [ROWS_READ, ROWS_READ, 1]
    assert found["more_waiting"]


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

    def refuse(*_: object) -> None:
        raise StoreUnavailable("the first database is away")

    with monkeypatch.context() as away:
        away.setattr(system.center.store.episodes, "of", refuse)
        row = known(system.center.store.get(int(made)))
        shown = why(system.center, row, system.center.catalog.get("test.sync"))
        assert shown is not None
        assert shown["cause"] == "paused"

    def waiting(query: str = "") -> Any:
        return gateway.call("GET", f"/v1/late{query}", token="reads").body["waiting"]

    (one,) = waiting()
    assert (one["topic"], one["cause"], one["tasks"]) == ("test.sync", "paused", 1)
    assert (one["worst_job_id"], one["evidence"].startswith("since ")) == (made, True)
    assert one["worst_seconds"] >= 1
    assert waiting("?cause=backlog") == waiting("?topic=test.async") == []

    resume.perform(Doing(system.center, "ann@ops", resume.right), {**operate, "rate": 0})
    system.center.store.topics.alter("test.sync", concurrency=1)
    system.start(processes=1)
    system.wait(lambda: not system.pending([int(made)]), "it has run", 10)
    assert waiting() == []
    told = late()
    assert told["cause"] == "paused"
    assert told["sentence"].startswith("It started ")
    assert told["seconds"] == pytest.approx(sum(one["seconds"] for one in told["shares"]))
    stages = [datetime.fromisoformat(told[one]) for one in ("prepared", "row_read", "started")]
    assert at + timedelta(seconds=1) < stages[0]
    assert stages == sorted(stages)
    assert by_command(system, made, monkeypatch) == told
    hosts = {one["host"] for one in gateway.call("GET", "/v1/workers").body["workers"]}
    slots = system.center.catalog.get("test.sync").slot_amount
    browser = Browser(gateway, "all")

    def by_host() -> bool:
        page = browser.get("/topics/test.sync").text
        return any(f"{host}\n{slots}\n" in page for host in hosts)

    system.wait(by_host, "the page tells how many slots a host has", 20)

    enough = system.directory / "enough"
    for _ in range(3):
        gateway.submit(delay=0.1, attribute={"until": str(enough)})
    system.wait(lambda: [one["cause"] for one in waiting()] == ["concurrency"], "what waits says why", 20)
    enough.touch()
