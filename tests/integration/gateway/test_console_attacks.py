"""The console under attack: nobody who may only look holds up others, or learns what is not for him."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from harness.console import Browser
from harness.gateway import Gateway
from harness.system import System

from toc.console.console import Console
from toc.console.sessions import COOKIE, FAILURES, Sessions
from toc.console.shown import Column
from toc.gateway.app import App
from toc.gateway.connections import Crowd
from toc.gateway.server import server
from toc.gateway.service import Service
from toc.model.access import Role
from toc.model.task import NewTask
from toc.operate.tokens import TokenBook, create_token


def test_a_page_that_is_long_to_draw_holds_up_no_other_request(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    center = system.center
    made = create_token(center.store, "reads", roles=[Role.READ], topics=["*"], clock=center.clock, by="test")
    center.put(NewTask("test.sync", 1, 3600))
    drawing, answered, cell = threading.Event(), threading.Event(), Column.cell
    in_time: list[bool] = []

    def slow(self: Column, record: Any) -> Any:
        drawing.set()
        in_time.append(all(in_time) and answered.wait(20))
        return cell(self, record)

    monkeypatch.setattr(Column, "cell", slow)

    def get(port: int, path: str, cookie: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path, headers={"Cookie": cookie})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    async def steps() -> None:
        book = TokenBook(center.store.tokens, center.clock)
        book.run_once()
        key = center.store.identity.lease_secret()
        service = Service(center, book, key)
        cookie = f"{COOKIE}={Sessions(book, center.clock, key).begin(made.secret)}"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            http_server = server(App(service, Console(service, key)), Crowd(), shutdown_deadline=1)
            serving = asyncio.create_task(http_server.serve([listener]))
            try:
                page = asyncio.create_task(asyncio.to_thread(get, port, "/console/tasks", cookie))
                assert await asyncio.to_thread(drawing.wait, 60), "no page is drawn"
                assert (await asyncio.to_thread(get, port, "/healthz"))[0] == 200
                answered.set()
                status, html = await page
                assert status == 200
                assert b"test.sync" in html
            finally:
                answered.set()
                http_server.should_exit = True
                await serving
                await service.close()

    asyncio.run(steps())
    assert all(in_time), "nothing else was answered while the page was drawn"


@pytest.fixture(scope="module")
def proxied(shared: Gateway) -> Iterator[Gateway]:
    """A gateway for which all its clients are one proxy."""
    gateway = Gateway(shared.system, "--proxy", "127.0.0.1/32", host="proxied", beside=shared)
    try:
        yield gateway
    finally:
        gateway.stop()


def test_failed_logins_through_a_proxy_keep_nobody_else_out(proxied: Gateway) -> None:
    stranger = Browser(proxied, None)
    assert [stranger.log_in("toc_wrong").status for _ in range(FAILURES + 1)] == [401] * (FAILURES + 1)
    assert stranger.log_in(proxied.tokens["all"]).status == 303


def test_an_origin_that_is_no_address_is_another_site(shared: Gateway) -> None:
    stranger = Browser(shared, None)
    for origin in ("http://[", "http://", "", f"http://[{shared.port}", "//", "x"):
        assert stranger.post("/login", csrf="", Origin=origin).status == 403, origin
    assert "page_failed" not in shared.told()
