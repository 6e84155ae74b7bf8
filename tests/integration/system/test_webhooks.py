"""Webhooks over a whole system: a worker that sends, and receivers on loopback."""

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from threading import Event
from typing import Any

import pytest
from harness import forks
from harness.gateway import Gateway
from harness.hooked import Hooked
from harness.patience import PATIENCE, in_a_moment, until
from harness.receiver import Got, Receive, Receiver, Reply, bomb
from harness.rows import known
from harness.system import System

from toc import Task, TaskStatus, TimeoutCenter, Topic
from toc.model.raised import MAX_ERROR_CHARS, Delivered, Postponed, Undelivered
from toc.model.target import ATTRIBUTE
from toc.model.task import Body, Content
from toc.model.topic import Delivery
from toc.operate.bulk_jobs import redrive
from toc.store.records.targets import new_key
from toc.webhooks.connect import Lookup
from toc.webhooks.handlers import Webhooks
from toc.webhooks.sender import Sender

Hook = Callable[..., Hooked]


@pytest.fixture
def hook(system: System) -> Iterator[Hook]:
    """Makes the system one that sends to these receivers."""
    with ExitStack() as stack:

        def make(*receivers: Receiver, **policies: Any) -> Hooked:
            hooked = Hooked(system, *receivers, **policies)
            stack.callback(hooked.center.close)
            return hooked

        yield make


def signatures(got: Got, *secrets: str) -> list[bool]:
    """Whether the signature of a request holds one by each of these secrets."""
    signed = f"{got.headers['webhook-id']}.{got.headers['webhook-timestamp']}.".encode() + got.body
    there = got.headers["webhook-signature"].split(" ")
    keys = [base64.b64decode(secret.removeprefix("whsec_")) for secret in secrets]
    made = [base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys]
    return [f"v1,{one}" in there for one in made]


def sending(center: TimeoutCenter, lookup: Lookup = socket.getaddrinfo) -> Webhooks:
    """What a worker process sends with, in this one; it has read the targets."""
    center.catalog.refresh()
    webhooks = Webhooks(
        targets=center.store.targets,
        queues=center.queues,
        catalog=center.catalog,
        clock=center.clock,
        allow=center.settings.allow,
        holder="me",
        members=1,
        lookup=lookup,
    )
    webhooks.run_once()
    return webhooks


async def close(webhooks: Webhooks) -> None:
    """End its threads and connections: a worker's end with its process."""
    webhooks._limiter._threads.close()
    for sender in vars(webhooks).values():
        if isinstance(sender, Sender):
            await sender.close()


def routed(job_id: int, **route: str) -> Task:
    """A task that is due."""
    now = datetime.now(UTC)
    return Task(job_id, "hook", job_id, 1, TaskStatus.PENDING, now, {ATTRIBUTE: route}, 1, 0)


def test_a_task_is_sent_signed_to_its_topics_target_or_its_own(hook: Hook, receive: Receive) -> None:
    receiver, other = receive(), receive()
    hooked = hook(receiver, other)
    center = hooked.center
    shop = center.targets.create("shop", receiver.url("/a"), headers={"X-Key": "open sesame"})
    center.targets.create("other", other.url("/b"))
    center.store.topics.alter("hook", target="shop")
    hooked.start()
    first = hooked.submit("Bestellung 7", attribute={"n": 1})
    second = hooked.submit(2, body=b"\x00raw", content_type="text/plain", target="other")
    third = hooked.submit(3, target="other", url="/path?q=1")
    fourth = hooked.submit(4, url=other.url("/own"))
    for job_id in (first, second, third, fourth):
        assert hooked.ended(job_id).status == TaskStatus.PROCESSED
    (got,) = receiver.got[:1]
    assert (got.path, json.loads(got.body)) == ("/a", {"n": 1})
    assert signatures(got, shop.secret) == [True]
    assert got.headers["x-key"] == "open sesame"
    assert got.headers["webhook-id"] == f"{first}_0"
    assert got.headers["toc-topic"] == "hook"
    assert got.headers["toc-attempt"] == "1"
    assert got.headers["toc-biz-id"] == "Bestellung%207"
    assert got.headers["toc-action-time"].endswith("Z")
    assert got.headers["accept-encoding"] == "identity"
    assert got.headers["traceparent"].startswith("00-")
    assert abs(int(got.headers["webhook-timestamp"]) - time.time()) < 60
    by_path = {one.path: one for one in other.got}
    assert (by_path["/b"].body, by_path["/b"].headers["content-type"]) == (b"\x00raw", "text/plain")
    assert by_path["/path?q=1"].body == b"{}"
    own = by_path["/own"]
    assert "webhook-signature" not in own.headers, "it could be passed on to the topic's target"
    assert "x-key" not in own.headers


