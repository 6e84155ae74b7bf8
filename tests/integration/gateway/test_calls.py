"""The calls of the gateway: what they do, by which token, and what those of one process share."""

import asyncio
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from harness.gateway import Gateway
from harness.patience import until
from harness.rows import change
from harness.system import System

from toc import NewTask, TaskStatus, Topic
from toc.gateway.app import CALLS
from toc.gateway.calls import HttpCall
from toc.gateway.exchange import CURRENT
from toc.gateway.service import MAX_CALLS, THREADS, Line, Service
from toc.model.access import Role, Token
from toc.model.errors import Busy, NotGranted, SchemaBehind, StoreUnavailable, TocError
from toc.model.pull import PullLease
from toc.model.topic import Delivery
from toc.operate import tokens
from toc.operate.tokens import REFRESH_SECONDS, TokenBook
from toc.sdk import batcher
from toc.sdk.batcher import Batcher, Settle
from toc.store.servers.server import Statement
from toc.store.tasks.history import FailedTry, line

# The calls of the gateway: what they do, and by which token.

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def test_a_task_lives_over_http(shared: Gateway) -> None:
    made = shared.submit(biz_id="order-1", attribute={"reason": "ünpaid"}, dedup_key="close")
    assert made.status == 201
    assert list(made.body) == ["job_id"]
    job_id = made.body["job_id"]
    assert (
        shared.submit(biz_id="order-1", attribute={"reason": "ünpaid"}, dedup_key="close").body == made.body
    )

    task = shared.call("GET", f"/v1/tasks/{job_id}").body
    assert {name: task[name] for name in ("job_id", "topic", "biz_id", "status", "attribute", "version")} == {
        "job_id": job_id, "topic": "test.sync", "biz_id": "order-1", "status": "pending",
        "attribute": {"reason": "ünpaid"}, "version": 0,
    }  # fmt: skip
    assert all(TIME.fullmatch(task[name]) for name in ("action_time", "next_time", "created", "modified"))

    later = datetime.now(UTC) + timedelta(hours=2)
    moved = shared.call("PATCH", f"/v1/tasks/{job_id}", {"action_time": later.isoformat()})
    assert moved.body == {"job_id": job_id, "outcome": "rescheduled"}
    assert shared.call("GET", f"/v1/tasks/{job_id}").body["version"] == 1
    assert shared.call("DELETE", f"/v1/tasks/{job_id}").body == {"job_id": job_id, "outcome": "cancelled"}
    assert shared.call("PATCH", f"/v1/tasks/{job_id}", {"delay": 60}).body["outcome"] == "too_late"
    for method, wanted in (("PATCH", {"delay": 60}), ("DELETE", None)):
        unknown = shared.call(method, "/v1/tasks/123456789", wanted)
        assert (unknown.status, unknown.body["outcome"]) == (404, "unknown")
    task = shared.call("GET", f"/v1/tasks/{job_id}").body
    assert (task["status"], task["next_time"]) == ("cancelled", None)
    assert TIME.fullmatch(task["ended"])


def test_a_history_has_its_times_as_texts_and_its_durations_in_seconds(shared: Gateway) -> None:
    job_id = shared.submit(biz_id=1).body["job_id"]
    failed = FailedTry(1, 0, 0, 1_700_000_000_047, "down", 500, 47, 1_700_000_060_000)
    change(shared.system.center.store, job_id, "history=%s", line(failed))
    assert shared.call("GET", f"/v1/tasks/{job_id}/history").body["tries"] == [
        {
            "attempt": 1, "crashes": 0, "version": 0, "at": "2023-11-14T22:13:20.047Z", "error": "down",
            "status": 500, "seconds": 0.047, "next": "2023-11-14T22:14:20.000Z",
        }
    ]  # fmt: skip


