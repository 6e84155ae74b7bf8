"""The decisions of webhooks: addresses, signatures, requests, answers, the breaker, what postponing does."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from ipaddress import ip_address
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import standardwebhooks
from harness.rows import known

from toc.index.messages import PermitRequest, Permits
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable, InvalidTarget
from toc.model.raised import Postponed, Sent, Undelivered, raised
from toc.model.target import ATTRIBUTE, Allow, Target, TargetSecrets, literal
from toc.model.task import Body, Task, TaskStatus, TryRow
from toc.model.topic import Topic
from toc.model.verdict import Check, after_failure, check
from toc.webhooks.answers import Meaning, Response, excerpt, meaning, retry_after
from toc.webhooks.breaker import FAILURES, FIRST_SECONDS, Breaker
from toc.webhooks.connect import IN_NAME_OF, Resolver, refusal
from toc.webhooks.handlers import OWN_URL, Webhooks
from toc.webhooks.limiter import FORGET_SECONDS, IDLE_SECONDS, Capacity, Full, Limiter
from toc.webhooks.request import plain, signature
from toc.webhooks.sender import Sender, check_headers, reason, send_test

NONE = Allow().address
SOME = Allow(["10.1.0.0/16", "127.0.0.1"]).address


# --- addresses


JUDGED = {
    None: "93.184.216.34 1.1.1.1 172.32.0.1 100.128.0.1 2606:4700::1111",
    "unspecified": "0.0.0.0 0.1.2.3 ::",
    "private": "10.0.0.1 172.16.0.1 192.168.1.1 fc00::1 fd12:3456::1 fec0::1",
    "shared": "100.64.0.1",
    "loopback": "127.0.0.1 127.255.255.254 ::1",
    "link-local": "169.254.169.254 fe80::1 fe80::1%eth0 fe80::5efe:5db8:d822",
    "documentation": "192.0.2.1 198.51.100.1 203.0.113.7 2001:db8::1 3fff::1",
    "benchmarks": "198.18.0.1 2001:2::1",
    "multicast": "224.0.0.1 239.1.2.3 ff02::1",
    "reserved": "192.0.0.8 240.0.0.1 255.255.255.255 192.88.99.1 2001:10::1 100::1 5f00::1 4000::1 "
    # NAT64 for local use, the last one with 10.0.0.1 behind a prefix of 64 bits
    "64:ff9b:1:a00:0:100:: 64:ff9b:1::a00:1 64:ff9b:1:7f00:0:100:: 64:ff9b:1:808:a:0:108:808",
}
EMBEDDED = {  # by NAT64, 6to4, Teredo (its server and, inverted, its client), mapped, translated, compatible
    None: "64:ff9b::5db8:d822 2002:5db8:d822::1 2001:0:5db8:d822::a247:27dd ::ffff:93.184.216.34",
    "embeds 10.0.0.1": "64:ff9b::a00:1 2002:a00:1:: 2001:0:5db8:d822::f5ff:fffe 2001:0:a00:1::a247:27dd "
    "::ffff:10.0.0.1 ::ffff:0:10.0.0.1 ::10.0.0.1 2606:4700::5efe:a00:1",  # the last one by ISATAP
    "embeds 127.0.0.1": "64:ff9b::7f00:1 2002:7f00:1::1 ::ffff:127.0.0.1 ::127.0.0.1",
}


@pytest.mark.parametrize(
    ("text", "why"),
    [(text, why) for table in (JUDGED, EMBEDDED) for why, texts in table.items() for text in texts.split()],
)
def test_an_address_is_judged_by_what_it_is_and_what_it_embeds(text: str, why: str | None) -> None:
    found = refusal(ip_address(text), NONE)
    assert (found is None) if why is None else (found is not None and why in found), found


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("10.1.2.3", True),
        ("10.2.0.1", False),
        ("127.0.0.1", True),
        ("::ffff:127.0.0.1", True),
        ("64:ff9b::a01:203", True),
        ("64:ff9b::a02:1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_what_is_listed_may_be_reached_also_where_it_is_embedded(text: str, *, allowed: bool) -> None:
    assert (refusal(ip_address(text), SOME) is None) == allowed


@pytest.mark.parametrize(
    "host",
    ["127.1", "2130706433", "0x7f.0.0.1", "0x7f000001", "0177.0.0.1", "127.0.0.1.", "017700000001", "1.2.3",
     "0", "256.1.1.1", "example.0x1", "[fe80::1%25eth0]", "fe80::1%eth0", "::1%"],
)  # fmt: skip
def test_a_host_that_only_some_read_as_an_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is not an address: write"):
        literal(host)


def test_a_host_is_a_name_or_a_plain_address() -> None:
    assert literal("example.com") is None
    assert literal("1und1.de") is None
    assert literal("10.0.0.1") == ip_address("10.0.0.1")
    assert literal("[::1]") == literal("::1") == ip_address("::1")


# --- signatures


SECRETS = [bytes(range(24)), bytes(range(100, 132))]


def message(keys: list[bytes], body: bytes) -> dict[str, str]:
    now = int(time.time())
    return {
        "webhook-id": "42_0",
        "webhook-timestamp": str(now),
        "webhook-signature": signature(keys, "42_0", now, body),
    }


@pytest.mark.parametrize("body", [b"{}", '{"a":"ü✓"}'.encode()])
def test_the_reference_library_of_python_accepts_signatures_also_during_a_rotation(body: bytes) -> None:
    headers = message(SECRETS, body)
    for key in SECRETS:
        standardwebhooks.Webhook(key).verify(body, headers)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(b"another key, of 24 bytes").verify(body, headers)
    old_only = message(SECRETS[:1], body)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(SECRETS[1]).verify(body, old_only)


# --- requests


def test_a_biz_id_cannot_inject_a_header() -> None:
    assert plain("7") == "7"
    assert plain("order:7/a") == "order:7/a"
    assert plain("a\r\nX-Evil: 1") == "a%0D%0AX-Evil%3A%201"
    assert plain("100%") == "100%25"
    assert plain("ü") == "%C3%BC"


# --- answers


MEANINGS: dict[Meaning, list[tuple[int | None, tuple[int, ...], bool]]] = {
    Meaning.PROCESSED: [(200, (), False), (204, (), True), (299, (), False)],
    Meaning.DEAD: [
        *((400, (400,), False), (404, (404,), False), (422, (404, 422), False)),
        *((500, (), True), (410, (), False)),
    ],
    Meaning.RETRY: [
        *((status, (), False) for status in (301, 302, 400, 408, 429, 500, 503, None)),
        *((404, (400,), False), (401, (400, 404, 422), False)),
    ],
}


def test_what_an_answer_means() -> None:
    for expected, answers in MEANINGS.items():
        for status, dead_on, no_retry in answers:
            found = meaning(Response(status, "", 1, no_retry=no_retry), dead_on)
            assert found is expected, (status, dead_on, no_retry)


def test_retry_after_is_seconds_or_a_date() -> None:
    now = 1_700_000_000_000
    at = datetime.fromtimestamp(now / 1000 + 90, UTC)
    assert retry_after({"Retry-After": "120"}, now) == 120.0
    assert retry_after({"Retry-After": format_datetime(at, usegmt=True)}, now) == pytest.approx(90, abs=1)
    assert (
        retry_after({"Retry-After": format_datetime(datetime.fromtimestamp(0, UTC), usegmt=True)}, now) == 0
    )
    assert retry_after({}, now) is None
    for old in ("Tue Nov 14 22:14:50 2023", "Tuesday, 14-Nov-23 22:14:50 GMT"):
        assert retry_after({"Retry-After": old}, now) == 90.0, "in whatever zone this host is"
    for long in ("9" * 10, "9" * 5000):
        assert known(retry_after({"Retry-After": long}, now)) >= 999_999_999, "so the backoff cap holds"
    for odd in ("-5", "soon", "1e9", ""):
        assert retry_after({"Retry-After": odd}, now) is None


def test_the_text_of_an_answer_is_bounded_and_printable() -> None:
    assert excerpt(500, b"x" * 5000) == "x" * 1000
    assert excerpt(500, "ü".encode() * 3000) == "ü" * 1000
    assert excerpt(500, b"a\x00b\x1b[2Jc\nd") == "a\ufffdb\ufffd[2Jc\nd"
    assert excerpt(503, b"") == "HTTP 503 Service Unavailable"
    assert excerpt(599, b" \n") == "HTTP 599"


# --- the breaker


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_probe_through() -> None:
    breaker = Breaker()

    def judged(now: float, *, well: bool) -> bool:
        return breaker.judge(now, breaker.era, well=well)

    for _ in range(FAILURES - 1):
        assert breaker.begin(0.0)
        assert not judged(0.0, well=False)
    judged(0.0, well=True)
    for number in range(FAILURES):
        assert breaker.begin(1.0)
        assert judged(1.0, well=False) == (number == FAILURES - 1)
    assert not breaker.begin(1.0 + FIRST_SECONDS - 0.01)
    assert breaker.blocked(1.0) == FIRST_SECONDS
    assert not breaker.judge(1.0, breaker.era - 1, well=False), "it began before"
    assert breaker.begin(1.0 + FIRST_SECONDS)
    assert not breaker.begin(1.0 + FIRST_SECONDS), "there is one probe"
    breaker.judge(4.0, breaker.era, well=None)
    assert breaker.begin(4.0), "it was broken off"
    assert judged(4.0, well=False)
    assert breaker.blocked(4.0) == 2 * FIRST_SECONDS
    assert breaker.begin(4.0 + 2 * FIRST_SECONDS)
    judged(9.0, well=True)
    assert breaker.begin(9.0)
    assert breaker.begin(9.0)


# --- postponing


ROW = TryRow(1, 2, 3, TaskStatus.PENDING, 1000, 2000, 5, 1, 2, 0, None, "{}")
TOPIC = Topic("t", 1, 1, retries=2)


def test_a_task_that_expires_while_it_is_postponed_is_looked_at_then() -> None:
    row = ROW._replace(expires_at=5000, attempts=0, crashes=0)
    failure = after_failure(row, TOPIC, raised(Postponed(9000, "")), 3000)
    assert (failure.dead, failure.next_time) == (False, 5001)
    again = row._replace(next_time=failure.next_time)
    assert check(again, now=5001, taken=5001) is Check.EXPIRED


def test_an_undelivered_try_says_what_was_answered() -> None:
    error = raised(Undelivered("x" * 2000, Sent(500, 12), after_ms=70_000))
    assert (error.text, error.sent, error.after_ms) == ("x" * 1000, Sent(500, 12), 70_000)
    failure = after_failure(ROW._replace(attempts=0), TOPIC, error, 3000)
    assert (failure.dead, failure.next_time, failure.sent) == (False, 73_000, Sent(500, 12))
    assert after_failure(ROW, TOPIC, raised(Undelivered("", Sent(0, 1), dead=True)), 3000).dead


def test_tasks_that_wait_for_an_origin_of_their_own_delay_none_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.random", lambda: 1.0)
    catalog: Any = SimpleNamespace(known=lambda: {"t": TOPIC})
    absent: Any = SimpleNamespace(permits=None)
    clock = Clock()
    webhooks = Webhooks(
        targets=absent, queues=absent, catalog=catalog, clock=clock, allow=Allow(), holder="me", members=1
    )
    waits = webhooks._waits

    async def refuse(*_: object) -> None:
        raise Full(0.0, "breaker", 1.0)

    monkeypatch.setattr(webhooks._limiter, "enter", refuse)

    async def wait(url: str) -> float:
        """For how many seconds a task with this URL waits."""
        attribute = {ATTRIBUTE: {"url": url}}
        task = Task(1, "t", 1, 1, TaskStatus.PENDING, datetime.now(UTC), attribute, 1, 0)
        with pytest.raises(Postponed, match=r"target \(url\): breaker") as postponed:
            await webhooks.deliver(task._replace(stored_body=Body(1 << 20)))
        return (postponed.value.until - clock.now_ms()) / 1000

    async def whole() -> None:
        assert [await wait("http://dead.test/") for _ in range(40)][-1] > 5
        assert await wait("http://alive.test/") < 3

    asyncio.run(whole())
    assert {waits.label(name) for name, _reason in waits._until} == {OWN_URL}
    waits.update_gauges(clock.now_ms() + 600_000)
    assert not waits._until, "all have come back"
    webhooks._limiter._threads.close()


# --- connections, with the proof of a listening socket


@contextmanager
def listening(family: socket.AddressFamily, address: str) -> Iterator[tuple[int, Callable[[], bool]]]:
    """A port that somebody listens on, and whether somebody has connected to it."""
    with socket.socket(family) as server:
        server.bind((address, 0))
        server.listen()
        server.settimeout(0.05)

        def met() -> bool:
            try:
                server.accept()[0].close()
            except TimeoutError:
                return False
            return True

        yield server.getsockname()[1], met


def send(
    url: str, allow: Allow, lookup: Callable[..., object] | None = None, seconds: float = 2.0
) -> Response:
    async def once() -> Response:
        sender = Sender(allow, lookup) if lookup is not None else Sender(allow)  # type: ignore[arg-type]
        try:
            return await sender.send(url, {"A": "b"}, b"{}", seconds)
        finally:
            await sender.close()

    return asyncio.run(once())


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "localhost", "0.0.0.0",
             "[::ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "127.0.0.1."]
)  # fmt: skip
def test_no_connection_is_made_to_what_is_refused(host: str) -> None:
    with listening(socket.AF_INET, "127.0.0.1") as (port, met):
        answer = send(f"http://{host}:{port}/", Allow([f"http://{host}:{port}"]))
        assert answer.status is None
        assert not met(), answer.text


def test_a_name_that_first_leads_to_a_public_and_then_to_a_private_address_leads_nowhere() -> None:
    told: list[str] = []

    with listening(socket.AF_INET, "127.0.0.1") as (port, met):

        def lookup(_host: str, _port: int, **_: object) -> list[tuple[object, ...]]:
            told.append("192.0.2.7" if not told else "127.0.0.1")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (told[-1], port))]

        allow = Allow([f"http://rebind.test:{port}", "192.0.2.0/24"])

        first, second = (send(f"http://rebind.test:{port}/", allow, lookup) for _ in range(2))
        assert told == ["192.0.2.7", "127.0.0.1"]
        assert first.status is None
        assert "loopback" in second.text
        assert not met()


def test_of_several_addresses_only_those_that_may_be_are_connected_to() -> None:
    with (
        listening(socket.AF_INET, "127.0.0.1") as (port, met),
        listening(socket.AF_INET, "127.0.0.2") as (_other, _),
    ):

        def lookup(_host: str, _port: int, **_: object) -> list[tuple[object, ...]]:
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, ("127.0.0.1", port)), (*kind, ("127.0.0.2", port))]

        answer = send(f"http://two.test:{port}/", Allow([f"http://two.test:{port}", "127.0.0.2"]), lookup)
        assert answer.status is None
        assert not met()


@contextmanager
def served(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port that a thread serves, whose end the block's end waits for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Thread(target=serve, args=[listener])
        server.start()
        yield listener.getsockname()[1]
        server.join(60)
        assert not server.is_alive()


def sent(
    port: int,
    times: int = 1,
    seconds: float = 60.0,
    then: Callable[[], object] = lambda: None,
    *,
    path: str = "/",
    body: bytes = b"{}",
) -> list[Response]:
    """So many requests by one sender, which does something more before it is closed."""

    async def each() -> list[Response]:
        url = f"http://127.0.0.1:{port}"
        sender = Sender(Allow([url, "127.0.0.1"]))
        try:
            answers = [await sender.send(f"{url}{path}", {"A": "b"}, body, seconds) for _ in range(times)]
            await asyncio.to_thread(then)
            return answers
        finally:
            await sender.close()

    return asyncio.run(each())


def test_what_is_told_of_connections_that_end_within_the_body_does_not_hold_the_url() -> None:
    def serve(listener: socket.socket) -> None:
        for _ in range(40):
            client, _ = listener.accept()
            with client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with served(serve) as port:
        answers = sent(port, 40, path="/?secret", body=bytes(70_000))
    assert not [answer.text for answer in answers if "secret" in answer.text]


@pytest.mark.parametrize(("kept", "statuses"), [(True, [200, 200]), (False, [None, None])])
def test_a_kept_connection_that_was_closed_meanwhile_costs_no_try_but_a_new_one_is_not_made_twice(
    kept: bool, statuses: list[int | None]
) -> None:
    connections = 0
    got = b""

    def read(client: socket.socket) -> None:
        nonlocal got
        while (part := client.recv(65536)) and not (got := got + part).endswith(b"{}"):
            pass

    def serve(listener: socket.socket) -> None:
        nonlocal connections
        for _ in range(2):
            client, _ = listener.accept()
            with client:
                connections += 1
                read(client)
                if kept:
                    client.sendall(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n")
                    read(client)  # the next request, which is not answered

    with served(serve) as port:
        assert [answer.status for answer in sent(port, 2)] == statuses
    assert connections == 2
    assert got.count(b"POST / ") == (3 if kept else 2)
    assert b"cookie" not in got.lower()


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWERED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    ("begin", "flood", "status"),
    [
        (b"", INTERIM, None),
        (b"", b"\r\n", None),
        (CHUNKED + b"2;", b"x", None),
        (CHUNKED, b"0", None),
        (CHUNKED, b"1\r\nx\r\n", 200),
        (ANSWERED, INTERIM, 200),
        (ANSWERED, ANSWERED, 200),
    ],
)
def test_a_receiver_that_sends_without_end_is_cut_off(begin: bytes, flood: bytes, status: int | None) -> None:
    broken = Event()

    def serve(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, suppress(OSError):
            client.settimeout(30)
            client.recv(65536)
            client.sendall(begin)
            while True:
                client.sendall(flood * 1000)
        broken.set()

    with served(serve) as port:
        (answer,) = sent(port, seconds=10.0, then=lambda: broken.wait(10))
        assert broken.is_set(), "it goes on sending"
    assert answer.status == status, answer.text
    assert "within" not in answer.text, "it was broken off in time only"


def test_the_longest_head_and_what_is_read_of_a_body_may_arrive() -> None:
    head = b"Set-Cookie: %s\r\n" % (b"x" * 50_000) + b"".join(b"H%d: x\r\n" % number for number in range(500))
    answers = [
        b"HTTP/1.1 500 X\r\n" + head + b"Content-Length: 600000\r\n\r\n" + b"y" * 600_000,
        INTERIM * 100 + CHUNKED.replace(b"200", b"500") + b"1\r\ny\r\n" * 70_000 + b"0\r\n\r\n",
    ]

    def serve(listener: socket.socket) -> None:
        for answer in answers:
            client, _ = listener.accept()
            with client, suppress(OSError):
                client.settimeout(30)
                client.recv(65536)
                client.sendall(answer)

    with served(serve) as port:
        found = sent(port, len(answers), 30.0)
    assert [(one.status, one.text) for one in found] == [(500, "y" * 1000)] * 2


def test_names_that_hang_hold_up_no_other() -> None:
    over = Event()

    def lookup(host: str, _port: int, **_: object) -> list[tuple[Any, ...]]:
        if host.startswith("hangs"):
            over.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]

    async def whole() -> None:
        resolver = Resolver(Allow(["192.0.2.0/24"]).address, lookup)
        loop = asyncio.get_running_loop()

        async def addresses(host: str) -> list[str]:
            IN_NAME_OF.set(host)
            return [one["host"] for one in await resolver.resolve(host, 443)]

        lost = [loop.create_task(addresses(f"hangs{n}.test")) for n in range(100)]
        async with asyncio.timeout(60):
            assert await addresses("other.test") == ["192.0.2.7"]
        over.set()
        await asyncio.gather(*lost)

    asyncio.run(whole())


def test_a_name_that_has_had_its_turn_does_not_wait_for_that_of_another_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toc.webhooks.connect.MAX_LOOKUPS", 4)  # one turn
    began, over = Event(), Event()

    def lookup(*_: object, **__: object) -> list[tuple[Any, ...]]:
        began.set()
        over.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]

    async def whole() -> None:
        resolver = Resolver(Allow(["192.0.2.0/24"]).address, lookup)
        one = asyncio.create_task(resolver.resolve("a.test", 443))
        assert await asyncio.to_thread(began.wait, 60)
        other = asyncio.create_task(resolver.resolve("a.test", 80))
        await asyncio.sleep(0)
        waiting = set(resolver.waiting)
        over.set()
        await asyncio.gather(one, other)
        assert waiting == {("a.test", 80)}

    asyncio.run(whole())


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\rb", "a\0b"])
def test_a_header_that_would_end_before_its_end_is_not_sent(value: str) -> None:
    check_headers({"A": "b"})
    for headers in ({"A": value}, {value: "b"}):
        with pytest.raises(InvalidTarget, match="control character") as refused:
            check_headers(headers)
        assert reason(refused.value, 1.0) == str(refused.value), "it is not the URL's fault"


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(socket.AF_INET, "127.0.0.1") as (port, met):
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        answer = send("http://192.0.2.1:9/", Allow(["http://192.0.2.1:9"]))
        assert "documentation" in answer.text
        assert not met()


def test_the_event_loop_of_a_thread_that_tests_a_target_is_still_its_own() -> None:
    own, secrets = asyncio.new_event_loop(), TargetSecrets("whsec_" + 32 * "A")
    asyncio.set_event_loop(own)
    try:
        answer = send_test(Target("shop", "https://192.0.2.1/"), secrets, Allow())
        assert "documentation" in answer.error
        assert asyncio.get_event_loop() is own
    finally:
        asyncio.set_event_loop(None)
        own.close()


class Generous:
    """Stands for Redis, and grants all that is wanted. Counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, asked: Mapping[str, PermitRequest]) -> dict[str, Permits]:
        self.asked += 1
        return {name: Permits(one.wanted, 0, 0, 1) for name, one in asked.items()}


