"""Why tasks were late: each cause by itself on real servers, some in pairs, and how many are told right.

``WHY_LATE_TASKS`` is how many late tasks of each are judged; the table of the run is printed at its end.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from fault.conftest import Case
from fault.kit.owners import operator_of
from fault.kit.proxy import Proxy, through
from fault.kit.servers import ClockFile
from harness.hooked import Hooked
from harness.programs import missing
from harness.receiver import Receiver, Reply
from harness.system import System
from sqlalchemy import create_engine

from toc import NewTask, TaskStatus, Topic
from toc.model.catalog import NOTICED_SECONDS
from toc.model.lateness import CAUSES, LATE_MS, Cause
from toc.model.topic import Delivery
from toc.operate.late import why
from toc.operate.operation import Doing
from toc.operate.topics import pause, resume
from toc.pull.handed_out import HandedOut
from toc.pull.pulls import Pulls

TASKS = int(os.environ.get("WHY_LATE_TASKS", "20"))
SYNC, ASYNC, PULLED = "test.sync", "test.async", "test.pulled"
_table: dict[str, Counter[str]] = {}
"""By what was injected, how often each cause was told."""


@pytest.fixture(scope="module", autouse=True)
def confusion() -> Iterator[None]:
    """Prints what was told of what was injected."""
    yield
    told = sorted({cause for counts in _table.values() for cause in counts})
    width = max(map(len, told), default=0) + 2
    print("\n" + " " * 24 + "".join(f"{cause:>{width}}" for cause in told))
    for injected, counts in _table.items():
        print(f"{injected:<24}" + "".join(f"{counts[cause] or '.':>{width}}" for cause in told))


def begin(case: Case, *, threads: int = 4, start: bool = True, env: Any = None, **settings: Any) -> System:
    """A system with one process."""
    system = case.build(**settings)
    if start:
        system.start(processes=1, threads=threads, env=env)
    return system


def submit(
    system: System, count: int, topic: str = SYNC, ahead: float = 1.0, spread: float = 0.5,
    connection: Any = None, **attribute: Any,
) -> list[int]:  # fmt: skip
    """Submit so many tasks, due from then on."""
    at = datetime.now(UTC) + timedelta(seconds=ahead)
    tasks = [
        NewTask(topic, n, action_time=at + timedelta(seconds=spread * n / count), attribute=attribute)
        for n in range(count)
    ]
    return list(system.center.submit_many(tasks, connection=connection))


def operate(system: System, operation: Any, **values: Any) -> None:
    operation.perform(Doing(system.center, "ann@ops", operation.right), {"topic": SYNC, **values})


def run(system: System, job_ids: Collection[int]) -> list[int]:
    system.wait(lambda: not system.pending(job_ids), "all have run", 60)
    return list(job_ids)


def crowd(
    count: int, *, topic: str = SYNC, threads: int = 4, sleep: float, **settings: Any
) -> Callable[[Case], tuple[System, list[int]]]:
    """So many tasks at once, each of which takes so long, where few may run at a time."""

    def inject(case: Case) -> tuple[System, list[int]]:
        system = begin(case, threads=threads, **settings)
        return system, run(system, submit(system, count, topic, spread=0, sleep=sleep))

    return inject


def event_loop(case: Case) -> tuple[System, list[int]]:
    system = case.build()
    daemon = system.start(processes=1, app="fault.apps.hostile:center")
    submit(system, 1, ASYNC, ahead=0.2, deed="block the event loop")
    time.sleep(0.5)
    job_ids = submit(system, TASKS, ASYNC)
    system.wait(lambda: bool(daemon.events("event_loop_blocked")), "it is said that it blocks", 10)
    (system.directory / "released").touch()
    return system, run(system, job_ids)


def redis(case: Case) -> tuple[System, list[int]]:
    """Tasks that a consumer waits for: those of a worker are late by less than a second."""
    gate = case.relay(case.redis.port)
    system = begin(case, redis_url=f"redis://127.0.0.1:{gate.port}/0")
    system.center.store.topics.create(Topic(PULLED, 9, 4, delivery=Delivery.PULL))
    system.center.catalog.refresh()
    job_ids: list[int] = []

    async def consume() -> None:
        pulls = Pulls(system.center, system.center.store.identity.lease_secret())
        await pulls.pull([PULLED])  # its threads run
        for _ in range(6):
            more = submit(system, TASKS, PULLED, ahead=2.0, spread=0.0)
            waiting = [asyncio.create_task(pulls.pull([PULLED], most=TASKS, wait=20)) for _ in range(4)]
            await asyncio.sleep(1.8)
            gate.stall()
            await asyncio.sleep(4)
            gate.flow()
            found = [one for got in await asyncio.gather(*waiting) for one in got]
            while found:
                await pulls.ack([one.key for one in found])
                found = await pulls.pull([PULLED], most=TASKS)
            job_ids.extend(more)
            if len(told(system, job_ids)) >= TASKS:
                break
        await pulls.stop()

    asyncio.run(consume())
    return system, run(system, job_ids)


def database(
    break_it: Callable[[Proxy], object], *, index: bool = True
) -> Callable[[Case], tuple[System, list[int]]]:
    """Tasks are due in 1.5 s, and what is between the worker and its only database server breaks."""

    def inject(case: Case) -> tuple[System, list[int]]:
        gate = case.relay(case.mariadb.port)
        system = begin(case, start=False, index=index)
        system.start(processes=1, env={"TOC_DATABASE_URLS": through(gate, case.mariadb.url)})
        job_ids = submit(system, TASKS, ahead=1.5)
        break_it(gate)
        run(system, job_ids)
        gate.delay(0)
        return system, job_ids

    return inject


def stalled(gate: Proxy) -> None:
    time.sleep(1.2)
    gate.stall()
    time.sleep(4)
    gate.flow()


def refused(gate: Proxy) -> None:
    gate.refuse()
    time.sleep(5)
    gate.accept()


def clock(
    seconds: float, *, ahead: float, afterwards: bool = False, index: bool = True
) -> Callable[[Case], tuple[System, list[int]]]:
    """The worker's clock is off, from the beginning or once it has tasks that are due in a while."""

    def inject(case: Case) -> tuple[System, list[int]]:
        own = ClockFile(case.path / "clock")
        if own.missing:
            missing(own.missing)
        own.shift(0 if afterwards else seconds)
        system = begin(case, env=own.python_env, index=index)
        job_ids = submit(system, TASKS, ahead=ahead)
        own.shift(seconds)
        return system, run(system, job_ids)

    return inject


