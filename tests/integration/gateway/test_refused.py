"""Requests that no client should send: each gets its problem, which names the field;
none a 500 or a trace."""

import json
import random
import re
import socket
from typing import Any

import pytest
from harness.gateway import Gateway
from harness.refused import TASKS
from hypothesis import HealthCheck, Phase, given, settings

from toc.gateway.app import CALLS
from toc.gateway.calls import HttpCall
from toc.gateway.openapi import document
from toc.gateway.problems import KINDS

# Requests that no client should send: each gets its problem, which names the field; none a trace.

SUBMIT = "/v1/topics/test.sync/tasks"
PLAIN: dict[str, Any] = {"biz_id": 1, "delay": 60}
TASK = b'{"biz_id":1,"delay":3600}'
TAKE = [call for call in CALLS if call.body is not None]
ASK = [call for call in CALLS if call.query.model_fields and call.method == "GET"]
TYPES = {f"/docs#{kind.name}": kind.status for kind in KINDS}
FOLLOWING = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

ONLY_PYTHON = {
    "zero timedelta", "negative timedelta", "eleven years", "timedelta.max", "action_time text", "odd", "set",
    "bytes", "biz bytes", "int key", "loop", "deep", "huge int", "datetime", "tries None", "dedup int",
    "unknown topic", "topic braces", "topic None", "topic control",
}  # fmt: skip
"""Values that JSON does not have, or that are right in it; topics, which are in the path."""


def exchange(gateway: Gateway, sent: bytes, *, pause: bytes = b"") -> bytes:
    """Send bytes, and return all that comes back until the gateway closes, or has answered ``FOLLOWING``."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as client:
        client.sendall(sent)
        answer = b""
        try:
            if pause:
                while b"\r\n\r\n" not in answer and (part := client.recv(65536)):
                    answer += part
                client.sendall(pause)
            while part := client.recv(65536):
                answer += part
        except ConnectionError:  # closed while we still sent: what it answered may be lost with it
            pass
        return answer


def statuses(answer: bytes) -> list[int]:
    """The statuses of the answers in these bytes."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) [A-Z]", answer)]


def head(
    gateway: Gateway, *lines: str, line: str = f"POST {SUBMIT} HTTP/1.1", host: str = "Host: a"
) -> bytes:
    """The line and headers of a request."""
    token = f"Authorization: Bearer {gateway.tokens['all']}"
    return "\r\n".join([line, *([host] if host else []), token, *lines, "", ""]).encode("latin-1")


JSON = "Content-Type: application/json"
LENGTH = f"Content-Length: {len(TASK)}"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(TASK), TASK)

FRAMES: dict[str, tuple[tuple[str, ...], bytes, set[int]]] = {
    "chunks": ((JSON, "Transfer-Encoding: chunked"), CHUNKS, {201}),
    "a length of 30 digits": ((JSON, "Content-Length: " + "9" * 30), TASK, {400, 413}),
    "a length of 19 digits": ((JSON, "Content-Length: " + "9" * 18), TASK, {413}),
    "a length in hex": ((JSON, "Content-Length: 0x19"), TASK, {400}),
    "a chunk that is no number": ((JSON, "Transfer-Encoding: chunked"), b"xyz\r\n", {400}),
    "a chunk of 20 digits": ((JSON, "Transfer-Encoding: chunked"), b"f" * 20 + b"\r\n", {400}),
    "a charset": (("Content-Type: application/json; charset=latin-1", LENGTH), TASK, {201}),
    "a type of bytes": (("Content-Type: application/\xff\xfe", LENGTH), TASK, {415, 422}),
    "an empty key": ((JSON, LENGTH, "Idempotency-Key:"), TASK, {422}),
    "a key of bytes": ((JSON, LENGTH, "Idempotency-Key: \xff"), TASK, {422}),
    "a key of 300": ((JSON, LENGTH, "Idempotency-Key: " + "k" * 300), TASK, {422}),
    "a header with NUL": ((JSON, LENGTH, "X-A: b\0c"), TASK, {400}),
    "20,000 headers": ((JSON, LENGTH, *("a: b" for _ in range(20_000))), TASK, {431}),
    "200 headers": ((JSON, LENGTH, *(f"X-{n}: y" for n in range(200))), TASK, {201}),
    "a header of 1 MiB": ((JSON, LENGTH, "X-A: " + "y" * (1 << 20)), TASK, {431}),
}


