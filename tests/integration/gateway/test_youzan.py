"""Youzan's dialect: every answer of every command, as bytes."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness.dialect import Raw, arrived, ask, port_of, receive, send
from harness.gateway import Gateway
from harness.patience import until

from toc.model.errors import InvalidTopic
from toc.model.task import NewTask, TaskStatus
from toc.operate.operation import Doing
from toc.operate.topics import create

JSON = "application/json; charset=utf-8"
DONE = '{"code":0,"message":"操作成功","data":null}'
ADDED = '{"code":0,"message":"添加成功","data":null}'
MIB = 1 << 20


def wrong(message: str) -> str:
    return json.dumps(
        {"code": 1, "message": message, "data": None}, ensure_ascii=False, separators=(",", ":")
    )


def refused(message: str) -> str:
    answer = {"success": False, "error": message, "id": "", "value": ""}
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":"))


class Client:
    """What tests ask a Youzan port."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, path: str, body: Any = b"", method: str = "POST") -> Raw:
        return ask(self.port, method, path, body)

    def push(self, job_id: str, topic: str = "t", delay: int = 1, ttr: int = 60, body: str = "") -> None:
        job = {"id": job_id, "topic": topic, "delay": delay, "ttr": ttr, "body": body}
        assert_is(self("/push", job), ADDED)

    def pop(self, topic: str = "t") -> Any:
        return self("/pop", {"topic": topic}).json["data"]

    def get(self, job_id: str) -> Any:
        return self("/get", {"id": job_id}).json["data"]


def assert_is(answer: Raw, body: str, status: int = 200, media_type: str = JSON) -> None:
    assert (answer.status, answer.media_type, answer.body.decode()) == (status, media_type, body)


@pytest.fixture
def youzan(dialects: Gateway) -> Client:
    return Client(port_of(dialects, "youzan"))


def test_a_job_lives_over_the_paths(youzan: Client) -> None:
    job = {"topic": " life ", "id": " order-1 ", "delay": 1, "ttr": 30, "body": ' {"a": "ü中"} '}
    before = int(time.time())
    assert_is(youzan("/push", job), ADDED)
    shown = youzan("/get", {"id": "order-1"})
    due = shown.json["data"]["delay"]
    assert due in range(before + 1, before + 4)
    job = {"topic": "life", "id": "order-1", "delay": due, "ttr": 30, "body": '{"a": "ü中"}'}
    answer = {"code": 0, "message": "操作成功", "data": job}
    assert_is(shown, json.dumps(answer, ensure_ascii=False, separators=(",", ":")))
    assert_is(
        youzan("/pop", {"topic": "life"}),
        '{"code":0,"message":"操作成功","data":{"id":"order-1","body":"{\\"a\\": \\"ü中\\"}"}}',
    )
    assert youzan.get("order-1") == shown.json["data"], "a reserved job is still shown"
    assert_is(youzan("/finish", {"id": "order-1"}), DONE)
    assert_is(youzan("/get", {"id": "order-1"}), DONE)


def test_a_job_lives_over_the_commands(youzan: Client) -> None:
    done = '{"success":true,"error":"","id":"","value":""}'
    add = {"command": "add", "topic": "cmd", "id": "c1", "delay": 1, "TTR": 60, "body": "hello"}
    assert_is(youzan("/", add), done)
    popped = youzan("/", {"command": "pop", "topic": "cmd"})
    assert_is(popped, '{"success":true,"error":"","id":"c1","value":"hello"}')
    assert_is(youzan("/", {"command": "finish", "id": "c1"}), done)
    assert youzan.get("c1") is None
    assert_is(youzan("/", add), done)
    assert_is(youzan("/", {"command": "delete", "id": "c1"}), done)
    assert youzan.get("c1") is None


def test_answers_are_escaped_as_by_the_original(youzan: Client) -> None:
    text = "<a href='x'>&\u2028\u2029!"
    youzan.push("escaped", "go", body=text)
    got = youzan("/pop", {"topic": "go"})
    assert got.body.endswith(b"\\u003ca href='x'\\u003e\\u0026\\u2028\\u2029!\"}}")
    assert got.json["data"]["body"] == text


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_any_method_will_do(youzan: Client, method: str) -> None:
    job = {"topic": "any", "id": method, "delay": 60, "ttr": 60, "body": "b"}
    assert_is(youzan("/push", job, method), ADDED)
    assert_is(youzan("/delete", {"id": method}, method), DONE)