def test_targets_at_rest_cost_the_others_nothing_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watched(Capacity):
        looks = 0

        def __getattribute__(self, name: str) -> object:
            Watched.looks += 1
            return super().__getattribute__(name)

    monkeypatch.setattr("toc.webhooks.limiter.Capacity", Watched)
    many = 10_000

    async def whole() -> None:
        redis, now = Generous(), asyncio.get_running_loop().time()
        limiter = Limiter(redis, "me", lambda: 1)
        for number in range(many):
            limiter.of(f"url:{number}", 50, None).used = now
        Watched.looks, shop = 0, limiter.of("shop", 1, None)
        await limiter.enter(shop)
        while redis.asked < 3:
            await asyncio.sleep(0.01)
        limiter.leave(shop, 0.01)
        assert Watched.looks < many
        limiter._threads.close()

    asyncio.run(whole())


def test_what_was_not_used_for_long_is_forgotten_but_not_what_has_requests() -> None:
    async def whole() -> None:
        limiter = Limiter(Generous(), "me", lambda: 1)
        old, busy, shop = (limiter.of(name, 1, None) for name in ("old", "busy", "shop"))
        await limiter.enter(busy)
        old.used = busy.used = asyncio.get_running_loop().time() - FORGET_SECONDS - 1
        await limiter.enter(shop)
        assert limiter.of("busy", 1, None) is busy
        assert limiter.of("old", 1, None) is not old
        limiter._threads.close()

    asyncio.run(whole())


