"""What a webhook target may be, which a task goes to, and the capacity of one in one process."""

import asyncio
import base64
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar
from unittest.mock import Mock, PropertyMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from toc import TimeoutCenter
from toc.index.messages import PermitRequest, Permits
from toc.model import target as model
from toc.model.errors import IndexUnavailable, InvalidAttribute, InvalidTarget
from toc.model.target import Allow, Route, Target, TargetSecrets
from toc.model.topic import Topic
from toc.sdk.targets import Targets
from toc.webhooks.breaker import FAILURES
from toc.webhooks.limiter import Capacity, Full, Limiter

# What a webhook target may be, and which of them a task goes to.

TOPIC = Topic("order.close", 1, 1, target="shop")
TARGET = Target("shop", "https://example.com/hooks?a=1")


@pytest.mark.parametrize(("url", "expected"), [
    ("https://example.com/a?b=%20c", "https://example.com/a?b=%20c"),
    ("HTTPS://Example.COM:443", "https://example.com/"),
    ("https://[2001:DB8::1]/x", "https://[2001:db8::1]/x"),
    ("https://example.com?a=/b", "https://example.com/?a=/b"),
    ("http://localhost:8080/x", "http://localhost:8080/x"),
    ("https://example.com:8443/x", "https://example.com:8443/x"),
])  # fmt: skip
def test_a_url_is_kept_with_scheme_and_host_in_lower_case(url: str, expected: str) -> None:
    allow = Allow(["http://localhost:8080", "https://example.com:8443"])
    found = model.check_url(url, allow)
    assert found == expected
    assert model.check_url(found, allow) == found


@pytest.mark.parametrize("url", [
    "", "example.com", "//example.com", "https://", "https:///x", "https://?x", "ftp://example.com/",
    "file:///etc/passwd", "http://example.com/", "https://example.com:8443/", "https://example.com:x/",
    "https://example.com:99999/", "https://example.com:0/",
    "https://127.1/", "https://2130706433/", "https://0x7f.1/", "https://a..com/",
    f"https://{64 * 'a'}.com/",
    "https://u:p@example.com/", "https://@example.com/",
    "https://example.com/#x", "https://example.com/\r\nx: y", "https://example.com/a b",
    "https://example.com\\@10.0.0.1/", "https://exämple.com/", "https://[::1/",
    "https://[fe80::1%25eth0]/",
    "https://e.com/" + 2000 * "x",
    7, None, "http://localhost:8081/", "http://localhost/",
])  # fmt: skip
def test_what_is_no_public_https_url_is_refused_by_name(url: object) -> None:
    with pytest.raises(InvalidTarget, match="url"):
        model.check_url(url, Allow(["http://localhost:8080"]))


def test_a_refused_url_is_not_quoted() -> None:
    with pytest.raises(InvalidTarget) as caught:
        model.check_url("https://ann:hunter2@example.com/", model.NOTHING_ALLOWED)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "entry", ["", "x", "10.0.0.1/8", "http://", "http://x/y", "ftp://x:21", "http://a@x:80", "http://x:y"]
)
def test_an_entry_of_the_allow_list_is_an_origin_or_a_network(entry: str) -> None:
    with pytest.raises(ValueError, match="origin"):
        Allow([entry])


def test_the_allow_list_has_origins_and_networks() -> None:
    allow = Allow(["https://x:8443", "http://h", "10.0.0.0/8", "127.0.0.1", "fd00::/8"])
    assert allow.origins == {"https://x:8443", "http://h:80"}
    assert allow.address(ipaddress.ip_address("10.2.3.4"))
    assert allow.address(ipaddress.ip_address("fd00::1"))
    assert not allow.address(ipaddress.ip_address("127.0.0.2"))
    assert not allow.address(ipaddress.ip_address("::a02:304"))


@pytest.mark.parametrize("path", ["/", "/a/b?c=d//e", "/a//b"])
def test_a_path_begins_with_one_slash(path: str) -> None:
    assert model.url_of(TARGET, path) == f"https://example.com{path}"


@pytest.mark.parametrize(
    "path", ["", "a", "//evil.com", "///x", "/\\evil.com", "https://x", "/a#b", "/a b", "/\n", "/ä"]
)
def test_a_path_that_could_name_another_host_is_refused(path: str) -> None:
    with pytest.raises(InvalidTarget, match="path"):
        model.check_path(path)


@given(st.text(max_size=20))
def test_no_path_leads_to_another_host(text: str) -> None:
    try:
        url = model.url_of(TARGET, "/" + text)
    except InvalidTarget:
        return
    assert url.startswith("https://example.com/")
    assert model.check_url(url, model.NOTHING_ALLOWED) == url


