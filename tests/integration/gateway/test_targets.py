"""Webhook targets and schedules over HTTP, and the tasks that name a target or a URL of their own."""

import asyncio
import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from harness.clocks import PushedClock
from harness.gateway import Gateway
from harness.patience import until

from toc import NewTask, TimeoutCenter
from toc.model.clock import Clock
from toc.model.errors import InvalidTarget, StoreUnavailable
from toc.model.target import TargetSecrets
from toc.model.topic import Delivery, Topic
from toc.operate.doctor_tasks import target_lines
from toc.sdk.batcher import Batcher
from toc.store.records.table import State
from toc.store.records.targets import new_key

# Webhook targets over HTTP, and the tasks that name one or a URL of their own.

KEY = new_key()
CANARY = "hunter2canary"


@pytest.fixture(scope="module")
def gateway(shared: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that has the key; ``shared`` has none."""
    shared.system.center.store.topics.create(Topic("hooks", 500, 2, delivery=Delivery.WEBHOOK))
    env = {"TOC_SECRET_KEY": KEY, "TOC_WEBHOOK_ALLOW": "http://127.0.0.1:8080,127.0.0.1"}
    system = copy.copy(shared.system)
    system.directory = tmp_path_factory.mktemp("keyed")  # for a log of its own
    with Gateway(system, "--plain-from", "127.0.0.1/32", env=env) as one:
        one.tokens |= shared.tokens
        yield one


def with_key(gateway: Gateway, clock: Clock | None = None) -> TimeoutCenter:
    """An application that has the key too."""
    settings = gateway.system.settings.model_dump() | {"secret_key": KEY}
    return TimeoutCenter(type(gateway.system.settings)(**settings), clock=clock)


def opened(gateway: Gateway, name: str) -> TargetSecrets:
    """What is stored of a target, decrypted."""
    with with_key(gateway) as center:
        return center.store.targets.open(center.store.targets.get(name))


def test_a_target_lives_over_http_and_its_secret_is_shown_twice(gateway: Gateway) -> None:
    made = gateway.call(
        "POST", "/v1/targets",
        {"name": "shop", "url": "https://shop.example.com/hooks?key=1", "rate": 2.5, "dead_on": [404, 400],
         "headers": {"X-Api-Key": CANARY}},
    )  # fmt: skip
    assert made.status == 201
    secret = made.body.pop("secret")
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/]{43}=", secret)
    assert (made.body["timeout"], made.body["concurrency"], made.body["rate"]) == (15.0, 50, 2.5)
    assert (made.body["dead_on"], made.body["headers"]) == ([400, 404], ["X-Api-Key"])
    assert opened(gateway, "shop").secret == secret
    assert gateway.call("POST", "/v1/targets", {"name": "shop", "url": "https://a.example"}).status == 409

    rotated = gateway.call("POST", "/v1/targets/shop:rotate", {"keep": 60})
    assert rotated.status == 200
    second = rotated.body.pop("secret")
    assert rotated.body["previous_until"] is not None
    stored = opened(gateway, "shop")
    assert (stored.secret, stored.previous, stored.headers) == (second, secret, {"X-Api-Key": CANARY})

    altered = gateway.call(
        "PATCH", "/v1/targets/shop", {"rate": None, "timeout": 3, "headers": {"X-B": CANARY}}
    )
    assert (altered.body["rate"], altered.body["timeout"], altered.body["headers"]) == (None, 3.0, ["X-B"])
    assert gateway.call("PATCH", "/v1/targets/shop", {"timeout": 4}).body["headers"] == ["X-B"]
    assert opened(gateway, "shop").secret == second
    dropped = gateway.call("POST", "/v1/targets/shop:rotate", {"keep": 0})
    assert dropped.body["previous_until"] is None
    assert opened(gateway, "shop").previous is None

    paused = gateway.call("POST", "/v1/targets/shop:pause", {"why": "it moves"}, token="operate").body
    assert (paused["paused"], paused["paused_by"], paused["paused_why"]) == (True, "operate", "it moves")
    shown = gateway.call("GET", "/v1/targets/shop")
    assert shown.body == paused
    assert gateway.call("GET", "/v1/targets").body["targets"] == [paused]
    resumed = gateway.call("POST", "/v1/targets/shop:resume").body
    assert (resumed["paused"], resumed["paused_by"], resumed["paused_why"]) == (False, "", "")

    assert gateway.call("DELETE", "/v1/targets/shop").body == {"name": "shop"}
    assert gateway.call("GET", "/v1/targets/shop").status == 404
    audit = gateway.call("GET", "/v1/audit?target=shop").body["actions"]
    assert [one["action"] for one in reversed(audit)] == [
        "target.create", "target.create", "target.rotate", "target.alter", "target.alter", "target.rotate",
        "target.pause", "target.resume", "target.delete",
    ]  # fmt: skip
    everything = json.dumps([made.body, rotated.body, altered.body, shown.body, audit]) + gateway.told()
    for hidden in (CANARY, secret[6:], second[6:]):
        assert hidden not in everything
    assert "key=1" not in json.dumps(audit) + gateway.told()


def test_a_test_of_a_target_that_does_not_answer_says_why(gateway: Gateway) -> None:
    gateway.call("POST", "/v1/targets", {"name": "silent", "url": "http://127.0.0.1:8080/"})
    answer = gateway.call("POST", "/v1/targets/silent:test", token="operate")
    assert (answer.status, answer.body["status"], answer.body["text"]) == (200, None, "")
    assert answer.body["error"]
    assert gateway.call("POST", "/v1/targets/nobody:test").status == 404
    assert gateway.call("POST", "/v1/targets/silent:test", token="produce").status == 403
    assert gateway.call("DELETE", "/v1/targets/silent").status == 200


def test_without_the_key_only_what_needs_secrets_is_refused(shared: Gateway, gateway: Gateway) -> None:
    gateway.call("POST", "/v1/targets", {"name": "keyed", "url": "https://example.com/"})
    for method, path, body in (
        ("POST", "/v1/targets", {"name": "new", "url": "https://example.com/"}),
        ("POST", "/v1/targets/keyed:rotate", {}),
        ("PATCH", "/v1/targets/keyed", {"headers": {}}),
    ):
        refused = shared.call(method, path, body)
        assert (refused.status, refused.body["type"]) == (503, "/docs#secrets-locked")
        assert "TOC_SECRET_KEY" in refused.body["detail"]
    assert shared.call("PATCH", "/v1/targets/keyed", {"timeout": 2}).body["timeout"] == 2.0
    assert shared.call("POST", "/v1/targets/keyed:pause", {}).status == 200
    assert shared.submit("hooks", target="keyed").status == 201
    assert shared.call("DELETE", "/v1/targets/keyed").status == 200


def test_a_task_names_a_target_and_only_an_admin_a_url(gateway: Gateway) -> None:
    gateway.call("POST", "/v1/targets", {"name": "shop", "url": "https://example.com/"})

    def attribute(**task: object) -> object:
        made = gateway.submit("hooks", attribute={"a": 1}, **task)
        assert made.status == 201, made
        return gateway.call("GET", f"/v1/tasks/{made.body['job_id']}").body["attribute"]

    assert attribute() == {"a": 1}
    assert attribute(target="shop") == {"a": 1, "toc-webhook": {"target": "shop"}}
    assert attribute(target="shop", url="/x") == {"a": 1, "toc-webhook": {"target": "shop", "path": "/x"}}
    assert attribute(url="http://127.0.0.1:8080/x") == {
        "a": 1, "toc-webhook": {"url": "http://127.0.0.1:8080/x"},
    }  # fmt: skip

    task: dict[str, object] = {"biz_id": 1, "delay": 60}
    for named in ({"url": "https://example.com/"}, {"target": "shop", "url": "/x"}):
        for path, body in (("tasks", task | named), ("tasks:batch", {"tasks": [task, task | named]})):
            refused = gateway.call("POST", f"/v1/topics/hooks/{path}", body, token="produce")
            assert (refused.status, refused.body["field"]) == (403, "url")
    named_only: dict[str, object] = {**task, "target": "shop"}
    assert gateway.call("POST", "/v1/topics/hooks/tasks", named_only, token="produce").status == 201
    raw = "/v1/topics/hooks/tasks?raw=true&biz_id=1&delay=60&target=shop"
    assert gateway.call("POST", raw, b"{}", token="produce").status == 201
    assert gateway.call("POST", f"{raw}&url=/x", b"{}", token="produce").status == 403
    assert gateway.call("POST", f"{raw}&url=/x", b"{}").status == 201
    by_hand: dict[str, object] = {**task, "attribute": {"toc-webhook": {"url": "https://example.com/"}}}
    refused = gateway.call("POST", "/v1/topics/hooks/tasks", by_hand, token="produce")
    assert (refused.status, refused.body["field"]) == (422, "attribute")


@pytest.mark.parametrize(("topic", "named", "field"), [
    ("hooks", {"target": "a b"}, "target"),
    ("hooks", {"url": "http://example.com/"}, "url"),
    ("hooks", {"url": "/x"}, "url"),
    ("hooks", {"target": "shop", "url": "//evil.example/"}, "url"),
    ("hooks", {"target": "shop", "url": "https://evil.example/"}, "url"),
    ("test.sync", {"target": "shop"}, "target"),
    ("test.sync", {"url": "https://example.com/"}, "url"),
])  # fmt: skip
def test_a_target_or_url_that_cannot_be_is_refused_before_anything_is_stored(
    gateway: Gateway, topic: str, named: dict[str, str], field: str
) -> None:
    refused = gateway.submit(topic, biz_id=f"refused-{topic}", **named)
    assert (refused.status, refused.body["field"]) == (422, field)
    assert gateway.call("GET", f"/v1/tasks?biz_id=refused-{topic}").body["tasks"] == []


def test_a_target_is_for_its_topics_alone_by_every_door_and_else_as_one_not_there(gateway: Gateway) -> None:
    center = gateway.system.center
    center.store.topics.create(Topic("bank.pay", 501, 2, delivery=Delivery.WEBHOOK))
    given = {"name": "vault", "url": "https://example.com/?key=1", "topics": ["bank.*"]}
    assert gateway.call("POST", "/v1/targets", given).body["topics"] == ["bank.*"]
    task: dict[str, Any] = {"biz_id": "vault", "delay": 60}

    async def batched(task: NewTask) -> None:
        batcher = Batcher(center)
        try:
            await batcher.put(task)
        finally:
            await batcher.close()

    def refusals(topic: str, target: str) -> set[str]:
        """What each door says, without the name of the target."""
        named = task | {"target": target}
        path = f"/v1/topics/{topic}/tasks"
        answers = [
            gateway.call("POST", path, named, token="produce"),
            gateway.call("POST", path, named | {"dedup_key": "k", "on_conflict": "replace"}),
            gateway.call("POST", f"{path}:batch", {"tasks": [task, named]}, token="produce"),
            gateway.call("POST", f"{path}?raw=true&biz_id=1&delay=60&target={target}", b"{}"),
        ]
        assert [one.status for one in answers] == [422] * 4, answers
        assert {one.body["field"] for one in answers} == {"target", "tasks.1.target"}
        said = {one.body["detail"] for one in answers}
        tried: list[Callable[[], object]] = [
            lambda: center.submit(topic, **named),
            lambda: center.put(NewTask(topic, **named)),
            lambda: center.submit_many([NewTask(topic, **task), NewTask(topic, **named)]),
            lambda: asyncio.run(batched(NewTask(topic, **named))),
        ]
        for attempt in tried:
            with pytest.raises(InvalidTarget) as refused:
                attempt()
            said.add(str(refused.value))
        altered = gateway.call("PATCH", f"/v1/topics/{topic}", {"target": target})
        assert altered.status == 404
        said.add(altered.body["detail"])
        return {text.replace(target, "TARGET") for text in said}

    (text,) = refusals("hooks", "vault")
    assert refusals("hooks", "nobody") == {text}, "no more is told of one that is there"
    assert center.find(biz_id="vault") == []
    path = "/v1/topics/bank.pay/tasks"
    assert gateway.call("POST", path, task | {"target": "vault"}, token="produce").status == 201
    assert center.submit("bank.pay", **task, target="vault")
    assert gateway.call("PATCH", "/v1/topics/bank.pay", {"target": "vault"}).status == 200
    gateway.call("PATCH", "/v1/targets/vault", {"topics": ["safe"]})
    found = target_lines(center, center.store.topics.list())
    assert [line.of for line in found if "not for that topic" in line.what] == ["vault"]
    gateway.system.wait(  # each process reads the targets again once a second
        lambda: gateway.call("POST", path, task | {"target": "vault"}).status == 422, "it is refused", 60
    )


def test_who_names_a_known_target_waits_for_no_server(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has changed of it is learned beside. Only an unknown name asks, unless the server is away."""
    asked: set[str] = set()
    clock = PushedClock()
    with with_key(gateway, clock) as center:
        store = center.store
        center.targets.create("known", "https://example.com/")

        def submit(target: str = "known") -> int:
            return center.submit("hooks", biz_id="known", delay=60, target=target)

        async def batched() -> None:
            batcher = Batcher(center)
            await batcher.checked(NewTask("hooks", "known", 60, target="known"))
            await batcher.close()

        def hangs() -> State:
            asked.add(threading.current_thread().name)
            raise StoreUnavailable("it hangs")

        submit()
        with monkeypatch.context() as trouble:
            trouble.setattr(store.targets, "state", hangs)
            clock.pushed += 10
            asyncio.run(batched())
            submit()
            assert until(lambda: bool(asked))
            assert asked == {"toc-topics"}
            trouble.setattr(store, "away", lambda _server: StoreUnavailable("it is away"))
            with pytest.raises(StoreUnavailable, match="away"):
                submit("nobody")
            assert asked == {"toc-topics"}
        center.targets.alter("known", topics=["other"], wait=False)

        def refused() -> bool:
            clock.pushed += 10
            with suppress(InvalidTarget):
                return submit() < 0
            return True

        assert until(refused)


def test_who_may_only_read_does_not_see_the_query_of_a_url(gateway: Gateway) -> None:
    url = "https://example.com/hook"
    gateway.call("POST", "/v1/targets", {"name": "quiet", "url": f"{url}?key={CANARY}"})
    for token, shown in (("read", f"{url}?***"), ("operate", f"{url}?key={CANARY}")):
        listed = gateway.call("GET", "/v1/targets", token=token).body["targets"]
        one = gateway.call("GET", "/v1/targets/quiet", token=token).body
        assert [one["url"], *(each["url"] for each in listed if each["name"] == "quiet")] == [shown] * 2
    own = gateway.submit("hooks", biz_id="own", url=f"http://127.0.0.1:8080/x?key={CANARY}").body["job_id"]
    for path in (f"/v1/tasks/{own}", "/v1/tasks?biz_id=own"):
        assert CANARY not in str(gateway.call("GET", path, token="read").body)


# Schedules over HTTP.

DAILY = {"topic": "test.sync", "cron": "0 2 * * *", "zone": "Europe/Berlin"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def made(gateway: Gateway, name: str, **more: Any) -> dict[str, Any]:
    answer = gateway.call("POST", "/v1/schedules", {**DAILY, "name": name, **more})
    assert answer.status == 201, answer
    body: dict[str, Any] = answer.body
    return body


def test_a_schedule_lives_over_http(shared: Gateway) -> None:
    first = made(shared, "life", window=7200, jitter=60.5, attribute={"region": "eu"}, overlap="buffer_one")
    assert {name: first[name] for name in ("name", "topic", "cron", "zone", "every", "dst")} == {
        "name": "life", "topic": "test.sync", "cron": "0 2 * * *", "zone": "Europe/Berlin", "every": None,
        "dst": "cron",
    }  # fmt: skip
    assert (first["missed_policy"], first["missed"], first["overlap"]) == ("latest", 0, "buffer_one")
    assert (first["window"], first["jitter"], first["attribute"]) == (7200.0, 60.5, {"region": "eu"})
    assert isinstance(first["schedule_id"], str)
    assert all(TIME.fullmatch(first[name]) for name in ("next_time", "created", "modified"))
    again = shared.call("POST", "/v1/schedules", {**DAILY, "name": "life"})
    assert (again.status, again.body["type"]) == (409, "/docs#exists")
    shown = shared.call("GET", "/v1/schedules/life", token="read")
    assert (shown.status, shown.body["schedule_id"]) == (200, first["schedule_id"])

    paused = shared.call("POST", "/v1/schedules/life:pause", token="operate").body
    assert (paused["paused"], paused["next_time"]) == (True, None)
    resumed = shared.call("POST", "/v1/schedules/life:resume", token="operate").body
    assert (resumed["paused"], resumed["next_time"]) == (False, first["next_time"])

    change = {"every": 86400, "anchor": "2030-01-01T01:00:00+01:00", "missed": "all", "topic": "test.batch"}
    altered = shared.call("PATCH", "/v1/schedules/life", change).body
    assert (altered["cron"], altered["every"], altered["anchor"]) == (None, 86400, "2030-01-01T00:00:00.000Z")
    assert (altered["missed_policy"], altered["topic"]) == ("all", "test.batch")
    assert (altered["overlap"], altered["attribute"]) == ("buffer_one", {"region": "eu"})
    shown = shared.call("GET", "/v1/schedules/life").body
    assert {**altered, "paused_by": None} == shown | {"modified": altered["modified"]}

    assert shared.call("DELETE", "/v1/schedules/life").body == {"name": "life", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", ":resume"), ("POST", ":trigger")):
        gone = shared.call(method, f"/v1/schedules/life{path}")
        assert (gone.status, gone.body["type"]) == (404, "/docs#unknown")
    audit = shared.call("GET", "/v1/audit?target=life").body["actions"]
    assert [(one["action"], one["by"]) for one in reversed(audit)] == [
        ("schedule.create", "all"), ("schedule.create", "all"), ("schedule.pause", "operate"),
        ("schedule.resume", "operate"), ("schedule.alter", "all"), ("schedule.delete", "all"),
    ]  # fmt: skip


def test_a_list_goes_by_name_in_pages_and_shows_what_the_token_may_see(shared: Gateway) -> None:
    names = [f"page.{number}" for number in range(7)]
    for name in names:
        made(shared, name, topic="test.batch" if name > "page.3" else "test.sync")

    def listed(token: str) -> list[str]:
        found: list[str] = []
        after = "page"
        for _ in range(20):
            page = shared.call("GET", f"/v1/schedules?limit=2&after={after}", token=token)
            assert page.status == 200, page
            found += [one["name"] for one in page.body["schedules"]]
            if page.body["next"] is None:
                return [name for name in found if name in names]
            assert page.body["next"] in found, "another's name"
            after = page.body["next"]
        raise AssertionError("it has no end")

    assert listed("all") == names
    assert listed("sync-only") == names[:4]


def test_a_preview_has_the_offsets_of_the_zone_stored_or_not(shared: Gateway) -> None:
    rule = {"cron": "30 2 * * *", "zone": "Europe/Berlin"}
    fires = [
        {"nominal": "2030-03-30T02:30:00.000+01:00", "due": "2030-03-30T01:30:00.000Z"},
        {"nominal": "2030-03-31T03:00:00.000+02:00", "due": "2030-03-31T01:00:00.000Z"},
        {"nominal": "2030-04-01T02:30:00.000+02:00", "due": "2030-04-01T00:30:00.000Z"},
    ]
    given = {**rule, "after": "2030-03-30T00:00:00Z", "count": 3}
    assert shared.call("POST", "/v1/schedules:preview", given, token="read").body == {"fires": fires}
    made(shared, "looked", **rule)
    shared.call("POST", "/v1/schedules/looked:pause")
    path = "/v1/schedules/looked:preview"
    assert shared.call("GET", f"{path}?after=2030-03-30T00:00:00Z&count=3").body == {"fires": fires}
    assert len(shared.call("GET", path).body["fires"]) == 20
    short = {"every": 1.5, "after": "2030-01-01T00:00:00Z", "count": 2}
    found = shared.call("POST", "/v1/schedules:preview", short).body["fires"]
    assert [fire["nominal"][19:] for fire in found] == [".500+00:00", ".000+00:00"]
    late = {"every": 86400 * 3000, "anchor": "9999-12-31T23:59:59Z"}
    assert shared.call("POST", "/v1/schedules:preview", late).body == {"fires": []}


def test_a_backfill_of_too_many_occurrences_is_refused(shared: Gateway) -> None:
    made(shared, "busy", cron="* * * * *", paused=True)
    wanted = {"from": "2020-01-01T00:00:00Z", "to": "2026-01-01T00:00:00Z", "dry_run": True}
    answer = shared.call("POST", "/v1/schedules/busy:backfill", wanted)
    assert (answer.status, answer.body["field"]) == (422, "to"), answer


def test_a_token_needs_the_pattern_of_the_topic_that_a_schedule_has_or_shall_have(shared: Gateway) -> None:
    own, other = {**DAILY, "name": "own"}, {**DAILY, "name": "other", "topic": "test.batch"}
    assert shared.call("POST", "/v1/schedules", own, token="sync-only").status == 201
    refused = shared.call("POST", "/v1/schedules", other, token="sync-only")
    assert (refused.status, refused.body["type"]) == (404, "/docs#unknown-topic")
    moved = shared.call("PATCH", "/v1/schedules/own", {"topic": "test.batch"}, token="sync-only")
    assert moved.body == refused.body
    assert shared.call("GET", "/v1/schedules/own").body["topic"] == "test.sync"