class AheadLoop(asyncio.SelectorEventLoop):
    """Its clock is ``ahead`` of the machine's by so many seconds."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class Away:
    """Stands for Redis that is away; once it is ``back``, others have all that the targets allow."""

    back = False

    def __call__(self, asked: Mapping[str, PermitRequest]) -> dict[str, Permits | IndexUnavailable]:
        return {name: Permits(0, 0, 0, 2) if self.back else IndexUnavailable("away") for name in asked}


def test_while_redis_is_away_too_what_is_at_rest_is_let_go_and_what_comes_again_asks_first() -> None:
    async def whole(loop: AheadLoop) -> None:
        redis = Away()
        limiter = Limiter(redis, "me", lambda: 1)
        closed.callback(limiter._threads.close)
        many = [limiter.of(f"url:{number}", 50, None) for number in range(20)]
        for _ in range(2):  # what was let go is served again
            for one in many:
                await limiter.enter(one)
            assert limiter.waiting_remotely() == len(many)
            for one in many:
                limiter.leave(one, 0.01)
            loop.ahead += IDLE_SECONDS + 1
            for _ in range(500):
                if not limiter._active:
                    break
                await asyncio.sleep(0.01)
            assert not limiter._active
        redis.back = True
        with pytest.raises(Full):
            await limiter.enter(many[0], 0.2)
        loop.ahead += FORGET_SECONDS + 1
        with pytest.raises(Full):
            await limiter.enter(limiter.of("shop", 50, None), 0.2)
        assert list(limiter._capacities) == ["shop"]

    with ExitStack() as closed, asyncio.Runner(loop_factory=AheadLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, AheadLoop)
        runner.run(whole(loop))