def worker_killed(case: Case) -> tuple[System, list[int]]:
    system = begin(case)
    job_ids = submit(system, TASKS, ASYNC, sleep=4)
    time.sleep(3)
    os.kill(system.daemons[0].workers()[0], signal.SIGKILL)
    return system, run(system, job_ids)


def halted(case: Case) -> tuple[System, list[int]]:
    system = begin(case)
    job_ids = submit(system, TASKS)
    pid = system.daemons[0].workers()[0]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(pid, signal.SIGCONT)
    return system, run(system, job_ids)


def paused(
    case: Case, *, count: int = TASKS, seconds: float = 4.0, rate: int = 0
) -> tuple[System, list[int]]:
    """The topic is paused for some seconds after the tasks' time, and resumed at a rate."""
    system = begin(case)
    operate(system, pause)
    time.sleep(NOTICED_SECONDS)
    job_ids = submit(system, count, ahead=0.5, spread=0)
    time.sleep(0.5 + seconds)
    operate(system, resume, rate=rate)
    return system, run(system, job_ids)


def stored_late(case: Case, *, index: bool = True) -> tuple[System, list[int]]:
    """The caller's transaction ends four seconds after the tasks' time."""
    system = begin(case, index=index)
    time.sleep(0 if index else 3)  # until it has read all tables
    with create_engine(case.mariadb.url).connect() as connection:
        job_ids = submit(system, TASKS, ahead=0.5, spread=0, connection=connection)
        time.sleep(4)
        connection.commit()
    return system, run(system, job_ids)


def no_owner(case: Case) -> tuple[System, list[int]]:
    """Nobody works when the tasks come due."""
    system = begin(case, start=False)
    job_ids = submit(system, TASKS, ahead=0.2)
    time.sleep(4)
    system.start(processes=1, threads=4)
    return system, run(system, job_ids)


