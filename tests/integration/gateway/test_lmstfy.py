"""lmstfy's API on a gateway: the bytes of every answer, and what becomes of jobs."""

import re
import threading
from base64 import b64encode
from collections.abc import Sequence

import pytest
from fault.kit.proxy import Proxy, through
from harness import secured
from harness.gateway import Gateway
from harness.lmstfy import ULID, Client, Raw, basic, data_of, exchange, port_of
from harness.patience import until
from harness.system import NewSystem

from benchmarks.local import MariaDB
from toc.dialects.lmstfy_wire import template_of
from toc.index.messages import Peek
from toc.model.topic import Slot
from toc.store.servers.server import Statement

JSON = "application/json; charset=utf-8"


@pytest.fixture(scope="module")
def gateway(dialects: Gateway) -> Gateway:
    return dialects


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Client:
    return client_of(gateway)


def client_of(gateway: Gateway) -> Client:
    answer = exchange(
        port_of(gateway, "lmstfy-admin"),
        (
            f"POST /token/ns?description=tests HTTP/1.1\r\nHost: localhost\r\n{basic(gateway)}\r\n"
            "Content-Length: 0\r\n\r\n"
        ).encode(),
    )
    assert answer.status == 201
    return Client(port_of(gateway, "lmstfy"), answer.json["token"])


def golden(answer: Raw, status: int, body: str) -> None:
    """The answer has this status, the original's headers, and this body, where <id> is any ULID, <ms> any
    number, and <day> a day in seconds of which few have passed."""
    assert (answer.status, answer.headers.get("content-type")) == (status, JSON if body else None)
    assert re.fullmatch(ULID, answer.headers["x-request-id"])
    pattern = re.escape(body).replace("<id>", f"1?{ULID}").replace("<ms>", r"\d+")
    pattern = pattern.replace("<day>", r"(86400|863[89]\d)")
    assert re.fullmatch(pattern.encode(), answer.body), answer.body


def test_every_command_is_answered_byte_for_byte_as_by_the_original(client: Client) -> None:
    call = client.call
    golden(call("PUT", "/api/ns/gold", b"hi"), 201, '{"job_id":"<id>","msg":"published"}')
    golden(call("GET", "/api/ns/gold/size"), 200, '{"namespace":"ns","queue":"gold","size":1}')
    shown = (
        '{"attributes":null,"data":"aGk=","elapsed_ms":<ms>,"job_id":"<id>",%s"namespace":"ns",'
        '"queue":"gold","remain_tries":%d,"ttl":<day>}'
    )
    golden(call("GET", "/api/ns/gold/peek"), 200, shown % ("", 1))
    job = client.consume("gold", ttr=60)
    golden(call("GET", f"/api/ns/gold/job/{job['job_id']}"), 200, shown % ("", 0))
    golden(call("DELETE", f"/api/ns/gold/job/{job['job_id']}"), 204, "")
    golden(call("GET", f"/api/ns/gold/job/{job['job_id']}"), 404, '{"error":"job not found"}')
    golden(call("GET", "/api/ns/gold"), 404, '{"msg":"no job available"}')
    golden(call("GET", "/api/ns/gold?count=2"), 404, '{"msg":"no job available"}')
    golden(call("GET", "/api/ns/gold/peek"), 404, '{"error":"the queue is empty"}')
    bulk = call("PUT", "/api/ns/gold/bulk?ttl=0", b'["hi", {"a":  1}]')
    golden(bulk, 201, '{"job_ids":["<id>","<id>"],"msg":"published"}')
    both = call("GET", "/api/ns/gold?count=100&ttr=60&timeout=5")
    assert both.headers["content-type"] == JSON
    assert {data_of(one) for one in both.json} == {b'"hi"', b'{"a":  1}'}
    assert {one["ttl"] for one in both.json} == {0}
    again = call("PUT", f"/api/ns/gold/job/{both.json[0]['job_id']}?tries=3", b"hi")
    golden(again, 201, '{"job_id":"<id>","msg":"published"}')
    golden(call("GET", "/api/ns/gold?timeout=3"), 200, shown % ('"msg":"new job",', 2))
    empty = '{"deadletter_head":"","deadletter_size":0,"namespace":"ns","queue":"gold"}'
    golden(call("GET", "/api/ns/gold/deadletter"), 200, empty)
    golden(call("GET", "/api/ns/gold/deadletter/size"), 200, '{"namespace":"ns","queue":"gold","size":0}')
    golden(call("PUT", "/api/ns/gold/deadletter"), 200, '{"count":0,"msg":"respawned"}')
    golden(call("DELETE", "/api/ns/gold/deadletter?limit=5"), 204, "")
    golden(call("DELETE", "/api/ns/gold"), 204, "")