@pytest.mark.parametrize("headers", [
    {"": "x"}, {"a b": "x"}, {"a:": "x"}, {"a\r\n": "x"}, {"x": "a\r\nb: c"}, {"x": "a\nb"}, {"x": "ä"},
    {"x": " a"}, {"x": "a "}, {"x": 1}, {"Host": "x"}, {"content-length": "1"}, {"Connection": "close"},
    {"Transfer-Encoding": "chunked"}, {"Webhook-Id": "1"}, {"TOC-Topic": "x"}, {"traceparent": "x"},
    {"X-A": "1", "x-a": "2"}, {f"h{n}": "x" for n in range(51)}, {"x": 8000 * "x"}, ["x"],
])  # fmt: skip
def test_a_header_that_could_change_the_request_is_refused(headers: object) -> None:
    with pytest.raises(InvalidTarget, match="header"):
        model.check_headers(headers)


def test_a_refused_header_is_named_without_its_value() -> None:
    with pytest.raises(InvalidTarget, match="X-Key") as caught:
        model.check_headers({"X-Key": "hunter2\n"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("change", [
    {"name": ""}, {"name": "a/b"}, {"name": 1}, {"timeout": 0}, {"timeout": 301}, {"timeout": "1"},
    {"timeout": float("nan")}, {"concurrency": 0}, {"concurrency": 1.5}, {"concurrency": True},
    {"rate": 0}, {"rate": float("inf")}, {"dead_on": frozenset({500})}, {"dead_on": [400]},
    {"topics": ()}, {"topics": "*"}, {"topics": ("a b",)}, {"topics": ("*",) * 101}, {"topics": (1,)},
])  # fmt: skip
def test_a_limit_out_of_range_is_refused_by_name(change: dict[str, object]) -> None:
    (field,) = change
    with pytest.raises(InvalidTarget, match="target" if field == "name" else field):
        replace(TARGET, **change)  # type: ignore[arg-type]


def test_a_secret_has_the_form_of_standard_webhooks_and_no_repr_shows_it() -> None:
    secret = model.new_secret()
    assert secret.startswith("whsec_")
    assert 24 <= len(base64.b64decode(secret.removeprefix("whsec_"))) <= 64
    assert secret != model.new_secret()
    opened = TargetSecrets(secret, None, {"X-Key": "hunter2"})
    assert secret not in repr(opened)
    assert "hunter2" not in repr(opened)
    assert "xyz" not in repr(replace(TARGET, sealed="xyz"))


def test_during_a_rotation_both_secrets_sign_the_new_one_first() -> None:
    new, old = model.new_secret(), model.new_secret()
    opened = TargetSecrets(new, old)
    target = replace(TARGET, previous_until=1000)
    keys = [model.signing_key(new), model.signing_key(old)]
    assert opened.signing(target, 999) == keys
    assert opened.signing(target, 1000) == keys[:1]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, Route("shop")),
        ({"target": "bank"}, Route("bank")),
        ({"target": "bank", "url": "/paid"}, Route("bank", "/paid")),
        ({"url": "https://example.com/x"}, Route("shop", "", "https://example.com/x")),
    ],
)
def test_a_task_goes_to_what_it_names_or_to_its_topics_target(named: dict[str, str], expected: Route) -> None:
    route = model.named_route(named.get("target"), named.get("url"), model.NOTHING_ALLOWED)
    attribute = {"a": 1} | ({} if route is None else {model.ATTRIBUTE: route})
    assert model.route_of(TOPIC, attribute) == expected
    assert model.payload_of(attribute) == {"a": 1}


@pytest.mark.parametrize("own", [None, [], "x", 7, {}, {"target": 7}, {"url": None, "path": []}])
def test_a_reserved_key_that_toc_did_not_write_names_nothing(own: object) -> None:
    assert model.route_of(TOPIC, {model.ATTRIBUTE: own}) == Route("shop")


def test_a_caller_cannot_write_the_reserved_key_by_hand() -> None:
    with pytest.raises(InvalidAttribute, match="toc-webhook"):
        model.check_not_reserved({model.ATTRIBUTE: {"url": "https://example.com"}})
    model.check_not_reserved({"a": 1})
    model.check_not_reserved(None)


# The capacity of a target in one process: shares, waits, what happens while Redis is away.

T = TypeVar("T")
Answers = Mapping[str, Permits | IndexUnavailable]


class Redis:
    """Answers as permits.lua would for one process that gets at most ``most``; or is away."""

    def __init__(self, most: int = 100, *, away: bool = False, tokens: int = 0) -> None:
        self.most = most
        self.away = away
        self.tokens = tokens
        self.asked: list[Mapping[str, PermitRequest]] = []

    def __call__(self, asked: Mapping[str, PermitRequest]) -> Answers:
        self.asked.append(asked)
        if self.away:
            return dict.fromkeys(asked, IndexUnavailable("away"))
        found = {}
        for name, request in asked.items():
            begin = min(request.asked, self.tokens)
            self.tokens -= begin
            granted = max(min(request.wanted, request.limit, self.most), request.held)
            found[name] = Permits(granted, begin, 1000 if request.rate else 0, 1)
        return found