@pytest.mark.parametrize("name", FRAMES)
def test_an_oddly_framed_request_is_answered_and_harms_none_after_it(shared: Gateway, name: str) -> None:
    lines, body, allowed = FRAMES[name]
    answer = exchange(shared, head(shared, *lines) + body + FOLLOWING)
    found = statuses(answer)
    if answer or allowed != {431}:  # else it was closed while we sent
        assert found[:1], "no answer"
        assert found[0] in allowed, answer[:600]
        assert found[1:] in ([], [200], [400]), "what follows is no part of a body, or it is closed"
        _check_problem(found[0], answer)
    assert shared.call("GET", "/healthz").status == 200


LINES: dict[str, tuple[str, set[int]]] = {
    "HTTP/1.0": ("GET /v1/topics HTTP/1.0", {200}),
    "HTTP/2.0": ("GET /v1/topics HTTP/2.0", {400, 200}),
    "HTTP/9999.1": ("GET /v1/topics HTTP/9999.1", {400}),
    "an absolute target": ("GET http://a/v1/topics HTTP/1.1", {200}),
    "a target with user and password": ("GET http://u:p@a/v1/topics HTTP/1.1", {200, 400}),
    "OPTIONS": (f"OPTIONS {SUBMIT} HTTP/1.1", {405}),
    "OPTIONS *": ("OPTIONS * HTTP/1.1", {404, 400}),
    "HEAD": ("HEAD /v1/topics HTTP/1.1", {200}),
    "TRACE": ("TRACE /v1/topics HTTP/1.1", {405}),
    "CONNECT": ("CONNECT a:443 HTTP/1.1", {400}),
    "an unknown method": ("BREW /v1/topics HTTP/1.1", {400, 405}),
    "bytes in the path": ("GET /\xff HTTP/1.1", {400}),
    "no host behind http": ("GET http:// HTTP/1.1", {400}),
    "NUL in the path": ("GET /v1/topics/\0 HTTP/1.1", {400}),
    "NUL escaped": ("GET /v1/topics/%00 HTTP/1.1", {404, 422}),
    "half an escape": ("GET /v1/topics/%2 HTTP/1.1", {404, 400, 422}),
    "no UTF-8": ("GET /v1/topics/%ff%fe HTTP/1.1", {404, 400, 422}),
    "dots": ("GET /v1/../../etc/passwd HTTP/1.1", {404}),
    "a query of NUL": ("GET /v1/tasks?topic=%00 HTTP/1.1", {200, 422}),
    "a query without names": ("GET /v1/tasks?=&=&&& HTTP/1.1", {400, 422}),
    "a biz_id of a surrogate": ("GET /v1/tasks?biz_id=%ed%a0%80 HTTP/1.1", {400}),
    "a biz_id of 5,000 digits": (f"GET /v1/tasks?biz_id={'9' * 5000} HTTP/1.1", {422}),
    "a limit of 5,000 digits": (f"GET /v1/tasks?limit={'9' * 5000} HTTP/1.1", {422}),
    "a time of the year 0": ("GET /v1/tasks?due_after=0000-01-01T00:00:00Z HTTP/1.1", {422}),
    "the last time": ("GET /v1/tasks?due_before=9999-12-31T23:59:59-23:59 HTTP/1.1", {200, 422}),
    "the first time": ("GET /v1/tasks?due_after=0001-01-01T00:00:00%2B23:59 HTTP/1.1", {200, 422}),
    "an error of NUL": ("GET /v1/dead?error=%00%ff HTTP/1.1", {400, 422}),
    "a thousand colons": (f"POST /v1/topics/a{':pull' * 1000} HTTP/1.1", {404}),
}


