"""redis-delayed's dialect: every answer of every call, as bytes."""

import json
import re
import time
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from harness.dialect import Raw, ask, popped, port_of
from harness.gateway import Gateway

JSON = "application/json;charset=UTF-8"
TEXT = "text/plain;charset=UTF-8"
EMPTY = '{"delayTime":0,"retryCount":0,"ttrTime":0}'
FORM = "Content-Type: application/x-www-form-urlencoded"
MIB = 1 << 20
JOB = {"id": 1, "topic": "x", "delayTime": 60_000, "ttrTime": 60_000, "message": "m"}


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def add(self, **more: Any) -> Raw:
        return ask(self.port, "POST", "/delay/add", urlencode(JOB | more).encode(), [FORM])

    def pop(self, topic: str = "x") -> Raw:
        return ask(self.port, "GET", f"/delay/pop?topic={quote(topic)}")

    def finish(self, job_id: object) -> Raw:
        return ask(self.port, "DELETE", f"/delay/finish?jobId={job_id}")

    def delete(self, job_id: object) -> Raw:
        return ask(self.port, "DELETE", f"/delay/delete?jobId={job_id}")

    def popped(self, topic: str) -> Any:
        def came() -> Any:
            answer = self.pop(topic)
            return None if answer.body.decode() == EMPTY else answer.json

        return popped(came)


def assert_is(answer: Raw, body: str, media_type: str = JSON, status: int = 200) -> None:
    assert (answer.status, answer.media_type, answer.body.decode()) == (status, media_type, body)


@pytest.fixture
def client(dialects: Gateway) -> Client:
    return Client(port_of(dialects, "redis-delayed"))


def test_a_job_lives(client: Client) -> None:
    before = int(time.time() * 1000)
    added = client.add(id=7, topic="life", delayTime=1500, ttrTime=1000, message="ü &=中")
    date = added.json["delayDate"]
    assert before + 1500 <= date <= time.time() * 1000 + 1501
    assert_is(added, f'{{"delayDate":{date},"jodId":7,"topic":"life"}}')
    assert_is(client.pop("life"), EMPTY)
    first = client.popped("life")
    assert time.time() * 1000 >= date
    assert first == {
        "delayTime": 1500, "id": "7", "message": "ü &=中", "retryCount": 0, "status": "reserved",
        "topic": "life", "ttrTime": 1000,
    }  # fmt: skip
    assert client.popped("life")["retryCount"] == 1
    assert_is(client.finish(7), "success", TEXT)
    client.add(id=8, topic="life", delayTime=1300)  # later than the end of its ttr
    assert client.popped("life")["id"] == "8", "what was finished comes no more"


def test_parameters_are_taken_from_the_query_as_well(client: Client) -> None:
    added = ask(
        client.port, "POST", "/delay/add?" + urlencode(JOB | {"id": 2, "delayTime": 0, "topic": "query"})
    )
    assert_is(added, f'{{"delayDate":{added.json["delayDate"]},"jodId":2,"topic":"query"}}')
    assert client.popped("query")["id"] == "2"


def test_adding_an_id_again_replaces_its_job(client: Client) -> None:
    client.add(id=3, topic="one", delayTime=300, message="old")
    client.add(id=3, topic="one", delayTime=300, message="new")
    assert client.popped("one")["message"] == "new"
    assert_is(client.pop("one"), EMPTY)
    assert_is(client.delete(3), "success", TEXT)


def test_unknown_ids_are_no_mistake(client: Client) -> None:
    assert_is(client.finish(5), "success", TEXT)
    assert_is(client.delete(2**63 - 1), "success", TEXT)


def number(name: str, least: int, most: int) -> str:
    return f"Parameter '{name}' must be a whole number from {least} to {most}"


