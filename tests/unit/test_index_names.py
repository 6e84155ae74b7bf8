"""Keys, scores and URLs: stored formats and settings that others rely on."""

import ssl
from binascii import crc_hqx

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toc.index.keys import SlotKeys
from toc.index.url import Topology, parse
from toc.model import scores
from toc.model.errors import ConfigError
from toc.model.topic import Slot

LAST_EXACT_SECOND = 2**41 // 1000 - 1


def test_keys_are_those_of_the_design() -> None:
    keys = SlotKeys.of(Slot("order.close", 3), None)
    assert keys[:6] == (
        "order.close_3", "prepare_{order.close_3}", "dead_{order.close_3}", "claims_{order.close_3}",
        "gen_{order.close_3}", "wake_{order.close_3}",
    )  # fmt: skip
    assert keys.hash_slot == crc_hqx(b"order.close_3", 0) % 16384


def test_a_namespace_goes_in_front_of_the_topic_inside_the_tag() -> None:
    keys = SlotKeys.of(Slot("order.close", 3), "stage")
    assert keys[:3] == ("stage:order.close_3", "prepare_{stage:order.close_3}", "dead_{stage:order.close_3}")
    assert keys.hash_slot == crc_hqx(b"stage:order.close_3", 0) % 16384


@given(st.integers(0, 2**41), st.integers(1, 31), st.integers(1, 31))
def test_a_store_score_is_due_at_its_floor_and_keeps_tries(due: int, remaining: int, attempts: int) -> None:
    assert scores.store_score(due, remaining, 0) == due
    score = scores.store_score(due, remaining, attempts)
    assert scores.due_ms(score) == due
    assert (score - due) * 32 == remaining


def test_a_store_score_without_tries_left_is_refused() -> None:
    with pytest.raises(ValueError, match="remaining"):
        scores.store_score(1, 0, 3)


@given(st.integers(0, LAST_EXACT_SECOND), st.integers(1, 31), st.integers(0, 4095))
def test_a_prepare_score_is_exact_until_september_2039(seconds: int, remaining: int, claim: int) -> None:
    fence = scores.fence(remaining, claim)
    score = seconds * 1000 + fence
    assert scores.fence_of(score) == fence
    assert scores.split(score) == (seconds, remaining, claim)
    assert float(f"{score:.17g}") == score


@pytest.mark.parametrize(("url", "kind", "addresses", "tls"), [
    ("redis://h", Topology.SINGLE, [("h", 6379)], False),
    ("rediss://h:1/2", Topology.SINGLE, [("h", 1)], True),
    ("redis://[::1]:7", Topology.SINGLE, [("::1", 7)], False),
    ("unix:///run/r.sock?db=2", Topology.SINGLE, [("/run/r.sock", 0)], False),
    ("redis+cluster://a:1,b", Topology.CLUSTER, [("a", 1), ("b", 6379)], False),
    ("rediss+cluster://u:p%40@a:1", Topology.CLUSTER, [("a", 1)], True),
    ("redis+sentinel://a,b:2/main?db=2", Topology.SENTINEL, [("a", 26379), ("b", 2)], False),
])  # fmt: skip
def test_urls_are_read(url: str, kind: Topology, addresses: list[tuple[str, int]], tls: bool) -> None:
    location = parse(url)
    assert (location.kind, list(location.addresses), location.tls is not None) == (kind, addresses, tls)


def test_the_parts_of_a_url_reach_the_connection() -> None:
    location = parse("redis+sentinel://u:p%40%2F:@a,b/main?db=2&sentinel_password=s%20s")
    assert location.service == "main"
    assert location.login(sentinel=False) == [("AUTH", "u", "p@/:"), ("SELECT", 2)]
    assert location.login(sentinel=True) == [("AUTH", "s s")]


@pytest.mark.parametrize(("query", "checked", "verified"), [
    ("", True, ssl.CERT_REQUIRED),
    ("?ssl_check_hostname=off", False, ssl.CERT_REQUIRED),
    ("?ssl_cert_reqs=none", False, ssl.CERT_NONE),
    ("?ssl_cert_reqs=none&ssl_check_hostname=false", False, ssl.CERT_NONE),
    ("?ssl_cert_reqs=optional", True, ssl.CERT_OPTIONAL),
])  # fmt: skip
def test_over_tls_a_server_must_prove_its_name(query: str, checked: bool, verified: ssl.VerifyMode) -> None:
    for url in ("rediss://a", "rediss+sentinel://a/s", "rediss+cluster://a:1"):
        location = parse(url + query)
        assert location.tls is not None
        context = location.tls_context(location.tls)
        assert (context.check_hostname, context.verify_mode) == (checked, verified)


@pytest.mark.parametrize("url", [
    "", "http://:canary@h", "redis://", "redis://:canary@a,b", "redis://:canary@h:x",
    "redis://:canary@h:0", "redis://:canary@h/x", "redis://:canary@h?colour=canary",
    "redis://:canary@h?ssl_ca_certs=/x", "redis+cluster://:canary@h/1",
    "redis+sentinel://:canary@h", "redis+sentinel://:canary@h/a/b", "unix://:canary@host/path",
    "unix+cluster:///path", "rediss://:canary@h?ssl_cert_reqs=canary",
    "rediss://:canary@h?ssl_check_hostname=canary",
    "rediss://:canary@h?ssl_ca_certs=/nowhere/ca.pem",
    "rediss://:canary@h?ssl_ca_certs=" + "x" * 5000,
    "rediss://:canary@h?ssl_keyfile=/nowhere/key.pem", "redis://:canary@[::1",
    "redis://u:1#canary@h", "redis://u:1/canary@h", "redis://u:1?canary@h",
])  # fmt: skip
def test_a_url_that_cannot_be_used_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url)
    assert "canary" not in str(caught.value)


def test_no_repr_shows_a_password() -> None:
    assert "canary" not in repr(parse("redis+sentinel://u:canary@a/main?sentinel_password=canary"))
