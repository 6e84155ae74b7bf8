"""Faults 43 to 45 at the dialects, by plain clients: gateways die, clients leave, jobs are finished late."""

import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fault.conftest import Case
from harness import dialect as plain
from harness import order_clients
from harness.dialect import arrived, send
from harness.final import Row, read_final
from harness.gateway import Gateway
from harness.lmstfy import port_of
from harness.order_clients import DIALECTS, Dialect, Job, Wire
from harness.patience import until
from harness.system import System

from toc.model.task import TaskStatus

LEAVERS = 20
TOPIC = "t"
OPTIONS = [
    word
    for name in ("youzan", "redis-delayed", "delay-task", "lmstfy")
    for word in (f"--{name}", "127.0.0.1:0")
]


@pytest.fixture
def system(case: Case) -> System:
    """Gateways and nobody else."""
    return case.build(hosts=True, slots=1)


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ttr of a second, and pollers that hardly rest: they measure."""
    monkeypatch.setattr(order_clients, "TTR_SECONDS", 1)
    monkeypatch.setattr(order_clients, "POLL_SECONDS", 0.005)


@pytest.fixture(autouse=True)
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The connections of a test's clients end with it."""
    opened: list[Wire] = []

    def wire(ports: list[int]) -> Wire:
        opened.append(Wire(ports))
        return opened[-1]

    monkeypatch.setattr(order_clients, "Wire", wire)
    yield
    for one in opened:
        one.close()


@contextmanager
def gateways(system: System, count: int = 1, env: dict[str, str] | None = None) -> Iterator[list[Gateway]]:
    found = [Gateway(system, *OPTIONS, env=env)]
    try:
        while len(found) < count:
            found.append(Gateway(system, *OPTIONS, host=f"away-{len(found)}", beside=found[0]))
        yield found
    finally:
        for one in reversed(found):
            one.stop()


def client_of(gateway: Gateway, dialect: str, monkeypatch: pytest.MonkeyPatch) -> Dialect:
    """A client that knows this gateway only."""
    if dialect == "lmstfy":
        if "shop" not in gateway.tokens:
            gateway.make_token("shop", "admin", topics=("lmstfy.shop.*",))
        assert until(lambda: gateway.call("GET", "/v1/tasks/1", token="shop").status != 401)
        monkeypatch.setenv("LMSTFY_TOKEN", gateway.tokens["shop"])
    return DIALECTS[dialect]([port_of(gateway, dialect)])


def popped(client: Dialect) -> Job:
    """Pop until something comes."""
    return plain.popped(lambda: client.pop([TOPIC]))


def rows(system: System) -> list[Row]:
    """All rows of the task tables."""
    return list(read_final(system.center).rows)


def test_who_left_a_hold_gets_nothing(system: System, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    line = case.verdict(44, "clients leave a hold of 178 s")
    with gateways(system) as (gateway,):
        for dialect in ("youzan", "lmstfy"):
            client = client_of(gateway, dialect, monkeypatch)
            client.push(0, TOPIC, time.time() + 1, "there is such a topic")
            client.finish(popped(client))
            leavers = [_hold(gateway, dialect) for _ in range(LEAVERS)]
            assert until(lambda: arrived(port_of(gateway, dialect), LEAVERS))  # noqa: B023
            answered, _, _ = select.select(leavers, [], [], 0.2)
            line.prove(not answered, f"{LEAVERS} of {dialect} left")
            for one in leavers:
                one.close()
            client.push(1, TOPIC, time.time() + 1, "kept")
            job = popped(client)
            assert job.body == "kept"
            client.finish(job)
    ended = rows(system)
    assert {(row.status, row.attempts) for row in ended} == {(TaskStatus.PROCESSED, 0)}, (
        "none was tried twice"
    )
    line.tasks = len(ended)


def _hold(gateway: Gateway, dialect: str) -> socket.socket:
    port = port_of(gateway, dialect)
    if dialect == "lmstfy":
        headers = [f"X-Token: {gateway.tokens['shop']}"]
        return send(port, "GET", f"/api/shop/{TOPIC}?timeout=178&ttr=60", headers=headers)
    return send(port, "POST", "/pop", b'{"topic":"%s"}' % TOPIC.encode())


def test_a_job_comes_again_at_the_end_of_its_ttr_and_never_before(
    system: System, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = case.verdict(45, "a job comes again at the end of its ttr")
    with gateways(system) as (gateway,):
        client = client_of(gateway, "youzan", monkeypatch)
        client.push(0, TOPIC, time.time() + 1, "body")
        popped(client)
        (stored,) = rows(system)
        for attempts in (1, 2, 3):
            row = system.row(stored.job_id)
            assert row.attempts == attempts
            popped(client)
            assert time.time() * 1000 >= row.next_time, "before its ttr had ended"
    line.prove(attempts == 3, "three times after its ttr, each charged")
    line.tasks = 1


@pytest.mark.parametrize(
    "dialect",
    ["youzan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lmstfy", "redis-delayed"))],
)
def test_late_and_repeated_ends_end_each_job_once(
    system: System, case: Case, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    line = case.verdict(
        45, "jobs are finished late, twice, by another gateway, after a push or a delete", dialect
    )
    with gateways(system, 2) as (here, there):
        client, other = client_of(here, dialect, monkeypatch), client_of(there, dialect, monkeypatch)

        def handed(number: int) -> tuple[Job, int]:
            """A job in a consumer's hands, and its job_id."""
            client.push(number, TOPIC, time.time() + 1, f"body {number}")
            job = popped(client)
            (row,) = [row for row in rows(system) if row.status == TaskStatus.PENDING and row.attempts]
            return job, row.job_id

        job, late = handed(1)
        end = system.row(late).next_time
        assert until(lambda: time.time() * 1000 > end)
        other.finish(job)
        ended = system.row(late)
        assert (ended.status, ended.attempts) == (TaskStatus.PROCESSED, 0)
        line.prove(ended.gmt_modified >= end, "one finished after its ttr, by another gateway")
        for one in (client, other):
            one.finish(job)
            one.delete(job.id)
        assert system.row(late) == ended, "it has ended once"

        job, deleted = handed(2)
        other.delete(job.id)
        ended = system.row(deleted)
        assert ended.status != TaskStatus.PENDING
        client.finish(job)
        assert system.row(deleted) == ended

        if dialect != "lmstfy":  # whose ids are the server's
            job, pushed = handed(3)
            other.push(3, TOPIC, time.time() + 3600, "pushed again")
            client.finish(job)
            row = system.row(pushed)
            assert (row.status, row.version) == (TaskStatus.PENDING, 1), "what was pushed since stays"
            line.prove(True, "one pushed again before its finish")
        line.tasks = len(rows(system))