def test_a_topic_can_be_searched_at_once_and_what_lies_outside_is_not_there(shared: Gateway) -> None:
    topic = Topic("of.elsewhere", 903, 2)  # as another process makes it
    shared.system.center.store.topics.create(topic)
    shared.system.center.catalog.refresh()
    job_id = shared.system.center.submit(topic.name, biz_id=90_300, delay=60)
    found = shared.call("GET", f"/v1/tasks?biz_id=90300&topic={topic.name}").body["tasks"]
    assert [one["job_id"] for one in found] == [str(job_id)]
    for path in ("tasks", "dead"):
        outside = shared.call("GET", f"/v1/{path}?topic={topic.name}", token="sync-only")
        assert (outside.status, outside.body["type"]) == (404, "/docs#unknown-topic")
        none = shared.call("GET", f"/v1/{path}?topic=none", token="sync-only").body
        assert outside.body == none | {"detail": none["detail"].replace("'none'", f"'{topic.name}'")}


def test_the_audit_of_a_bulk_change_names_every_task(shared: Gateway) -> None:
    store = shared.system.center.store
    tasks = [{"biz_id": 777, "delay": 7200} for _ in range(1000)]
    made = shared.call("POST", "/v1/topics/test.doomed/tasks:batch", {"tasks": tasks}).body["tasks"]
    job_ids = [one["job_id"] for one in made]
    name = store._shards.names[store._shards.table_of(int(job_ids[0]))]
    store._shards.servers[0].run([Statement(f"UPDATE {name} SET status=4 WHERE biz_id=777")])
    assert shared.call("POST", "/v1/dead:purge", {"job_ids": job_ids}).body == {"purged": 1000, "left": 0}
    (action,) = shared.call("GET", "/v1/audit?target=tasks&limit=1").body["actions"]
    assert action["details"]["tasks"] == 1000
    assert set(action["details"]["job_ids"]) == set(job_ids)


@pytest.mark.parametrize(("call", "done"), [("redrive", "redriven"), ("purge", "purged")])
def test_a_locked_table_leaves_its_own_dead_tasks_and_the_rest_is_answered(
    shared: Gateway, call: str, done: str
) -> None:
    store = shared.system.center.store
    tasks = [{"biz_id": biz_id, "delay": 7200} for biz_id in range(50)]
    made = shared.call("POST", "/v1/topics/test.doomed/tasks:batch", {"tasks": tasks}).body["tasks"]
    job_ids = [one["job_id"] for one in made]
    for job_id in job_ids:
        change(store, job_id, "status=4")
    table = store._shards.table_of(int(job_ids[0]))
    left = [job_id for job_id in job_ids if store._shards.table_of(int(job_id)) == table]
    locker = store._shards.server_of[table]._connect_within(5)
    try:
        locker.batch([f"LOCK TABLES {store.name_of(table)} READ"])
        answer = shared.call("POST", f"/v1/dead:{call}", {"job_ids": job_ids})
    finally:
        locker.close()
    assert (answer.status, answer.body[done], answer.body["left"]) == (200, 50 - len(left), len(left))
    assert answer.body.get("not_indexed_yet", 0) == 0
    (action,) = shared.call("GET", f"/v1/audit?action=tasks.{call}&limit=1").body["actions"]
    assert (action["outcome"], action["result"]) == ("done", answer.body)

    def again() -> bool:
        """The table is set aside until it was found unlocked."""
        return bool(shared.call("POST", f"/v1/dead:{call}", {"job_ids": left}).body[done] == len(left))

    assert until(again)


# --- tokens


