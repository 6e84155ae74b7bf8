"""lmstfy's admin API: tokens of namespaces, which are access tokens of toc, and what queues there are."""

import json
import socket
from urllib.parse import quote

import pytest
from harness.dialect import ask
from harness.gateway import Gateway
from harness.lmstfy import OPTIONS, Client, Raw, basic, exchange, port_of
from harness.system import System

OUTSIDE = ("--lmstfy", "0.0.0.0:0", "--lmstfy-admin", "0.0.0.0:0", "--dialect-from", "0.0.0.0/0")


class Admin:
    """Asks the admin port of a gateway, as the holder of a token."""

    def __init__(self, gateway: Gateway, token: str = "all") -> None:
        self._port = port_of(gateway, "lmstfy-admin")
        self._basic = basic(gateway, token)

    def __call__(
        self, line: str, *headers: str, body: bytes = b"", host: str = "127.0.0.1", auth: str | None = None
    ) -> Raw:
        auth = self._basic if auth is None else auth
        lines = [f"{line} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
        lines += [auth] if auth else []
        return exchange(self._port, "\r\n".join(lines).encode() + b"\r\n\r\n" + body, host=host)


def address_of_this_machine() -> str:
    """An address of ours that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def test_everybody_needs_basic_auth_and_sees_and_grants_no_more_than_natively(system: System) -> None:
    with Gateway(system, *OPTIONS) as gateway:
        asked, api = Admin(gateway), port_of(gateway, "lmstfy")
        for line in ("GET /info", "GET /version", "GET /pools", "GET /token/shop", "GET /nothing",
                     "POST /token/shop?description=x", "DELETE /token/shop/x", "GET /limits"):  # fmt: skip
            for auth in ("", "Authorization: Basic Og==", f"Authorization: Bearer {gateway.tokens['all']}"):
                refused = asked(line, auth=auth)
                assert (refused.status, refused.body) == (401, b""), (line, auth)
                assert refused.headers["www-authenticate"] == 'Basic realm="Authorization Required"'
        for namespace in ("order", "mine"):
            token = asked(f"POST /token/{namespace}?description=x").json["token"]
            Client(api, token, namespace).publish("jobs")
            native = gateway.call(
                "POST", "/v1/topics/test.sync/tasks", {"biz_id": 1, "delay": 9}, token=token
            )
            assert native.status == 404, "a token of a namespace is for no native topic"
        few = Admin(gateway, token=gateway.make_token("few", "admin", topics=("lmstfy.mine.*",)))
        assert few("GET /info").json == {"mine": ["jobs"]}
        assert few("POST /token/order?description=x").status == 403
        assert few("POST /token/mine?description=x").status == 201
        poor = Admin(gateway, token=gateway.make_token("poor", "operate", topics=("lmstfy.*",)))
        assert poor("GET /info").status == 401


def test_tokens_of_any_length_are_compared_as_a_whole(system: System) -> None:
    with Gateway(system, *OPTIONS) as gateway:
        asked, api = Admin(gateway), port_of(gateway, "lmstfy")
        given = "a" * 189
        assert asked(f"POST /token/shop?description=x&token={given}").status == 201
        assert Client(api, given, "shop").consume("orders") is None
        assert Client(api, given[:-1] + "b", "shop").call("GET", "/api/shop/orders").status == 401
        assert asked(f"DELETE /token/shop/{given[:-1]}b").status == 204
        assert Client(api, given, "shop").consume("orders") is None, "it is still valid"
        longer = asked(f"POST /token/shop?description=x&token={given}b")
        assert (longer.status, longer.json) == (400, {"error": "the user token was too long"})


def test_tokens_are_made_listed_by_name_and_revoked(system: System) -> None:
    with Gateway(system, *OUTSIDE) as gateway:
        asked, api = Admin(gateway), port_of(gateway, "lmstfy")
        made = asked("POST /token/shop?description=web%20shop")
        assert (made.status, made.headers["content-type"]) == (201, "application/json; charset=utf-8")
        token = made.json["token"]
        assert made.body == f'{{\n    "token": "{token}"\n}}'.encode()
        client = Client(api, token, "shop")
        client.publish("orders")
        assert client.call("PUT", "/api/other/orders", b"x").status == 401

        given = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
        form = f"description=old+clients&token={quote('default:' + given)}".encode()
        kept = asked("POST /token/shop", "Content-Type: application/x-www-form-urlencoded", body=form)
        assert (kept.status, kept.json) == (201, {"token": given})
        assert Client(api, given, "shop").consume("orders", timeout=30) is not None
        again = asked(f"POST /token/shop?description=x&token={given}")
        assert again.status == 400

        listed = asked("GET /token/shop")
        assert sorted(listed.json["tokens"].values()) == ["old clients", "web shop"]
        assert token.encode() not in listed.body
        assert given.encode() not in listed.body
        assert asked("GET /token/other").json == {"tokens": {}}
        assert asked("GET /info").json == {"shop": ["orders"]}
        assert asked("GET /pools/").json == ["default"]
        assert set(asked("GET /version").json) == {"version", "build_commit", "build_date"}

        assert asked(f"DELETE /token/shop/{given}").status == 204
        assert client.call("GET", "/api/shop/orders", token=given).status == 401
        assert asked(f"DELETE /token/other/{token}").status == 204  # of another namespace: left alone
        assert client.call("GET", "/api/shop/orders").status == 404
        audit = system.center.store.audit.list(10)
        assert {row.action for row in audit} >= {"token.create", "token.revoke"}
        for secret in (token, given):
            assert secret not in gateway.told()
            assert all(secret not in json.dumps(row._asdict(), default=str) for row in audit)

        mistakes = {
            "POST /token/shop": "invalid description",
            "POST /token/shop?description=x&token=short": "the user token was too short",
            f"POST /token/{'n' * 256}?description=x": "the namespace name was too long",
            "POST /token/n.s?description=x": "namespace name contains forbidden characters",
            "GET /token/shop?pool=other": "pool not found",
        }
        for line, words in mistakes.items():
            answer = asked(line)
            assert (answer.status, answer.json) == (400, {"error": words})
        found = {
            "GET /pools": (200, b'[\n    "default"\n]'),
            "GET /pools?kind=redis_v2": (200, b"[]"),
            "GET /info": (200, b'{\n    "shop": [\n        "orders"\n    ]\n}\n'),
            "GET /info?kind=redis_v2": (200, b""),
            "GET /info?pool=other": (200, b""),
            "GET /token/other": (200, b'{\n    "tokens": {}\n}'),
            "GET /limits": (404, b"404 page not found"),
            "POST /token/shop/x/limit": (404, b"404 page not found"),
            "DELETE /token/shop/unknown": (204, b""),
            "DELETE /token/shop/other:unknown": (400, b'{"error":"pool not found"}'),
            "POST /token/shop?description=x&token=%ff": (400, b'{"error":"the user token was too short"}'),
            "GET /pushers": (404, b"404 page not found"),
            "POST /pusher/shop/orders": (404, b"404 page not found"),
            "PUT /token/shop": (404, b"404 page not found"),
        }
        for line, pinned in found.items():
            answer = asked(line)
            assert (answer.status, answer.body) == pinned, line
        lost = asked("GET /nothing")
        assert (lost.status, lost.body) == (404, b"404 page not found")
        assert asked("GET /info", "Origin: http://evil.example").status == 403

        host = address_of_this_machine()
        assert asked("GET /info", host=host, auth="").status == 401
        for role, secret, status in (
            ("admin", gateway.make_token("boss", "admin"), 200),
            ("read", gateway.make_token("reader", "read"), 401),
            ("none", "toc_wrong", 401),
        ):
            assert asked("GET /info", host=host, auth=basic(gateway, secret)).status == status, role
        few = basic(gateway, gateway.make_token("few", "admin", topics=("lmstfy.mine.*",)))
        kept = asked(f"DELETE /token/shop/{token}", host=host, auth=few)
        assert kept.status == 204, "as for a token that is unknown"
        assert client.call("GET", "/api/shop/orders").status == 404, "but it is still valid"


def test_queues_are_listed_by_the_names_that_clients_use_and_none_of_other_dialects(system: System) -> None:
    with Gateway(system, *OPTIONS, "--youzan", "127.0.0.1:0") as gateway:
        asked, api = Admin(gateway), port_of(gateway, "lmstfy")
        youzan = port_of(gateway, "youzan")
        job = {"id": "j", "topic": "order", "delay": 3600, "ttr": 60, "body": "x"}
        assert ask(youzan, "POST", "/push", job).json["code"] == 0
        assert asked("GET /info").json == {}

        wanted = {"youzan": ["order"], "shop": ["orders", "q" * 200], "n" * 200: ["orders"]}
        for namespace, queues in wanted.items():
            token = asked(f"POST /token/{namespace}?description=x").json["token"]
            assert list(asked(f"GET /token/{namespace}").json["tokens"].values()) == ["x"]
            for queue in queues:
                Client(api, token, namespace).publish(queue)
        shown = asked("GET /info").json
        assert shown["youzan"] == ["order"]
        assert len(shown) == 3, "what a topic cannot hold is hashed"
        assert "orders" in shown["shop"]
        topics = {topic.name for topic in system.center.store.topics.list()}
        assert [name for name in topics if name.startswith("youzan.")] == ["youzan.order"]
        every = system.center.store.tokens.list()
        assert not [one.name for one in every if "youzan.*" in one.topics]

        client = Client(api, asked("POST /token/youzan?description=x").json["token"], "youzan")
        assert client.consume("order", timeout=30)["queue"] == "order"