@pytest.mark.parametrize(("request_line", "body", "status", "answer"), [
    ("PUT /api/ns/bad?delay=x", b"", 400, '{"error":"invalid delay"}'),
    ("PUT /api/ns/bad?ttl=-1", b"", 400, '{"error":"invalid ttl"}'),
    ("PUT /api/ns/bad?ttl=1&delay=2", b"", 400, '{"error":"ttl is shorter than delay"}'),
    ("PUT /api/ns/bad?tries=x", b"", 400, '{"error":"invalid tries"}'),
    ("PUT /api/ns/bad?tries=0", b"", 400, '{"error":"tries shouldn\'t be zero"}'),
    ("PUT /api/ns/bad", b"x" * (2**20 + 1), 413, '{"error":"body too large"}'),
    ("PUT /api/ns/bad/bulk", b"{}", 400, '{"error":"request body should be an array of objects"}'),
    ("GET /api/ns/bad?ttr=x", b"", 400, '{"error":"invalid ttr"}'),
    ("GET /api/ns/bad?timeout=x", b"", 400, '{"error":"invalid timeout"}'),
    ("GET /api/ns/bad?count=101", b"", 400, '{"error":"invalid count"}'),
    ("GET /api/ns/,", b"", 400, '{"error":"invalid queue name(s)"}'),
    ("PUT /api/ns/bad/deadletter?limit=0", b"", 400, '{"error":"invalid limit"}'),
    ("PUT /api/ns/bad/deadletter?limit=-1", b"", 400, '{"error":"invalid limit"}'),
    ("PUT /api/ns/bad/deadletter?limit=9223372036854775808", b"", 400, '{"error":"invalid limit"}'),
    ("PUT /api/ns/bad/deadletter?ttl=-1", b"", 400, '{"error":"invalid ttl"}'),
    ("PUT /api/ns/none/deadletter?ttl=-0&limit=%2B7", b"", 200, '{"count":0,"msg":"respawned"}'),
    ("PUT /api/ns/bad/deadletter?ttl=x", b"", 400, '{"error":"invalid ttl"}'),
    ("DELETE /api/ns/bad/deadletter?limit=x", b"", 400, '{"error":"invalid limit"}'),
    ("PUT /api/n.s/bad", b"", 400, '{"error":"namespace name contains forbidden characters"}'),
    ("PUT /api/ns/a,b", b"", 400, '{"error":"queue name contains forbidden characters"}'),
    ("PUT /api/ns/%ff", b"", 400, '{"error":"queue name contains forbidden characters"}'),
    (f"PUT /api/ns/{'q' * 256}", b"", 400, '{"error":"namespace or queue name too long"}'),
    ("GET /api/ns/none/job/01ARZ3NDEKTSV4RRFFQ69G5FAV", b"", 404, '{"error":"job not found"}'),
    ("GET /api/ns/none/job/%00", b"", 404, '{"error":"job not found"}'),
    ("DELETE /api/ns/none/job/unknown", b"", 204, ""),
    ("PUT /api/ns/bad/bulk?tries=x", b"[1]", 400, '{"error":"invalid tries"}'),
    ("PUT /api/ns/bad/bulk?ttl=1&delay=2", b"[1]", 400, '{"error":"ttl is shorter than delay"}'),
    ("PUT /api/ns/bad/job/unknown?delay=x", b"", 400, '{"error":"invalid delay"}'),
    ("PUT /api/ns/bad/job/unknown", b"x" * (2**20 + 1), 413, '{"error":"body too large"}'),
    ("PUT /api/ns/bad?delay=%ff", b"", 400, '{"error":"invalid delay"}'),
    (f"GET /api/{'n' * 256}/bad/size", b"", 400, '{"error":"namespace or queue name too long"}'),
    ("GET /api/ns/_bad/peek", b"", 400, '{"error":"queue name contains forbidden characters"}'),
    ("GET /api/ns/%ff/job/1", b"", 400, '{"error":"queue name contains forbidden characters"}'),
    ("DELETE /api/ns/a.b/job/1", b"", 400, '{"error":"queue name contains forbidden characters"}'),
    ("DELETE /api/ns/a.b", b"", 400, '{"error":"queue name contains forbidden characters"}'),
    ("GET /api/n.s/bad", b"", 400, '{"error":"namespace name contains forbidden characters"}'),
    ("GET /api/ns/none/job/%ff", b"", 404, '{"error":"job not found"}'),
    (f"GET /api/ns/none/job/{'j' * 256}", b"", 404, '{"error":"job not found"}'),
    (f"DELETE /api/ns/none/job/{'j' * 256}", b"", 204, ""),
    ("DELETE /api/ns/none/job/%ff", b"", 204, ""),
    ("GET /api/ns/none/deadletter/size", b"", 200, '{"namespace":"ns","queue":"none","size":0}'),
    ("DELETE /api/ns/none/deadletter", b"", 204, ""),
    ("DELETE /api/ns/none", b"", 204, ""),
    ("PUT /api/ns/none/deadletter", b"", 200, '{"count":0,"msg":"respawned"}'),
    ("GET /api/ns/none/peek", b"", 404, '{"error":"the queue is empty"}'),
    ("GET /api/ns/none/size", b"", 200, '{"namespace":"ns","queue":"none","size":0}'),
    ("POST /api/ns/bad", b"", 404, '{"error":"api not found"}'),
    ("GET /", b"", 404, '{"error":"api not found"}'),
])  # fmt: skip
def test_mistakes_are_answered_in_the_originals_words(
    client: Client, request_line: str, body: bytes, status: int, answer: str
) -> None:
    method, path = request_line.split(" ")
    golden(client.call(method, path, body), status, answer)