def run(redis: Redis, test: Callable[[Limiter], Awaitable[T]], members: int = 4) -> T:
    async def whole() -> T:
        limiter = Limiter(redis, "me", lambda: members)
        try:
            return await test(limiter)
        finally:
            limiter._threads.close()

    return asyncio.run(whole())


async def entered(limiter: Limiter, capacity: Capacity, count: int) -> tuple[int, list[Full]]:
    """How many of so many that come at once get in, and what the others are told."""
    got = await asyncio.gather(*(limiter.enter(capacity) for _ in range(count)), return_exceptions=True)
    refused = [one for one in got if isinstance(one, Full)]
    assert all(one is None or isinstance(one, Full) for one in got), got
    return got.count(None), refused


def test_a_cancelled_wait_keeps_no_place() -> None:
    async def test(limiter: Limiter) -> None:
        capacity = limiter.of("shop", 1, None)
        await limiter.enter(capacity)
        waiting = asyncio.ensure_future(limiter.enter(capacity))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        limiter.leave(capacity, 0.01)
        assert capacity.in_flight == 0
        await limiter.enter(capacity)

    run(Redis(), test)


@pytest.mark.parametrize(("limit", "members", "expected"), [(8, 4, 2), (3, 4, 1), (100, 1, 100)])
def test_while_redis_is_away_each_process_has_its_part(limit: int, members: int, expected: int) -> None:
    async def test(limiter: Limiter) -> int:
        return (await entered(limiter, limiter.of("shop", limit, None), 120))[0]

    assert run(Redis(away=True), test, members) == expected


def test_of_two_redis_nodes_one_that_is_away_matters_to_its_targets_only() -> None:
    class TwoNodes(Redis):
        """One node is away. Others have all that the target of the other node allows."""

        def __call__(self, asked: Mapping[str, PermitRequest]) -> Answers:
            answers = super().__call__(asked)
            return {
                name: IndexUnavailable("away") if name == "lost" else answer
                for name, answer in answers.items()
            }

    async def test(limiter: Limiter) -> None:
        lost, full = limiter.of("lost", 8, None), limiter.of("full", 8, None)
        for _ in range(3):
            gone = await asyncio.gather(entered(limiter, full, 1), entered(limiter, lost, 1))
            assert [inside for inside, _ in gone] == [0, 1]
            limiter.leave(lost, 0.01)

    with capture_logs() as lines:
        run(TwoNodes(0), test)
    told = [line["event"] for line in lines]
    assert told == ["webhook_limits_alone"], "once, and not whenever the other node answers"


def test_a_rate_is_kept_while_redis_is_away() -> None:
    async def test(limiter: Limiter) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        inside, _ = await entered(limiter, limiter.of("shop", 1000, 40.0), 100)
        assert 1 <= inside <= 3 + 10 * (loop.time() - began)  # a quarter of 40 a second

    run(Redis(away=True), test)


def test_a_probe_that_is_cancelled_before_it_begins_leaves_the_probe_to_another_one() -> None:
    async def test(limiter: Limiter) -> None:
        capacity = limiter.of("shop", 1, None)
        await limiter.enter(capacity)
        for _ in range(FAILURES):
            capacity.breaker.judge(asyncio.get_running_loop().time(), capacity.breaker.era, well=False)
        capacity.breaker._until = 0.0
        waiting = asyncio.ensure_future(limiter.enter(capacity))
        await asyncio.sleep(0)
        limiter.leave(capacity, 0.01)  # admits it
        waiting.cancel()  # before it could go on
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await limiter.enter(capacity)
        assert capacity.in_flight == 1

    run(Redis(), test)


def test_who_waits_for_a_silent_target_waits_elsewhere_and_keeps_no_process_from_taking() -> None:
    async def test(limiter: Limiter) -> None:
        capacity = limiter.of("shop", 2, None)
        first = [asyncio.ensure_future(limiter.enter(capacity)) for _ in range(10)]
        while capacity.in_flight < 2:
            await asyncio.sleep(0)
        assert limiter.waiting_remotely() == 2, "the others will go in a moment, as far as is known"
        await asyncio.wait(first)
        assert limiter.waiting_remotely() == 2
        assert sum(isinstance(one.exception(), Full) for one in first) == 8
        waiting = asyncio.ensure_future(limiter.enter(capacity))
        await asyncio.sleep(0)
        assert limiter.waiting_remotely() == 3
        limiter.leave(capacity, 0.01)
        await waiting
        assert limiter.waiting_remotely() == 2

    run(Redis(), test)


def test_who_asks_for_a_target_while_what_was_read_is_forgotten_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = TimeoutCenter().targets
    book = Mock(**{"serves.return_value": True})
    monkeypatch.setattr(Targets, "_book", PropertyMock(side_effect=[book, None]), raising=False)
    assert targets.serves("shop", "order.close")