def test_a_pop_whose_answer_would_have_no_body_hands_out_nothing(youzan: Client) -> None:
    youzan.push("headed", "headed")
    with send(youzan.port, "HEAD", "/pop", b'{"topic":"headed"}') as link:
        assert link.recv(1000).startswith(b"HTTP/1.1 405 ")
    assert youzan.pop("headed")["id"] == "headed"


GOOD = {"topic": "t", "id": "i", "delay": 60, "ttr": 60, "body": "b"}


NO_ID, NO_TOPIC, NO_TOPIC_TO_POP = "job id不能为空", "topic 不能为空", "topic不能为空"
DELAY, TTR, NO_JSON = "delay 取值范围1 - (2^31 - 1)", "ttr 取值范围1 - 86400", "解析json失败"
WRONG_TYPES: list[dict[str, Any]] = [
    *({"delay": odd} for odd in ("60", 60.5, 60.0, True, 2**63)),
    {"ttr": "60"},
    {"id": 7},
    {"topic": ["t"]},
    {"body": {"a": 1}},
]
TOO_LONG = [{"id": "中" * 255}, {"id": "i" * 256}, {"body": "b" * (MIB + 1)}]
NO_OBJECTS = [
    *(b"", b"{", b"[]", b"7", b'{"id": "\xff", "topic": "\xff", "delay": 60, "ttr": 60}', b'{"delay": NaN}'),
    b'{"delay": %s}' % (b"9" * 5000),
    b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b" " * (7 * MIB),
]
BY_ID = ("/finish", "/delete", "/get")


@pytest.mark.parametrize(("path", "body", "message"), [
    *(("/push", GOOD | {"id": odd}, NO_ID) for odd in ("", " \t", None)),
    *(("/push", body, NO_ID) for body in (b"{}", b"null")),
    *(("/push", body, NO_TOPIC) for body in (GOOD | {"topic": " "}, {"id": "i"})),
    *(("/push", GOOD | {"delay": odd}, DELAY) for odd in (0, -1, 2**31, None)),
    *(("/push", GOOD | {"ttr": odd}, TTR) for odd in (0, 86401)),
    *(("/push", GOOD | odd, NO_JSON) for odd in WRONG_TYPES + TOO_LONG),
    *(("/pop", {"topic": odd}, NO_TOPIC_TO_POP) for odd in ("  ", None)),
    ("/pop", {"topic": 1}, NO_JSON),
    *((path, {"id": odd}, NO_ID) for path in BY_ID for odd in ("", " ", None)),
    *((path, {"id": odd}, NO_JSON) for path in BY_ID for odd in (5, False, ["i"])),
    *((path, body, NO_JSON) for path in ("/push", "/pop", *BY_ID) for body in NO_OBJECTS),
    ("/finish", b"null", NO_ID),
    ("/delete", b"\x00", NO_JSON),
])  # fmt: skip
def test_a_mistake_is_answered_as_by_the_original(youzan: Client, path: str, body: Any, message: str) -> None:
    assert_is(youzan(path, body), wrong(message))


@pytest.mark.parametrize(("body", "message"), [
    *(({"command": "add", **GOOD, "id": odd}, NO_ID) for odd in ("", None)),
    ({"command": "add", **GOOD, "topic": ""}, NO_TOPIC),
    ({"command": "add", **GOOD, "delay": 0}, DELAY),
    ({"command": "add", **GOOD, "ttr": 0}, TTR),
    *(({"command": "add", **GOOD, **odd}, NO_JSON) for odd in WRONG_TYPES + TOO_LONG),
    ({"command": "pop"}, NO_TOPIC_TO_POP),
    *(({"command": command}, NO_ID) for command in ("finish", "delete")),
    *(({"command": command, "id": 5}, NO_JSON) for command in ("finish", "delete")),
    *((body, NO_JSON) for body in ({"command": "push", **GOOD}, {"command": "pop", "topic": 5})),
    *((body, NO_JSON) for body in ({"command": 1}, {}, b'{"command":"pop","topic":"\xff"}', *NO_OBJECTS)),
])  # fmt: skip
def test_a_mistake_in_a_command_is_answered_in_its_form(youzan: Client, body: Any, message: str) -> None:
    assert_is(youzan("/", body), refused(message))