def test_a_mistake_creates_no_queue(client: Client, gateway: Gateway) -> None:
    attributes = {f"Job_Attr_{n:030}": '"' * 128 for n in range(16)}
    large = client.call("PUT", "/api/ns/large", b"hi", Enable_Job_Version="YES", **attributes)
    golden(large, 400, '{"error":"attributes too large"}')
    assert "lmstfy.ns.large" not in gateway.system.center.catalog.refresh()


def test_a_request_that_announces_too_much_is_refused_before_it_comes(client: Client) -> None:
    head = f"PUT /api/ns/bad HTTP/1.1\r\nHost: x\r\nX-Token: {client.token}\r\n"
    answer = exchange(client.port, f"{head}Content-Length: {2**24 + 1}\r\n\r\n".encode())
    golden(answer, 413, '{"error":"body too large"}')


def test_a_request_without_a_token_is_refused_before_its_body_comes(client: Client) -> None:
    request = b"PUT /api/ns/q HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n%b\r\nx"
    for given, why in ((b"", "token not found"), (b"X-Token: unknown\r\n", "invalid token")):
        answer = exchange(client.port, request % given)
        assert (answer.status, answer.json) == (401, {"error": why})


def test_tokens_are_checked_as_by_the_original(gateway: Gateway, client: Client) -> None:
    def asked(path: str, token: str) -> Raw:
        return exchange(client.port, f"GET {path} HTTP/1.1\r\nHost: x\r\n{token}\r\n".encode())

    golden(asked("/api/other/q", f"X-Token: {client.token}\r\n"), 401, '{"error":"invalid token"}')
    golden(asked("/api/ns/q", f"X-Token: pool:{client.token}\r\n"), 404, '{"error":"pool not found"}')
    golden(asked("/api/ns/q", f"X-Token: default:{client.token}\r\n"), 404, '{"msg":"no job available"}')
    golden(asked(f"/api/ns/q?token={client.token}", ""), 404, '{"msg":"no job available"}')
    golden(asked("/api/ns/q/size", ""), 200, '{"namespace":"ns","queue":"q","size":0}')
    only_q1 = gateway.make_token("q1", "consume", topics=("lmstfy.ns.q1",))
    golden(asked("/api/ns/q1", f"X-Token: {only_q1}\r\n"), 404, '{"msg":"no job available"}')
    golden(asked("/api/ns/q1,q2", f"X-Token: {only_q1}\r\n"), 401, '{"error":"invalid token"}')
    golden(asked("/api/ns/q1/peek", f"X-Token: {only_q1}\r\n"), 404, '{"error":"the queue is empty"}')
    assert client.call("DELETE", "/api/ns/q1", token=only_q1).status == 401
    slow = gateway.make_token("slow", "produce", topics=("lmstfy.ns.*",), rate=0.001)
    for path in ("/api/ns/rated", "/api/ns/rated/bulk", "/api/ns/rated/job/another"):
        golden(
            client.call("PUT", path, b"[1]", token=slow),
            429,
            '{"msg":"token(slow) produce reach the limit rate, please retry later"}',
        )
    assert client.token not in gateway.told()