@pytest.mark.parametrize("role", Role)
def test_a_role_makes_the_calls_of_the_matrix_and_no_others(shared: Gateway, role: Role) -> None:
    for call in CALLS:
        body = b"[]" if call.body is not None else None  # no call takes that: nothing is changed
        bare = body is None and call.method != "GET"  # what it would change is not there
        topic = "not.there" if bare else "test.sync"
        path = call.path.format(
            topic=topic, topics=topic, job_id="1234567", name="nobody", pattern="none.*",
            host="nobody", slot="not.there_0",
        )  # fmt: skip
        status = shared.call(call.method, path, body, token="all" if role is Role.ADMIN else role).status
        if role not in call.access.roles:
            assert status == 403, call.name
        elif bare:
            without_cluster = call.path.startswith(("/v1/hosts/", "/v1/slots/"))
            assert status == (409 if without_cluster else 404), call.name
        else:
            assert status != 403, call.name


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_what_is_outside_the_patterns_of_a_token_is_not_there(shared: Gateway, call: HttpCall) -> None:
    job_id = shared.submit("test.batch", biz_id=1).body["job_id"]
    topic = "test.batch"
    path = call.path.format(
        topic=topic, topics=topic, job_id=job_id, name="all", pattern="x.*", host="a", slot=f"{topic}_0"
    )
    bodies: dict[str, Any] = {
        "TaskToSubmit": {"biz_id": 1, "delay": 60},
        "TasksToSubmit": {"tasks": [{"biz_id": 1, "delay": 60}]},
        "NewDeadline": {"delay": 60},
        "TopicPolicies": {"retries": 5},
        "Resume": {},
        "Chosen": {"job_ids": [job_id]},
        "NewTopic": {"name": "test.other", "biz_type": 77, "slot_amount": 1},
        "NewToken": {"name": "more", "roles": ["read"], "topics": ["*"]},
        "NewSchedule": {"name": "more", "topic": topic, "every": 60},
        "DefinitionToPreview": {"every": 60},
        "Range": {"from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"},
    }
    schedule = {"name": "all", "topic": topic, "every": 3600, "paused": True}
    assert shared.call("POST", "/v1/schedules", schedule).status in (201, 409)
    body = bodies.get(call.body.__name__, {}) if call.body is not None else None
    answer = shared.call(call.method, path, body, token="sync-only")
    if call.access.cluster or call.name == "POST /v1/tokens":
        assert answer.status == 403
    elif call.name == "DELETE /v1/tokens/{name}":
        unknown = shared.call("DELETE", "/v1/tokens/nobody", token="sync-only")
        assert (answer.status, answer.body["detail"]) == (
            404,
            unknown.body["detail"].replace("nobody", "all"),
        )
        assert shared.call("GET", "/v1/topics").status == 200, "it still holds"
    elif call.name == "POST /v1/topics":
        assert (answer.status, answer.body["type"]) == (404, "/docs#unknown-topic")
    elif "{" in call.path:
        assert (answer.status, answer.body["detail"][:16]) == (404, "there is no such")
    elif call.name == "POST /v1/schedules":
        assert (answer.status, answer.body["detail"]) == (404, f"there is no such topic: {topic!r}")
    else:  # a list, or a bulk call that leaves alone what it may not see
        assert "test.batch" not in str(answer.body)
        assert job_id not in str(answer.body)
    assert shared.system.row(int(job_id)).status == TaskStatus.PENDING


def test_a_topic_just_made_elsewhere_is_known_and_what_has_none_is_for_who_sees_all(shared: Gateway) -> None:
    shared.make_token("narrow", "admin", topics=("new.*", "biz_type-*"))
    center = shared.system.center
    center.store.topics.create(Topic("new.topic", 88, 2))
    center.catalog.refresh()
    job_id = center.submit("new.topic", biz_id=1, delay=60)
    assert shared.call("GET", f"/v1/tasks/{job_id}", token="narrow").body["topic"] == "new.topic"
    orphan = shared.submit("test.sync", biz_id=2).body["job_id"]
    change(center.store, orphan, "biz_type=999")
    assert shared.call("GET", f"/v1/tasks/{orphan}", token="narrow").status == 404
    assert shared.call("DELETE", f"/v1/tasks/{orphan}", token="narrow").status == 404
    assert shared.call("GET", f"/v1/tasks/{orphan}").body["topic"] == "biz_type-999"


def test_what_a_request_holds_is_counted_before_it_is_made(shared: Gateway) -> None:
    lists = b'{"tasks":[{"biz_id":[' + b"[]," * 100_000 + b"[]]}]}"
    refused = shared.call("POST", "/v1/topics/test.sync/tasks:batch", lists)
    assert (refused.status, refused.body["type"]) == (413, "/docs#too-large")
    assert "more than 64000 values" in refused.body["detail"]
    text = {"tasks": [{"biz_id": 1, "delay": 3600, "body": "[,{" * 100_000}]}
    assert shared.call("POST", "/v1/topics/test.sync/tasks:batch", text).status == 200
    refused = shared.call("POST", f"/v1/topics/{','.join(['a'] * 101)}:pull", {})
    assert (refused.status, refused.body["field"]) == (422, "topics")
    wanted = {"name": "wide", "roles": ["read"], "topics": ["a.*"] * 21}
    assert shared.call("POST", "/v1/tokens", wanted).status == 422


