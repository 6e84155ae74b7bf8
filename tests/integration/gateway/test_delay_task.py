"""delay/task's dialect: every answer of every call, as bytes."""

import json
import socket
import time
from typing import Any

import pytest
from harness.dialect import Raw, ask, popped, port_of
from harness.gateway import Gateway
from harness.patience import until

from toc import Settings, TaskStatus, TimeoutCenter
from toc.store.records.targets import new_key

JSON = "application/json; charset=utf-8"
DONE = "操作成功"
NOTHING = {"dm_error": 1, "error_msg": "没有到期的任务", "content": ""}
MIB = 1 << 20


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, call: str, body: Any, method: str = "POST") -> Raw:
        answer = ask(self.port, method, f"/delay/task/{call}", body)
        assert (answer.status, answer.media_type) == (200, JSON)
        return answer

    def add(self, topic: str, after: float = 0, content: Any = '{"a":1}') -> int:
        moment = int(time.time() + after)
        answer = self("add", {"topic": topic, "timing_moment": moment, "content": content})
        number: int = answer.json["task_id"]
        assert answer.body.decode() == f'{{"dm_error":0,"error_msg":"{DONE}","task_id":{number}}}'
        assert number // 10_000 == moment
        return number

    def pull(self, topic: str, task_id: int | None = None) -> Any:
        return self("pull", {"topic": topic} | ({} if task_id is None else {"task_id": task_id})).json

    def pulled(self, topic: str) -> Any:
        return self.first(topic).json

    def first(self, topic: str) -> Raw:
        """The first answer with a task."""

        def came() -> Raw | None:
            answer = self("pull", {"topic": topic})
            return None if answer.json["dm_error"] else answer

        return popped(came)


@pytest.fixture
def client(dialects: Gateway) -> Client:
    return Client(port_of(dialects, "delay-task"))


def test_a_task_lives(client: Client, dialects: Gateway) -> None:
    content = '{"a": "ü中"}'
    number = client.add("life", 1.5, content)
    assert client.pull("life") == NOTHING
    assert client.pull("life", number) == {"dm_error": 1, "error_msg": "任务未到执行时间", "content": ""}
    got = client.pulled("life")
    assert got == {"dm_error": 0, "error_msg": DONE, "content": content}
    center = dialects.system.center
    dialects.system.wait(
        lambda: [row.status for row in center.find(biz_id=number)] == [TaskStatus.PROCESSED], "processed", 10
    )
    assert client.pull("life") == NOTHING
    assert client.pull("life", number) == got, "what was pulled stays readable"


def test_the_answer_to_a_pull_is_what_the_original_sends(client: Client) -> None:
    client.add("bytes", 0, '{"b":"中"}')
    answer = client.first("bytes")
    assert answer.body.decode() == f'{{"dm_error":0,"error_msg":"{DONE}","content":"{{\\"b\\":\\"中\\"}}"}}'


def test_one_task_is_pulled_by_its_number(client: Client) -> None:
    first, second = client.add("one", 0, "first"), client.add("one", 0, "second")
    assert first != second
    assert client.pull("one", second)["content"] == "second"
    assert client.pulled("one")["content"] == "first"
    assert until(lambda: client.pull("one", first)["content"] == "first", 5), "what was pulled can be read"
    assert client.pull("other", first)["dm_error"] == 1
    assert client.pull("one", 17)["dm_error"] == 1


def test_what_a_client_has_read_is_processed_however_soon_it_goes(client: Client, dialects: Gateway) -> None:
    numbers = [client.add("close", 0, str(number)) for number in range(100)]
    assert {client.pulled("close")["content"] for _ in numbers} == {str(n) for n in range(100)}
    center = dialects.system.center

    def pending() -> list[int]:
        rows = [row for number in numbers for row in center.find(biz_id=number)]
        return [row.job_id for row in rows if row.status == TaskStatus.PENDING]

    dialects.system.wait(lambda: not pending(), "processed", 10)