@pytest.mark.parametrize("name", LINES)
def test_an_odd_line_or_target_is_answered_by_name(shared: Gateway, name: str) -> None:
    line, allowed = LINES[name]
    answer = exchange(shared, head(shared, "Connection: close", line=line))
    found = statuses(answer)
    assert found, "no answer"
    assert found[0] in allowed, answer[:600]
    if line.startswith("HEAD"):
        assert answer.endswith(b"\r\n\r\n"), "no body"
        assert b"\ncontent-length: 0" not in answer.lower(), "the length that GET's would have"
    else:
        _check_problem(found[0], answer)


def test_a_client_that_expects_to_be_told_sends_its_body_after_it_was(shared: Gateway) -> None:
    answer = exchange(
        shared, head(shared, JSON, LENGTH, "Expect: 100-continue", "Connection: close"), pause=TASK
    )
    assert statuses(answer) == [100, 201]
    refused = head(shared, JSON, "Content-Length: 999999999", "Expect: 100-continue")
    assert statuses(exchange(shared, refused)) == [413], "before it has sent anything"


DEEP = 10_000
ODD = [
    b"null", b"true", b"[]", b"{}", b'""', b"0", b"-0", b"-1", b"1.5", b"1e400", b"-1e400", b"NaN",
    b"Infinity",
    b"9" * 30, b"9" * 5000, b"1e-400", b"0.1e1", b'"\\u0000"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff"',
    b'"a\\nb"', b'"' + b"x" * 70_000 + b'"', b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    b'{"a":1,"a":2}', b'[null,{"":[]}]', b'"2099-13-45T99:99:99Z"', b'"2099-01-01"',
    b'"2099-01-01T00:00:00Z"',
    b'"9999-12-31T23:59:59.999999-23:59"', b'"0001-01-01T00:00:00+23:59"', b'"../../etc"', b'"*"',
    b'"%s%s%n"',
    b"'single'", b"01", b"+1", b".5", b"1.", b"0x10", b"\xef\xbb\xbf1", b"tru", b'"\\x41"', b"[1,]", b'{"a"}',
    '"\u202e\u0000\U0001f4a9"'.encode(), b'"' + "ü".encode() * 200 + b'"',
]  # fmt: skip
"""Values as JSON has them, and as it has not."""

BODIES: dict[str, dict[str, Any]] = {
    "/v1/topics/{topic}/tasks": {
        "biz_id": 1, "delay": 60, "action_time": None, "attribute": {"a": 1}, "dedup_key": "k", "tries": 3,
        "expires_at": None, "body": "x", "body_base64": None, "content_type": None, "on_conflict": "replace",
        "slot_basis": "s", "target": None, "url": None,
    },
    "/v1/topics/{topic}/tasks:batch": {"tasks": [PLAIN]},
    "/v1/topics/{topics}:pull": {"max": 1, "wait": 0, "ttr": 1},
    "/v1/leases:ack": {"lease": "x"},
    "/v1/leases:nack": {"lease": "x", "delay": 1, "dead": False, "error": "e"},
    "/v1/leases:extend": {"lease": "x", "ttr": 1},
    "/v1/topics": {"name": "fuzz", "biz_type": 60_000, "slot_amount": 3, "delivery": "pull"},
    "/v1/tokens": {"name": "fuzz", "roles": ["king"], "topics": ["*"], "expires_at": None, "rate": 1},
    "/v1/templates": {"pattern": "fuzz.*", "most_topics": 1, "policies": {"slot_amount": 3}},
    "/v1/targets": {"name": "fuzz", "url": "ftp://a", "timeout": 1, "concurrency": 1, "headers": {}},
    "/v1/schedules": {"name": "fuzz", "topic": "none", "cron": "0 2 * * *", "zone": "Europe/Berlin"},
    "/v1/schedules:preview": {"cron": "0 2 * * *", "zone": "Europe/Berlin"},
    "/v1/dead:redrive": {"job_ids": ["1"], "dry_run": True},
    "/v1/dead:purge": {"job_ids": ["1"], "dry_run": True},
}  # fmt: skip
"""A body of each call that takes one, so far as it can be sent without harm to others."""
PLACES = {
    "topic": "test.sync", "topics": "test.sync", "name": "fuzz", "pattern": "fuzz.*", "job_id": "1",
    "host": "fuzz", "slot": "test.sync_0",
}  # fmt: skip