@pytest.mark.parametrize("typed", ["late", "1e9", "%D9%A5", "5.5", ""])
def test_what_is_no_whole_number_is_refused_in_a_query(shared: Gateway, typed: str) -> None:
    for path in (f"/v1/tasks?limit={typed}", f"/v1/late?limit={typed}"):
        answer = shared.call("GET", path)
        assert (answer.status, answer.body["field"]) == (422, "limit"), path
    raw = f"/v1/topics/test.sync/tasks?raw=1&biz_id=1&delay=60&tries={typed}"
    answer = shared.call("POST", raw, b"body", headers={"Content-Type": "text/plain"})
    assert (answer.status, answer.body["field"]) == (422, "tries")


def test_a_token_is_needed_shown_once_limited_and_ends_within_a_second(shared: Gateway) -> None:
    none, unknown = "no access token was sent", "there is no such access token"
    for token, why in ((None, none), ("", none), ("toc_nonsense", unknown), ("ünknown", unknown)):
        answer = shared.call("GET", "/v1/tasks/1", token=token)
        assert (answer.status, answer.body["type"]) == (401, "/docs#unauthenticated")
        assert answer.body["detail"].startswith(why)
        assert answer.headers["www-authenticate"] == "Bearer"
    wanted = {"name": "brief", "roles": ["read"], "topics": ["*"], "rate": 1, "expires": 3600}
    made = shared.call("POST", "/v1/tokens", wanted)
    assert made.status == 201
    left = datetime.fromisoformat(made.body["expires_at"]) - datetime.fromisoformat(made.body["created"])
    assert left == timedelta(hours=1)
    secret = made.body["token"]
    assert until(lambda: shared.call("GET", "/v1/topics", token=secret).status == 200, 5)
    answers = [shared.call("GET", "/v1/topics", token=secret) for _ in range(20)]
    limited = [one for one in answers if one.status == 429]
    assert limited
    assert {one.headers["retry-after"] for one in limited} == {"1"}
    shown = shared.call("GET", "/v1/tokens").body["tokens"]
    assert secret not in str(shown)
    assert hashlib.sha256(secret.encode()).hexdigest() not in str(shown)
    assert (
        shared.call(
            "POST", "/v1/tokens", {"name": "x", "roles": ["admin"], "topics": ["*"]}, token="sync-only"
        ).status
        == 403
    )
    assert shared.call("DELETE", "/v1/tokens/brief").status == 200
    assert until(lambda: shared.call("GET", "/v1/topics", token=secret).status == 401, 5)
    assert "token was revoked" in shared.call("GET", "/v1/topics", token=secret).body["detail"]
    soon = shared.make_token("soon", "read", expires=2)
    assert until(lambda: shared.call("GET", "/v1/topics", token=soon).status == 401, 60)
    assert "token has expired" in shared.call("GET", "/v1/topics", token=soon).body["detail"]
    assert 2 * REFRESH_SECONDS < 1.0, "two looks at the table within a second, of which the last sees it"
    assert secret not in shared.told()


def test_pages_for_people_and_programs_need_no_token(shared: Gateway) -> None:
    assert shared.call("GET", "/healthz", token=None).body == b"ok\n"
    assert shared.call("GET", "/readyz", token=None).body == b"ok\n"
    page = shared.call("GET", "/docs", token=None).body.decode()
    assert all(call.path in page for call in CALLS)
    assert "The body of a task that was looked up is gone: it was purged or replaced since" in page
    assert not re.search(r"(?:src|href)=.?(?:https?:)?//", page)
    document = shared.call("GET", "/openapi.json", token=None).body
    assert document["openapi"] == "3.1.0"
    assert {(method.upper(), path) for path, calls in document["paths"].items() for method in calls} == {
        (call.method, call.path) for call in CALLS
    }


