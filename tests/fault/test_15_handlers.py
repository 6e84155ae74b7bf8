"""Faults 15 to 18, 31 and 36: handlers that are long, fail, kill or hold their process;
bursts and slow topics."""

import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from fault.conftest import Case
from fault.kit.doors import memory
from fault.kit.load import TOPICS, Load, tasks
from fault.kit.table import overdue
from harness.system import DaemonProcess, System
from harness.threads import Beside

from toc import NewTask, TaskStatus, Topic
from toc.index.messages import Peek
from toc.model.topic import Slot
from toc.worker.daemon.processes import SILENT_SECONDS
from toc.worker.run.handler_loop import CLEAN_UP_SECONDS
from toc.worker.settle.finish import MAX_UNWRITTEN
from toc.worker.take.poll import MAX_UNSTARTED, ROUND_LIMIT

# Faults 15 to 17, 31 and 36: handlers that are long, fail, kill or hold their process, or clean up.

# Fault 15: handlers that run past prepare_timeout, and handlers that never end.

PREPARE_TIMEOUT = 3
LONG = 5 * PREPARE_TIMEOUT


@pytest.mark.slow
def test_handlers_five_times_as_long_as_prepare_timeout_are_kept_alive_and_not_doubled(case: Case) -> None:
    line = case.verdict(15, "handler past prepare_timeout", "5 times as long, on threads and coroutines")
    system = case.build(topic_prepare_timeout=PREPARE_TIMEOUT)
    # Each host takes every slot, as it knows of no other: it would take over what the other one let expire.
    for host in ("host-a", "host-b"):
        system.start(host, processes=1)
    long_ones = system.client.submit_many(
        [NewTask("test.async", n, 0.5, attribute={"sleep": LONG}) for n in range(40)]
        + [NewTask("test.sync", n, 0.5, attribute={"sleep": LONG}) for n in range(2)]  # of 3 threads
    )
    with Load(system.client, rate=30):
        system.wait(lambda: len(system.late(long_ones)) == len(long_ones), "all of them run", 10)
        system.wait(lambda: not system.pending(long_ones), "all of them have ended", LONG + 10)
    began, ended = (
        {event.job_id: event.at for event in system.history() if event.event == name}
        for name in ("start", "end")
    )
    shortest = min((ended[job_id] - began[job_id]) / 1e9 for job_id in long_ones)
    line.prove(shortest >= LONG, f"{len(long_ones)} handlers ran {shortest:.1f} s or longer")
    line.judge(system, within=3)


def test_a_handler_that_never_ends_is_a_failed_try_and_its_process_is_recycled(case: Case) -> None:
    line = case.verdict(15, "handler past prepare_timeout", "never ends: max_runtime")
    system = case.build(topic_prepare_timeout=PREPARE_TIMEOUT, topic_max_runtime=2, topic_retries=2)
    daemon = system.start(processes=2)
    before = set(daemon.workers())
    submit = system.client.submit
    endless = [
        submit(topic, biz_id=n, delay=0.3, attribute={"sleep": 3600})
        for n, topic in enumerate(("test.sync", "test.async"))
    ]
    neighbours = [submit("test.async", biz_id=n, delay=0.3, attribute={"sleep": 1}) for n in range(2, 22)]
    with Load(system.client, rate=30):
        system.wait(lambda: not system.pending([*endless, *neighbours]), "all have ended", 25)
    replaced = system.wait(lambda: before - set(daemon.workers()), "a process was replaced", 30)
    stuck = daemon.log.read_text().count("handler_stuck")
    line.prove(stuck, f"{stuck} stuck threads logged, {len(replaced)} of 2 processes were replaced")
    rows = system.center.store.read([*endless, *neighbours])
    assert all(rows[job_id].status == TaskStatus.DEAD for job_id in endless)
    assert all("max_runtime" in (rows[job_id].last_error or "") for job_id in endless[:1])
    assert all((rows[job_id].attempts, rows[job_id].crashes) == (0, 0) for job_id in neighbours)
    line.judge(system, within=5)


# Fault 16: tasks that always fail do not hold up fresh ones.

FAILING = 1000
RETRIES = 5
TOLD_APART = 500
"""Milliseconds that p99 may grow by. Were failed tries not set back, thousands of them would be ahead of a
fresh task."""


