"""Every kind of bad request is answered as a problem that stays the same; never a 500, never a trace."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from harness.gateway import Gateway

TASK = {"biz_id": 1, "delay": 60}
SUBMIT = "/v1/topics/test.sync/tasks"
DEEP = b'{"biz_id":1,"delay":60,"attribute":' + b'{"a":' * 2000 + b"1" + b"}" * 2001

BODIES: dict[str, tuple[bytes | dict[str, Any], int, str, str | None]] = {
    "no JSON": (b"{", 400, "syntax", None),
    "empty": (b"", 400, "syntax", None),
    "no UTF-8": (b'{"biz_id":"\xff","delay":60}', 400, "syntax", None),
    "a lone surrogate in biz_id": (b'{"biz_id":"\\ud800","delay":60}', 422, "invalid", "biz_id"),
    "a lone surrogate in body": (b'{"biz_id":1,"delay":60,"body":"a\\udc00b"}', 422, "invalid", "body"),
    "a lone surrogate in dedup_key": (
        b'{"biz_id":1,"delay":60,"dedup_key":"\\ud800"}',
        422,
        "invalid",
        "dedup_key",
    ),
    "a lone surrogate in attribute": (
        b'{"biz_id":1,"delay":60,"attribute":{"a":["\\ud800"]}}',
        422,
        "invalid",
        "attribute",
    ),
    "a lone surrogate in target": (
        b'{"biz_id":1,"delay":60,"target":"\\ud800"}',
        422,
        "invalid",
        "target",
    ),
    "a lone surrogate and no JSON": (b'{"biz_id":1,"delay":60,"body":"\\ud800"', 400, "syntax", None),
    "an attribute 65 deep": (
        b'{"biz_id":1,"delay":60,"attribute":{"a":' + b"[" * 64 + b"]" * 64 + b"}}",
        422,
        "invalid",
        "attribute",
    ),
    "biz_id that is rounded": (TASK | {"biz_id": 2**53}, 422, "invalid", "biz_id"),
    "nested deeply": (DEEP, 400, "syntax", None),
    "a list": (b"[]", 400, "syntax", None),
    "null": (b"null", 400, "syntax", None),
    "no biz_id": ({"delay": 60}, 422, "invalid", "biz_id"),
    "an unknown field": (TASK | {"dealy": 1}, 422, "invalid", "dealy"),
    "biz_id null": (TASK | {"biz_id": None}, 422, "invalid", "biz_id"),
    "biz_id a fraction": (TASK | {"biz_id": 1.5}, 422, "invalid", "biz_id"),
    "biz_id true": (TASK | {"biz_id": True}, 422, "invalid", "biz_id"),
    "biz_id negative": (TASK | {"biz_id": -1}, 422, "invalid", "biz_id"),
    "biz_id too large": (TASK | {"biz_id": 2**63}, 422, "invalid", "biz_id"),
    "biz_id of 5,000 digits": (b'{"biz_id":' + b"9" * 5000 + b',"delay":60}', 400, "syntax", None),
    "biz_id too long": (TASK | {"biz_id": "x" * 256}, 422, "invalid", "biz_id"),
    "biz_id with a line break": (TASK | {"biz_id": "a\nb"}, 422, "invalid", "biz_id"),
    "delay a text": (TASK | {"delay": "60"}, 422, "invalid", "delay"),
    "delay negative": (TASK | {"delay": -1}, 422, "invalid", "delay"),
    "delay NaN": (b'{"biz_id":1,"delay":NaN}', 422, "invalid", "delay"),
    "delay 1e400": (b'{"biz_id":1,"delay":1e400}', 422, "invalid", "delay"),
    "delay of centuries": (TASK | {"delay": 1e11}, 422, "invalid", "delay"),
    "delay 0": (TASK | {"delay": 0}, 422, "invalid", "delay"),
    "no time": ({"biz_id": 1}, 422, "invalid", "delay"),
    "both times": (TASK | {"action_time": "2099-01-01T00:00:00Z"}, 422, "invalid", "delay"),
    "a time without a zone": (
        {"biz_id": 1, "action_time": "2099-01-01T00:00:00"},
        422,
        "invalid",
        "action_time",
    ),
    "a time in the past": (
        {"biz_id": 1, "action_time": "2001-01-01T00:00:00Z"},
        422,
        "invalid",
        "action_time",
    ),
    "a time centuries ahead": (
        {"biz_id": 1, "action_time": "9999-01-01T00:00:00Z"},
        422,
        "invalid",
        "action_time",
    ),
    "a time as a number": ({"biz_id": 1, "action_time": 4070908800}, 422, "invalid", "action_time"),
    "no time at all": ({"biz_id": 1, "action_time": "soon"}, 422, "invalid", "action_time"),
    "an attribute that is a list": (TASK | {"attribute": [1]}, 422, "invalid", "attribute"),
    "an attribute with NaN": (b'{"biz_id":1,"delay":60,"attribute":{"a":NaN}}', 422, "invalid", "attribute"),
    "a long attribute": (TASK | {"attribute": {"a": "x" * 5000}}, 422, "invalid", "attribute"),
    "tries negative": (TASK | {"tries": -1}, 422, "invalid", "tries"),
    "expired before it is due": (TASK | {"expires_at": "2001-01-01T00:00:00Z"}, 422, "invalid", "expires_at"),
    "an empty dedup_key": (TASK | {"dedup_key": ""}, 422, "invalid", "dedup_key"),
    "a dedup_key with NUL": (TASK | {"dedup_key": "a\0"}, 422, "invalid", "dedup_key"),
    "a long slot_basis": (TASK | {"slot_basis": "x" * 300}, 422, "invalid", "slot_basis"),
    "too large": (b" " * (6500 << 10), 413, "too-large", None),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_task_is_refused_by_name(shared: Gateway, name: str) -> None:
    body, status, kind, field = BODIES[name]
    answer = shared.call("POST", SUBMIT, body)
    assert (answer.status, answer.body["type"]) == (status, f"/docs#{kind}"), answer
    assert answer.body.get("field") == field
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.body["status"] == status
    assert answer.body["title"]
    assert answer.body["detail"]


REQUESTS: dict[str, tuple[str, str, Any, dict[str, str], int, str, str | None]] = {
    "no such call": ("GET", "/v2/tasks", None, {}, 404, "not-found", None),
    "the root": ("GET", "/", None, {}, 404, "not-found", None),
    "a wrong method": ("PUT", SUBMIT, TASK, {}, 405, "method-not-allowed", None),
    "HEAD where there is no GET": ("HEAD", SUBMIT, None, {}, 405, "", None),
    "an unknown topic": ("POST", "/v1/topics/none/tasks", TASK, {}, 404, "unknown-topic", None),
    "a topic that is no name": ("POST", "/v1/topics/{a}/tasks", TASK, {}, 422, "invalid", "topic"),
    "a topic with an escaped slash": ("POST", "/v1/topics/a%2Fb/tasks", TASK, {}, 404, "not-found", None),
    "an unknown task": ("GET", "/v1/tasks/894573895733248", None, {}, 404, "unknown-task", None),
    "a job_id that is none": ("GET", "/v1/tasks/x", None, {}, 404, "unknown-task", None),
    "a job_id of 100 digits": ("GET", "/v1/tasks/" + "9" * 100, None, {}, 404, "unknown-task", None),
    "a job_id in Arabic digits": ("GET", "/v1/tasks/%D9%A1%D9%A2", None, {}, 404, "unknown-task", None),
    "form data": (
        "POST",
        SUBMIT,
        b"biz_id=1",
        {"Content-Type": "application/x-www-form-urlencoded"},
        422,
        "invalid",
        "biz_id",
    ),
    "gzip": ("POST", SUBMIT, b"\x1f\x8b", {"Content-Encoding": "gzip"}, 415, "media-type", None),
    "an unknown parameter": ("GET", "/v1/tasks?topics=a", None, {}, 422, "invalid", "topics"),
    "a parameter twice": ("GET", "/v1/tasks?limit=1&limit=2", None, {}, 400, "syntax", None),
    "a parameter for none": ("GET", "/v1/topics?a=1", None, {}, 422, "invalid", "a"),
    "a parameter that is no UTF-8": ("GET", "/v1/tasks?topic=%FF", None, {}, 400, "syntax", None),
    "100 parameters": (
        "GET",
        "/v1/tasks?" + "&".join(f"a{n}=1" for n in range(100)),
        None,
        {},
        400,
        "syntax",
        None,
    ),
    "a limit of 0": ("GET", "/v1/tasks?limit=0", None, {}, 422, "invalid", "limit"),
    "a status that is none": ("GET", "/v1/tasks?status=late", None, {}, 422, "invalid", "status"),
    "a biz_id of 30 digits": ("GET", "/v1/tasks?biz_id=" + "9" * 30, None, {}, 422, "invalid", "biz_id"),
    "a next that is none": ("GET", "/v1/tasks?next=1", None, {}, 422, "invalid", "next"),
    "a next beyond time": ("GET", "/v1/tasks?next=999999999999999.1", None, {}, 422, "invalid", "next"),
    "times the wrong way round": (
        "GET",
        "/v1/tasks?due_after=2099-01-01T00:00:00Z&due_before=2098-01-01T00:00:00Z",
        None,
        {},
        422,
        "invalid",
        "due_after",
    ),
    "no tasks in a batch": ("POST", SUBMIT + ":batch", {"tasks": []}, {}, 422, "invalid", "tasks"),
    "1,001 tasks in a batch": (
        "POST",
        SUBMIT + ":batch",
        {"tasks": [TASK] * 1001},
        {},
        422,
        "invalid",
        "tasks",
    ),
    "a topic with 3 slots": (
        "POST",
        "/v1/topics",
        {"name": "t", "biz_type": 5, "slot_amount": 3},
        {},
        422,
        "invalid",
        "slot_amount",
    ),
    "a topic whose name is none": (
        "POST",
        "/v1/topics",
        {"name": "a b", "biz_type": 5, "slot_amount": 2},
        {},
        422,
        "invalid",
        "name",
    ),
    "a topic with 32 tries": (
        "PATCH",
        "/v1/topics/test.sync",
        {"retries": 32},
        {},
        422,
        "invalid",
        "retries",
    ),
    "a topic with a negative backoff": (
        "PATCH",
        "/v1/topics/test.sync",
        {"backoff_base": -1},
        {},
        422,
        "invalid",
        "backoff_base",
    ),
    "a policy that is none": (
        "PATCH",
        "/v1/topics/test.sync",
        {"backoff": "slow"},
        {},
        422,
        "invalid",
        "backoff",
    ),
    "nothing to change": ("PATCH", "/v1/topics/test.sync", {}, {}, 422, "invalid", None),
    "nothing to change of a target": ("PATCH", "/v1/targets/t", {}, {}, 422, "invalid", None),
    "a field of a call that has none": (
        "POST",
        "/v1/schedules/s:trigger",
        {"attribute": {}},
        {},
        422,
        "invalid",
        "attribute",
    ),
    "a field of a call without a body": ("DELETE", "/v1/tasks/1", {"why": "x"}, {}, 422, "invalid", "why"),
    "no JSON to a call that has no fields": ("DELETE", "/v1/tasks/1", b"{", {}, 400, "syntax", None),
    "no fields to a call that has none": ("DELETE", "/v1/tasks/1", {}, {}, 404, "unknown-task", None),
    "an empty form to a call that has no fields": (
        "DELETE",
        "/v1/tasks/1",
        b"",
        {"Content-Type": "application/x-www-form-urlencoded"},
        404,
        "unknown-task",
        None,
    ),
    "a token for nobody": (
        "POST",
        "/v1/tokens",
        {"name": "n", "roles": ["king"], "topics": ["*"]},
        {},
        422,
        "invalid",
        "roles.0",
    ),
    "a token of hardly any requests": (
        "POST",
        "/v1/tokens",
        {"name": "n", "roles": ["read"], "topics": ["*"], "rate": 5e-324},
        {},
        422,
        "invalid",
        "rate",
    ),
    "a template with a number of 400 digits": (
        "POST",
        "/v1/templates",
        b'{"pattern":"a.*","most_topics":1,"policies":{"slot_amount":1,"backoff_base":' + b"9" * 400 + b"}}",
        {},
        422,
        "invalid",
        "policies.backoff_base",
    ),
    "a template with a backoff that is none": (
        "POST",
        "/v1/templates",
        {"pattern": "a.*", "most_topics": 1, "policies": {"slot_amount": 1, "backoff": "slow"}},
        {},
        422,
        "invalid",
        "policies.backoff",
    ),
    "a search in an unknown topic": ("GET", "/v1/tasks?topic=none", None, {}, 404, "unknown-topic", None),
    "the dead of an unknown topic": ("GET", "/v1/dead?topic=none", None, {}, 404, "unknown-topic", None),
    "a search in a topic that is no name": ("GET", "/v1/tasks?topic=a!", None, {}, 422, "invalid", "topic"),
    "a template that is none": ("DELETE", "/v1/templates/a.*", None, {}, 404, "unknown", None),
    "a token that is none": ("DELETE", "/v1/tokens/nobody", None, {}, 404, "unknown", None),
    "rebalance of one daemon": ("POST", "/v1/cluster:rebalance", {}, {}, 409, "no-cluster", None),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_bad_request_is_answered_as_a_problem(shared: Gateway, name: str) -> None:
    method, path, body, headers, status, kind, field = REQUESTS[name]
    answer = shared.call(method, path, body, headers=headers)
    assert answer.status == status, answer
    if method != "HEAD":
        assert answer.body["type"] == f"/docs#{kind}"
        assert answer.body.get("field") == field
    assert "limit" not in shared.told()
    assert "due_after" not in shared.told()


@pytest.mark.parametrize(
    "path", ["/v1/tasks?due_after=2030-01-01T00:00:00+01:00", "/v1/audit?after=2030-01-01T00:00+0100"]
)
def test_a_plus_that_became_a_space_is_named(shared: Gateway, path: str) -> None:
    answer = shared.call("GET", path)
    assert (answer.status, "write +01:00 as %2B01:00" in answer.body["detail"]) == (422, True), answer


def test_a_conflict_names_the_other_task(shared: Gateway) -> None:
    first = shared.submit(biz_id=5, dedup_key="k", attribute={"a": 1})
    answer = shared.submit(biz_id=5, dedup_key="k", attribute={"a": 2})
    assert (answer.status, answer.body["type"]) == (409, "/docs#dedup-conflict")
    assert answer.body["job_id"] == first.body["job_id"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"x" * 70_000, 431),
        (b"POST /v1/topics/a/tasks HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/topics/a/tasks HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"GET http:// HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_what_is_no_http_is_answered_and_closed(shared: Gateway, sent: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=60) as client:
        client.sendall(sent)
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"application/problem+json" in answer
    assert shared.call("GET", "/healthz").status == 200


def test_a_problem_says_what_there_is_instead(shared: Gateway) -> None:
    """An unknown field names the known ones, a token what it lacks, an unknown topic itself."""
    fields = {
        ("POST", SUBMIT): (TASK | {"dealy": 1}, "dealy", "biz_id, delay, action_time"),
        ("POST", f"{SUBMIT}:batch"): ({"tasks": [TASK | {"dealy": 1}]}, "tasks.0.dealy", "biz_id, delay"),
        ("POST", "/v1/topics/test.sync:pause"): ({"a": 1}, "a", "there are none"),
        ("GET", "/v1/tasks?limt=1"): (None, "limt", "biz_id, text, topic, status"),
        ("POST", "/v1/schedules/none:backfill"): ({"start": 1}, "start", "from, to, rate"),
    }
    for (method, path), (body, field, known) in fields.items():
        answer = shared.call(method, path, body)
        (told,) = [one["detail"] for one in answer.body["errors"] if one["field"] == field]
        assert (answer.status, told.startswith("there is no such field; "), known in told) == (
            422,
            True,
            True,
        )
    for token, method, path, says in (
        ("sync-only", "GET", "/v1/workers", "for all topics, *"),
        (
            shared.make_token("reader", "read"),
            "POST",
            SUBMIT,
            "needs an access token with the role admin or produce; this one has read",
        ),
    ):
        refused = shared.call(method, path, TASK if method == "POST" else None, token=token or "reader")
        assert (refused.status, says in refused.body["detail"]) == (403, True), refused
    assert "'test.none'" in shared.call("POST", "/v1/topics/test.none/tasks", TASK).body["detail"]
    assert "'test.none'" in shared.call("GET", "/v1/tasks?topic=test.none").body["detail"]


def test_a_text_of_digits_is_the_number_as_a_biz_id(shared: Gateway) -> None:
    for biz_id, shown in (
        (4242, 4242),
        ("4242", 4242),
        (str(2**63 - 1), str(2**63 - 1)),
        ("0042", "0042"),
        ("9" * 28, "9" * 28),
    ):
        job_id = shared.submit(biz_id=biz_id).body["job_id"]
        assert shared.call("GET", f"/v1/tasks/{job_id}").body["biz_id"] == shown
        text = "&text=true" if biz_id == "9" * 28 else ""
        found = shared.call("GET", f"/v1/tasks?biz_id={biz_id}{text}").body["tasks"]
        assert job_id in [one["job_id"] for one in found]
    same = [shared.submit(biz_id=one, dedup_key="digits").body["job_id"] for one in (4243, "4243")]
    assert same[0] == same[1]