# What calls of one process share: threads, and what several want at once.


async def test_callers_are_refused_while_the_process_can_start_no_thread(system: System) -> None:
    many = Batcher(system.center)
    many.keep_topics()
    store = system.center.store
    book = TokenBook(store.tokens, system.center.clock)
    service = Service(system.center, book, store.identity.lease_secret())
    keyed = [NewTask("test.sync", n, 3600, dedup_key=f"key-{n}", on_conflict="replace") for n in range(6)]
    try:
        known = await asyncio.to_thread(system.center.put, NewTask("test.sync", 1, 3600))
        done: list[int] = []
        threading.stack_size(1 << 47)  # all that there is room for
        try:
            with suppress(StoreUnavailable):
                await many.read_topics()  # perhaps one that was under way
            with pytest.raises(StoreUnavailable, match="thread"):
                await many.read_topics()
            for _ in range(2 * batcher.UNDER_WAY):  # as often as would block a batcher for good
                asked = [*map(many.put, keyed), many.get(known.job_id)]
                found = await asyncio.gather(*asked, return_exceptions=True)
                assert {type(one) for one in found} == {Busy}, found
            for _ in range(MAX_CALLS):
                with pytest.raises(Busy, match="thread"):
                    await service.within("first", partial(done.append, 1))
        finally:
            threading.stack_size(0)
        async with asyncio.timeout(60):
            await asyncio.gather(*map(many.put, keyed))
            await service.within("first", partial(done.append, 2))
        assert done == [2], "what was refused was done nevertheless"
    finally:
        async with asyncio.timeout(60):
            await asyncio.gather(many.close(), service.close())


@pytest.mark.parametrize("error", [SchemaBehind("the topic table is gone"), ValueError("a bug")])
def test_what_fails_after_the_outcome_of_a_submit_is_logged_and_changes_it_not(
    system: System, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_args: object) -> None:
        raise error

    async def steps() -> None:
        many = Batcher(system.center)
        try:
            monkeypatch.setattr(type(system.center.catalog), "of_type", fails)
            with structlog.testing.capture_logs() as logs:
                job_ids.append((await many.put(NewTask("test.sync", 1, 3600))).job_id)
                if isinstance(error, TocError):
                    job_ids.extend(system.center.submit_many([NewTask("test.sync", 2, 3600)]))
                    job_ids.append(system.center.submit("test.sync", biz_id=3, delay=3600))
                else:  # a signal handler of the application may have raised it
                    with pytest.raises(type(error)):
                        system.center.submit("test.sync", biz_id=3, delay=3600)
                await many.close()
        finally:
            monkeypatch.undo()
        events.extend(line["event"] for line in logs)

    job_ids: list[int] = []
    events: list[str] = []
    asyncio.run(steps())
    event = "submit_not_indexed" if isinstance(error, TocError) else "batch_not_indexed"
    assert events == [event] * len(job_ids)
    assert set(system.center.store.read(job_ids)) == set(job_ids)