def test_what_is_no_path_is_not_found(youzan: Client) -> None:
    for path in ("/nothing", "/push/", "/PUSH", "/v1/topics"):
        assert_is(youzan(path, GOOD), "404 page not found\n", 404, "text/plain; charset=utf-8")
    assert_is(youzan("/", b"", "GET"), "404 page not found\n", 404, "text/plain; charset=utf-8")


def test_unknown_ids_are_no_mistake(youzan: Client) -> None:
    for path in ("/finish", "/delete", "/get"):
        assert_is(youzan(path, {"id": "unknown"}), DONE)
        assert_is(youzan(path, {"id": "i" * 300}), DONE)
    for command in ("finish", "delete"):
        done = youzan("/", {"command": command, "id": "unknown"})
        assert_is(done, '{"success":true,"error":"","id":"","value":""}')


def test_the_largest_of_everything_is_taken(youzan: Client) -> None:
    youzan.push("i" * 255, topic="中" * 255, delay=2**31 - 1, ttr=86_400, body="b" * MIB)
    shown = youzan.get("i" * 255)
    assert (shown["topic"], shown["ttr"], shown["body"]) == ("中" * 255, 86_400, "b" * MIB)
    assert abs(shown["delay"] - time.time() - 2**31) < 60
    youzan.push("escaped", body="\x01" * MIB, delay=60)
    assert youzan.get("escaped")["body"] == "\x01" * MIB


def test_odd_texts_come_back_as_they_were(youzan: Client) -> None:
    texts = ("a\nb", "h-" + "0" * 32, "'; DROP TABLE x; --", "%s%d", "ключ", "a\u2028b", "a\x00b")
    for job_id in texts:
        youzan.push(job_id, topic=job_id, delay=1, body=f"of {job_id}")
    for job_id in texts:
        assert youzan.get(job_id)["topic"] == job_id.strip()
        assert youzan.pop(job_id) == {"id": job_id.strip(), "body": f"of {job_id}"}
        assert_is(youzan("/finish", {"id": job_id}), DONE)
        assert youzan.get(job_id) is None


def test_of_a_repeated_name_the_last_value_counts_and_case_does_not(youzan: Client) -> None:
    body = b'{"ID": "no", "id": "twice", "Topic": "t", "delay": 0, "DELAY": 60, "Ttr": 60, "more": [1]}'
    assert_is(youzan("/push", body), ADDED)
    assert youzan.get("twice")["ttr"] == 60


def test_a_lone_surrogate_is_replaced(youzan: Client) -> None:
    assert_is(youzan("/push", b'{"id":"s","topic":"t","delay":60,"ttr":60,"body":"a\\ud800b"}'), ADDED)
    assert youzan.get("s")["body"] == "a\ufffdb"


def test_a_pop_waits_for_its_job_even_on_a_topic_that_is_not_there_yet(youzan: Client) -> None:
    with send(youzan.port, "POST", "/pop", b'{"topic":"new-topic"}') as link:
        assert until(lambda: arrived(youzan.port, 1))
        pushed = time.time()
        youzan.push("first", topic="new-topic", delay=1, body="x")
        assert receive(link).json["data"] == {"id": "first", "body": "x"}
        assert time.time() - pushed > 1.0


def test_finish_ends_only_what_was_handed_out_since_it_was_pushed(youzan: Client) -> None:
    youzan.push("waits", delay=60)
    assert_is(youzan("/finish", {"id": "waits"}), DONE)
    assert youzan.get("waits") is not None, "it was never handed out"

    youzan.push("renewed", topic="renewed", delay=1)
    assert youzan.pop("renewed")["id"] == "renewed"
    youzan.push("renewed", topic="renewed", delay=60, body="second")
    assert_is(youzan("/finish", {"id": "renewed"}), DONE)
    assert youzan.get("renewed")["body"] == "second", "its new version was never handed out"