@pytest.mark.slow
def test_a_thousand_tasks_that_always_fail_leave_fresh_ones_on_time(case: Case) -> None:
    line = case.verdict(16, "tasks that always fail", f"{FAILING:,}, each {RETRIES} times, beside fresh ones")
    system = case.build(topic_retries=RETRIES, topic_backoff_base=0.5, topic_backoff_cap=4.0)
    system.start()
    topics = ("test.sync", "test.async", "test.batch")
    with Load(system.client, rate=60, cancel=0, fail=0, ahead=(0.5, 1.0), topics=topics) as load:
        load.more(360)
        quiet = time.time()
        failing = [NewTask("test.doomed", n, 2.0) for n in range(FAILING // 2)]
        failing += [NewTask("test.sync", n, 2.0, attribute={"fail": 31}) for n in range(FAILING // 2)]
        system.client.submit_many(failing)
        began = time.time() + 1.5
        while _failed(system) < FAILING * RETRIES:
            assert time.time() < began + 120, f"{_failed(system):,} tries failed\n{system.logs()}"
            time.sleep(1)  # whoever reads the history takes time from the workers
        ended = time.time()
    line.prove(_failed(system) == FAILING * RETRIES, f"{_failed(system):,} tries failed")
    judged = line.judge(system, within=10)
    assert judged.counts["dead"] == FAILING
    before = system.late(load.job_ids, since=quiet - 4, before=quiet)
    beside = system.late(load.job_ids, since=began, before=ended)
    line.prove(len(beside) > 100, f"fresh ones meanwhile: {beside}; before {before}")
    assert beside.p99 < before.p99 + TOLD_APART, "fresh tasks waited for those that fail"


def _failed(system: System) -> int:
    return sum(event.outcome == "raise" for event in system.history())


# Fault 17: tasks that kill the process that runs them, again and again.

SETTLE_SECONDS = 60
"""How long a neighbour may wait for its own run alone. Each culprit costs its worker process two loads of the
application, which take several seconds where the machine has other things to do."""
IN_FLIGHT = 120
"""How many tasks a process has running, or ended and not yet written, when one of them kills it: a new one
finds hundreds overdue, and those of the topic with coroutines begin all at once."""


@pytest.mark.slow
def test_poison_tasks_end_alone_and_no_neighbour_dies_of_them(case: Case) -> None:
    """Six all at once amid a thousand, then one after the other."""
    line = case.verdict(17, "tasks that kill their process", "6 of 1,000, all due in one second, and 3 more")
    system = case.build()
    daemon = system.start(processes=2)
    poison = [NewTask(topic, n, 1.5, attribute={"die": 99}) for n, topic in enumerate(TOPICS * 2)]
    poison_ids = system.client.submit_many(poison)
    system.client.submit_many(tasks(1000, ahead=(1.0, 2.0), first=100, fail=0.1))
    system.wait(lambda: not system.pending(poison_ids), "the poison is dead", 90)
    with Load(system.client, rate=60, ahead=(0.2, 1.0)):
        for n, topic in enumerate(TOPICS):
            poison_ids.append(system.client.submit(topic, biz_id=n, delay=0.2, attribute={"die": 99}))
            system.wait(lambda: not system.pending(poison_ids), "the poison is dead", 90)
    died, alone = len(daemon.events("worker_died")), len(daemon.events("task_quarantined"))
    line.prove(died >= 3, f"{died} processes died, {alone} tasks ran alone")
    assert all("alone" in (system.row(job_id).last_error or "") for job_id in poison_ids)
    judged = line.judge(
        system, within=SETTLE_SECONDS, wait=SETTLE_SECONDS + 30, at_most=IN_FLIGHT * died, crash_limit=3
    )
    assert judged.counts["dead"] == len(poison_ids)


# Fault 31: handlers that hold the interpreter: no other thread of their process runs.

APP = "fault.apps.hostile:center"


def test_a_process_that_a_handler_holds_is_ended_and_what_it_held_runs_elsewhere(case: Case) -> None:
    line = case.verdict(31, "a handler holds the interpreter", "once, a call into C")
    max_runtime = 1
    system = case.build(topic_max_runtime=max_runtime)
    daemon = system.start(processes=2, app=APP)
    # They run beside it, as far as they are in its process.
    released = system.directory / "released"
    waiting = {"until": str(released)}
    beside = system.client.submit_many([NewTask("test.async", n, 0.2, attribute=waiting) for n in range(40)])
    system.wait(lambda: len(system.late(beside)) == len(beside), "they run", 20)
    held = {"deed": "hold the interpreter"}
    job_id = system.client.submit("test.sync", biz_id=0, delay=0.2, attribute=held)
    system.wait(lambda: bool(system.starts(job_id)), "it holds its process", 20)
    with Load(system.client, rate=30) as load:
        system.wait(lambda: daemon.events("worker_killed"), "its process was silent", 40)
        released.touch()
        system.wait(lambda: not system.pending([job_id, *beside]), "all have ended", 40)
        system.wait(lambda: len(daemon.events("worker_ready")) == 3, "it is replaced", 20)
    first, second = system.starts(job_id)
    took = (second.at - first.at) / 1e9
    killed = daemon.events("worker_killed")
    line.prove(
        [event["pid"] for event in killed] == [first.pid],
        f"its process was silent and was killed; it ran again elsewhere after {took:.1f} s",
    )
    line.within(took, max_runtime + SILENT_SECONDS + 10)
    rows = system.center.store.read([job_id, *beside])
    assert all(row.status == TaskStatus.PROCESSED for row in rows.values())
    assert (rows[job_id].attempts, rows[job_id].crashes) == (1, 0) or rows[job_id].crashes == 1
    again = {event.job_id for event in system.history() if event.event == "start" and event.attempt == 2}
    assert again & set(beside), "others were held with it"
    line.on_time(system.late(load.job_ids), p50=1000)  # the other process served
    line.judge(system, within=max_runtime + SILENT_SECONDS + 10, at_most=100)


@pytest.mark.slow
def test_tasks_that_hold_two_processes_at_once_again_and_again_end_alone(case: Case) -> None:
    line = case.verdict(
        31, "a handler holds the interpreter", "a call into C and a regular expression, each time"
    )
    max_runtime = 3
    system = case.build(topic_max_runtime=max_runtime)
    daemon = system.start(processes=2, app=APP)
    with Load(system.client, rate=20) as load:
        poison = [
            system.client.submit(topic, biz_id=n, delay=1.0, attribute={"deed": deed, "deeds": 99})
            for n, (topic, deed) in enumerate(
                [("test.sync", "hold the interpreter"), ("test.async", "backtrack")]
            )
        ]
        system.wait(lambda: not system.pending(poison), "both are dead", 180)
    killed = len(daemon.events("worker_killed"))
    rows = system.center.store.read(poison)
    assert all("the last time alone" in (row.last_error or "") for row in rows.values())
    late = system.late(load.job_ids)
    # Three deaths each, shared if they meet in one process; then alone: once, or twice behind another.
    line.prove(5 <= killed <= 10, f"{killed} processes were silent and were killed; others meanwhile: {late}")
    # As many such tasks as processes hold all of them, until each has done so three times.
    limit = 3 * (max_runtime + SILENT_SECONDS + 10)
    assert late[-1] < 1000 * limit
    line.judge(system, within=limit, wait=120, at_most=120 * killed, crash_limit=3)


# Fault 36: coroutines past max_runtime, which clean up.


def test_a_coroutine_past_max_runtime_is_cancelled_once_and_may_await_its_clean_up(case: Case) -> None:
    line = case.verdict(36, "a coroutine past max_runtime", "it awaits in finally")
    system = case.build(topic_max_runtime=1, topic_retries=1)
    daemon = system.start(processes=1, app=APP)
    before = daemon.workers()
    submit = system.client.submit
    clean_up = CLEAN_UP_SECONDS - 2.5
    tidy = [
        submit("test.async", biz_id=n, delay=0.3, attribute={"sleep": 3600, "clean_up": clean_up, **more})
        for n, more in enumerate(({}, {}, {"sleep": 0, "call": 3600}, {"background": 1}))
    ]
    system.wait(lambda: not system.pending(tidy), "they have failed", 30)
    assert daemon.workers() == before, "nobody had to be replaced"
    # One that does not end in time takes its process with it, and nobody else.
    endless = submit("test.async", biz_id=9, delay=0.1, attribute={"sleep": 3600, "clean_up": 3600})
    neighbour = submit("test.sync", biz_id=10, delay=0.1, attribute={"sleep": 0.9})
    system.wait(lambda: not system.pending([endless]), "its try has failed", 20)
    system.wait(lambda: daemon.workers() not in ([], before), "another process serves", 20)
    assert [event["reason"] for event in daemon.events("worker_recycled")] == [
        "a handler ran longer than max_runtime"
    ]
    began = {event.job_id: event.at for event in system.history() if event.event == "start"}
    took = [
        (event.at - began[event.job_id]) / 1e9
        for event in system.history()
        if event.event == "end" and event.job_id in tidy
    ]
    line.prove(
        len(took) == 4
        and min(took) >= clean_up,  # from the first line of the handler, a while after its start
        f"{len(took)} coroutines cleaned up for {clean_up:g} s, which ended after {min(took):.1f} s or later",
    )
    (stuck,) = daemon.events("handler_stuck")
    assert re.search(r"hostile\.py:\d+ in on_event_loop > .*tasks\.py:\d+ in sleep$", stuck["stack"]), stuck
    rows = system.center.store.read([*tidy, endless, neighbour])
    assert all(
        rows[job_id].last_error == "CancelledError: the handler ran longer than max_runtime (1 s)"
        for job_id in tidy
    )
    assert "max_runtime" in (rows[endless].last_error or "")
    assert rows[neighbour].status == TaskStatus.PROCESSED
    line.judge(system, within=5)


def test_calls_that_coroutines_left_behind_hold_up_no_other_topic_and_their_process_is_replaced(
    case: Case,
) -> None:
    line = case.verdict(36, "a coroutine past max_runtime", "its calls in asyncio.to_thread never end")
    system = case.build(topic_max_runtime=2, topic_retries=1)
    system.center.store.topics.create(Topic("test.other", 9, 8, retries=1, max_runtime=2))
    daemon = system.start(processes=1, app="fault.apps.calling:center")
    before = daemon.workers()
    calls = [NewTask("test.async", n, 0.3, attribute={"call": 3600}) for n in range(40)]  # more than threads
    endless = system.client.submit_many(calls)
    system.wait(lambda: not system.pending(endless), "they have failed", 30)
    others = system.client.submit_many(
        [NewTask("test.other", n, 0.1, attribute={"call": 0}) for n in range(40)]
    )
    system.wait(lambda: not system.pending(others), "the others have ended", 30)
    rows = system.center.store.read(others)
    assert {(row.status, row.attempts) for row in rows.values()} == {(TaskStatus.PROCESSED, 0)}
    system.wait(lambda: daemon.workers() not in ([], before), "another process serves", 40)
    reasons = {event["reason"] for event in daemon.events("worker_recycled")}
    line.prove(len(reasons) == 1 and "test.async" in str(reasons), f"{len(calls)} calls hang: {reasons}")
    line.judge(system, within=5)


# Fault 18: a burst, a hot biz_id and a slow topic at once; other topics stay on time, memory bounded.

MEGABYTE = 1 << 20
AWAY_MS = 1500
"""By which tasks may be late whose only database server seemed to be away."""
PROCESSES = 2
SLOTS = 16
BOUND = PROCESSES * (MAX_UNSTARTED + ROUND_LIMIT + MAX_UNWRITTEN)
"""What may be taken of a topic at most: what has not started, what is done and not written yet, and what a
round adds."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "slow", "seconds"), [(6_000, 90, 7), pytest.param(100_000, 300, 30, marks=pytest.mark.slow)]
)
def test_a_burst_of_one_topic_leaves_the_others_on_time_and_memory_bounded(
    case: Case, count: int, slow: int, seconds: float
) -> None:
    line = case.verdict(18, "burst, hot biz_id, slow topic", f"{count:,} due in one second")
    system = case.build(slots=SLOTS)
    for number, name in enumerate(SLOW):
        system.center.store.topics.create(Topic(name, 9 + number, SLOTS))
    daemon = system.start(processes=PROCESSES, app="fault.apps.slow:center")
    client = system.client
    for ahead in (seconds, 8 * seconds):  # those of the first may be due before all are stored
        due = datetime.now(UTC) + timedelta(seconds=ahead)
        for first in range(0, count, 10_000):
            client.submit_many(
                [
                    NewTask("test.batch", biz_id(n), action_time=due + timedelta(milliseconds=n % 1000))
                    for n in range(first, min(first + 10_000, count))
                ]
            )
        client.submit_many(
            [NewTask("test.sync", n, action_time=due, attribute={"sleep": 0.2}) for n in range(slow)]
        )
        spare = (due - datetime.now(UTC)).total_seconds()
        if spare > 0:
            break
    line.prove(spare > 0, f"all of them stored {spare:.0f} s ahead")
    with Watch(system, daemon) as watch:
        time.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds() - 1.5))
        watch.mark()
        others = ("test.async", "test.slow0")
        with Load(client, rate=40, ahead=(0.5, 1.0), cancel=0, fail=0, topics=others) as trickle:
            # Not the history: to read it takes time.
            over = due.timestamp() + 1
            system.wait(lambda: time.time() > over and not overdue(system, 0), "the burst is over", 120)
            begun = due.timestamp()
            system.wait(lambda: len(system.late(trickle.job_ids, since=begun)) >= 20, "others have run", 60)
            ended = time.time()
        judged = line.judge(system, within=120)
    late = system.late(trickle.job_ids, since=due.timestamp(), before=ended)
    line.prove(
        judged.counts["processed"] >= count + slow and watch.prepared and len(late) >= 20,
        f"{count:,} done, {count // 20:,} of them of one biz_id, at most {watch.prepared:,} taken at once; "
        f"two other topics meanwhile: {late}; memory +{watch.growth // MEGABYTE} MB a process at most",
    )
    assert watch.prepared <= BOUND
    assert watch.growth < 60 * MEGABYTE
    # A crowded machine may keep the server from answering for 50 ms: then it counts as away for a moment, and
    # what was put away comes back once it answers. Half of the tasks never meet that.
    away = AWAY_MS if line.slack and '"database_away"' in daemon.told() else 0.0
    line.on_time(late, p50=500, p99=1000 + away)


def biz_id(number: int) -> int:
    """Every twentieth task is of one biz_id: all of these share a slot and a table."""
    return 7 if number % 20 == 0 else number


class Watch(Beside):
    """What the processes of a daemon occupy, and how much of the burst they have taken, at most."""

    def __init__(self, system: System, daemon: DaemonProcess) -> None:
        super().__init__()
        self._queues = system.center.queues
        self._slots = [Slot("test.batch", number) for number in range(SLOTS)]
        self._pids = [daemon.process.pid, *daemon.workers()]
        self._base: dict[int, int] = {}
        self.growth = 0
        """Bytes that a process grew by after ``mark``."""
        self.prepared = 0

    def mark(self) -> None:
        self._base = {pid: memory(pid) for pid in self._pids}

    def _run(self) -> None:
        while not self._over.wait(0.1):
            for pid, base in self._base.items():
                self.growth = max(self.growth, memory(pid) - base)
            peeks = self._queues.peek(self._slots).values()
            taken = sum(peek.prepared for peek in peeks if isinstance(peek, Peek))
            self.prepared = max(self.prepared, taken)


# Fault 18: topics whose handlers take a minute flood a process; another topic stays on time.

SLOW = ("test.slow0", "test.slow1", "test.slow2")
THREADS = 16
FLOOD = 40
"""More of each slow topic than there are threads."""


@pytest.mark.parametrize("turn", [pytest.param("at once", marks=pytest.mark.slow), "one after the other"])
def test_topics_with_slow_handlers_take_no_thread_that_another_topic_needs(case: Case, turn: str) -> None:
    line, system = case.begin(18, "three topics with slow handlers flood a process", turn)
    for number, topic in enumerate(SLOW):
        system.center.store.topics.create(Topic(topic, 20 + number, 8))
    system.start(processes=1, threads=THREADS, app="fault.apps.slow:center")
    released = case.path / "released"
    flood: set[int] = set()

    def running() -> int:
        return sum(event.event == "start" and event.job_id in flood for event in system.history())

    for number, topic in enumerate(SLOW, start=1):
        some = [NewTask(topic, n, 0.5, attribute={"until": str(released)}) for n in range(FLOOD)]
        flood.update(system.client.submit_many(some))
        if turn != "at once":
            threads = THREADS - THREADS // 4**number
            system.wait(lambda: running() >= threads, f"{topic} has its threads", 10)  # noqa: B023
    system.wait(lambda: running() >= THREADS - 2, "they have their threads", 10)
    with Load(system.client, rate=50, ahead=(0.3, 0.6), cancel=0, fail=0, topics=("test.sync",)) as trickle:
        trickle.more(100)
    system.wait(lambda: len(system.late(trickle.job_ids)) == len(trickle.job_ids), "all have started", 10)
    late, busy = system.late(trickle.job_ids), running()
    released.touch()
    line.prove(
        THREADS - 2 <= busy < len(flood),
        f"{busy} handlers of three topics held {THREADS} threads; another topic meanwhile: {late}",
    )
    line.judge(system, within=60)
    line.on_time(late, p99=200)
