"""Faults 49 and 53: a target, a caller or a tenant that misbehaves costs nobody else anything."""

import contextlib
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise

import pytest
from fault.conftest import Case
from fault.kit.doors import BROKEN, PULLED, create_pulled, p99, raw
from harness import dialect
from harness.gateway import Gateway
from harness.hooked import Hooked
from harness.receiver import Got, Receive, Receiver, Reply, bomb
from harness.secured import Tls
from harness.system import Lateness, System
from harness.threads import beside

from toc import NewTask, TaskStatus
from toc.webhooks.connect import NAMES_SECONDS

# Fault 49: a target that misbehaves costs its own tasks only, and what waits for it uses up no try.

ALL_AT_ONCE = 150
"""Tasks of each target that misbehaves."""
SECONDS = 6.0
RATE = 100
"""Tasks a second of the target that is well."""


@pytest.mark.slow
def test_targets_that_misbehave_cost_their_own_tasks_only(case: Case, receive: Receive) -> None:
    line = case.verdict(
        49, "targets that hang, reset, trickle, bomb, redirect, answer 410", "all due at once"
    )
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
    hooked = Hooked(case.build(), well, *receivers.values(), allow=[elsewhere], retries=31, backoff_cap=2.0)
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


def test_a_worker_killed_between_answer_and_row_sends_the_same_id_again(case: Case, receive: Receive) -> None:
    line = case.verdict(49, "worker killed between answer and row")
    receiver = receive()
    hooked = Hooked(case.build(), receiver)
    hooked.center.targets.create("shop", receiver.url())
    once = case.path / "once"
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


def test_what_answers_too_late_and_names_and_certificates_that_are_away(case: Case, receive: Receive) -> None:
    """Each is a failure of its own task, says what it was, and is sent again under the same id."""
    line = case.verdict(49, "answers after the time-out, DNS away, TLS expired, a receiver's clock is off")
    tls = Tls.make(case.path, days=-1)
    expired = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    expired.load_cert_chain(tls.certificate, tls.key)
    slow_once = {"times": 0}

    def slow(_got: Got) -> Reply:
        slow_once["times"] += 1
        return Reply(hang=slow_once["times"] == 1, headers={"Date": "Thu, 01 Jan 1970 00:00:00 GMT"})

    late, secure = receive(slow), receive(tls=expired)
    hooked = Hooked(case.build(), late, secure, allow=["http://nowhere.invalid:80"], retries=2)
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
    assert "certificate has expired" in str(rows["expired"].last_error)
    assert not secure.got
    name_error = str(rows["nowhere"].last_error)
    assert "name cannot be looked up" in name_error or "within" in name_error
    line.prove(Counter(row.attempts for row in rows.values())[2] == 2, "TLS and DNS failed twice each")
    line.tasks = len(jobs)
    hooked.center.close()


def test_a_name_that_leads_to_a_private_address_is_never_connected_to(case: Case, receive: Receive) -> None:
    line = case.verdict(
        49, "a target's name leads to a private address", "listed by name, its address is not"
    )
    receiver = receive()
    origin = f"http://localhost:{receiver.port}"
    hooked = Hooked(case.build(), receiver, allow=[origin], retries=2)
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


# Fault 53: one caller's large or deep requests, many searches, many connections: others are served.

PATH = "/v1/topics/test.sync/tasks:batch"
CALLER_SECONDS = 1.5
CALLERS = 4
THOUSAND = json.dumps(
    {"tasks": [{"biz_id": 1, "delay": 3600, "attribute": {"text": "x" * 3900}}] * 1000}
).encode()
"""What is several round trips to the database."""
LISTS = b'{"tasks":[{"biz_id":[' + b"[]," * 5_000_000 + b"[]]}]}"
ESCAPED = b'{"id":"' + b"\\u0041" * 1_000_000 + b'"}'
MANY_TOPICS = b'{"topic":"' + b"t," * 1_000_000 + b't"}'


@pytest.fixture
def system(case: Case) -> System:
    one = case.build(slots=1)
    create_pulled(one)
    return one


@pytest.fixture
def gateway(system: System) -> Iterator[Gateway]:
    one = Gateway(system, "--youzan", "127.0.0.1:0")
    one.make_token("other", "produce", "read")
    one.make_token("greedy", "produce", "read", "consume")
    yield one
    assert one.stop() == 0


