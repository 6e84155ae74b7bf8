"""Fault 49: a target that misbehaves costs its own tasks only, and what waits for it uses up no try."""

from __future__ import annotations

import ssl
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from harness.hooked import Hooked
from harness.receiver import Got, Receive, Reply, bomb
from harness.secured import Tls
from harness.system import Lateness

from toc import NewTask, TaskStatus

ALL_AT_ONCE = 150
"""Tasks of each target that misbehaves."""
SECONDS = 6.0
RATE = 100
"""Tasks a second of the target that is well."""


@pytest.mark.slow
def test_targets_that_misbehave_cost_their_own_tasks_only(
    build: Build, verdict: Verdict, receive: Receive
) -> None:
    line = verdict(49, "targets that hang, reset, trickle, bomb, redirect, answer 410", "all due at once")
    private = receive()
    bad = {
        "hang": Reply(hang=True),
        "reset": Reply(reset=True),
        "trickle": Reply(body=b"x" * 500, drip=1.0),
        "bomb": bomb(),
        "redirect": Reply(302, headers={"Location": private.url("/redirected")}),
        "gone": Reply(410),
        "broken": Reply(500),
    }
    receivers = {name: receive(reply) for name, reply in bad.items()}
    well = receive()
    elsewhere = "http://private.localhost:9"
    hooked = Hooked(build(), well, *receivers.values(), allow=[elsewhere], retries=31, backoff_cap=2.0)
    center = hooked.center
    for name, receiver in {**receivers, "well": well}.items():
        center.targets.create(name, receiver.url(f"/{name}"), timeout=2.0, concurrency=10)
    hooked.start(processes=2)
    due = datetime.now(UTC) + timedelta(seconds=3)
    jobs = {
        name: center.submit_many(
            [NewTask("hook", n, action_time=due, target=name) for n in range(ALL_AT_ONCE)]
        )
        for name in bad
    }
    healthy = center.submit_many(
        [
            NewTask("hook", n, action_time=due + timedelta(seconds=n / RATE - 1), target="well")
            for n in range(int(SECONDS * RATE))
        ]
    )
    system = hooked.system
    system.wait(lambda: not system.pending(healthy), "all tasks of the target that is well", 30)
    rows = center.store.read(healthy)
    assert {row.status for row in rows.values()} == {TaskStatus.PROCESSED}
    assert {row.attempts for row in rows.values()} == {0}
    received = {int(got.message_id.partition("_")[0]): got.at for got in reversed(well.got)}
    late = Lateness(received[job_id] * 1000 - rows[job_id].action_time for job_id in healthy)
    line.prove(len(receivers["hang"].got) >= 10, f"{len(receivers['hang'].got)} requests hung")
    line.prove(True, f"of the others {late}")
    line.on_time(late, p99=1500)  # one that hangs does so for 2 s
    assert not private.got, "a redirection was followed"
    opened = system.daemons[0].events("webhook_breaker_opened")
    line.prove({one["target"] for one in opened} >= {"hang", "reset"}, "breakers opened")
    bombed = center.store.read(jobs["bomb"])
    system.wait(lambda: not system.pending(jobs["bomb"]), "what was answered with a bomb", 30)
    assert {row.attempts for row in bombed.values()} == {0}
    assert center.targets.get("gone").paused  # type: ignore[union-attr]
    for name in ("hang", "reset", "broken", "redirect", "gone"):
        charged = sum(row.attempts for row in center.store.read(jobs[name]).values())
        assert charged <= len(receivers[name].got), f"{name}: a wait has used up a try"

    def all_charged(name: str) -> bool:
        """Whether its requests are charged to tasks, but for a few in flight, or whose rows are late."""
        charged = sum(row.attempts for row in center.store.read(jobs[name]).values())
        return len(receivers[name].got) - charged <= 30

    for name in ("hang", "reset", "broken", "redirect", "gone"):
        system.wait(partial(all_charged, name), f"the requests of {name} are charged", 10)
    waiting = center.store.read(jobs["hang"])
    assert max(row.attempts for row in waiting.values()) < 10
    for receiver in receivers.values():
        receiver.reply = Reply()
    center.targets.resume("gone")
    for name in ("reset", "broken", "redirect"):
        system.wait(lambda name=name: not system.pending(jobs[name]), f"{name} has recovered", 120)  # type: ignore[misc]
        assert {row.status for row in center.store.read(jobs[name]).values()} == {TaskStatus.PROCESSED}
    line.tasks = len(healthy) + sum(map(len, jobs.values()))
    center.close()