def test_data_of_every_size_and_kind_comes_back(client: Client) -> None:
    for body in (b"", b"\x00\xff<>&", b"x" * 2**20):
        client.publish("bytes", body)
        job = client.consume("bytes", timeout=30)
        assert job["data"] == b64encode(body).decode()
        client.call("DELETE", f"/api/ns/bytes/job/{job['job_id']}")


def test_attributes_of_the_request_are_those_of_the_job(client: Client) -> None:
    answer = client.call(
        "PUT",
        "/api/ns/attributes",
        b"x",
        Enable_Job_Version="yes",
        Job_Attr_Hello="world",
        Job_Attr_b="<1>",
        **{f"Job_Attr_{'k' * 40}": "v" * 300},
    )
    job_id = answer.json["job_id"]
    assert re.fullmatch(f"1{ULID}", job_id)
    job = client.consume("attributes", timeout=30)
    assert (job["job_id"], job["attributes"]) == (job_id, {"hello": "world", "b": "<1>", "k" * 32: "v" * 128})
    assert client.call("GET", f"/api/ns/attributes/job/{job_id}").json["attributes"] == job["attributes"]
    assert client.call("PUT", "/api/ns/plain", b"x", Job_Attr_Hello="world").status == 201
    assert client.consume("plain", timeout=30)["attributes"] is None
    many = {f"Job_Attr_{number}": "x" for number in range(17)}
    golden(
        client.call("PUT", "/api/ns/attributes", b"x", Enable_Job_Version="YES", **many),
        400,
        '{"error":"too many attributes, cannot exceed 16"}',
    )