def ask(port: int, request: bytes) -> bytes:
    """The first bytes of an answer."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(request)
        return client.recv(4096)
    return b""


def post(gateway: Gateway, path: str, body: bytes) -> bytes:
    """A request of the greedy token as bytes."""
    head = raw(gateway, "POST", path, token="greedy").partition(b"Content-Length")[0]
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def large(gateway: Gateway, body: bytes) -> Callable[[], bytes]:
    return lambda: ask(gateway.port, post(gateway, PATH, body))


def searches(gateway: Gateway) -> Callable[[], bytes]:
    request = raw(gateway, "GET", "/v1/tasks?error=x&status=dead", token="greedy")

    def many() -> bytes:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            clients = [socket.create_connection(("127.0.0.1", gateway.port), 10) for _ in range(30)]
            for client in clients:
                stack.enter_context(client).sendall(request)
            return b"".join(client.recv(4096) for client in clients)
        return b""

    return many


def youzan(gateway: Gateway, path: str, body: bytes) -> Callable[[], bytes]:
    port = dialect.port_of(gateway, "youzan")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return lambda: ask(port, head + body)


GREED: dict[str, Callable[[Gateway], Callable[[], bytes]]] = {
    "16 MiB of empty lists": lambda gateway: large(gateway, LISTS),
    "1,000 tasks of 4 kB": lambda gateway: large(gateway, THOUSAND),
    "searches": searches,
    "Youzan, 6 MiB without a token": lambda gateway: youzan(gateway, "/push", ESCAPED),
    "Youzan, a pop of a million topics": lambda gateway: youzan(gateway, "/pop", MANY_TOPICS),
}


@contextmanager
def greedy(do: Callable[[], bytes]) -> Iterator[list[bytes]]:
    """Do it from a few threads meanwhile. Yields what was answered."""
    answers: list[bytes] = []

    def again(over: threading.Event) -> None:
        while not over.is_set():
            answers.append(do())

    with beside([again] * CALLERS):
        yield answers


def submit(gateway: Gateway) -> int:
    """The status of another token's submit."""
    task = {"biz_id": 1, "delay": 3600}
    return gateway.call("POST", "/v1/topics/test.sync/tasks", task, token="other").status


def serve(gateway: Gateway) -> list[float]:
    """Seconds that each call of another token took, 100 a second."""
    took = []
    until = time.monotonic() + CALLER_SECONDS
    while time.monotonic() < until:
        began = time.monotonic()
        assert submit(gateway) == 201
        assert gateway.call("GET", "/v1/tasks?limit=1", token="other").status == 200
        took.append(time.monotonic() - began)
        time.sleep(0.01)
    return took


@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=[pytest.mark.slow] * ("4 kB" not in name)) for name in GREED]
)
def test_one_caller_delays_no_other(gateway: Gateway, case: Case, what: str) -> None:
    line = case.verdict(53, "one caller's greed", what)
    usual = serve(gateway)
    with greedy(GREED[what](gateway)) as answers:
        meanwhile = serve(gateway)
    answered = [answer for answer in answers if answer]
    line.prove(
        len(answers) >= CALLERS,
        f"{len(answered)} of {len(answers)} answered; others p99 {1000 * p99(meanwhile):.0f} ms, before "
        f"{1000 * p99(usual):.0f} ms",
    )
    # The callers share two processors with the gateway.
    line.within(p99(meanwhile), 2 * p99(usual) + 0.25)
    line.tasks = len(usual) + len(meanwhile)


WAITS = 4096


@pytest.mark.slow
@pytest.mark.parametrize("what", ["one byte each", "pulls that wait"])
def test_connections_of_one_caller_take_no_last_place(gateway: Gateway, case: Case, what: str) -> None:
    line = case.verdict(53, "one caller's connections", what)
    sent = b"G" if what == "one byte each" else raw(
        gateway, "POST", f"/v1/topics/{PULLED}:pull", {"wait": 60}, token="greedy"
    )  # fmt: skip
    crowd: list[socket.socket] = []
    served = 0
    try:
        for number in range(WAITS + 104):
            crowd.append(socket.create_connection(("127.0.0.1", gateway.port), 10))
            with contextlib.suppress(OSError):
                crowd[-1].sendall(sent)
            if not number % 50:
                with contextlib.suppress(*BROKEN):
                    served += gateway.call("GET", "/healthz", attempts=1).status == 200
                    assert submit(gateway) == 201
        line.prove(len(crowd) > WAITS, f"{len(crowd):,} connections; {served} of 84 probes were answered")
        assert served == 84
    finally:
        for client in crowd:
            client.close()
    line.tasks = served


# Fault 53: thousands of schedules of one topic, names and origins that hang: other tenants are on time.

SCHEDULES = 2000
NAMES = ORIGINS = 40
TASKS_OF_EACH = 5
TENANT_RATE, TENANT_SECONDS = 50, 6