def test_a_worker_killed_between_the_answer_and_the_row_sends_the_same_id_again(
    build: Build, verdict: Verdict, receive: Receive, tmp_path: Path
) -> None:
    line = verdict(49, "worker killed between answer and row")
    receiver = receive()
    hooked = Hooked(build(), receiver)
    hooked.center.targets.create("shop", receiver.url())
    once = tmp_path / "once"
    hooked.env |= {"TOC_FAILPOINT": "webhook.answered", "TOC_FAILPOINT_ONCE": str(once)}
    hooked.start()
    job_id = hooked.submit(1, target="shop")
    row = hooked.ended(job_id, 30)
    line.prove(once.exists(), "the process died with the answer")
    assert row.status == TaskStatus.PROCESSED
    assert [got.message_id for got in receiver.got] == [f"{job_id}_0"] * 2
    assert [got.headers["toc-attempt"] for got in receiver.got] == ["1", "2"]
    line.tasks = 1
    hooked.center.close()


def test_what_answers_too_late_and_names_and_certificates_that_are_away(
    build: Build, verdict: Verdict, receive: Receive, tmp_path: Path
) -> None:
    """Each is a failure of its own task, says what it was, and is sent again under the same id."""
    line = verdict(49, "answers after the time-out, DNS away, TLS expired, a receiver's clock is off")
    tls = Tls.make(tmp_path, days=-1)
    expired = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    expired.load_cert_chain(tls.certificate, tls.key)
    slow_once = {"times": 0}

    def slow(_got: Got) -> Reply:
        slow_once["times"] += 1
        return Reply(hang=slow_once["times"] == 1, headers={"Date": "Thu, 01 Jan 1970 00:00:00 GMT"})

    late, secure = receive(slow), receive(tls=expired)
    hooked = Hooked(build(), late, secure, allow=["http://nowhere.invalid:80"], retries=2)
    hooked.env |= {"SSL_CERT_FILE": str(tls.ca)}
    targets = hooked.center.targets
    targets.create("late", late.url(), timeout=3.0)
    targets.create("expired", secure.url())
    targets.create("nowhere", "http://nowhere.invalid/", timeout=5.0)
    hooked.start(whole=True)
    jobs = {name: hooked.submit(n, target=name) for n, name in enumerate(("late", "expired", "nowhere"))}
    rows = {name: hooked.ended(job_id, 60) for name, job_id in jobs.items()}
    assert (rows["late"].status, rows["late"].attempts) == (TaskStatus.PROCESSED, 1)
    assert [got.message_id for got in late.got] == [f"{jobs['late']}_0"] * 2
    assert rows["late"].last_error == "no complete answer within 3 s"
    assert (rows["expired"].status, rows["nowhere"].status) == (TaskStatus.DEAD, TaskStatus.DEAD)
    assert rows["expired"].last_error == "TLS: certificate has expired"
    assert not secure.got
    name_error = str(rows["nowhere"].last_error)
    assert "name cannot be looked up" in name_error or "within" in name_error
    line.prove(Counter(row.attempts for row in rows.values())[2] == 2, "TLS and DNS failed twice each")
    line.tasks = len(jobs)
    hooked.center.close()


def test_a_name_that_leads_to_a_private_address_is_never_connected_to(
    build: Build, verdict: Verdict, receive: Receive
) -> None:
    line = verdict(49, "a target's name leads to a private address", "listed by name, its address is not")
    receiver = receive()
    origin = f"http://localhost:{receiver.port}"
    hooked = Hooked(build(), receiver, allow=[origin], retries=2)
    hooked.center.targets.create("shop", f"{origin}/hook", timeout=2.0)
    worker = hooked.start(env=hooked.env | {"TOC_WEBHOOK_ALLOW": origin})
    refused = hooked.ended(hooked.submit(1, target="shop"), 30)
    line.prove(refused.status == TaskStatus.DEAD, f"refused: {refused.last_error}")
    assert not receiver.got
    assert not receiver.connections
    worker.terminate()
    assert worker.process.wait(60) == 0
    hooked.start()  # this one may
    assert hooked.ended(hooked.submit(2, target="shop"), 30).status == TaskStatus.PROCESSED
    assert len(receiver.got) == 1
    line.tasks = 2
    hooked.center.close()
