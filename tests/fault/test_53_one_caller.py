"""Fault 53: one caller's large or deep requests, many searches, many connections: others are served."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fault.conftest import Build, Verdict
from fault.kit.doors import BROKEN, PULLED, create_pulled, p99, raw
from harness import dialect
from harness.gateway import Gateway
from harness.system import System

PATH = "/v1/topics/test.sync/tasks:batch"
SECONDS = 1.5
CALLERS = 4
THOUSAND = json.dumps(
    {"tasks": [{"biz_id": 1, "delay": 3600, "attribute": {"text": "x" * 3900}}] * 1000}
).encode()
"""What is several round trips to the database."""
LISTS = b'{"tasks":[{"biz_id":[' + b"[]," * 5_000_000 + b"[]]}]}"
ESCAPED = b'{"id":"' + b"\\u0041" * 1_000_000 + b'"}'
MANY_TOPICS = b'{"topic":"' + b"t," * 1_000_000 + b't"}'


@pytest.fixture
def system(build: Build) -> System:
    one = build(slots=1)
    create_pulled(one)
    return one


@pytest.fixture
def gateway(system: System) -> Iterator[Gateway]:
    one = Gateway(system, "--youzan", "127.0.0.1:0")
    one.make_token("other", "produce", "read")
    one.make_token("greedy", "produce", "read", "consume")
    yield one
    assert one.stop() == 0


def ask(port: int, request: bytes) -> bytes:
    """The first bytes of an answer."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(request)
        return client.recv(4096)
    return b""


def post(gateway: Gateway, path: str, body: bytes) -> bytes:
    """A request of the greedy token as bytes."""
    head = raw(gateway, "POST", path, token="greedy").partition(b"Content-Length")[0]
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def large(gateway: Gateway, body: bytes) -> Callable[[], bytes]:
    return lambda: ask(gateway.port, post(gateway, PATH, body))


def searches(gateway: Gateway) -> Callable[[], bytes]:
    request = raw(gateway, "GET", "/v1/tasks?error=x&status=dead", token="greedy")

    def many() -> bytes:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            clients = [socket.create_connection(("127.0.0.1", gateway.port), 10) for _ in range(30)]
            for client in clients:
                stack.enter_context(client).sendall(request)
            return b"".join(client.recv(4096) for client in clients)
        return b""

    return many


def youzan(gateway: Gateway, path: str, body: bytes) -> Callable[[], bytes]:
    port = dialect.port_of(gateway, "youzan")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return lambda: ask(port, head + body)


GREED: dict[str, Callable[[Gateway], Callable[[], bytes]]] = {
    "16 MiB of empty lists": lambda gateway: large(gateway, LISTS),
    "1,000 tasks of 4 kB": lambda gateway: large(gateway, THOUSAND),
    "searches": searches,
    "Youzan, 6 MiB without a token": lambda gateway: youzan(gateway, "/push", ESCAPED),
    "Youzan, a pop of a million topics": lambda gateway: youzan(gateway, "/pop", MANY_TOPICS),
}


@contextmanager
def greedy(do: Callable[[], bytes]) -> Iterator[list[bytes]]:
    """Do it from a few threads meanwhile. Yields what was answered."""
    over, answers = threading.Event(), list[bytes]()

    def again() -> None:
        while not over.is_set():
            answers.append(do())

    threads = [threading.Thread(target=again) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def submit(gateway: Gateway) -> int:
    """The status of another token's submit."""
    task = {"biz_id": 1, "delay": 3600}
    return gateway.call("POST", "/v1/topics/test.sync/tasks", task, token="other").status


def serve(gateway: Gateway) -> list[float]:
    """Seconds that each call of another token took, 100 a second."""
    took = []
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        began = time.monotonic()
        assert submit(gateway) == 201
        assert gateway.call("GET", "/v1/tasks?limit=1", token="other").status == 200
        took.append(time.monotonic() - began)
        time.sleep(0.01)
    return took


@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=[pytest.mark.slow] * (not name[0].isdigit())) for name in GREED]
)
def test_one_caller_delays_no_other(gateway: Gateway, verdict: Verdict, what: str) -> None:
    line = verdict(53, "one caller's greed", what)
    usual = serve(gateway)
    with greedy(GREED[what](gateway)) as answers:
        meanwhile = serve(gateway)
    answered = [answer for answer in answers if answer]
    line.prove(
        len(answers) >= CALLERS,
        f"{len(answered)} of {len(answers)} answered; others p99 {1000 * p99(meanwhile):.0f} ms, before "
        f"{1000 * p99(usual):.0f} ms",
    )
    # The callers share two processors with the gateway.
    line.within(p99(meanwhile), 2 * p99(usual) + 0.25)
    line.tasks = len(usual) + len(meanwhile)


WAITS = 4096


@pytest.mark.slow
@pytest.mark.parametrize("what", ["one byte each", "pulls that wait"])
def test_connections_of_one_caller_take_no_last_place(gateway: Gateway, verdict: Verdict, what: str) -> None:
    line = verdict(53, "one caller's connections", what)
    sent = b"G" if what == "one byte each" else raw(
        gateway, "POST", f"/v1/topics/{PULLED}:pull", {"wait": 60}, token="greedy"
    )  # fmt: skip
    crowd: list[socket.socket] = []
    served = 0
    try:
        for number in range(WAITS + 104):
            crowd.append(socket.create_connection(("127.0.0.1", gateway.port), 10))
            with contextlib.suppress(OSError):
                crowd[-1].sendall(sent)
            if not number % 50:
                with contextlib.suppress(*BROKEN):
                    served += gateway.call("GET", "/healthz", attempts=1).status == 200
                    assert submit(gateway) == 201
        line.prove(len(crowd) > WAITS, f"{len(crowd):,} connections; {served} of 84 probes were answered")
        assert served == 84
    finally:
        for client in crowd:
            client.close()
    line.tasks = served