def test_each_class_of_answer(hook: Hook, receive: Receive) -> None:
    plain: dict[str, Reply] = {
        "/500": Reply(500, b"down"), "/302": Reply(302, headers={"Location": "/200"}),
        "/400": Reply(400, b"y" * 5000), "/no-retry": Reply(500, b"never", {"toc-no-retry": "1"}),
        "/drip": Reply(body=b"x" * 1000, drip=0.2), "/bomb": bomb(), "/hang": Reply(hang=True),
        "/garbage": Reply(200), "/410": Reply(410, b"gone"),
    }  # fmt: skip
    receiver = receive(lambda got: plain[got.path])
    hooked = hook(receiver, retries=2)
    for name in plain:
        hooked.center.targets.create(
            name[1:],
            receiver.url(name),
            timeout=1.0 if name in ("/hang", "/drip") else 30.0,
            dead_on=[400] if name == "/400" else [],
        )
    hooked.start()
    jobs = {name: hooked.submit(number, target=name[1:]) for number, name in enumerate(plain)}
    rows = {name: hooked.ended(job_id) for name, job_id in jobs.items()}
    tries = Counter(got.path for got in receiver.got)
    assert {name: row.status for name, row in rows.items()} == {
        **dict.fromkeys(plain, TaskStatus.DEAD),
        "/bomb": TaskStatus.PROCESSED,
        "/garbage": TaskStatus.PROCESSED,
    }
    assert {name: rows[name].attempts for name in plain if rows[name].status == TaskStatus.DEAD} == {
        "/500": 2, "/302": 2, "/400": 1, "/no-retry": 1, "/drip": 2, "/hang": 2, "/410": 1,
    }  # fmt: skip
    assert tries["/200"] == 0, "a redirection was followed"
    assert tries["/500"] == tries["/drip"] == tries["/hang"] == 2
    errors = {name: row.last_error for name, row in rows.items()}
    assert errors["/500"] == "down"
    assert errors["/400"] == "y" * MAX_ERROR_CHARS
    assert errors["/302"] == "HTTP 302 Found"
    assert errors["/hang"] == errors["/drip"] == "no complete answer within 1 s"
    assert hooked.history(jobs["/500"]) == [(500, "down")] * 2
    assert hooked.history(jobs["/hang"])[0][0] == 0
    past = hooked.center.store.history(jobs["/500"])
    assert past[0].next
    assert past[0].ms is not None
    (well,) = hooked.center.store.history(jobs["/garbage"])
    assert (well.attempt, well.status, well.error, well.next) == (1, 200, "HTTP 200 OK", 0)
    assert well.ms is not None
    target = known(hooked.center.targets.get("410"))
    assert (target.paused, target.paused_by) == (True, "webhook")
    assert not known(hooked.center.targets.get("500")).paused


