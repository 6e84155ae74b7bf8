"""How worker processes treat handlers: how many run at once, what is taken for them,
how long they may take."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest
from harness import calls
from harness.hands import SLOT, TOPIC, Hands, Pair, in_five_minutes, submit_due
from harness.patience import PATIENCE, until
from harness.rows import insert_many
from harness.system import System

from toc import NewTask, TaskStatus, TimeoutCenter, Topic
from toc.index.messages import Peek, PrepareRequest
from toc.model.clock import to_ms
from toc.model.errors import IndexUnavailable, StoreUnavailable
from toc.model.topic import Delivery, Slot
from toc.observe.board import own_board
from toc.observe.metrics import PENDING
from toc.store.servers.shards import Answers, Trouble
from toc.worker.check import FORGET_UNREAD_SECONDS, LUMP_MS, MAX_RETRY_MS, RETRY_MS
from toc.worker.daemon.slots import WorkerSlots
from toc.worker.entry import NO_LEASE, UNLEASED_SECONDS, Entry
from toc.worker.run import handler_calls
from toc.worker.take import poll
from toc.worker.take.poll import TAKE_LIMIT

# How worker processes treat handlers that take long, crash or never end, and how they leave.


def test_a_second_sigterm_gives_back_what_runs_at_once(system: System) -> None:
    system.create_topics()
    daemon = system.start("-h {\u00f6}%s", processes=1)  # a name may hold whatever is printable
    job_id = system.center.submit("test.sync", biz_id=1, delay=0.1, attribute={"sleep": 20})
    system.wait(lambda: bool(system.history()), "it has started", 5)
    daemon.terminate()
    system.wait(lambda: "daemon_stopping" in daemon.log.read_text(), "it is stopping", 5)
    daemon.terminate()
    daemon.process.wait(60)
    row = system.row(job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0)
    slot = system.center.catalog.get("test.sync").slot(row.slot_crc)
    peek = system.center.queues.peek([slot])[slot]
    assert not isinstance(peek, Exception)
    assert (peek.store, peek.prepared) == (1, 0)


def test_who_finds_that_a_process_must_be_replaced_does_not_mind_a_busy_main_thread(hands: Pair) -> None:
    """It has not read its wake-ups for long."""
    worker, _ = hands
    for _ in range(10_000):  # more than it holds
        worker.worker._bell()
    worker.worker._recycle("as the test wants")


def test_who_leaves_tells_no_more_what_comes_due_in_its_tables(system: System, hands: Pair) -> None:
    """Whoever has them from now on counts it too."""
    system.center.submit(TOPIC, biz_id=1, action_time=in_five_minutes())
    services = next(iter(hands)).worker.services
    (due,) = (loop for loop in services.loops if loop.name == "due")

    def told() -> float:
        return own_board().read().get((PENDING.metric.name, TOPIC, "hour"), [0.0])[0]

    before = told()
    services.add(system.center.store.tables)
    due.start()
    assert until(lambda: told() == before + 1)
    services.end()
    due.stop()
    assert told() == before


# How many handlers run at once: by topic, and whatever waits in front of a daemon.


def _start(system: System, *, concurrency: int, processes: int = 1) -> None:
    for biz_type, name in enumerate(calls.TOPICS, start=1):
        system.center.store.topics.create(Topic(name, biz_type, 4, concurrency=concurrency))
    system.start(app="harness.calls:center", processes=processes, threads=8)


def test_no_more_handlers_of_a_topic_run_at_once_than_it_allows(system: System) -> None:
    _start(system, concurrency=2)
    job_ids = [
        system.center.submit(topic, biz_id=n, delay=0.3 + n / 500, attribute={"sleep": 0.1})
        for n in range(40)
        for topic in calls.TOPICS
    ]
    system.wait(lambda: not system.pending(job_ids), "all have run", 20)
    most = {topic: calls.most_at_once(system.history_directory, topic)[0] for topic in calls.TOPICS}
    assert most == dict.fromkeys(calls.TOPICS, 2)


@pytest.mark.parametrize("topic", calls.TOPICS)
def test_a_limited_topic_holds_up_no_other_nor_is_much_of_it_taken_ahead(system: System, topic: str) -> None:
    _start(system, concurrency=1)
    for n in range(4):  # so that it is known to be slow
        job_id = system.center.submit(topic, biz_id=n, delay=0.1, attribute={"sleep": 0.5})
        system.wait(lambda: not system.pending([job_id]), "it has run", 10)  # noqa: B023
    slow = [system.center.submit(topic, biz_id=n, delay=0.1, attribute={"sleep": 600}) for n in range(40)]
    system.wait(lambda: calls.most_at_once(system.history_directory, topic)[1] == 5, "one runs", 5)
    others = [system.center.submit(other, biz_id=1, delay=0.2) for other in calls.TOPICS if other != topic]
    system.wait(lambda: not system.pending(others), "the others have run", 5)
    assert len(system.pending(slow)) == len(slow)
    slots = system.center.catalog.get(topic).slots()
    peeks = system.center.queues.peek(slots).values()
    assert 0 < sum(0 if isinstance(peek, Exception) else peek.prepared for peek in peeks) <= 30, "not all 40"
    system.daemons[0].kill()


def test_a_limit_that_is_raised_or_lifted_applies_to_what_waits_already(system: System) -> None:
    _start(system, concurrency=1)
    topics, history = ("call.thread", "call.coroutine"), system.history_directory
    for topic in topics:
        for n in range(20):
            system.center.submit(topic, biz_id=n, delay=0.1, attribute={"sleep": 600})

    def most() -> list[int]:
        return [calls.most_at_once(history, topic)[0] for topic in topics]

    system.wait(lambda: most() == [1, 1], "one of each runs", 5)
    for topic in topics:
        system.center.store.topics.alter(topic, concurrency=3)
    system.wait(lambda: most() == [3, 3], "three of each run", 6)
    for topic in topics:
        system.center.store.topics.alter(topic, concurrency=0)
    system.wait(lambda: min(most()) > 3, "more run", 6)
    system.daemons[0].kill()


def test_a_limit_that_is_lowered_below_what_runs_holds_up_no_other_topic(system: System) -> None:
    _start(system, concurrency=6)
    for n in range(20):
        system.center.submit("call.thread", biz_id=n, delay=0.1, attribute={"sleep": 600})
    history = system.history_directory
    system.wait(lambda: calls.most_at_once(history, "call.thread")[0] == 6, "all that may run do", 5)
    for n in range(20):
        system.center.submit("call.coroutine", biz_id=n, delay=0.1, attribute={"sleep": 600})
    system.wait(lambda: calls.most_at_once(history, "call.coroutine")[0] == 6, "as many of these", 5)
    system.center.store.topics.alter("call.thread", concurrency=1)
    system.center.store.topics.alter("call.coroutine", concurrency=8)
    system.wait(lambda: calls.most_at_once(history, "call.coroutine")[0] == 8, "the limits are known", 5)
    others = [system.center.submit("call.batch", biz_id=n, delay=0.2) for n in range(3)]
    system.wait(lambda: not system.pending(others), "the others have run", 5)
    system.daemons[0].kill()


def test_a_stop_gives_back_coroutines_that_wait_for_their_turn(system: System) -> None:
    _start(system, concurrency=1)
    quick = [system.center.submit("call.coroutine", biz_id=n, delay=0.1) for n in range(20)]
    system.wait(lambda: not system.pending(quick), "they are known to be quick: some may wait", 10)
    job_ids = [
        system.center.submit("call.coroutine", biz_id=n, delay=0.2, attribute={"sleep": 2}) for n in range(20)
    ]
    system.wait(lambda: calls.most_at_once(system.history_directory, "call.coroutine")[1] > 20, "one runs", 5)
    (daemon,) = system.daemons
    daemon.terminate()
    assert daemon.process.wait(60) == 0, system.logs()
    left = system.pending(job_ids)
    begun = calls.most_at_once(system.history_directory, "call.coroutine")[1] - len(quick)
    assert 0 < begun < 5, "the first, and the next on a machine that is slow to stop it"
    assert len(left) == len(job_ids) - begun
    assert all(system.center.store.read(left)[job_id].attempts == 0 for job_id in left)


# What a worker has taken and not finished is bounded, whatever is slow: if it dies, others wait for that.


def submit(system: System, count: int) -> list[int]:
    """Submit tasks; returns once they are due."""
    due = datetime.now(UTC)
    job_ids = system.center.submit_many([NewTask(TOPIC, number, 0.001) for number in range(count)])
    assert until(lambda: system.center.clock.now_ms() > to_ms(due) + 1, PATIENCE)
    return job_ids


def test_what_is_refused_for_want_of_a_lease_makes_no_room_for_more(
    system: System, hands: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers are slow and no lease comes: each second the whole line is refused, and comes back."""
    worker, _ = hands
    monkeypatch.setattr(handler_calls, "START_WITHIN_SECONDS", 100)
    monkeypatch.setattr(poll, "MAX_UNSTARTED", 300)
    submit(system, 1600)
    worker.begin()
    while worker.inflight.waiting(TOPIC) <= 300:
        assert until(lambda: worker.dispatcher.load()[TOPIC][0] == 1, PATIENCE), "none has started"
        worker.clock.slept += 2 * UNLEASED_SECONDS
        worker.end()  # so the thread meets the rest of the line
        assert until(lambda: worker.dispatcher.load()[TOPIC] == (0, 0), PATIENCE)
        worker.take()
    assert worker.inflight.waiting(TOPIC) < 300 + TAKE_LIMIT
    prepared = len(worker.snapshot())
    worker.take()
    assert len(worker.snapshot()) == prepared, "nothing more is taken"
    worker.leases.look(0)
    worker.finish()
    worker.take()
    assert until(lambda: worker.dispatcher.load()[TOPIC][0] == 1, PATIENCE), "they come back"
    worker.end()