NO_ID = "Required String parameter 'id' is not present"
NO_TOPIC = "Required String parameter 'topic' is not present"
NO_JOB_ID = "Required String parameter 'jobId' is not present"
ID, JOB_ID = number("id", 0, 2**63 - 1), number("jobId", 0, 2**63 - 1)
DELAY, TTR = number("delayTime", 0, 315_360_000_000), number("ttrTime", 1, 604_800_000)
NOT_UTF8 = "the parameters are not UTF-8, percent-encoded"
TOO_MANY = "at most 30 parameters are allowed"
TOO_LARGE = (
    f"body has {MIB + 1} bytes; {MIB} are allowed (TOC_MAX_BODY): keep it elsewhere and put its address here"
)


@pytest.mark.parametrize(("method", "target", "body", "status", "message"), [
    ("POST", "/delay/add", {**JOB, "id": None}, 400, NO_ID),
    ("POST", "/delay/add", b"", 400, "Required String parameter 'delayTime' is not present"),
    *(
        ("POST", "/delay/add", {**JOB, "id": odd}, 400, ID)
        for odd in ("x", "-1", "\u0663", 2**63, "9" * 5000)
    ),
    ("POST", "/delay/add", {**JOB, "topic": ""}, 400, NO_TOPIC),
    *(
        ("POST", "/delay/add", {**JOB, "delayTime": odd}, 400, DELAY)
        for odd in ("1.5", "true", 315_360_000_001)
    ),
    *(("POST", "/delay/add", {**JOB, "ttrTime": odd}, 400, TTR) for odd in (0, "x")),
    ("POST", "/delay/add", {**JOB, "message": "m" * (MIB + 1)}, 413, TOO_LARGE),
    *(("POST", "/delay/add", odd, 400, NOT_UTF8) for odd in (b"id=%ff&topic=x", b"id=1&topic=\xff")),
    ("POST", "/delay/add", b"x" * (7 * MIB), 413, f"at most {6 * MIB + 65_536} bytes are allowed"),
    ("POST", "/delay/add", b"&".join(b"a%d=1" % n for n in range(31)), 400, TOO_MANY),
    ("GET", "/delay/pop", b"", 400, NO_TOPIC),
    ("GET", "/delay/pop?topic=%ff", b"", 400, NOT_UTF8),
    *(
        ("DELETE", f"/delay/{call}{query}", b"", 400, message)
        for call in ("finish", "delete")
        for message, queries in (
            (NO_JOB_ID, ("", "?jobId=")),
            (JOB_ID, ("?jobId=abc", "?jobId=1e3")),
            (NOT_UTF8, ("?jobId=%ff",)),
        )
        for query in queries
    ),
    *(
        (method, f"/delay/{call}", b"", 405, f"Request method '{method}' not supported")
        for method, call in (("GET", "add"), ("POST", "pop"), ("GET", "finish"), ("POST", "delete"))
    ),
    ("GET", "/nothing", b"", 404, "No message available"),
])  # fmt: skip
def test_a_mistake_is_answered_as_by_the_framework_of_the_original(
    client: Client, method: str, target: str, body: Any, status: int, message: str
) -> None:
    if isinstance(body, dict):
        body = urlencode({name: value for name, value in body.items() if value is not None}).encode()
    answer = ask(client.port, method, target, body, [FORM])
    assert (answer.status, answer.media_type) == (status, JSON)
    path = target.partition("?")[0]
    pinned = (
        f'"status":{status},"error":"{HTTPStatus(status).phrase}","message":"{message}","path":"{path}"}}'
    )
    began = r'{"timestamp":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.000\+0000",'
    assert re.fullmatch(began + re.escape(pinned), answer.body.decode()), answer.body


def test_the_largest_message_and_names_of_255_characters_are_taken(client: Client) -> None:
    client.add(id=8, topic="中" * 255, delayTime=0, message="m" * MIB)
    assert client.popped("中" * 255)["message"] == "m" * MIB
    assert json.loads(client.pop("中" * 254).body) == json.loads(EMPTY)