def path_of(path: str) -> str:
    return path.format(**PLACES)


@pytest.mark.parametrize("call", [one for one in CALLS if one.body is None], ids=lambda call: call.name)
def test_an_empty_object_is_no_body_where_none_is_taken(shared: Gateway, call: HttpCall) -> None:
    path = call.path.format(**{**PLACES, "topic": "not.there"})
    without, empty = (shared.call(call.method, path, body).status for body in (None, b"{}"))
    assert empty == without


def test_a_query_counts_beside_an_empty_object(shared: Gateway) -> None:
    job_id = shared.submit(biz_id="beside").body["job_id"]
    shared.submit(biz_id="another")
    found = shared.call("GET", "/v1/tasks?biz_id=beside", {}).body["tasks"]
    assert [one["job_id"] for one in found] == [job_id]


@pytest.mark.parametrize("call", TAKE, ids=lambda call: call.name)
def test_every_field_with_every_odd_value_is_answered_by_its_name(shared: Gateway, call: Any) -> None:
    """One value is another, one more is there that is unknown, or the whole body is an odd value."""
    fields = BODIES.get(call.path, {}) if call.method == "POST" else {}
    names = sorted({*fields, *call.body.model_fields, "unknown"})
    chosen = random.Random(call.path).sample(range(len(names) * len(ODD)), min(50, len(names) * len(ODD)))
    sent = []
    for number in chosen:
        name, odd = names[number // len(ODD)], ODD[number % len(ODD)]
        values = {key: json.dumps(value).encode() for key, value in fields.items()} | {name: odd}
        pairs = (b'"%b":%b' % (key.encode(), value) for key, value in values.items())
        sent.append(b"{" + b",".join(pairs) + b"}")
    for body in (*sent, *random.Random(call.name).sample(ODD, 5), b"", b"{"):
        answer = shared.call(call.method, path_of(call.path), body)
        _check(answer.status, answer.body, (call.name, body[:200]))
    assert "call_failed" not in shared.told()
    assert "Traceback" not in shared.told()


TEXTS = ["", "0", "-1", "9" * 30, "late", "%00", "a%21", "1e9", "%C3%BC", "2030-01-01T00:00:00", "x" * 300]


@pytest.mark.parametrize("call", ASK, ids=lambda call: call.name)
def test_every_parameter_with_odd_texts_is_answered_by_its_name(shared: Gateway, call: Any) -> None:
    missing = [name for name, field in call.query.model_fields.items() if field.is_required()]
    for name in (*call.query.model_fields, "unknown"):
        for text in TEXTS:
            answer = shared.call("GET", f"{path_of(call.path)}?{name}={text}")
            _check(answer.status, answer.body, (call.name, name, text))
            if answer.status == 422:
                assert answer.body["field"] in (name, "after", "due_after", "topic", *missing), answer
        assert shared.call("GET", f"{path_of(call.path)}?{name}=1&{name}=2").status in (400, 404), name


@pytest.mark.parametrize("case", [case for case in TASKS if case not in ONLY_PYTHON])
def test_a_task_that_cannot_be_is_refused_by_its_field(shared: Gateway, case: str) -> None:
    _, given = TASKS[case]
    values = {"biz_id": 1, **given}
    body = json.dumps(values, default=lambda value: value.isoformat()).encode()
    answer = shared.call("POST", SUBMIT, body)
    fields = {*given, "delay"}
    assert (answer.status, answer.body["type"]) in ((422, "/docs#invalid"), (400, "/docs#syntax")), answer
    assert answer.status == 400 or answer.body["field"] in fields, answer
    assert answer.body["detail"]


REQUESTS: dict[tuple[str, str], tuple[Any, int, str, str | None]] = {
    ("GET", "/v2/tasks"): (None, 404, "not-found", None),
    ("PUT", SUBMIT): ({}, 405, "method-not-allowed", None),
    ("POST", "/v1/topics/none/tasks"): (PLAIN, 404, "unknown-topic", None),
    ("POST", "/v1/topics/{a}/tasks"): (PLAIN, 422, "invalid", "topic"),
    ("POST", "/v1/topics/a%2Fb/tasks"): (PLAIN, 404, "not-found", None),
    ("GET", "/v1/tasks/894573895733248"): (None, 404, "unknown-task", None),
    ("GET", "/v1/tasks/x"): (None, 404, "unknown-task", None),
    ("GET", "/v1/tasks/" + "9" * 100): (None, 404, "unknown-task", None),
    ("GET", "/v1/tasks/%D9%A1%D9%A2"): (None, 404, "unknown-task", None),
    ("GET", "/v1/tasks?" + "&".join(f"a{n}=1" for n in range(100))): (None, 400, "syntax", None),
    ("GET", "/v1/tasks?due_after=2030-01-01T00:00:00+01:00"): (None, 422, "invalid", "due_after"),
    ("GET", "/v1/tasks?due_after=2099-01-01T00:00:00Z&due_before=2098-01-01T00:00:00Z"): (
        None, 422, "invalid", "due_after",
    ),
    ("POST", SUBMIT): (b" " * (6500 << 10), 413, "too-large", None),
    ("POST", SUBMIT + ":batch"): ({"tasks": [PLAIN] * 1001}, 422, "invalid", "tasks"),
    ("PATCH", "/v1/topics/test.sync"): ({}, 422, "invalid", None),
    ("PATCH", "/v1/targets/t"): ({}, 422, "invalid", None),
    ("PATCH", "/v1/topics/test.async"): ({"retries": True}, 422, "invalid", "retries"),
    ("PATCH", "/v1/topics/test.batch"): ({"retries": "5"}, 422, "invalid", "retries"),
    ("POST", "/v1/topics/test.none:pull"): ({"wait": 0}, 404, "unknown-topic", None),
    ("POST", "/v1/topics/test.sync:pull"): ({"wait": 0}, 422, "invalid", "topic"),
    ("POST", "/v1/topics/test.pulled:pull"): ({"max": 101}, 422, "invalid", "max"),
    ("POST", "/v1/topics/test.sync,test.none:pull"): ({"wait": 61}, 422, "invalid", "wait"),
    ("POST", "/v1/topics/test.sync,test.sync:pull"): ({"ttr": 0.5}, 422, "invalid", "ttr"),
    ("POST", "/v1/leases:ack"): ({"lease": "a", "leases": ["a"]}, 422, "invalid", "lease"),
    ("POST", "/v1/leases:nack"): ({"leases": []}, 422, "invalid", "leases"),
    ("POST", "/v1/leases:extend"): ({"lease": "a"}, 422, "invalid", "ttr"),
    ("DELETE", "/v1/tasks/1"): (b"{", 400, "syntax", None),
    ("DELETE", "/v1/tasks/2"): ({"why": "x"}, 422, "invalid", "why"),
    ("DELETE", "/v1/tasks/3"): ({}, 404, "unknown-task", None),
    ("GET", "/v1/tasks?topic=none"): (None, 404, "unknown-topic", None),
    ("GET", "/v1/dead?topic=none"): (None, 404, "unknown-topic", None),
    ("DELETE", "/v1/templates/a.*"): (None, 404, "unknown", None),
    ("DELETE", "/v1/tokens/nobody"): (None, 404, "unknown", None),
    ("POST", "/v1/cluster:rebalance"): ({}, 409, "no-cluster", None),
    ("POST", "/v1/dead:purge"): ({}, 422, "invalid", "job_ids"),
    ("POST", "/v1/dead:redrive"): ({"job_ids": ["1"], "all": True}, 422, "invalid", "all"),
}  # fmt: skip


@pytest.mark.parametrize(("method", "path"), REQUESTS, ids=lambda word: word[:40])
def test_a_request_that_leads_nowhere_gets_a_problem(shared: Gateway, method: str, path: str) -> None:
    body, status, kind, field = REQUESTS[method, path]
    answer = shared.call(method, path, body)
    assert (answer.status, answer.body["type"]) == (status, f"/docs#{kind}"), answer
    assert answer.body.get("field") == field
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.body["status"], bool(answer.body["title"])) == (status, True)
    assert "due_after" not in shared.told(), "what was asked is in no log"