def moved(case: Case) -> tuple[System, list[int]]:
    """Of a backlog that the topic's concurrency holds back, half moves to another host, which lives too."""
    system = case.build(hosts=True, topic_concurrency=2)
    system.start("host-a", processes=1)
    other = system.start("host-b", processes=1)
    with operator_of(system) as operator:

        def owned() -> int:
            return sum(one.owned for one in operator.workers() if one.member.host == "host-b")

        system.wait(owned, "host-b has some slots", 20)
        operator.want("drain", "host-b", by="ann")
        system.wait(lambda: not owned(), "host-a has them all", 20)
        job_ids = submit(system, 8 * TASKS, spread=0, sleep=0.25)
        time.sleep(5)
        operator.unwant("drain", "host-b")
    run(system, job_ids)
    pids = other.workers()
    there = [one.job_id for one in system.history() if one.event == "start" and one.pid in pids]
    assert len(there) > TASKS, "few have moved"
    return system, there[4 : TASKS + 4]  # behind the first, most of whose wait was before the move


def backoff(case: Case) -> tuple[System, list[int]]:
    """The first try of each fails. A second one comes at random within the backoff."""
    system = begin(case, topic_backoff_base=6.0, topic_backoff_cap=6.0)
    return system, run(system, submit(system, 2 * TASKS, fail=1))


def target(case: Case, *, rate: float = 0.0) -> tuple[System, list[int]]:
    """A target that is paused when its tasks come due, or takes few a second."""
    with closing(Receiver(Reply())) as receiver:
        hooked = Hooked(case.build(), receiver)
        limits: dict[str, Any] = {"rate": rate} if rate else {}
        hooked.center.targets.create("shop", receiver.url(), **limits)
        hooked.start()
        if not rate:
            hooked.center.targets.pause("shop")
        count = 2 * TASKS if rate else TASKS
        job_ids = hooked.center.submit_many([NewTask("hook", n, target="shop") for n in range(count)])
        time.sleep(0 if rate else 4)
        hooked.center.targets.resume("shop")
        run(hooked.system, job_ids)
        hooked.center.close()
    return hooked.system, list(job_ids)


def paused_then_backlog(case: Case) -> tuple[System, list[int]]:
    system = begin(case, threads=2)
    operate(system, pause)
    time.sleep(NOTICED_SECONDS)
    job_ids = submit(system, 3 * TASKS + 200, ahead=0.2, spread=0.1, sleep=0.02)
    time.sleep(1)
    operate(system, resume, rate=0)
    return system, run(system, job_ids)


def pulled(pause: float, busy: float, case: Case) -> tuple[System, list[int]]:
    """Tasks of a pulled topic: nobody asks for so long, then one consumer that takes so long for each, or
    none and all at once."""
    system = begin(case)
    system.center.store.topics.create(Topic(PULLED, 9, 4, delivery=Delivery.PULL))
    system.center.catalog.refresh()

    async def consume(count: int) -> None:
        pulls = Pulls(system.center, system.center.store.identity.lease_secret())
        await pulls.pull([PULLED])  # its threads run
        job_ids.extend(submit(system, count, PULLED, ahead=0.5))
        await asyncio.sleep(pause)
        done = 0
        while done < count:
            got = await pulls.pull([PULLED], most=1 if busy else count, wait=20)
            await asyncio.sleep(busy)
            await pulls.ack([one.key for one in got])
            done += len(got)
        await pulls.stop()

    job_ids: list[int] = []
    asyncio.run(consume(TASKS if not busy else 2 * TASKS + 20))
    return system, run(system, job_ids)


def ttr(case: Case) -> tuple[System, list[int]]:
    """Consumers that take tasks and do not answer; then one that does."""
    system = begin(case)
    system.center.store.topics.create(Topic(PULLED, 9, 4, delivery=Delivery.PULL))
    system.center.catalog.refresh()
    job_ids: list[int] = []

    async def consume() -> None:
        pulls = Pulls(system.center, system.center.store.identity.lease_secret())
        job_ids.extend(submit(system, TASKS, PULLED, ahead=0.3, spread=0.1))
        for seconds in (3.0, 60.0):
            got: list[HandedOut] = []
            while len(got) < TASKS:
                got += await pulls.pull([PULLED], most=TASKS, wait=20, ttr=seconds)
        await pulls.ack([one.key for one in got])
        await pulls.stop()

    asyncio.run(consume())
    return system, run(system, job_ids)