@pytest.fixture
def origins() -> Iterator[list[str]]:
    """Origins that take connections and never answer."""
    with ExitStack() as stack:
        ports = [
            stack.enter_context(socket.create_server((f"127.0.1.{n + 1}", 0), backlog=512)).getsockname()
            for n in range(ORIGINS)
        ]
        yield [f"http://{host}:{port}" for host, port in ports]


@pytest.fixture
def bank() -> Iterator[Receiver]:
    """The receiver of another tenant, which keeps no connection: its name is looked up again and again."""
    one = Receiver(Reply(headers={"Connection": "close"}))
    yield one
    one.close()


def bank_late(hooked: Hooked, bank: Receiver) -> list[float]:
    """By how many ms tasks of the bank's target were received late, and that each came at its first try."""
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    job_ids = hooked.center.submit_many(
        [
            NewTask("hook", n, action_time=due + timedelta(seconds=n / TENANT_RATE), target="bank")
            for n in range(TENANT_SECONDS * TENANT_RATE)
        ]
    )
    hooked.system.wait(lambda: not hooked.system.pending(job_ids), "the bank has what is its own", 60)
    rows = hooked.center.store.read(job_ids)
    assert {(row.status, row.attempts) for row in rows.values()} == {(TaskStatus.PROCESSED, 0)}
    received = {int(got.message_id.partition("_")[0]): got.at * 1000 for got in reversed(bank.got)}
    return [received[job_id] - rows[job_id].action_time for job_id in job_ids]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_tenants_target_and_schedule_keep_their_time(
    case: Case, bank: Receiver, origins: list[str]
) -> None:
    line = case.verdict(53, "one tenant's schedules, names and origins", "thousands, and all of them hang")
    names = [f"http://hang{n}.invalid:80" for n in range(NAMES)]
    at_home = f"http://localhost:{bank.port}"
    system = case.build()
    allow = [*names, *origins, at_home, "127.0.0.0/8", "::1"]
    hooked = Hooked(system, bank, allow=allow, retries=31)
    center, targets = hooked.center, hooked.center.targets
    targets.create("bank", f"{at_home}/bank")
    for n, name in enumerate(names):
        targets.create(f"hang{n}", name)
    center.schedules.create("fair", topic="test.sync", every=1, overlap="allow")
    center.store.topics.alter("test.async", paused=True)
    daemon = hooked.start(app="fault.apps.hanging_names:center", processes=2, whole=True)
    usual = bank_late(hooked, bank)

    began = time.time()
    with ThreadPoolExecutor(8) as pool:
        for made in pool.map(
            lambda n: center.schedules.create(
                f"many-{n}", topic="test.async", cron="*/5 * * * * *", overlap="allow"
            ),
            range(SCHEDULES),
        ):
            assert made
    hung = center.submit_many(
        [NewTask("hook", n, target=f"hang{n % NAMES}") for n in range(NAMES * TASKS_OF_EACH)]
    )
    hung += center.submit_many(
        [NewTask("hook", n, url=f"{origins[n % ORIGINS]}/x") for n in range(ORIGINS * TASKS_OF_EACH)]
    )
    time.sleep(NAMES_SECONDS)  # by then the bank's name is to be looked up again
    meanwhile = bank_late(hooked, bank)
    time.sleep(3)
    ran = sorted(
        (task.action_time.timestamp(), task.job_id)
        for task in center.find(biz_id="fair")
        if began < task.action_time.timestamp() < time.time() - 2
    )
    late = system.late([job_id for _, job_id in ran])
    fired = [one.fired for n in range(0, SCHEDULES, 100) if (one := center.schedules.get(f"many-{n}"))]
    line.prove(len(fired) == SCHEDULES // 100 and min(fired) > 0, f"{SCHEDULES} schedules of one topic fired")
    line.prove(len(system.pending(hung)) == len(hung), f"{len(hung)} tasks wait for what hangs")
    line.prove(
        len(late) == len(ran) >= TENANT_SECONDS,
        f"the bank's p99 {p99(meanwhile):.0f} ms late, before {p99(usual):.0f} ms; another schedule's {late}",
    )
    nominal = [at for at, _ in ran]
    assert {round(after - before) for before, after in pairwise(nominal)} == {1}
    line.within(p99(meanwhile) / 1000, 2 * p99(usual) / 1000 + 0.25)
    line.on_time(late, most=1000)
    assert not daemon.events("worker_died")
    line.tasks = len(usual) + len(meanwhile) + len(ran) + len(hung)
    center.close()