def test_a_problem_says_what_there_is_instead(shared: Gateway) -> None:
    """An unknown field names the known ones, a token what it lacks, an unknown topic itself."""
    fields: dict[tuple[str, str], tuple[Any, str, str]] = {
        ("POST", f"{SUBMIT}:batch"): ({"tasks": [{**PLAIN, "dealy": 1}]}, "tasks.0.dealy", "action_time"),
        ("POST", "/v1/topics/test.sync:pause"): ({"a": 1}, "a", "there are none"),
        ("GET", "/v1/tasks?limt=1"): (None, "limt", "biz_id, text, topic, status"),
    }
    for (method, path), (body, field, known) in fields.items():
        answer = shared.call(method, path, body)
        (told,) = [one["detail"] for one in answer.body["errors"] if one["field"] == field]
        assert (answer.status, known in told) == (422, True), told
    lacks = "needs an access token with the role admin; this one has read"
    for token, path, says in (
        ("sync-only", "/v1/workers", "for all topics, *"),
        ("read", "/v1/tokens", lacks),
    ):
        refused = shared.call("GET", path, token=token)
        assert (refused.status, says in refused.body["detail"]) == (403, True), refused
    assert "'test.none'" in shared.call("POST", "/v1/topics/test.none/tasks", PLAIN).body["detail"]
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


