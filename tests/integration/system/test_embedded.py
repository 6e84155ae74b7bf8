"""A worker within the application's process, which stays the application's."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from fault.kit.proxy import Proxy, through
from harness.patience import PATIENCE, until
from harness.rows import known
from harness.system import System, small_system
from opentelemetry import trace
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB
from toc import InvalidInput, NewTask, Task, TaskStatus, TimeoutCenter, Topic, loop
from toc.coordination.assignment import Member
from toc.coordination.znodes import member_values
from toc.model.errors import ConfigError, StoreUnavailable, UnknownTopic
from toc.model.minute import MINUTE_MS, STARTS
from toc.model.verdict import Failure
from toc.observe.tracing import trace_id
from toc.operate import doctor, due
from toc.operate.cluster import living_workers
from toc.operate.due import hour
from toc.operate.operation import Doing
from toc.operate.top import Top
from toc.sdk.client import apart
from toc.worker import embedded


class Shop:
    """An application with handlers of both kinds."""

    def __init__(self, system: System) -> None:
        self.center = center = TimeoutCenter(system.settings)
        self.runs: list[tuple[str, int | str, str]] = []
        self.hang = threading.Event()
        self.copies: list[int] = []
        """How the copies that a handler made of the process have ended."""
        center.handler("order.close")(self.close)
        center.handler("member.remind")(self.remind)

    def close(self, task: Task) -> None:
        self.runs.append((task.topic, task.biz_id, threading.current_thread().name))
        if task.attribute.get("hang"):
            self.hang.wait(PATIENCE)
        if task.attribute.get("fork") and (copy := os.fork()):
            self.copies.append(os.waitpid(copy, 0)[1])

    async def remind(self, task: Task) -> None:
        await asyncio.sleep(0.001)
        if task.attribute.get("leave"):  # a call on a thread
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self.hang.wait, PATIENCE), 0.1)
        while task.attribute.get("hang") and not self.hang.is_set():
            await asyncio.sleep(0.01)
        self.runs.append((task.topic, task.biz_id, threading.current_thread().name))

    def ran(self, *biz_ids: int) -> None:
        wanted = set(biz_ids)
        assert until(lambda: wanted <= {biz_id for _, biz_id, _ in self.runs}, PATIENCE), (wanted, self.runs)

    def ended(self, *job_ids: int) -> None:
        def so() -> bool:
            found = [self.center.get(job_id) for job_id in job_ids]
            return all(task is not None and task.status is TaskStatus.PROCESSED for task in found)

        assert until(so, PATIENCE), "they are processed"


@pytest.fixture
def system(tmp_path: Path, mariadb: MariaDB, database_prefix: str) -> Iterator[System]:
    with small_system(tmp_path, None, mariadb, database_prefix, session_timeout=2.0) as one:
        one.center.store.topics.create(Topic("order.close", 1, 4, max_runtime=2))
        one.center.store.topics.create(Topic("member.remind", 2, 4))
        yield one


@pytest.fixture
def shop(system: System) -> Iterator[Shop]:
    one = Shop(system)
    yield one
    one.hang.set()
    one.center.close()


def test_handlers_run_in_the_process_between_start_and_stop(shop: Shop) -> None:
    def settings() -> tuple[object, ...]:
        return *map(signal.getsignal, (signal.SIGTERM, signal.SIGINT)), sys.getswitchinterval()

    before, frozen = settings(), gc.get_freeze_count()
    with shop.center.worker() as worker:
        assert worker.ready.wait(PATIENCE)
        ids = [shop.center.submit("order.close", biz_id=1, delay=0.1)]
        ids.append(shop.center.submit("member.remind", biz_id=2, delay=0.1))
        shop.ran(1, 2)
        shop.ended(*ids)
        assert settings() == before
        assert gc.get_freeze_count() <= frozen, "what the application has loaded is not frozen"
    assert settings() == before
    late = shop.center.submit("order.close", biz_id=3, delay=0.1)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("toc-rows", "toc-beat", "toc-members"))], names
    with shop.center.worker():
        shop.ended(late)


def test_as_many_plain_handlers_run_at_once_as_the_setting_of_threads_allows(system: System) -> None:
    together = threading.Barrier(5)
    with TimeoutCenter(system.settings.model_copy(update={"threads": 8})) as center:
        center.handler("order.close")(lambda _task: together.wait(PATIENCE) and None)
        with center.worker():
            ids = center.submit_many([NewTask("order.close", n, 0.1) for n in range(5)])
            assert until(
                lambda: all(
                    task is not None and task.status is TaskStatus.PROCESSED for task in map(center.get, ids)
                )
            ), "five handlers have met"


def test_a_failure_of_ours_begins_the_pipeline_anew(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with shop.center.worker() as worker:
        shop.ended(shop.center.submit("order.close", biz_id=1, delay=0.1))
        assert worker._keeper is not None
        (life,) = worker._keeper._children.values()

        def fails(_now: float) -> float:
            raise RuntimeError("as the test wants")

        monkeypatch.setattr(life.worker.rows, "_slots", fails)
        life.worker.rows.look_now()
        shop.ended(shop.center.submit("order.close", biz_id=2, delay=0.1))
        assert life not in worker._keeper._children.values()


def test_a_handler_that_runs_while_something_of_ours_fails_runs_once(system: System) -> None:
    """Its thread cannot be stopped, and this process lives on."""
    runs, goes_on = list[int](), threading.Event()
    system.center.store.topics.create(Topic("order.ship", 3, 4))
    with TimeoutCenter(system.settings) as center:

        @center.handler("order.ship")
        def ship(task: Task) -> None:
            runs.append(task.attempt)
            assert task.biz_id == 2 or goes_on.wait(PATIENCE)

        with center.worker() as worker:
            job_id = center.submit("order.ship", biz_id=1, delay=0.1)
            assert until(lambda: bool(runs), PATIENCE)
            keeper = worker._keeper
            assert keeper is not None
            (life,) = keeper._children.values()
            life.worker.end_for("the test wants it")
            other = center.submit("order.ship", biz_id=2, delay=0.1)
            assert until(lambda: known(center.get(other)).status is TaskStatus.PROCESSED, PATIENCE)
            goes_on.set()
            assert until(lambda: known(center.get(job_id)).status is TaskStatus.PROCESSED, PATIENCE)
            assert runs == [1, 1], "once each"
            assert until(lambda: life not in keeper._children.values(), PATIENCE)


def _one_pipeline() -> bool:
    names = Counter(thread.name for thread in threading.enumerate())
    return (names["toc-poll"], names["toc-rows-0"], names["toc-beat"], names["toc-handler-0"]) == (1, 1, 1, 1)


def test_a_pipeline_that_could_not_begin_leaves_nothing_behind(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [OSError(errno.EMFILE, "Too many open files")] * 3

    def short(of: type[selectors.DefaultSelector] = selectors.DefaultSelector) -> selectors.DefaultSelector:
        if threading.current_thread().name == "toc-worker" and left:
            raise left.pop()
        return of()

    monkeypatch.setattr(selectors, "DefaultSelector", short)
    with shop.center.worker():
        shop.ended(shop.center.submit("order.close", biz_id=1, delay=0.1))
        assert not left
        assert until(_one_pipeline, PATIENCE), [thread.name for thread in threading.enumerate()]


def test_a_pipeline_whose_main_thread_fails_takes_nothing_more(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop.center.worker() as worker:
        shop.ended(shop.center.submit("order.close", biz_id=1, delay=0.1))
        keeper = worker._keeper
        assert keeper is not None
        (life,) = keeper._children.values()
        monkeypatch.setattr(life.worker.handover, "step", lambda _now: 1 / 0)
        assert until(lambda: life.worker_id not in list(keeper._children), PATIENCE)
        ids = [shop.center.submit("order.close", biz_id=number, delay=0.1) for number in range(2, 9)]
        shop.ended(*ids)
        assert until(_one_pipeline, PATIENCE), [thread.name for thread in threading.enumerate()]


def test_a_begin_without_a_thread_to_spare_is_made_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "OPEN_AGAIN_SECONDS", 0.1)
    refused: list[str] = []

    def first_away(of: TimeoutCenter) -> TimeoutCenter:
        monkeypatch.setattr(embedded, "apart", apart)
        raise StoreUnavailable(f"the server of {of.settings.cluster} is away, as the test wants")

    def start(thread: threading.Thread, then: Any = threading.Thread.start) -> None:
        if threading.current_thread().name == "toc-embedded" and len(refused) < 3:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        then(thread)

    monkeypatch.setattr(embedded, "apart", first_away)
    monkeypatch.setattr(threading.Thread, "start", start)
    with shop.center.worker():
        shop.ended(shop.center.submit("order.close", biz_id=1, delay=0.1))
        assert len(refused) == 3


def test_a_failure_where_the_database_is_asked_for_the_poller_begins_it_anew_and_the_hook_is_told(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread of its own waits for that: what the asking held would be held for good."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda error: told.append(error.exc_type))
    monkeypatch.setattr(loop, "_on_death", None)  # as in a process that had no worker before
    with shop.center.worker() as worker:
        assert worker.ready.wait(PATIENCE)
        assert worker._keeper is not None
        (life,) = worker._keeper._children.values()

        def fails(_entries: object) -> None:
            raise UnicodeError("as the test wants")

        monkeypatch.setattr(life.worker.leases, "judge", fails)
        job_id = shop.center.submit("order.close", biz_id=1, delay=0.5)
        shop.center.store.leases.identify("who is gone")
        assert shop.center.store.leases.take({job_id: 0}) == {job_id: True}
        shop.ended(job_id)
        assert told == [UnicodeError]
        theirs = threading.Thread(target=fails, name="mine")
        theirs.start()
        theirs.join()
        assert told == [UnicodeError, TypeError], "a thread of the application's harms nobody"
        assert life not in worker._keeper._children.values()


def test_a_handler_that_never_ends_is_charged_and_others_go_on(shop: Shop) -> None:
    with shop.center.worker(threads=1):
        shop.ended(shop.center.submit("member.remind", biz_id=3, delay=0.1, attribute={"leave": True}))
        stuck = shop.center.submit("order.close", biz_id=1, delay=0.1, attribute={"hang": True}, tries=1)
        shop.ran(1)
        other = shop.center.submit("order.close", biz_id=2, delay=0.1)
        shop.ended(other)
        assert known(shop.center.get(stuck)).status is TaskStatus.DEAD
        assert until(lambda: [one.member.lost_threads for one in living_workers(shop.center)] == [2])
        shop.hang.set()


def test_others_go_on_though_a_handler_that_may_runs_on_beside_one_that_never_ends(shop: Shop) -> None:
    with shop.center.worker(threads=2):
        may = shop.center.submit("member.remind", biz_id=1, delay=0.1, attribute={"hang": True})
        stuck = shop.center.submit("order.close", biz_id=2, delay=0.1, attribute={"hang": True}, tries=1)
        shop.ran(2)
        assert until(lambda: known(shop.center.get(stuck)).status is TaskStatus.DEAD), "it is charged"
        shop.ended(*shop.center.submit_many([NewTask("order.close", n, 0.1) for n in range(3, 9)]))
        shop.ended(*shop.center.submit_many([NewTask("member.remind", n, 0.1) for n in range(9, 12)]))
        assert known(shop.center.get(may)).status is TaskStatus.PENDING
        assert 1 not in {biz_id for _, biz_id, _ in shop.runs}, "it runs on"
        shop.hang.set()
        shop.ended(may)
        assert [biz_id for _, biz_id, _ in shop.runs].count(1) == 1
        assert known(shop.center.store.get(may)).attempts == 0


def test_a_child_of_the_application_that_lives_on_does_not_keep_a_pipeline_from_its_end(shop: Shop) -> None:
    with shop.center.worker(threads=1) as worker:
        assert worker.ready.wait(PATIENCE)
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        try:
            shop.center.submit("order.close", biz_id=1, delay=0.1, attribute={"hang": True}, tries=1)
            shop.ran(1)
            shop.ended(shop.center.submit("order.close", biz_id=2, delay=0.1))
            shop.hang.set()
            worker.stop()
            assert "toc-embedded" not in [thread.name for thread in threading.enumerate()]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_copy_that_a_handler_makes_ends_where_the_handler_returns(shop: Shop) -> None:
    with shop.center.worker(threads=1):
        tasks = [NewTask("order.close", 1, 0.1, attribute={"fork": True}), NewTask("order.close", 2, 0.1)]
        shop.ended(*shop.center.submit_many(tasks))
        assert shop.copies == [0]


def test_a_handler_that_would_wait_for_itself_is_told_so(shop: Shop) -> None:
    told: list[str] = []

    @shop.center.handler("order.stop")
    def stop(_task: Task) -> None:
        try:
            worker.stop()
        except InvalidInput as exc:
            told.append(str(exc))

    @shop.center.handler("order.end")
    async def end(task: Task) -> None:
        stop(task)

    shop.center.store.topics.create(Topic("order.stop", 3, 1))
    shop.center.store.topics.create(Topic("order.end", 4, 1))
    with shop.center.worker() as worker:
        tasks = [NewTask("order.stop", 1, 0.1), NewTask("order.end", 1, 0.1)]
        shop.ended(*shop.center.submit_many(tasks))
        assert ["outside of them" in text for text in told] == [True, True]


def _told(logs: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(one["event"] + one["source"] * (one["event"] == "topics_not_read") for one in logs)


def test_it_starts_while_the_database_is_away_and_works_once_that_is_back(
    shop: Shop, mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "OPEN_AGAIN_SECONDS", 0.1)
    with Proxy(mariadb.port) as proxy:
        proxy.refuse()
        urls = {"database_urls": [through(proxy, mariadb.url)]}
        with TimeoutCenter(shop.center.settings.model_copy(update=urls)) as center:
            center.handler("order.close")(shop.close)
            with structlog.testing.capture_logs() as starts, center.worker() as worker:
                with pytest.raises(InvalidInput, match="has a worker already"):
                    center.worker().start()
                assert not worker.ready.wait(0.3)
                proxy.accept()
                shop.ended(shop.center.submit("order.close", biz_id=1, delay=0.01))
                assert _told(starts)["worker_not_started"] == 1
                with structlog.testing.capture_logs() as logs:
                    proxy.refuse()
                    both = {"rows_not_taken", "sweep_failed"}
                    assert until(lambda: both <= set(_told(logs)), PATIENCE)
                    time.sleep(5)  # what is asked each second or two is asked again
                    proxy.accept()
                    assert until(lambda: "database_back" in _told(logs), PATIENCE)
                assert max(_told(logs).values()) == 1, logs
            proxy.refuse()
            with worker:
                assert not worker.ready.is_set()  # it ends without having begun anew


def test_a_start_that_only_an_operator_can_help_is_refused_and_may_be_made_again(
    shop: Shop, mariadb: MariaDB
) -> None:
    wrong = make_url(mariadb.url).set(password="wrong").render_as_string(hide_password=False)
    for urls in ([wrong], ["sqlite:////no/such/directory/toc.db"]):
        with TimeoutCenter(shop.center.settings.model_copy(update={"database_urls": urls})) as center:
            center.handler("order.close")(print)
            with pytest.raises(StoreUnavailable, match=r"TOC_DATABASE_URLS|unable to open"):
                center.worker().start()
    with shop.center.worker():
        shop.ended(shop.center.submit("order.close", biz_id=1, delay=0.01))


def test_a_worker_that_could_not_start_is_none_and_one_that_could_not_stop_is_one(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
        if thread.name == "toc-embedded":
            raise RuntimeError("can't start new thread")
        start(thread)

    worker, other = shop.center.worker(), shop.center.worker()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            worker.start()
    worker.start()
    shop.center.submit("order.close", biz_id=1, delay=0.01, attribute={"hang": True})
    shop.ran(1)
    monkeypatch.setattr(embedded, "LATE_SECONDS", 0.1 - shop.center.settings.shutdown_deadline)
    worker.stop()
    with pytest.raises(InvalidInput, match="has a worker already"):
        other.start()
    shop.hang.set()

    def starts() -> bool:
        with contextlib.suppress(InvalidInput):
            return bool(other.start())
        return False

    assert until(starts, PATIENCE)
    monkeypatch.undo()
    other.stop()


def test_what_cannot_be_is_refused(shop: Shop, system: System) -> None:
    with shop.center.worker() as worker:
        for threads in (0, -1, 1025):
            with pytest.raises(InvalidInput, match="1 to 1024 threads"):
                shop.center.worker(threads=threads)
        with pytest.raises(InvalidInput, match="has a worker already"):
            shop.center.worker().start()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                worker.start()
            except InvalidInput as exc:
                os.write(write, str(exc).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert b"before a fork" in os.read(read, 1000)
        for end in (read, write):
            os.close(end)
    apart = TimeoutCenter(system.settings.model_copy(update={"zookeeper": "localhost:1"}))
    apart.handler("order.close")(print)
    with pytest.raises(ConfigError, match="one daemon per host"):
        apart.worker().start()
    unknown = TimeoutCenter(system.settings)
    unknown.handler("order.unknown")(print)
    with pytest.raises(UnknownTopic):
        unknown.worker().start()
    unknown.close()


BARE = """
import sys
from threading import Event
sys.modules |= dict.fromkeys(["alembic", "kazoo", "prometheus_client", "rich", "typer"])  # not installed
from toc import TimeoutCenter
center, done = TimeoutCenter(), Event()
center.handler("order.close")(lambda task: done.set())
with center.worker():
    center.submit("order.close", biz_id=1, delay=0.1)
    print(done.wait(60))