def test_what_a_client_left_before_it_had_all_is_not_processed(client: Client, dialects: Gateway) -> None:
    number = client.add("left", 0, "\x01" * MIB)  # each character is six in the answer
    body = json.dumps({"topic": "left"}).encode()

    request = f"POST /delay/task/pull HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"

    def begun() -> socket.socket | None:
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # it takes little of the answer
        link.connect(("127.0.0.1", client.port))
        link.sendall(request.encode() + body)
        if b'"content":""' not in link.recv(4096):
            return link
        link.close()
        return None

    link = popped(begun)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    link.close()
    center = dialects.system.center
    after = client.add("after", 0)
    client.pulled("after")
    dialects.system.wait(
        lambda: center.find(biz_id=after)[0].status == TaskStatus.PROCESSED, "the next is processed", 10
    )
    (row,) = center.find(biz_id=number)
    assert row.status == TaskStatus.PENDING


def test_content_that_is_an_object_is_taken(client: Client) -> None:
    number = client.add("object", 0, {"a": ["ü"]})
    assert json.loads(client.pull("object", number)["content"]) == {"a": ["ü"]}


def test_a_lone_surrogate_in_an_object_is_replaced(client: Client) -> None:
    body = b'{"topic":"odd","timing_moment":1700000000,"content":{"\\ud800":"a\\udfff"}}'
    number = client("add", body).json["task_id"]
    assert json.loads(client.pull("odd", number)["content"]) == {"\ufffd": "a\ufffd"}


def test_a_mistake_creates_no_topic(client: Client, dialects: Gateway) -> None:
    long = "c" * (MIB + 1)
    for topic, content in (
        ("new-1", long),
        ("new-2", '{"sn":"shop","url":"//evil"}'),
        ("new-3", '{"sn":"","url":"/"}'),
    ):
        body = {"topic": topic, "timing_moment": 2_000_000_000, "content": content}
        assert client("add", body).json["dm_error"] == 1
    far = {"topic": "new-4", "timing_moment": 5_000_000_000, "content": "{}"}
    assert client("add", far).json["dm_error"] == 1
    assert not [one.name for one in dialects.system.center.store.topics.list() if "new-" in one.name]


def test_numbers_clash_with_none(client: Client) -> None:
    moment = int(time.time()) + 60
    numbers = [
        client("add", {"topic": f"t{n % 3}", "timing_moment": moment, "content": str(n)}).json["task_id"]
        for n in range(60)
    ]
    assert len(set(numbers)) == 60


GOOD = {"topic": "t", "timing_moment": 2_000_000_000, "content": "{}"}


WRONG = "参数错误: "
MOMENT = WRONG + "timing_moment must be a time in seconds since 1970"
NO_NUMBER = WRONG + "timing_moment must be a whole number"
NO_CONTENT = WRONG + "content must be a JSON text"
NO_TOPIC = WRONG + "topic is empty"
NO_JSON = WRONG + "the request is not JSON in UTF-8"
NO_OBJECT = WRONG + "the request is not a JSON object"
NO_TASK_ID = WRONG + "task_id must be a whole number"
UNKNOWN = "任务不存在"
LARGE = (
    f"{WRONG}body has {MIB + 1} bytes; {MIB} are allowed (TOC_MAX_BODY): keep it elsewhere and put its "
    "address here"
)
LARGEST = f"{WRONG}at most {6 * MIB + 65_536} bytes are allowed"