def test_jobs_of_a_bulk_are_consumed_in_the_order_of_the_array(gateway: Gateway, client: Client) -> None:
    center = gateway.system.center
    texts = [f'"{number}"'.encode() for number in range(64)]
    for queue, count in (("row", 1), ("rows", 100)):
        client.call("PUT", f"/api/ns/{queue}/bulk?ttl=0", b"[" + b",".join(texts) + b"]")
        slots = center.catalog.refresh()[f"lmstfy.ns.{queue}"].slots()

        def all_wait(slots: Sequence[Slot] = slots) -> bool:
            """The answer does not wait for the index, and what is not yet in it cannot come first."""
            peeks = center.queues.peek(slots).values()
            return sum(peek.store for peek in peeks if isinstance(peek, Peek)) == len(texts)

        assert until(all_wait)
        got: list[bytes] = []
        while len(got) < len(texts):
            found = client.call("GET", f"/api/ns/{queue}?timeout=30&count={count}").json
            got += map(data_of, found if isinstance(found, list) else [found])
        assert got == texts


@pytest.mark.skipif(secured.SECURED, reason="a proxy must be able to read along")
def test_repeating_a_bulk_that_one_server_cannot_store_does_not_store_the_rest_each_time(
    new_system: NewSystem, mariadb: MariaDB
) -> None:
    with Proxy(mariadb.port) as proxy:
        system = new_system(database_urls=[mariadb.url, through(proxy, mariadb.url)], read_timeout=1.0)
        system.create_topics()
        store, bulk = system.center.store, b"[" + b",".join([b'"x"'] * 50) + b"]"
        names = [store._shards.names[table] for table in store.tables_of_server()[0]]
        counts = [Statement(f"SELECT COUNT(*) FROM {name}") for name in names]

        def stored() -> int:
            return sum(result.rows[0][0] for result in store._shards.servers[0].run(counts))

        with Gateway(system, "--lmstfy", "127.0.0.1:0", "--lmstfy-admin", "127.0.0.1:0") as gateway:
            client = client_of(gateway)
            assert client.call("PUT", "/api/ns/bulk/bulk", bulk).status == 201
            assert 0 < stored() < 50
            proxy.stall()

            def refused() -> bool:
                """Nothing is stored by a repetition."""
                before = stored()
                assert client.call("PUT", "/api/ns/bulk/bulk", bulk).status == 503
                return stored() == before

            assert until(refused)
            proxy.flow()
            assert until(lambda: client.call("PUT", "/api/ns/bulk/bulk", bulk).status == 201)


def test_a_consumer_of_many_large_jobs_gets_what_fits_and_the_rest_is_not_charged(client: Client) -> None:
    left = {client.publish("large", b"x" * 2**20, tries=2) for _ in range(10)}
    while left:
        found = client.call("GET", "/api/ns/large?count=100&timeout=30&ttr=600").json
        assert 1 <= len(found) <= 8
        assert {job["remain_tries"] for job in found} == {1}
        left -= {job["job_id"] for job in found}


def test_a_job_without_tries_left_is_a_dead_letter_that_can_be_respawned(client: Client) -> None:
    job_id = client.publish("dead", tries=1)
    assert client.consume("dead", ttr=1, timeout=30)["remain_tries"] == 0
    assert until(lambda: client.call("GET", "/api/ns/dead/deadletter/size").json["size"] == 1, 15)
    golden(
        client.call("GET", "/api/ns/dead/deadletter"),
        200,
        f'{{"deadletter_head":"{job_id}","deadletter_size":1,"namespace":"ns","queue":"dead"}}',
    )
    assert client.call("GET", f"/api/ns/dead/job/{job_id}").json["ttl"] == 0
    assert client.consume("dead") is None
    golden(client.call("PUT", "/api/ns/dead/deadletter?limit=9&ttl=50"), 200, '{"count":1,"msg":"respawned"}')
    again = client.consume("dead", ttr=1, timeout=30)
    assert client.call("GET", "/api/ns/dead/deadletter").json["deadletter_head"] == ""
    assert (again["job_id"], again["remain_tries"], data_of(again)) == (job_id, 0, b"hello")
    assert 0 < again["ttl"] <= 50
    assert until(lambda: client.call("GET", "/api/ns/dead/deadletter/size").json["size"] == 1, 15)
    assert client.call("DELETE", "/api/ns/dead/deadletter").status == 204
    assert client.call("GET", f"/api/ns/dead/job/{job_id}").status == 404
    assert client.call("GET", "/api/ns/dead/deadletter/size").json["size"] == 0