def test_delete_ends_anything(youzan: Client) -> None:
    youzan.push("waiting", topic="deleted", delay=60)
    youzan.push("ready", topic="deleted", delay=1)
    youzan.push("reserved", topic="deleted-2", delay=1)
    assert youzan.pop("deleted-2")["id"] == "reserved"
    for job_id in ("waiting", "ready", "reserved"):
        assert_is(youzan("/delete", {"id": job_id}), DONE)
        assert youzan.get(job_id) is None
    youzan.push("last", topic="deleted", delay=1)
    assert youzan.pop("deleted")["id"] == "last", "what was deleted while it was ready does not come"


def test_a_push_replaces_the_job_of_its_id_that_is_pending_in_its_topic(youzan: Client) -> None:
    youzan.push("moved", topic="from", delay=1, body="old")
    youzan.push("moved", topic="from", delay=2, body="new", ttr=7)
    shown = youzan.get("moved")
    assert (shown["topic"], shown["body"], shown["ttr"]) == ("from", "new", 7)
    youzan.push("moved", topic="to", delay=3600, body="other")
    assert youzan.pop("from")["body"] == "new"
    assert_is(youzan("/finish", {"id": "moved"}), DONE)
    assert youzan.get("moved")["body"] == "other", "who uses an id in two topics has two jobs"
    assert_is(youzan("/delete", {"id": "moved"}), DONE)
    assert youzan.get("moved") is None


def test_only_own_rows_are_touched(youzan: Client, dialects: Gateway) -> None:
    youzan.push("mine", topic="own", delay=60)
    center = dialects.system.center
    center.catalog.refresh()
    native = [
        center.submit("test.sync", biz_id="foreign", delay=60),
        center.submit("test.sync", biz_id="foreign", delay=60, dedup_key="youzan:job"),
    ]
    for path in ("/finish", "/delete", "/get"):
        assert_is(youzan(path, {"id": "foreign"}), DONE)
    youzan.push("foreign", topic="own", delay=1)
    assert youzan.pop("own")["id"] == "foreign"
    assert_is(youzan("/delete", {"id": "foreign"}), DONE)
    rows = center.store.read(native)
    assert all(row.status == TaskStatus.PENDING and row.version == 0 for row in rows.values())


@pytest.mark.parametrize("topic", ["youzan.own", "lmstfy.ns.q", "delay-task-callback.x"])
def test_native_doors_neither_create_topics_of_dialects_nor_fill_them(dialects: Gateway, topic: str) -> None:
    center, task = dialects.system.center, {"biz_id": 1, "delay": 60}
    said = [
        dialects.call("POST", "/v1/topics", {"name": topic, "biz_type": 77, "slot_amount": 4}),
        dialects.submit(topic),
        dialects.call("POST", f"/v1/topics/{topic}/tasks:batch", {"tasks": [task]}),
        dialects.call("POST", "/v1/schedules", {"name": "s", "topic": topic, "every": 60}),
    ]
    assert [(one.status, one.body["type"].rpartition("#")[2]) for one in said] == [(422, "invalid")] * 4, said
    native: list[Callable[[], object]] = [
        lambda: center.submit(topic, biz_id=1, delay=60),
        lambda: center.submit_many([NewTask(topic, 1, 60)]),
        lambda: center.put(NewTask(topic, 1, 60, dedup_key="k", on_conflict="replace")),
        lambda: center.schedules.create("s", topic=topic, every=60),
        lambda: create.do(Doing(center, "ann", create.right), topic, biz_type=77, slot_amount=4),
    ]
    for call in native:
        with pytest.raises(InvalidTopic, match="choose another name"):
            call()
    assert topic not in center.catalog.refresh() or topic == "youzan.own"


def test_nothing_of_a_request_reaches_the_log(youzan: Client, dialects: Gateway) -> None:
    youzan.push("canary-id", topic="canary-topic", body="canary-body")
    youzan("/push", {"id": "canary-wrong", "delay": "canary"})
    assert until(lambda: youzan.pop("canary-topic")), "whatever is logged of it has been"
    for canary in ("canary-id", "canary-wrong", "canary-body"):
        assert canary not in dialects.told()