@pytest.mark.parametrize(("call", "body", "message"), [
    *(("add", body, NO_TOPIC) for body in ({}, GOOD | {"topic": ""})),
    ("add", GOOD | {"topic": 5}, WRONG + "topic must be a text"),
    *(("add", GOOD | {"timing_moment": odd}, MOMENT) for odd in (0, -1, 10**12, None)),
    *(("add", GOOD | {"timing_moment": odd}, NO_NUMBER) for odd in ("5", 1.5, True, 2**63)),
    *(("add", GOOD | {"content": odd}, NO_CONTENT) for odd in (5, None, ["x"])),
    ("add", GOOD | {"content": "c" * (MIB + 1)}, LARGE),
    ("add", b'{"topic":"t","timing_moment":2000000000,"content":{"a":1e999}}', NO_JSON),
    ("add", b'{"x":' + b"[" * 200_000, NO_JSON),
    *((call, b"[]", NO_OBJECT) for call in ("add", "pull")),
    *((call, odd, NO_JSON) for call in ("add", "pull") for odd in (b"", b"{", b'{"topic":"\xff"}')),
    *((call, b" " * (7 * MIB), LARGEST) for call in ("add", "pull")),
    *(("pull", body, NO_TOPIC) for body in ({}, {"topic": None})),
    ("pull", {"topic": ["t"]}, WRONG + "topic must be a text"),
    *(("pull", {"topic": "t", "task_id": odd}, NO_TASK_ID) for odd in ("5", 2**64)),
    *(("pull", {"topic": "t", "task_id": odd}, UNKNOWN) for odd in (-5, 17)),
    ("pull", {"topic": "中" * 255}, "没有到期的任务"),
])  # fmt: skip
def test_a_mistake_is_said_and_no_more(client: Client, call: str, body: Any, message: str) -> None:
    more = '"task_id":0' if call == "add" else '"content":""'
    assert client(call, body).body.decode() == f'{{"dm_error":1,"error_msg":"{message}",{more}}}'


def test_what_is_no_call_is_not_found(client: Client) -> None:
    assert ask(client.port, "POST", "/delay/task", b"").status == 404
    assert ask(client.port, "GET", "/delay/task/add", b"").status == 405
    assert ask(client.port, "POST", "/delay/task/add", b"{}", ["Origin: http://evil.example"]).status == 403


def test_the_largest_content_and_names_of_255_characters_are_taken(client: Client) -> None:
    number = client.add("中" * 255, 0, "c" * MIB)
    assert client.pull("中" * 255, number)["content"] == "c" * MIB


def test_content_with_sn_and_url_is_a_callback_to_that_path(client: Client, dialects: Gateway) -> None:
    content = '{"sn":"shop","url":"/paid?x=1","n":1}'
    call = {"topic": "hooks", "timing_moment": int(time.time()), "content": content}
    refused = client("add", call).json
    assert (refused["dm_error"], "no target 'shop'" in refused["error_msg"]) == (1, True), refused
    given = dialects.system.settings.model_dump() | {"secret_key": [new_key()]}
    with TimeoutCenter(Settings(**given)) as keyed:
        keyed.targets.create("shop", "https://example.com/", topics=["delay-task.*"])
        assert client("add", call).json["dm_error"] == 1, "it is not for topics of callbacks"
        keyed.targets.alter("shop", topics=["delay-task-callback.h*"])
    number = client.add("hooks", 0, content)
    assert client("add", call | {"topic": "other"}).json["dm_error"] == 1
    assert client.pull("hooks") == NOTHING, "it is sent, not pulled"
    assert client.pull("hooks", number)["dm_error"] == 1
    center = dialects.system.center
    center.catalog.refresh()
    (task,) = center.find(biz_id=number)
    assert task.topic == "delay-task-callback.hooks"
    assert task.attribute["toc-webhook"] == {"target": "shop", "path": "/paid?x=1"}
    assert task.body == content.encode()


@pytest.mark.parametrize("url", ["//evil.example/", "paid", "http://evil.example/", "/a b", 5, ""])
def test_a_callback_leads_to_a_path_of_its_target_and_nowhere_else(client: Client, url: Any) -> None:
    content = json.dumps({"sn": "shop", "url": url})
    said = client("add", {"topic": "t", "timing_moment": 2_000_000_000, "content": content}).json
    assert (said["dm_error"], said["task_id"]) == (1, 0)