Inject = Callable[[Case], tuple[System, list[int]]]
ALONE: dict[str, tuple[Inject, Cause]] = {
    "backlog": (crowd(3 * TASKS + 200, threads=2, sleep=0.02), Cause.BACKLOG),
    "concurrency": (crowd(TASKS + 10, topic_concurrency=2, sleep=0.2), Cause.CONCURRENCY),
    "coroutines": (crowd(TASKS + 10, topic=ASYNC, topic_concurrency=2, sleep=0.2), Cause.CONCURRENCY),
    "threads": (crowd(TASKS + 20, sleep=0.3), Cause.THREADS),
    "event_loop": (event_loop, Cause.EVENT_LOOP),
    "redis": (redis, Cause.REDIS),
    "database": (database(stalled), Cause.DATABASE),
    "database_slow": (database(lambda gate: gate.delay(0.7)), Cause.DATABASE),
    "database_alone": (database(refused, index=False), Cause.DATABASE),
    "clock_behind": (clock(-3, ahead=1.0), Cause.CLOCK),
    "clock_ahead": (clock(3, ahead=4.0), Cause.CLOCK),
    "clock_set_forward": (clock(10, ahead=5.0, afterwards=True, index=False), Cause.CLOCK),
    "worker_killed": (worker_killed, Cause.WORKER_KILLED),
    "halted": (halted, Cause.HALTED),
    "slow_consumer": (partial(pulled, 0.1, 0.1), Cause.BACKLOG),
    "ttr": (ttr, Cause.TTR),
    "paused": (paused, Cause.PAUSED),
    "resume_rate": (
        partial(paused, count=2 * TASKS, seconds=0.2, rate=max(TASKS // 14, 1)),
        Cause.RESUME_RATE,
    ),
    "stored_late": (stored_late, Cause.STORED_LATE),
    "stored_late_alone": (partial(stored_late, index=False), Cause.STORED_LATE),
    "no_owner": (no_owner, Cause.NO_OWNER),
    "moved": (moved, Cause.CONCURRENCY),
    "backoff": (backoff, Cause.BACKOFF),
    "no_consumer": (partial(pulled, 4.0, 0.0), Cause.NO_CONSUMER),
    "target_paused": (target, Cause.TARGET),
    "target_limited": (partial(target, rate=max(TASKS // 4, 1)), Cause.TARGET),
}


def told(system: System, job_ids: Collection[int]) -> list[dict[str, Any]]:
    """Why those of the tasks are late that are, as far as that is told; at most TASKS of them."""
    system.center.catalog.refresh()
    rows = system.center.store.read(job_ids).values()
    found = []
    for row in rows:
        assert row.status == TaskStatus.PROCESSED
        shown = why(system.center, row, system.center.catalog.of_type(row.biz_type))
        if shown is not None and shown["seconds"] * 1000 > LATE_MS:
            found.append(dict(shown))
    return found[-TASKS:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_cause_of_late_tasks_is_told(case: Case, name: str) -> None:
    inject, cause = ALONE[name]
    system, job_ids = inject(case)
    shown = told(system, job_ids)
    counts = _table[name] = Counter(one["cause"] for one in shown)
    wrong = [one for one in shown if one["cause"] != cause]
    example = shown[len(shown) // 2]["sentence"] if shown else ""
    print(f"\n{name}: {len(shown)} late; {dict(counts)}; {example}")
    assert len(shown) >= TASKS * 0.9, f"only {len(shown)} of {TASKS} tasks are told to be late"
    assert counts[cause] >= 0.95 * len(shown), wrong[:3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inject", "first"),
    [
        ("paused_then_backlog", paused_then_backlog, Cause.PAUSED),
        ("no_consumer_then_one", partial(pulled, 4.0, 3 / (2 * TASKS + 20)), Cause.NO_CONSUMER),
    ],
)
def test_two_causes_are_both_named(case: Case, name: str, inject: Inject, first: Cause) -> None:
    """The first one ends about a second after their time, or after four; what follows is a backlog."""
    system, job_ids = inject(case)
    shown = told(system, job_ids)
    _table[name] = Counter(one["cause"] for one in shown)
    both = 0
    for one in shown:
        shares = {share["cause"]: share["seconds"] for share in one["shares"]}
        rest = shares.get(Cause.BACKLOG, 0.0)  # who starts at once waited for nothing more
        assert 0.8 < shares[first] < 5.0, one
        assert rest == pytest.approx(one["seconds"] - shares[first], abs=0.3), one
        smaller = min(rest, shares[first])
        named = "more was due" in one["sentence"], CAUSES[first].words in one["sentence"]
        assert all(named) == (smaller >= one["seconds"] / 4), one
        both += all(named)
    assert both, shown[:3]