def test_who_gives_back_an_entry_with_a_lease_does_not_wait_for_its_row(
    system: System, hands: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever it is may serve other servers: the entry waits for the thread of its own."""
    worker, _ = hands
    submit(system, 1)
    worker.take()
    (entry,) = worker.inflight.snapshot()
    asked: list[int] = []

    def release(job_ids: Iterable[int]) -> dict[int, Trouble]:
        asked.extend(job_ids)
        return {}

    monkeypatch.setattr(worker.store.leases, "release", release)
    assert not worker.leases.take([entry])
    worker.finisher.give_back([entry])
    assert not asked
    worker.finish()
    assert asked == [entry.job_id]


@pytest.mark.parametrize("by", ["flush", "thread that takes"])
def test_who_asks_while_a_move_fails_is_not_told_that_nothing_is_left_to_write(
    system: System, hands: Pair, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Its slot would be handed over although an entry is still there, or its process would end."""
    worker, _ = hands
    submit(system, 1)
    worker.take()
    (entry,) = worker.inflight.snapshot()
    worker.dispatcher.withdraw()
    looked, failed = threading.Event(), threading.Event()
    idle: list[bool] = []
    asks = threading.Thread(target=lambda: idle.append(worker.finisher.idle))

    class Queue(deque[Any]):
        """Who asks looks into it before the move has failed, and goes on after that."""

        def __bool__(self) -> bool:
            found = len(self) > 0
            if threading.current_thread() is asks:
                looked.set()
                assert failed.wait(PATIENCE)
            return found

    def rollback(entries: Iterable[Slot]) -> dict[Slot, IndexUnavailable]:
        worker.inflight.arrived([entry])
        asks.start()
        assert until(lambda: looked.is_set() or not asks.is_alive(), PATIENCE)
        return dict.fromkeys(entries, IndexUnavailable("as the test wants"))

    (flusher,) = worker.finisher.flushers
    monkeypatch.setattr(flusher, "_moves", Queue())
    monkeypatch.setattr(worker.queues, "rollback", rollback)
    if by == "flush":
        worker.finisher.give_back([entry])
        flusher.run_once()
    else:
        worker.finisher.put_away([(entry, worker.clock.now_ms())])
    failed.set()
    asks.join()
    assert idle == [False]
    assert not worker.finisher.idle


# A worker whose clock is set back by an hour: what it meant to do in a moment it does in a moment.

HOUR_MS = 3_600_000


@contextmanager
def an_hour_ahead(worker: Hands) -> Iterator[pytest.MonkeyPatch]:
    """Its clock is ahead; it is set back when this ends."""
    clock, now_ms, time = worker.clock, worker.clock.now_ms, worker.clock.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now_ms", lambda: now_ms() + HOUR_MS)
        patch.setattr(clock, "time", lambda: time() + HOUR_MS / 1000)
        yield patch


def unanswered(worker: Hands, error: Trouble, *, leased: bool = False) -> Callable[..., None]:
    """How the database server does not tell of rows."""

    def ask(job_ids: Iterable[int], take: Callable[..., None]) -> None:
        asked = list(job_ids)
        for entry in worker.inflight.snapshot():
            entry.lease = NO_LEASE._replace(possible=leased)
        take(asked, Answers({}, dict.fromkeys(asked, error)))

    return ask


def test_a_prepare_that_redis_serves_late_is_looked_for(system: System, hands: Pair) -> None:
    worker, _ = hands
    claim = worker.book.owned[SLOT].claim
    with an_hour_ahead(worker):
        worker.adopter.reply_lost(SLOT, claim)
        worker.adopt()
    submit_due(system)
    worker.queues.prepare([PrepareRequest(SLOT, 10, 3, claim)])
    worker.clock.slept += 1.0
    assert worker.adopter.run_once() < 10
    worker.turn()
    worker.start_and_wait()


def test_what_has_a_lease_and_waits_for_its_row_is_checked_again(system: System, hands: Pair) -> None:
    worker, _ = hands
    submit_due(system)
    error = StoreUnavailable("away")
    with an_hour_ahead(worker) as patch:
        patch.setattr(worker.checker.reader, "ask", unanswered(worker, error, leased=True))
        worker.take()
    assert worker.turn() < 1
    worker.clock.slept += 1.0
    worker.turn()
    worker.start_and_wait()


def test_what_is_put_away_comes_back(system: System, hands: Pair) -> None:
    worker, _ = hands
    away = unanswered(worker, StoreUnavailable("away"))
    submit_due(system)
    with an_hour_ahead(worker) as patch:
        patch.setattr(worker.checker.reader, "ask", away)
        worker.take()
    submit_due(system)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.checker.reader, "ask", away)
        worker.take()
    peek = worker.queues.peek([SLOT])[SLOT]
    assert isinstance(peek, Peek)
    assert (peek.store, peek.prepared) == (2, 0)
    assert peek.next_due is not None
    assert peek.next_due < worker.clock.now_ms() + 60_000