"""


def test_it_needs_no_extra(system: System) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BARE], env=system.env, capture_output=True, text=True, check=False
    )
    assert run.stdout == "True\n", run.stderr


def test_a_try_has_its_span(system: System) -> None:
    system.settings = system.settings.model_copy(update={"traces": 1.0})
    within: dict[int, int] = {}
    with TimeoutCenter(system.settings) as center:

        @center.handler("order.close")
        def close(task: Task) -> None:
            within[task.job_id] = trace.get_current_span().get_span_context().trace_id

        with center.worker():
            job_id = center.submit("order.close", biz_id=1, delay=0.1)
            assert until(lambda: bool(within), PATIENCE), "it ran"
    assert within == {job_id: int(trace_id(job_id), 16)}


def test_an_application_starts_while_others_have_all_slots(shop: Shop) -> None:
    slots = {"order.close": "f", "member.remind": "f", "~tables": "f"}
    other = {"workers": {"other-0": member_values(Member("other-0", "h")) | {"slots": slots}}}
    members = shop.center.store.members
    members.join("other", "h", 1, 3_600_000, json.dumps(other))
    with shop.center.worker() as worker:
        assert until(lambda: len(members.list()) == 2, PATIENCE), "it has joined"
        assert not worker.ready.is_set(), "it has nothing yet"
        members.leave("other", "h")
        shop.ended(shop.center.submit("order.close", biz_id=1, delay=0.1))


def test_a_failure_where_slots_are_kept_is_tried_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with shop.center.worker() as worker:
        assert worker.ready.wait(PATIENCE)
        failed = threading.Event()
        assert worker._keeper is not None
        turn = worker._keeper._turn

        def fails() -> None:
            if failed.is_set():
                turn()
                return
            failed.set()
            raise RuntimeError("as the test wants")

        monkeypatch.setattr(worker._keeper, "_turn", fails)
        assert failed.wait(PATIENCE)
        shop.ended(shop.center.submit("order.close", biz_id=1, delay=0.1))
        assert shop.center.store.members.list(), "its row is there"


def test_what_it_did_and_what_is_pending_is_told(system: System, shop: Shop) -> None:
    later = [shop.center.submit("order.close", biz_id=number, delay=1800) for number in range(10, 13)]
    with shop.center.worker() as worker:
        assert worker.ready.wait(PATIENCE)
        ids = [shop.center.submit("order.close", biz_id=number, delay=0.1) for number in range(3)]
        shop.ended(*ids)
        assert "all members by `toc lateness`" in Top(shop.center).look().trouble[-1]
        doing = Doing(shop.center, "test", due.show.right)
        assert until(lambda: due.show.perform(doing, {})["total"]["hour"] == len(later), PATIENCE)
    found = hour(system.center.store.minutes, system.center.clock.now_ms() + MINUTE_MS)
    assert sum(tally[STARTS] for tally in found.topics["order.close"] if tally) == len(ids)
    assert [name.partition(".")[0] for name in found.members] == [f"{system.settings.host}-embedded"]


def test_doctor_names_what_waits_for_a_daemon(system: System, shop: Shop) -> None:
    job_id = shop.center.submit("order.close", biz_id=1, delay=0.05)
    soon = shop.center.clock.now_ms() + 1000
    shop.center.store.fail([Failure(job_id, 0, 0, 0, 3, system.settings.max_crashes, soon, "it died")])

    def told() -> bool:
        lines = doctor.examine(system.center)
        return any(line.of == "order.close" and "only a daemon" in line.what for line in lines)

    with shop.center.worker() as worker:
        assert worker.ready.wait(PATIENCE)
        assert until(lambda: shop.center.clock.now_ms() > soon + 1000), "it was put off"
        assert told()
    assert not shop.runs


SERVER = """
import sys, time
from toc import TimeoutCenter
center = TimeoutCenter()
@center.handler("order.close")
def close(task):
    print(task.biz_id, flush=True)
with center.worker() as worker:
    worker.ready.wait(60)
    print("ready", flush=True)
    time.sleep(120)
"""


def test_processes_share_the_work_and_one_that_dies_is_followed(system: System) -> None:
    servers = [
        subprocess.Popen([sys.executable, "-c", SERVER], env=system.env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"

        def owners() -> int:
            rows = system.center.store.members.list()
            masks = [json.loads(row.data).get("workers", {}) for row in rows if not row.dead]
            return sum(any(each["slots"].get("order.close") for each in one.values()) for one in masks)

        assert until(lambda: owners() == 2, PATIENCE), "both have slots"
        servers[0].kill()
        ids = [system.center.submit("order.close", biz_id=n, delay=0.1) for n in range(20)]

        def all_ended() -> bool:
            found = [system.center.get(job_id) for job_id in ids]
            return all(task is not None and task.status is TaskStatus.PROCESSED for task in found)

        assert until(all_ended, PATIENCE), "the other one has run all"
    finally:
        for server in servers:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()