def test_a_410_to_a_path_or_url_of_a_tasks_own_pauses_nothing(hook: Hook, receive: Receive) -> None:
    receiver = receive(Reply(410))
    hooked = hook(receiver)
    hooked.center.targets.create("shop", receiver.url())
    hooked.start()
    jobs = [hooked.submit(1, target="shop", url="/x"), hooked.submit(2, url=receiver.url("/own"))]
    assert [hooked.ended(job_id).status for job_id in jobs] == [TaskStatus.DEAD] * 2
    assert not known(hooked.center.targets.get("shop")).paused


def test_of_the_tasks_of_a_target_that_is_gone_one_waits_for_its_pause(
    hook: Hook, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all would wait one after the other while the first database hangs, and no other be sent. None
    is sent meanwhile, to die of the same answer."""
    receiver = receive(Reply(410))
    center, answers = hook(receiver).center, threading.Event()
    targets, webhooks = center.targets, sending(center)
    targets.create("gone", receiver.url())
    webhooks.run_once()
    pause = webhooks._targets.pause

    def hangs(*what: Any, **how: Any) -> bool:
        return answers.wait(PATIENCE) and pause(*what, **how)

    monkeypatch.setattr(webhooks._targets, "pause", hangs)

    async def whole() -> None:
        left = {asyncio.create_task(webhooks.deliver(routed(n, target="gone"))) for n in range(5)}
        async with asyncio.timeout(PATIENCE):
            while len(left) > 1:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                assert {type(one.exception()) for one in done} == {Undelivered}
        assert not known(targets.get("gone")).paused
        with pytest.raises(Postponed):
            await webhooks.deliver(routed(5, target="gone"))
        answers.set()
        with pytest.raises(Undelivered):
            await left.pop()
        await close(webhooks)

    asyncio.run(whole())
    assert known(targets.get("gone")).paused
    assert len(receiver.got) == 5


def test_what_cannot_be_sent_now_waits_and_uses_up_no_try(hook: Hook, receive: Receive) -> None:
    receiver = receive()
    hooked = hook(receiver)
    center = hooked.center
    center.targets.create("paused", receiver.url("/paused"))
    center.targets.pause("paused")
    center.targets.create("unknown", receiver.url("/never"))
    center.targets.create("other", receiver.url("/other"))
    jobs = [hooked.submit(1, target="paused"), hooked.submit(2, target="unknown"), hooked.submit(3)]
    jobs.append(hooked.submit(4, target="other"))
    center.targets.delete("unknown")
    center.targets.alter("other", topics=["hook.*"])
    hooked.start()
    system = hooked.system
    before = {job_id: system.row(job_id).action_time for job_id in jobs}
    system.wait(
        lambda: all(system.row(job_id).next_time > before[job_id] for job_id in jobs), "they wait", 10
    )
    rows = [system.row(job_id) for job_id in jobs]
    assert [(row.status, row.attempts, row.crashes, row.last_error) for row in rows] == [
        (TaskStatus.PENDING, 0, 0, None)
    ] * 4
    assert not receiver.got
    center.targets.resume("paused")
    center.targets.create("unknown", receiver.url("/unknown"))
    center.targets.alter("other", topics=["a", "hoo*"])
    for job_id in (jobs[0], jobs[1], jobs[3]):
        row = hooked.ended(job_id)
        assert (row.status, row.attempts) == (TaskStatus.PROCESSED, 0)
    system.daemons[0].stop()  # which looks now and then, and while it does, a try may be starting
    assert center.cancel(jobs[2]).value == "cancelled", "no try of it has ever started"


def test_a_change_of_a_target_is_answered_when_every_sender_goes_by_it(hook: Hook, receive: Receive) -> None:
    receiver = receive()
    hooked = hook(receiver)
    targets, system = hooked.center.targets, hooked.system
    secret = targets.create("shop", receiver.url("/old")).secret
    hooked.start(processes=3)
    gateway = Gateway(system, env=hooked.env)

    def act(door: str, what: str, **more: Any) -> Any:
        if door == "sdk":
            return getattr(targets, what)("shop", **more)
        method, path = {"alter": ("PATCH", ""), "delete": ("DELETE", "")}.get(what, ("POST", f":{what}"))
        answer = gateway.call(method, f"/v1/targets/shop{path}", more or None)
        assert answer.status == 200, answer
        return answer.body

    def put_off(jobs: list[int]) -> None:
        def all_are() -> bool:
            return all(row.next_time > row.action_time for row in map(system.row, jobs))

        system.wait(all_are, "all are put off", 60)

    try:
        for number, door in enumerate(
            ("sdk", "http")
        ):  # at once after the answer; by turns of three processes
            hooked.ended(hooked.submit(number, target="shop"))
            act(door, "alter", url=receiver.url(f"/{number}"))
            seen = len(receiver.got)
            for job_id in [hooked.submit(number, target="shop") for _ in range(20)]:
                hooked.ended(job_id)
            assert {got.path for got in receiver.got[seen:]} == {f"/{number}"}
            made = act(door, "rotate", keep=0)
            former, secret = secret, made["secret"] if door == "http" else made.secret
            seen = len(receiver.got)
            for job_id in [hooked.submit(number, target="shop") for _ in range(20)]:
                hooked.ended(job_id)
            assert all(signatures(got, secret, former) == [True, False] for got in receiver.got[seen:])
            act(door, "pause")
            seen = len(receiver.got)
            jobs = [hooked.submit(number, target="shop") for _ in range(20)]
            put_off(jobs)
            assert len(receiver.got) == seen
            act(door, "resume")
            for job_id in jobs:
                hooked.ended(job_id)
        targets.create("other", receiver.url("/other"))
        for name, path in (("shop", "/1"), ("other", "/other")):
            assert gateway.call("PATCH", "/v1/topics/hook", {"target": name}).body["target"] == name
            seen = len(receiver.got)
            for job_id in [hooked.submit(10) for _ in range(20)]:
                hooked.ended(job_id)
            assert {got.path for got in receiver.got[seen:]} == {path}
        jobs = [hooked.submit(9, delay=2.0, target="shop") for _ in range(20)]
        act("http", "delete")
        seen = len(receiver.got)
        put_off(jobs)
        assert len(receiver.got) == seen
    finally:
        gateway.stop()


@pytest.mark.parametrize("change", [{"paused": True}, {"target": "other"}], ids=["paused", "rerouted"])
def test_a_task_that_waits_for_its_turn_while_its_topic_is_changed_is_not_sent(
    hook: Hook, receive: Receive, change: dict[str, Any]
) -> None:
    receiver = receive()
    center = hook(receiver).center
    for name in ("shop", "other"):
        center.targets.create(name, receiver.url())
    center.store.topics.alter("hook", target="shop")
    webhooks = sending(center)
    enter = webhooks._limiter.enter

    async def wait(*given: Any) -> None:
        center.store.topics.alter("hook", **change)
        center.catalog.refresh()
        await enter(*given)

    async def whole() -> None:
        webhooks._limiter.enter = wait  # type: ignore[assignment,method-assign]
        with pytest.raises(Postponed):
            await webhooks.deliver(routed(1))
        await close(webhooks)

    asyncio.run(whole())
    assert not receiver.got


def test_a_sender_without_the_new_key_names_the_target_and_tasks_wait(hook: Hook, receive: Receive) -> None:
    receiver = receive()
    hooked = hook(receiver)
    hooked.center.targets.create("late", receiver.url())
    old = hooked.env["TOC_SECRET_KEY"]
    hooked.env["TOC_SECRET_KEY"] = new_key()
    hooked.start(host="elsewhere")  # it has another key alone
    job_id = hooked.submit(1, target="late")
    system = hooked.system
    system.wait(lambda: bool(system.daemons[0].events("webhook_secrets_locked")), "it is named", 10)
    system.wait(lambda: system.row(job_id).next_time > system.row(job_id).action_time, "it waits", 10)
    named = system.daemons[0].events("webhook_secrets_locked")
    assert [one["target"] for one in named] == ["late"]
    assert "add the key that did, behind the others" in named[0]["error"]
    assert old not in system.daemons[0].told()
    system.daemons[0].stop()
    hooked.env["TOC_SECRET_KEY"] += f",{old}"
    done = forks.run(["secrets", "rotate", "--json"], env=system.env | hooked.env)
    assert json.loads(done.stdout) == {"targets": 1, "locked": []}, done.stderr
    hooked.start()
    row = hooked.ended(job_id)
    assert (row.status, row.attempts) == (TaskStatus.PROCESSED, 0), hooked.history(job_id)


def test_a_worker_that_ends_waits_for_its_requests_and_sends_none_twice(hook: Hook, receive: Receive) -> None:
    hooked = hook(receiver := receive(Reply(after=0.5)))
    hooked.center.targets.create("shop", receiver.url(), concurrency=2)
    jobs = [hooked.submit(number, target="shop") for number in range(12)]
    hooked.start()
    assert until(lambda: len(receiver.got) >= 2)
    (daemon,) = hooked.system.daemons
    daemon.terminate()
    daemon.await_end()
    assert 2 <= len(receiver.got) < len(jobs), "it goes on with what waits in memory at most"
    hooked.start(host="next")
    rows = [hooked.ended(job_id, 60) for job_id in jobs]
    assert {(row.status, row.attempts, row.crashes) for row in rows} == {(TaskStatus.PROCESSED, 0, 0)}
    assert Counter(got.message_id for got in receiver.got) == {f"{job_id}_0": 1 for job_id in jobs}


def test_the_id_is_one_over_tries_and_redrives_but_not_reschedules(hook: Hook, receive: Receive) -> None:
    down = [True]
    receiver = receive(lambda _got: Reply(500) if down[0] else Reply())
    hooked = hook(receiver, retries=2)
    hooked.center.targets.create("shop", receiver.url())
    hooked.start()
    job_id = hooked.submit(1, target="shop", delay=3600)
    in_a_moment(lambda soon: hooked.center.reschedule(job_id, action_time=soon))
    assert hooked.ended(job_id).status == TaskStatus.DEAD
    down[0] = False
    assert redrive(hooked.center, [job_id])["redriven"] == 1
    assert hooked.ended(job_id).status == TaskStatus.PROCESSED
    assert [got.message_id for got in receiver.got] == [f"{job_id}_1"] * 3


async def under_way(webhooks: Webhooks, places: int, *tasks: Task) -> list[asyncio.Task[Delivered]]:
    """Those that are on their way, as many as there are places, once all others are put off."""
    given = [asyncio.create_task(webhooks.deliver(task)) for task in tasks]
    async with asyncio.timeout(PATIENCE):
        while len(found := [one for one in given if not one.done()]) > places:
            await asyncio.wait(found, return_when=asyncio.FIRST_COMPLETED)
    assert all(isinstance(one.exception(), Postponed) for one in given if one.done())
    assert len(found) == places
    return found


def test_requests_that_hang_leave_descriptors_and_places_for_others(
    hook: Hook, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toc.webhooks.handlers.most_requests", lambda: 40)
    hanging, well = [receive(Reply(hang=True)) for _ in range(6)], receive()
    hooked = hook(*hanging, well)
    targets = hooked.center.targets
    for n, one in enumerate(hanging[:3]):
        targets.create(f"hangs{n}", one.url(), concurrency=10_000, timeout=60.0)
    targets.create("shop", well.url())
    webhooks = sending(hooked.center)

    async def whole() -> None:
        # Of three quarters as many as are left free, to however many origins or to one target; then a few.
        own = await under_way(
            webhooks, 15, *(routed(n, url=one.url()) for n, one in enumerate(hanging[3:] * 20))
        )
        mine = []
        for n, places in enumerate((8, 4, 4)):
            mine += await under_way(
                webhooks, places, *(routed(100 * n + m, target=f"hangs{n}") for m in range(30))
            )
        async with asyncio.timeout(PATIENCE):
            while sum(one.connections for one in hanging) < 31:
                await asyncio.sleep(0.01)
        assert (await webhooks.deliver(routed(200, target="shop"))).text == "HTTP 200 OK"
        for one in [*own, *mine]:
            one.cancel()
        await asyncio.wait([*own, *mine])
        await close(webhooks)

    asyncio.run(whole())
    assert sum(one.connections for one in hanging) == 31


def test_a_name_that_has_no_turn_costs_no_try_and_those_of_one_topic_leave_turns_for_others(
    hook: Hook, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toc.webhooks.connect.MAX_LOOKUPS", 8)
    monkeypatch.setattr("toc.webhooks.handlers.OWN_SECONDS", 0.5)
    over, well = Event(), receive()
    names, at_home = [f"http://hang{n}.invalid:80" for n in range(20)], f"http://home.test:{well.port}"
    hooked = hook(well, allow=[*names, at_home])
    hooked.center.store.topics.create(Topic("other", 501, 4, delivery=Delivery.WEBHOOK))

    def lookup(host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        if host.startswith("hang"):
            over.wait(PATIENCE)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", well.port))]

    async def whole() -> None:
        webhooks = sending(hooked.center, lookup)
        hung = [webhooks.deliver(routed(n, url=f"{name}/")) for n, name in enumerate(names)]
        came = Counter(map(type, await asyncio.gather(*hung, return_exceptions=True)))
        assert came == {Undelivered: 2, Postponed: 18}
        other = routed(100, url=f"{at_home}/")._replace(topic="other")
        assert (await webhooks.deliver(other)).text == "HTTP 200 OK"
        over.set()
        await close(webhooks)

    asyncio.run(whole())


def test_bodies_for_what_hangs_leave_memory_for_others(
    hook: Hook, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toc.webhooks.handlers.MAX_HELD", 100)
    hanging, well = [receive(Reply(hang=True)) for _ in range(2)], receive()
    hooked = hook(*hanging, well)
    for name, one in {"hangs0": hanging[0], "hangs1": hanging[1], "shop": well}.items():
        hooked.center.targets.create(name, one.url(), timeout=60.0)
    webhooks = sending(hooked.center)

    def large(job_id: int, target: str) -> Task:
        body = Body(10, Content("text/plain", b"0123456789"))
        return routed(job_id, target=target)._replace(stored_body=body)

    async def whole() -> None:
        given = await under_way(webhooks, 5, *(large(n, "hangs0") for n in range(20)))
        given += await under_way(webhooks, 3, *(large(n, "hangs1") for n in range(100, 120)))
        for n in range(200, 210):
            await webhooks.deliver(large(n, "shop"))
        for one in given:
            one.cancel()
        await asyncio.wait(given)
        await webhooks.deliver(large(210, "shop"))
        await close(webhooks)

    asyncio.run(whole())
    assert len(well.got) == 11


def test_tasks_with_large_bodies_are_looked_at_less_often_while_they_wait(
    hook: Hook, receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.random", lambda: 1.0)
    hooked = hook(receive())
    for name in ("small", "large"):
        hooked.center.targets.create(name, "https://example.com")
        hooked.center.targets.pause(name, wait=False)
    webhooks = sending(hooked.center)

    async def waits(target: str, length: int) -> int:
        """Until when the last of some tasks waits (ms)."""
        until = 0
        for n in range(20):
            task = routed(n, target=target)._replace(stored_body=Body(length))
            with pytest.raises(Postponed) as postponed:
                await webhooks.deliver(task)
            until = postponed.value.until
        return until

    async def whole() -> None:
        assert await waits("large", 1 << 20) - await waits("small", 100) > 1000
        await close(webhooks)

    asyncio.run(whole())