def test_a_server_that_has_been_away_for_long_makes_the_rows_of_no_other_wait(
    hands: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = hands
    servers: dict[int, int] = {}
    pauses: list[int] = []

    def put_away(pairs: Iterable[tuple[Entry, int]]) -> None:
        now = worker.clock.now_ms()
        pauses.extend(until - now for _, until in pairs)

    monkeypatch.setattr(worker.checker.reader, "ask", unanswered(worker, StoreUnavailable("away")))
    monkeypatch.setattr(worker.store, "server_of", servers.__getitem__)
    monkeypatch.setattr(worker.finisher, "put_away", put_away)
    for server in (0, 0, 1):
        servers[submit_due(hands.system)] = server
        worker.take()
        worker.clock.slept += FORGET_UNREAD_SECONDS - 1
    assert pauses[1] > MAX_RETRY_MS / 2
    assert pauses[2] <= RETRY_MS + LUMP_MS


def test_the_next_look_at_the_topics_assigns_a_new_one_and_comes_soon(system: System) -> None:
    """Its first task, such as a webhook, waits for it."""
    told: list[object] = []
    topics = WorkerSlots(system.center, system.settings, lambda: told.append(None)).topics
    topics.loop.turn()
    told.clear()
    system.center.store.topics.create(Topic("new", 77, 2, delivery=Delivery.WEBHOOK))
    assert topics.loop.turn() <= 0.05
    assert (len(told), topics.assigned()[0]["new"]) == (1, 2)


def test_a_daemon_with_zookeeper_says_so_in_the_rows_unless_another_does(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever leads: that host may be gone, or not reach the first database."""
    identity = system.center.store.identity
    with ExitStack() as stack:
        hosts = []
        for host in ("a", "b", "c", "d"):
            settings = system.settings.model_copy(update={"host": host, "zookeeper": "127.0.0.1:1"})
            center = stack.enter_context(TimeoutCenter(settings))
            hosts.append(WorkerSlots(center, settings, lambda: None).topics)
        first, second, third, fourth = hosts
        for one, said in ((first, ["a"]), (second, ["a"])):
            one.loop.turn()
            assert identity.marked_by() == said
        for one, said in ((second, ["a"]), (first, [])):
            one.stop()
            one.loop.turn()  # the last
            assert identity.marked_by() == said
        third.loop.turn()
        assert identity.marked_by() == ["c"]
        for host, seconds, said in (("c", 0, []), ("c", 9, ["c"]), ("d", 15, ["d"])):
            identity.mark(host, seconds * 1000)
            assert identity.marked_by() == said, "what holds for less than ten seconds is said again"
        monkeypatch.setattr(center.store.identity, "mark", Mock(side_effect=StoreUnavailable("read-only")))
        assert fourth.loop.turn() <= 0.05, "the topics can be read"


def test_the_death_of_a_task_that_expired_while_its_topic_was_paused_is_told_to_who_handles_it(
    system: System, hands: Pair
) -> None:
    worker, _ = hands
    dead: list[tuple[int, str]] = []
    worker.center.on_dead(lambda task, reason: dead.append((task.job_id, reason)))
    for topic in (TOPIC, "test.async"):
        system.center.store.topics.alter(topic, paused=True)
    now = worker.clock.now_ms()
    tried: dict[str, Any] = {"attempts": 1, "next_time": now - 90_000, "expires_at": now - 60_000}
    tasks = [NewTask(topic, 1, delay=1) for topic in (TOPIC, "test.async")]
    rows = [system.center._intake.submission(one, system.center.catalog.get).row for one in tasks]
    ours, theirs = insert_many(system.center.store, [row._replace(**tried) for row in rows])
    worker.center.catalog.refresh()
    services = worker.worker.services
    services.add(range(system.settings.tables))

    def ended() -> bool:
        for loop in services.loops:
            if loop.name.startswith("sweep"):
                worker.clock.slept += loop.turn()
        return not system.pending([ours, theirs])

    assert until(ended, PATIENCE)
    worker.center.hooks.flush(PATIENCE)
    assert dead == [(ours, "it has expired")]
