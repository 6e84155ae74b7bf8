"""The console: who gets in, what each role sees, and that what users wrote does nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from harness.console import Browser
from harness.gateway import Gateway
from harness.patience import until

from toc.console.pages import PAGES
from toc.console.sessions import FAILURES
from toc.model.access import MATRIX, Role


def test_a_stranger_learns_nothing(shared: Gateway) -> None:
    stranger = Browser(shared, None)
    assert [stranger.get(path).status for path in ("", "/tasks", "/nothing")] == [303, 303, 303]
    assert stranger.get("/topics").headers["location"] == "/console/login?next=%2Fconsole%2Ftopics"
    assert stranger.get("/live?of=/console/topics").status == 401
    assert stranger.post("/logout", csrf="x").status == 401
    page = stranger.get("/login")
    assert page.status == 200
    assert "test.sync" not in page.html
    assert "script" not in page.html


def test_a_login_lasts_as_long_as_its_token(shared: Gateway) -> None:
    secret = shared.make_token("short-lived", "read")
    browser = Browser(shared, None)
    answer = browser.log_in(secret, "/console/topics?x=1")
    assert (answer.status, answer.headers["location"]) == (303, "/console/topics?x=1")
    assert re.fullmatch(
        r"__Host-toc=[\w-]+; Path=/; Secure; HttpOnly; SameSite=Strict", answer.headers["set-cookie"]
    )
    assert secret not in answer.headers["set-cookie"]
    assert browser.get("/topics").status == 200
    with browser.asked("GET", "/console/live?of=/console/topics") as stream:
        assert stream.getheader("Content-Type") == "text/event-stream"
        assert (stream.getheader("X-Accel-Buffering"), stream.getheader("Cache-Control")) == (
            "no",
            "no-store",
        )
        assert shared.call("DELETE", "/v1/tokens/short-lived").status == 200
        assert b"event: end" in stream.read()  # it ends
    assert until(lambda: browser.get("/topics").status == 303, 10)


def test_a_cookie_that_was_changed_lets_nobody_in(shared: Gateway) -> None:
    browser = Browser(shared)
    name, _, value = browser.cookie.partition("=")
    for place in (0, 50, 60, len(value) - 2):
        other = value[:place] + ("A" if value[place] != "A" else "B") + value[place + 1 :]
        browser.cookie = f"{name}={other}"
        assert browser.get("/topics").status == 303
    for odd in ("", "x", "=" * 300, "A" * 96):
        browser.cookie = f"{name}={odd}"
        assert browser.get("/topics").status == 303


def test_who_logs_out_is_out(shared: Gateway) -> None:
    browser = Browser(shared)
    answer = browser.post("/logout")
    assert (answer.status, answer.headers["location"]) == (303, "/console/login")
    assert "Max-Age=0" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    "headers",
    [{"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}, {"Origin": "https://evil.example"},
     {"Origin": "null"}],
)  # fmt: skip
def test_a_form_of_another_site_is_refused(shared: Gateway, headers: dict[str, str]) -> None:
    browser = Browser(shared)
    assert browser.post("/logout", None, **headers).status == 403
    assert browser.log_in(shared.tokens["all"], **headers).status == 403


def test_a_form_needs_the_token_of_its_login(shared: Gateway) -> None:
    browser, other = Browser(shared), Browser(shared, "read")
    for csrf in ("", "x" * 64, other.csrf()):
        assert browser.post("/logout", csrf=csrf).status == 403
    assert browser.post("/logout", Origin=f"http://127.0.0.1:{shared.port}").status == 303


def test_the_next_page_is_one_of_the_console(shared: Gateway) -> None:
    browser = Browser(shared, None)
    for elsewhere in (
        "https://evil.example",
        "//evil.example",
        "/consoles",
        "/console\r\nx: y",
        "/v1/tokens",
    ):
        assert browser.log_in(shared.tokens["all"], elsewhere).headers["location"] == "/console"


def test_a_link_from_another_site_finds_the_login_again(shared: Gateway) -> None:
    page = Browser(shared, None).get("/tasks?biz_id=4711&topic=a%20b", Sec_Fetch_Site="cross-site")
    assert page.status == 200
    assert 'content="0; url=/console/tasks?biz_id=4711&amp;topic=a%20b"' in page.html


def test_the_login_page_says_where_it_cannot_work(shared: Gateway) -> None:
    stranger = Browser(shared, None)
    assert "cannot log in at this address" in stranger.get("/login", Host="gate.example:8080").text
    assert "cannot log in" not in stranger.get("/login").text
    behind = stranger.get("/login", Host="gate.example", Sec_Fetch_Site="none")  # a proxy has the certificate
    assert "cannot log in" not in behind.text


def test_failed_logins_are_bounded(system_gateway: Gateway) -> None:
    stranger = Browser(system_gateway, None)
    answers = [stranger.log_in("toc_wrong").status for _ in range(FAILURES + 1)]
    assert answers == [401] * FAILURES + [429]
    refused = stranger.log_in(system_gateway.tokens["all"])
    assert refused.status == 429
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert "toc_wrong" not in system_gateway.told()


@pytest.fixture(scope="module")
def system_gateway(shared: Gateway) -> Iterator[Gateway]:
    """A gateway of its own, whose only client is known to fail."""
    gateway = Gateway(shared.system, host="guessed", beside=shared)
    try:
        yield gateway
    finally:
        gateway.stop()


def test_every_page_has_a_policy_without_which_no_script_runs(shared: Gateway) -> None:
    browser = Browser(shared)
    nonces = set()
    for page in (browser.get("/topics"), browser.get("/nothing"), browser.get("/login")):
        policy = dict(
            one.strip().partition(" ")[::2] for one in page.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        found = re.fullmatch(r"'nonce-([\w-]{20,})'", policy["script-src"])
        assert found
        nonces.add(found[1])
        assert all(
            f'nonce="{found[1]}"' in tag for tag in re.findall(r"<(?:script|[^>]+ hx-)[^>]*>", page.html)
        )
        assert not re.search(r"<[^>]+\s(on\w+|style)=|<style|javascript:", page.html)
    assert len(nonces) == 3


def test_each_role_sees_its_pages(shared: Gateway) -> None:
    for role in ("produce", "consume", "read", "operate"):
        browser = Browser(shared, role)
        for one in PAGES:
            if one.menu and one.right is not None:
                allowed = Role(role) in MATRIX[one.right]
                assert browser.get(f"/{one.path}").status == (200 if allowed else 403), (role, one.path)
