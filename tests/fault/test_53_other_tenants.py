"""Fault 53: thousands of schedules of one topic, names and origins that hang: other tenants are on time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from fault.conftest import Build, Verdict
from fault.kit.doors import p99
from harness.hooked import Hooked
from harness.receiver import Receiver, Reply

from toc import NewTask, TaskStatus
from toc.webhooks.connect import NAMES_SECONDS

SCHEDULES = 2000
NAMES = ORIGINS = 40
TASKS_OF_EACH = 5
RATE, SECONDS = 50, 6


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
            NewTask("hook", n, action_time=due + timedelta(seconds=n / RATE), target="bank")
            for n in range(SECONDS * RATE)
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
    build: Build, verdict: Verdict, bank: Receiver, origins: list[str]
) -> None:
    line = verdict(53, "one tenant's schedules, names and origins", "thousands, and all of them hang")
    names = [f"http://hang{n}.invalid:80" for n in range(NAMES)]
    at_home = f"http://localhost:{bank.port}"
    system = build()
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
        len(late) == len(ran) >= SECONDS,
        f"the bank's p99 {p99(meanwhile):.0f} ms late, before {p99(usual):.0f} ms; another schedule's {late}",
    )
    nominal = [at for at, _ in ran]
    assert {round(after - before) for before, after in pairwise(nominal)} == {1}
    line.within(p99(meanwhile) / 1000, 2 * p99(usual) / 1000 + 0.25)
    line.on_time(late, most=1000)
    assert not daemon.events("worker_died")
    line.tasks = len(usual) + len(meanwhile) + len(ran) + len(hung)
    center.close()