async def test_whoever_reads_topics_sees_all_before(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    topics, catalog = system.center.store.topics, system.center.catalog
    has_read, answers = threading.Event(), threading.Event()

    def read(*, real: Callable[[], list[Topic]] = catalog._read) -> list[Topic]:
        found = real()
        has_read.set()
        answers.wait(60)
        return found

    monkeypatch.setattr(catalog, "_read", read)
    many = Batcher(system.center)
    many.keep_topics()  # it reads them at once
    try:
        assert await asyncio.to_thread(has_read.wait, 60)
        topics.create(Topic("new", 4711, 1))
        reading = asyncio.ensure_future(many.read_topics())
        await asyncio.sleep(0)  # it has begun to wait
        answers.set()
        await reading
        assert "new" in catalog.known()
    finally:
        answers.set()
        await many.close()


def test_tokens_that_a_token_made_make_no_more_than_it_could(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MAX_GIVEN", 3)

    def make(name: str, giver: Token | None, topics: str = "shop.*") -> Token:
        by = "an operator" if giver is None else f"{giver.name}: of a queue"
        wanted: dict[str, Any] = {"roles": [Role.ADMIN], "topics": [topics], "by": by, "giver": giver}
        return tokens.create_token(system.center, name, **wanted).token

    everywhere = make("everywhere", None, "*")
    shop, bank = make("shop", everywhere), make("bank", everywhere)
    child = make("child", shop)
    make("grandchild", make("second", child))
    for giver in (shop, child):
        with pytest.raises(NotGranted, match="'shop' has made 3 tokens that live or ended within a day"):
            make("too-many", giver)
    make("of-bank", bank)
    make("third", everywhere)
    with pytest.raises(NotGranted, match="'everywhere' has made 3 tokens"):
        make("fourth", everywhere)
    table = system.center.store.tokens
    for at, ended in ((None, ("third", "grandchild")), (1, ("third", "grandchild"))):  # just now; long ago
        for name in ended:
            table._change(table._column.name == name, revoked_at=at or system.center.clock.now_ms())
        if at is None:
            with pytest.raises(NotGranted, match="'everywhere' has made 3 tokens"):
                make("fourth", everywhere)
    make("fourth", everywhere)
    make("of-child", child)
    with suppress(NotGranted):  # rows that were changed by hand, which name each other, have an answer too
        make("ring", replace(shop, created_by="child: by hand"))


async def test_one_sender_has_neither_all_places_of_a_line_nor_its_last_thread() -> None:
    line, over, began = Line("test", most=14), threading.Event(), list[str]()

    def work(name: str) -> str:
        began.append(name)
        over.wait(30)
        return name

    async def ask(name: str) -> str:
        found: str = await line.run(name, lambda: work(name))
        return found

    try:
        many = [asyncio.create_task(ask("many")) for _ in range(20)]
        while sum(one.done() for one in many) < 20 - 7:  # half of the places are left
            await asyncio.sleep(0.01)
        other = [asyncio.create_task(ask("other")) for _ in range(2)]
        while Counter(began) != {"many": THREADS - 1, "other": 1}:
            await asyncio.sleep(0.01)
        many[-5].cancel()  # what nobody waits for is not begun
        over.set()
        found = await asyncio.gather(*many, *other, return_exceptions=True)
        assert Counter(type(one) for one in found)[Busy] == 20 - 7
        assert began[THREADS] == "other" or began[THREADS + 1] == "other", "in turns"
    finally:
        over.set()


@pytest.mark.parametrize("what", ["submit", "ack", "extend"])
async def test_one_sender_has_not_all_places_before_a_server(
    system: System, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store, over = system.center.store, threading.Event()
    store.topics.create(Topic("test.pulled", 9, 4, delivery=Delivery.PULL))
    system.center.catalog.refresh()
    service = Service(
        system.center, TokenBook(store.tokens, system.center.clock), store.identity.lease_secret()
    )
    pulls, many = service.pulls, service.batcher
    lines = many._submits if what == "submit" else pulls._batches._batchers[what]
    task: Any = await many.checked(NewTask("test.sync", 1, 3600))
    lease = PullLease(1 << 22, 0, 9, 0, bytes(16))

    def send(items: Sequence[object], answer: Settle) -> None:
        over.wait(60)
        answer([None] * len(items))

    async def ask(sender: str) -> set[type]:
        CURRENT.set(SimpleNamespace(sender=sender))  # type: ignore[arg-type]
        if what == "submit":
            return set(map(type, await many.store_each([task] * 100)))
        found = pulls.ack([lease] * 100) if what == "ack" else pulls.extend([lease] * 100, ttr=5)
        return set(map(type, await found))

    try:
        for line in lines:
            monkeypatch.setattr(line, "_send", send)
        asked = [asyncio.create_task(ask(sender)) for sender in ["many"] * 128 + ["other"] * 8]
        await asyncio.wait(asked, return_when="FIRST_COMPLETED")
        over.set()
        found = await asyncio.gather(*asked)
        assert {Busy} in found[:128]
        assert {Busy} not in found[128:]
    finally:
        over.set()
        await service.close()