def _check(status: int, body: Any, what: Any) -> None:
    """Raise unless it is an answer, or a problem of a request."""
    if status < 300:
        return
    assert isinstance(body, dict), (what, status, body)
    assert TYPES.get(body["type"]) == status, (what, body)
    assert status < 500 or body["type"] == "/docs#secrets-locked", (what, body)
    if status == 422:
        assert "field" in body or "nothing" in body["detail"], (what, body)


def _check_problem(status: int, answer: bytes) -> None:
    if status >= 300:
        assert b"application/problem+json" in answer.partition(b"\r\n\r\n")[0], answer[:600]
        body = re.split(rb"HTTP/1\.1 \d\d\d [A-Z]", answer.partition(b"\r\n\r\n")[2])[0]
        _check(status, json.loads(body), answer[:200])


# Requests that Schemathesis makes up from the document: none is answered with a 500, each as documented.

TRIES = settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""So many requests for each call, the same in each run. Some are made up with every run, in test_refused."""


@pytest.mark.chaos
def test_no_made_up_request_is_answered_otherwise_than_documented(shared: Gateway) -> None:
    import schemathesis  # a second of a processor, for each process of a run
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    excluded = [
        not_a_server_error,  # 503 is documented; 500 is looked for below
        positive_data_acceptance,  # a value may fit the document and not the system: a time in the past
    ]
    schema = schemathesis.openapi.from_dict(shared.call("GET", "/openapi.json").body)
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    address = f"http://127.0.0.1:{shared.port}"
    headers = {"Authorization": f"Bearer {shared.tokens['all']}"}
    made = 0
    for operation in operations:

        def call(case: Any) -> None:
            nonlocal made
            made += 1
            response = case.call(base_url=address, headers=headers)
            assert response.status_code not in (500, 502), response.text
            case.validate_response(response, excluded_checks=excluded)

        TRIES(given(operation.as_strategy())(call))()  # type: ignore[no-untyped-call]
    assert made > 100
    assert "call_failed" not in shared.told()
    assert "Traceback" not in shared.told()


def test_the_document_has_nothing_that_generators_trip_over() -> None:
    found = document(CALLS)
    schemas = found["components"]["schemas"]
    assert not [name for name in schemas if "__" in name], "two schemas of one name"

    def look(node: Any, where: str) -> None:
        if isinstance(node, dict):
            assert not isinstance(node.get("title"), str) or where == "/info", where
            assert "*/*" not in node, where
            assert "default" not in node or where.endswith("/responses"), where
            for key, value in node.items():
                look(value, f"{where}/{key}")
        elif isinstance(node, list):
            for value in node:
                look(value, where)

    look(found, "")
    for name in ("Leases", "Nack", "Extend"):
        assert schemas[name]["not"] == {"required": ["lease", "leases"]}
        assert "lease" not in schemas[name].get("required", [])