def test_a_job_is_not_handed_out_after_its_ttl(client: Client) -> None:
    job_id = client.publish("ttl", ttl=3)
    shown = client.call("GET", f"/api/ns/ttl/job/{job_id}")
    assert shown.json["ttl"] in (1, 2, 3)
    assert until(lambda: client.call("GET", f"/api/ns/ttl/job/{job_id}").status == 404, 10)
    assert client.consume("ttl", timeout=1) is None


def test_a_consumer_may_name_any_number_of_queues(client: Client) -> None:
    queues = [f"wide-{number}" for number in range(101)]
    client.publish(queues[-1])
    assert client.consume(",".join(queues), timeout=30)["queue"] == queues[-1]


def test_a_queue_that_is_not_there_yet_is_waited_for(gateway: Gateway, client: Client) -> None:
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(client.consume("born,unborn", timeout=30)))
    waiting.start()
    job_id = client.publish("born")
    waiting.join(30)
    assert [job["job_id"] for job in found] == [job_id]  # type: ignore[index]
    assert "lmstfy.ns.unborn" not in gateway.system.center.catalog.refresh()


def test_only_ready_jobs_are_destroyed(client: Client) -> None:
    working, ready, delayed = (client.publish("destroy", delay=seconds) for seconds in (0, 0, 60))
    first = client.consume("destroy", ttr=60, timeout=30)["job_id"]
    ready = ready if first == working else working
    assert client.call("DELETE", "/api/ns/destroy").status == 204
    assert client.call("GET", "/api/ns/destroy/size").json["size"] == 0
    status = {one: client.call("GET", f"/api/ns/destroy/job/{one}").status for one in (first, ready, delayed)}
    assert status == {first: 200, ready: 404, delayed: 200}


def test_a_job_is_deleted_in_its_own_queue_only(client: Client) -> None:
    job_id = client.publish("mine")
    assert client.call("DELETE", f"/api/ns/yours/job/{job_id}").status == 204
    assert client.call("GET", f"/api/ns/mine/job/{job_id}").status == 200
    assert client.consume("mine", timeout=30)["job_id"] == job_id


def test_tries_of_65535_are_nearly_without_limit(client: Client) -> None:
    client.publish("tries", tries=65_535)
    assert client.consume("tries", timeout=30)["remain_tries"] == 65_533


def test_a_republished_job_has_another_id_and_the_old_one_is_gone(client: Client) -> None:
    old = client.publish("republish", tries=2)
    client.consume("republish", ttr=60, timeout=30)
    answer = client.call("PUT", f"/api/ns/republish/job/{old}?ttl=60", b"new")
    new = answer.json["job_id"]
    job = client.consume("republish", timeout=30)
    assert new != old
    assert (job["job_id"], data_of(job)) == (new, b"new")
    assert 0 < job["ttl"] <= 60
    assert client.call("GET", f"/api/ns/republish/job/{old}").status == 404
    bad = client.call("PUT", f"/api/ns/republish/job/{new}?tries=0", b"new")  # deletes all the same
    assert (bad.status, client.call("GET", f"/api/ns/republish/job/{new}").status) == (400, 404)


def test_a_token_for_all_namespaces_makes_no_templates_without_end(gateway: Gateway) -> None:
    templates = gateway.system.center.store.templates
    made = [template_of(f"many-{number}") for number in range(100)]
    for template in made:
        templates.create(template)
    wide = Client(
        port_of(gateway, "lmstfy"), gateway.make_token("wide", "produce", topics=("lmstfy.*",)), "new"
    )
    refused = wide.call("PUT", "/api/new/q", b"x")
    assert (refused.status, refused.json) == (400, {"error": "too many queues"})
    for template in made:
        templates.delete(template.pattern)
    wide.publish("q")
