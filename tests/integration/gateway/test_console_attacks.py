"""The console under attack: nobody who may only look holds up others, or learns what is not for him."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from typing import Any

import pytest
from harness.console import Browser
from harness.gateway import Gateway
from harness.rows import change
from harness.system import System

from toc.console.console import Console
from toc.console.sessions import COOKIE, Sessions
from toc.console.shown import Column
from toc.gateway.app import App
from toc.gateway.connections import Crowd, server
from toc.gateway.service import Service
from toc.model.access import Role
from toc.model.errors import StoreUnavailable
from toc.model.lateness import Cause, Episode, LateStart, Span
from toc.model.task import NewTask, TaskStatus
from toc.operate.operation import Doing
from toc.operate.operations.due import show
from toc.operate.tokens import TokenBook, create_token
from toc.store.servers.shards import Answers


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


def test_an_origin_that_is_no_address_is_another_site(shared: Gateway) -> None:
    stranger = Browser(shared, None)
    for origin in ("http://[", "http://", "", f"http://[{shared.port}", "//", "x"):
        assert stranger.post("/login", csrf="", Origin=origin).status == 403, origin
    assert "page_failed" not in shared.told()


SERVER = "db1.internal:3306"


def test_who_sees_some_topics_is_told_of_no_server(shared: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    center, now = shared.system.center, shared.system.center.clock.now_ms()
    job_id = int(shared.submit("test.sync", biz_id="late").body["job_id"])
    causes = (Cause.DATABASE, Cause.REDIS, Cause.NO_OWNER)
    for n, cause in enumerate(causes, 1):
        episode = Episode(
            n, "test.sync", cause, "w", now - 9000, now, now, 1, 0, 9000, job_id, f"{SERVER} away"
        )
        center.store.episodes.write(episode)
    spans = [Span(cause, now - 9000 + n, now - 8000 + n, f"{SERVER} away") for n, cause in enumerate(causes)]
    server = center.store._shards.servers[center.store.server_of(job_id)]
    due, ended = server.instant(now - 9000), server.instant(now)
    sets = f"status={TaskStatus.PROCESSED:d},action_time={due},next_time={ended},late=%s"
    change(center.store, job_id, sets, LateStart(0, now - 9000, now, spans).line())
    shared.make_token("scoped", "read", topics=("test.*",))
    shared.make_token("whole", "read")
    away = Answers[Any]({}, {0: StoreUnavailable(f"{SERVER} away")})
    monkeypatch.setattr(center.store.due_counts, "kept", lambda _tables: away)
    for name, told in (("whole", True), ("scoped", False)):
        for path in (f"/v1/tasks/{job_id}", "/v1/late?topic=test.sync"):
            found = shared.call("GET", path, token=name)
            assert found.body.get("late") or found.body.get("episodes"), (path, found.body)
            assert (SERVER in str(found.body)) is told, (name, path)
        browser = Browser(shared, name)
        for path in (f"/tasks/{job_id}", "/late"):
            assert (SERVER in browser.get(path).html) is told, (name, path)
        token = next(one for one in center.store.tokens.list() if one.name == name)
        missing = show.do(Doing(center, name, show.right, token))["missing"]
        assert len(missing) == 1
        assert (SERVER in str(missing)) is told
