"""Orders of events in which a lease once came too late, or where none was due. See test_interleavings.py."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from harness.hands import SLOT, TOPIC, Hands, Pair, meanwhile, out_of_reach, submit_due
from harness.leases import taken
from harness.patience import PATIENCE, until
from harness.system import NewSystem

from benchmarks.local import MariaDB, RedisServer
from toc import TaskStatus
from toc.model.errors import StoreUnavailable
from toc.model.topic import Delivery
from toc.model.verdict import Failure
from toc.store.servers.shards import Answers, Trouble
from toc.store.tasks.batch import Guard
from toc.store.tasks.leases import Leases
from toc.store.tasks.scan import DueRow, Position
from toc.store.tasks.tries import TakeTries
from toc.worker.check import RETRY_MS
from toc.worker.control import Suspect
from toc.worker.entry import NO_FENCE, Held, State
from toc.worker.lease_keeper import AGAIN_SECONDS
from toc.worker.settle.finish import RETRY_SECONDS
from toc.worker.take.by_rows import OWNED_SECONDS

PREPARE_TIMEOUT = 30  # as the topic has it


def test_a_lease_that_is_asked_for_while_the_failure_is_written_is_not_given(hands: Pair) -> None:
    worker, other = hands
    job_id = worker.begin_one()
    worker.end(fails=True)
    meanwhile(hands.patch, worker.store.leases, "take", worker.finish)
    worker.ask_for_leases()
    assert hands.row(job_id).attempts == 1
    assert taken(other.store.leases, {job_id: 30}) == {job_id}, "the failed try has left a lease"


def test_a_lease_that_is_asked_for_while_the_entry_is_given_back_is_given_up(hands: Pair) -> None:
    worker, other = hands
    job_id = worker.take_one()

    def give_back() -> None:
        worker.finisher.give_back(worker.inflight.snapshot())
        worker.finish()

    meanwhile(hands.patch, worker.store.leases, "take", give_back)
    worker.ask_for_leases()
    worker.leases.look(0)
    assert taken(other.store.leases, {job_id: 30}) == {job_id}, "nothing runs, and there is a lease"


@pytest.mark.parametrize("orphaned", [False, True])
def test_what_waited_for_its_row_does_not_start_beside_a_new_holder(hands: Pair, orphaned: bool) -> None:
    """MySQL answered late, or its daemon is gone; the slot went to a worker that has no Redis."""
    first, second = hands
    if orphaned:
        first.lose_daemon()
    job_id = submit_due(hands.system)

    def ask(job_ids: Iterable[int], take: TakeTries) -> None:
        hands.patch.undo()
        first.clock.slept += 0 if orphaned else 3
        rows = first.store.read_tries(job_ids)
        assert taken(second.store.leases, {job_id: 30}) == {job_id}
        take([job_id], rows)

    hands.patch.setattr(first.checker.reader, "ask", ask)
    first.take()
    first.start()
    first.await_gone(job_id)
    assert not first.runs


def test_what_waits_long_for_its_row_starts_all_the_same(hands: Pair) -> None:
    """Each read takes longer than an entry may be old that starts without a lease."""
    first, second = hands
    job_id = submit_due(hands.system)

    def ask(job_ids: Iterable[int], take: TakeTries) -> None:
        rows = first.store.read_tries(job_ids)
        first.clock.slept += 2
        take([job_id], rows)

    hands.patch.setattr(first.checker.reader, "ask", ask)
    first.begin()
    assert second.store.read_tries([job_id])[job_id].lease > 0
    first.end_well(job_id)


def test_what_nobody_kept_alive_while_it_waited_for_its_row_gets_no_lease(hands: Pair) -> None:
    """It will not start, and another, who found that it had timed out, has begun it a moment ago."""
    first, second = hands
    job_id = submit_due(hands.system)

    def ask(job_ids: Iterable[int], take: TakeTries) -> None:
        hands.patch.undo()
        first.sleep()
        second.reclaim()
        second.begin()
        take([job_id], first.store.read_tries(job_ids))

    hands.patch.setattr(first.checker.reader, "ask", ask)
    first.take()
    first.leases.look(0)
    second.ask_for_leases()
    entry = second.held(job_id)
    assert entry.lease.until > 0
    second.end_well(job_id)


def begun_beside_a_sleeper(hands: Pair) -> int:
    """The first worker sleeps while it runs a task, the second reclaims and begins it; both want leases."""
    first, second = hands
    job_id = first.begin_one()
    first.sleep()
    second.reclaim()
    second.begin()
    first.leases.look(0)
    second.ask_for_leases()
    return job_id


def test_who_slept_while_it_ran_takes_no_lease_from_the_next_try(hands: Pair) -> None:
    """It has the slot again, its late failure is refused, and it has lost Redis: it looks at the table."""
    first, second = hands
    job_id = begun_beside_a_sleeper(hands)
    first.end_and_finish(fails=True)
    with out_of_reach(hands.redis):
        first.miss_redis()
        first.take_without_redis()
        assert first.inflight.get(job_id) is None, "it runs beside the newest try"
    second.end_well(job_id)


def test_who_slept_while_it_ran_does_not_reclaim_the_next_try(hands: Pair) -> None:
    """Whoever runs that has lost Redis since, but writes leases."""
    first, second = hands
    job_id = begun_beside_a_sleeper(hands)
    first.end_and_finish(fails=True)
    second.time_out()
    first.reclaim()
    assert hands.row(job_id).crashes == 1, "the newest try is charged while it runs"
    second.end_well(job_id)


def begun_and_leased_elsewhere(hands: Pair) -> int:
    """The first worker runs a task that Redis forgot; the second has taken it again, and leased its row."""
    first, second = hands
    job_id = first.begin_one()
    hands.redis.call("FLUSHALL")
    hands.center.queues.add({SLOT: [(job_id, float(hands.row(job_id).action_time))]})
    second.take()
    entry = second.held(job_id)
    assert not second.leases.take([entry])
    assert entry.lease.until
    return job_id


def test_a_failure_beside_a_lease_is_charged_once_its_holder_did_not_begin(hands: Pair) -> None:
    first, second = hands
    job_id = begun_and_leased_elsewhere(hands)
    first.end_and_finish(fails=True)
    assert first.inflight.get(job_id) is not None, "another try of it may start here before this one counts"
    second.worker.withdraw()
    second.finish()
    first.clock.slept += RETRY_SECONDS
    first.finish()
    row = hands.row(job_id)
    assert (row.attempts, row.crashes) == (1, 0)
    assert first.inflight.get(job_id) is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_failure_beside_a_lease_is_not_charged_once_its_holder_ended(hands: Pair, *, fails: bool) -> None:
    first, second = hands
    job_id = begun_and_leased_elsewhere(hands)
    second.start_and_wait()
    first.end_and_finish(fails=True)
    second.end_and_finish(fails=fails)
    first.clock.slept += RETRY_SECONDS
    first.finish()
    row = hands.row(job_id)
    expected = (TaskStatus.PENDING, 1) if fails else (TaskStatus.PROCESSED, 0)
    assert (row.status, row.attempts) == expected
    assert first.inflight.get(job_id) is None


def test_a_failure_waits_no_longer_than_prepare_timeout_for_the_holder_of_a_lease(hands: Pair) -> None:
    """Else a process could not leave before the other's try has ended."""
    first, second = hands
    job_id = begun_and_leased_elsewhere(hands)
    second.start_and_wait()
    first.end_and_finish(fails=True)
    first.clock.slept += PREPARE_TIMEOUT + RETRY_SECONDS
    first.finish()
    assert first.inflight.get(job_id) is None
    second.end_and_finish(fails=True)
    assert hands.row(job_id).attempts == 1


def test_who_slept_while_it_ran_under_a_lease_renews_it(hands: Pair) -> None:
    """As long as nobody has charged its try, no other runs: its entry and its lease ran out, no more."""
    first, second = hands
    job_id = first.begin_one()
    first.ask_for_leases()
    first.sleep()
    first.leases.look(0)
    entry = first.held(job_id)
    assert entry.lease.until > first.clock.monotonic()
    second.reclaim()
    assert hands.row(job_id).crashes == 0
    first.end_well(job_id)


def test_what_will_not_start_gives_its_lease_to_who_runs_it(hands: Pair) -> None:
    """Redis is emptied just before a worker without its daemon gets the lease by which it may start."""
    orphan, owner = hands
    orphan.lose_daemon()
    job_id = submit_due(hands.system)

    def begin_elsewhere() -> None:
        hands.redis.call("FLUSHALL")
        hands.center.queues.add({SLOT: [(job_id, float(hands.row(job_id).action_time))]})
        owner.begin()

    meanwhile(hands.patch, orphan.store.leases, "take", begin_elsewhere)
    orphan.take()
    owner.ask_for_leases()
    assert owner.store.read_tries([job_id])[job_id].lease > 0, "the one that waits has it"
    orphan.clock.slept += PREPARE_TIMEOUT / 3 + 1
    orphan.heartbeat.run_once()  # its entry is gone
    orphan.leases.look(0)
    orphan.finish()
    assert orphan.inflight.get(job_id) is None
    owner.clock.slept += AGAIN_SECONDS
    owner.leases.look(0)
    assert orphan.store.read_tries([job_id])[job_id].lease > 0, "the one that runs has it"
    owner.end_well(job_id)


def test_what_is_refused_its_start_gives_up_its_lease_before_it_is_let_go(hands: Pair) -> None:
    """It slept just before the start; nobody else has found that, and it runs uncharged."""
    first, second = hands
    job_id = first.take_one()
    first.ask_for_leases()
    assert taken(second.store.leases, {job_id: 30}) == set()
    entry = first.held(job_id)
    first.clock.slept += PREPARE_TIMEOUT + 1
    assert not first.inflight.start(entry, first.clock.monotonic())
    first.leases.look(0)
    first.finish()
    assert first.inflight.get(job_id) is None
    second.begin()
    assert [(task.attempt, task.job_id) for task in second.runs] == [(1, job_id)]


def test_what_is_refused_its_start_is_let_go_though_its_lease_is_gone(hands: Pair) -> None:
    """The keeper of leases is just renewing it, and learns that another has it."""
    first, second = hands
    job_id = first.take_one()
    entry = first.held(job_id)
    first.ask_for_leases()

    def refuse() -> None:
        assert not first.inflight.start(entry, first.clock.monotonic() + PREPARE_TIMEOUT)
        first.store.leases.release([job_id])
        assert taken(second.store.leases, {job_id: 30}) == {job_id}

    meanwhile(hands.patch, first.store.leases, "take", refuse)
    first.clock.slept += PREPARE_TIMEOUT / 3 + 1
    first.leases.look(0)
    assert entry.lease.until == 0
    first.leases.look(0)
    first.finish()
    assert first.inflight.get(job_id) is None


def test_what_is_refused_a_lease_asks_again_soon(hands: Pair) -> None:
    """Whoever has it may be about to give it up; until prepare_timeout / 3 much may happen."""
    first, second = hands
    job_id = first.begin_one()
    assert taken(second.store.leases, {job_id: 30}) == {job_id}
    first.ask_for_leases()
    second.store.leases.release([job_id])
    first.clock.slept += AGAIN_SECONDS
    first.leases.look(0)
    assert taken(second.store.leases, {job_id: 30}) == set()
    first.end_and_finish()


def suspected(hands: Pair) -> Suspect:
    """A due task that as many workers have not survived as it takes."""
    job_id = submit_due(hands.system)
    row, limit = hands.row(job_id), hands.system.settings.max_crashes
    crashed = Failure(job_id, row.version, 0, 0, 0, limit, row.next_time, None)
    assert hands.system.center.store.fail([crashed]) == {job_id: Guard.APPLIED}
    return Suspect(job_id, SLOT, row.version, 0, limit)


def test_a_run_alone_is_counted_and_keeps_its_lease(hands: Pair) -> None:
    """It has no fence, so it could take no first lease once it runs."""
    worker, other = hands
    suspect = suspected(hands)
    job_id, limit = suspect.job_id, suspect.crashes
    alone = worker.worker.alone
    alone.take(suspect, "")
    alone.run_once()
    worker.start_and_wait()
    entry = worker.held(job_id)
    assert hands.row(job_id).crashes == limit + 1, "it is counted"
    worker.clock.slept += PREPARE_TIMEOUT / 3 + 1
    worker.leases.look(0)
    assert entry.lease.until > 0
    assert taken(other.store.leases, {job_id: 30}) == set()
    worker.end_well(job_id)


@pytest.mark.parametrize("what", ["paused", "paused in between", "pulled"])
def test_a_suspect_whose_topic_is_paused_or_delivered_otherwise_does_not_run_alone(
    hands: Pair, what: str
) -> None:
    worker, _ = hands
    suspect, topics = suspected(hands), hands.system.center.store.topics

    def change() -> None:
        topics.alter(TOPIC, paused=True)
        if what == "pulled":
            assert topics.deliver(TOPIC, topics.get_with_version(TOPIC)[1], Delivery.PULL)
            topics.alter(TOPIC, paused=False)
        worker.dispatcher.follow_topics()

    if what == "paused in between":
        meanwhile(hands.patch, worker.store.leases, "take", change)
    else:
        change()
    alone = worker.worker.alone
    alone.take(suspect, "")
    alone.run_once()
    worker.start()
    worker.await_gone(suspect.job_id)
    alone.run_once()
    row = hands.row(suspect.job_id)
    assert (worker.runs, row.attempts, row.crashes) == ([], 0, suspect.crashes)


def test_only_who_has_owned_the_slot_for_long_takes_a_first_lease_without_redis(hands: Pair) -> None:
    """What it holds without lease and fence stands in a slot that may be another's by now."""
    first, second = hands
    job_id = submit_due(hands.system)
    entry = first.entry(job_id, NO_FENCE, held_seconds_ago=5)
    entry.row = first.store.read_tries([job_id])[job_id]
    assert first.inflight.hold_if_free(entry)
    first.leases.look(0)
    assert second.store.read_tries([job_id])[job_id].lease == 0


def test_a_lease_that_was_given_up_is_asked_for_anew(hands: Pair) -> None:
    """The id may be taken anew before its move begins; then it is asked for as for any other."""
    first, second = hands
    job_id = first.take_one()
    entry = first.held(job_id)
    assert not first.leases.take([entry])
    assert entry.lease.until
    again = first.entry(job_id, entry.fence, held_seconds_ago=5)

    def taken_anew() -> None:
        assert second.store.read_tries([job_id])[job_id].lease == 0
        assert first.inflight.hold(again) is Held.NEW

    meanwhile(hands.patch, first.inflight, "depart", taken_anew)
    first.finisher.give_back([entry])
    first.finish()
    assert first.inflight.get(job_id) is again
    again.row = entry.row
    first.leases.look(0)
    assert second.store.read_tries([job_id])[job_id].lease > 0


def test_a_worker_without_its_daemon_starts_nothing_without_a_lease(hands: Pair) -> None:
    """Another owns the slot as well by now, and takes what has no lease once it has lost Redis."""
    orphan, owner = hands
    job_id = orphan.take_one()
    orphan.lose_daemon()
    orphan.start()
    orphan.await_gone(job_id)  # what had no lease yet is let go
    orphan.adopt()
    orphan.await_runs(1)  # it is taken again, with a lease
    assert taken(owner.store.leases, {job_id: 30}) == set()
    orphan.end_well(job_id)


def test_a_worker_without_its_daemon_asks_again_for_a_lease_and_starts_others_meanwhile(hands: Pair) -> None:
    orphan, _ = hands
    orphan.lose_daemon()
    refused = submit_due(hands.system)
    take = orphan.store.leases.take

    def one_is_away(seconds: Mapping[int, int], *more: Any) -> Answers[bool]:
        found = take({job_id: lasts for job_id, lasts in seconds.items() if job_id != refused}, *more)
        if refused in seconds:
            found.unanswered[refused] = StoreUnavailable("as the test wants")
        return found

    hands.patch.setattr(orphan.store.leases, "take", one_is_away)
    orphan.take()
    started = orphan.begin_one()
    assert [run.job_id for run in orphan.runs] == [started]
    orphan.end_and_finish()
    hands.patch.undo()
    orphan.clock.slept += RETRY_MS / 1000
    orphan.turn()
    orphan.await_runs(2)
    orphan.end_and_finish()
    assert hands.row(refused).status == TaskStatus.PROCESSED


def test_without_redis_a_database_server_that_hangs_delays_no_task_of_another(
    new_system: NewSystem, clean_redis: RedisServer, mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = new_system(database_urls=[mariadb.url, mariadb.url.replace("127.0.0.1", "localhost")])
    system.create_topics(slots=1)
    worker = Hands(system, clean_redis, "a:1")
    hanging, _ = worker.store.tables_of_server()
    page, release = worker.store.scans.page, threading.Event()

    def hangs(starts: Mapping[int, Position], *more: Any, **named: Any) -> Answers[list[DueRow]]:
        if not starts.keys().isdisjoint(hanging):
            release.wait()
        return page(starts, *more, **named)

    monkeypatch.setattr(worker.store.scans, "page", hangs)
    job_ids = [system.client.submit(TOPIC, biz_id=biz_id, delay=0.01) for biz_id in range(20)]
    others = {job_id for job_id in job_ids if worker.store.server_of(job_id) == 1}
    with out_of_reach(clean_redis):
        worker.miss_redis()
        for loop in worker.worker.rows.loops:
            loop.start()
        try:
            assert until(lambda: others <= {entry.job_id for entry in worker.inflight.snapshot()}, PATIENCE)
        finally:
            release.set()
            for loop in worker.worker.rows.loops:
                loop.stop()
    worker.close()


def test_what_was_refused_its_start_is_given_back_while_another_database_server_hangs(
    new_system: NewSystem, clean_redis: RedisServer, mariadb: MariaDB
) -> None:
    system = new_system(database_urls=[mariadb.url, mariadb.url.replace("127.0.0.1", "localhost")])
    system.create_topics(slots=1)
    worker = Hands(system, clean_redis, "a:1")
    job_id = submit_due(system)
    while worker.store.server_of(job_id) != 1:
        job_id = submit_due(system)
    worker.take()
    worker.sleep()
    worker.start()
    assert until(lambda: worker.held(job_id).state is State.REFUSED, PATIENCE)
    worker.leases.look(1)  # that of the other server does not return
    worker.finish()
    assert worker.inflight.get(job_id) is None
    worker.close()


def test_a_worker_without_its_daemon_takes_nothing_without_redis(hands: Pair) -> None:
    """Another owns the slot as well by now: with Redis back, it may have begun what has no lease yet."""
    orphan, owner = hands
    job_id = submit_due(hands.system)
    orphan.lose_daemon()
    with out_of_reach(hands.redis):
        for worker in (orphan, owner):
            worker.miss_redis()
            worker.take_without_redis()
        assert orphan.inflight.get(job_id) is None
        assert owner.inflight.get(job_id) is not None


@pytest.mark.parametrize("during", ["page", "take"])
def test_a_slot_handed_over_during_a_look_without_redis_is_its_new_owners(hands: Pair, during: str) -> None:
    """The look takes longer than the handover waits, and Redis is back."""
    former, owner = hands
    job_id = submit_due(hands.system)
    with out_of_reach(hands.redis):
        former.miss_redis()

    def hand_over() -> None:
        former.book.give_up([SLOT])
        owner.begin()

    meanwhile(hands.patch, former.store.scans if during == "page" else former.store.leases, during, hand_over)
    former.take_without_redis()
    former.start()
    former.finish()
    former.await_gone(job_id)
    assert not former.runs
    owner.end_well(job_id)


@pytest.mark.parametrize("during", ["page", "take"])
def test_who_leaves_during_a_look_without_redis_waits_for_what_it_takes(hands: Pair, during: str) -> None:
    """Else its leases stay behind, and cost the tasks a try."""
    leaving, other = hands
    job_id = submit_due(hands.system)
    settled: list[bool] = []
    with out_of_reach(hands.redis):
        leaving.miss_redis()

    def leave() -> None:
        leaving.worker.book.leave()
        leaving.book.give_up([SLOT])
        settled.append(leaving.worker.settled)

    meanwhile(hands.patch, leaving.store.scans if during == "page" else leaving.store.leases, during, leave)
    leaving.take_without_redis()
    assert settled == [False]
    leaving.finish()
    assert leaving.worker.settled
    assert taken(other.store.leases, {job_id: 30}) == {job_id}, "a lease was left behind"


def unanswered(monkeypatch: pytest.MonkeyPatch, leases: Leases) -> None:
    """The next request for leases is executed, and its answer is lost."""
    take = leases.take

    def lost(seconds: Mapping[int, int], *more: Any) -> Answers[bool]:
        monkeypatch.setattr(leases, "take", take)
        take(seconds, *more)
        return Answers({}, dict.fromkeys(seconds, StoreUnavailable("as the test wants")))

    monkeypatch.setattr(leases, "take", lost)


def test_a_lease_whose_answer_was_lost_is_given_up_by_who_leaves(hands: Pair) -> None:
    """It would look like a crash, as soon as its worker is known to be gone."""
    leaving, other = hands
    job_id = submit_due(hands.system)
    unanswered(hands.patch, leaving.store.leases)
    with out_of_reach(hands.redis):
        leaving.miss_redis()
        leaving.take_without_redis()
    assert other.store.read_tries([job_id])[job_id].lease > 0
    leaving.worker.book.leave()
    leaving.take_without_redis()
    leaving.finish()
    assert leaving.worker.settled
    assert taken(other.store.leases, {job_id: 30}) == {job_id}, "a lease was left behind"


def test_a_lease_whose_answer_was_lost_is_given_up_with_its_entry(hands: Pair) -> None:
    worker, other = hands
    job_id = worker.take_one()
    unanswered(hands.patch, worker.store.leases)
    worker.ask_for_leases()
    worker.finisher.give_back(worker.inflight.snapshot())
    worker.finish()
    assert taken(other.store.leases, {job_id: 30}) == {job_id}, "a lease was left behind"


def test_who_leaves_waits_for_the_lease_that_it_has_asked_for(hands: Pair) -> None:
    """The entry is given back before the request is executed."""
    leaving, other = hands
    job_id = leaving.take_one()
    settled: list[bool] = []

    def leave() -> None:
        leaving.book.leave()
        leaving.finisher.give_back(leaving.inflight.snapshot())
        leaving.finish()
        settled.append(leaving.worker.settled)

    meanwhile(hands.patch, leaving.store.leases, "take", leave)
    leaving.ask_for_leases()
    settled.append(leaving.worker.settled)
    leaving.leases.look(0)
    assert settled == [False, False]
    assert leaving.worker.settled
    assert taken(other.store.leases, {job_id: 30}) == {job_id}, "a lease was left behind"


def test_a_lease_that_could_not_be_given_up_is_given_up_later(hands: Pair) -> None:
    """Its server is away for a moment. Who leaves waits for that: the task has not run."""
    leaving, other = hands
    job_id = leaving.take_one()
    entry = leaving.held(job_id)
    assert not leaving.leases.take([entry])
    release = leaving.store.leases.release

    def away(job_ids: Iterable[int]) -> dict[int, Trouble]:
        hands.patch.setattr(leaving.store.leases, "release", release)
        return dict.fromkeys(job_ids, StoreUnavailable("as the test wants"))

    hands.patch.setattr(leaving.store.leases, "release", away)
    leaving.book.leave()
    leaving.finisher.give_back([entry])
    leaving.finish()
    settled = [leaving.worker.settled]
    leaving.leases.look(0)
    settled.append(leaving.worker.settled)
    assert settled == [False, True]
    assert taken(other.store.leases, {job_id: 30}) == {job_id}, "a lease was left behind"


def test_a_worker_that_stood_still_waits_whether_its_slots_are_still_its_own(hands: Pair) -> None:
    """Others may have had them for seconds, with Redis back."""
    sleeper, other = hands
    job_id = submit_due(hands.system)
    with out_of_reach(hands.redis):
        sleeper.miss_redis()
        sleeper.stand_still(3)
        sleeper.take_without_redis()
        assert sleeper.inflight.get(job_id) is None
        sleeper.clock.slept += OWNED_SECONDS
        sleeper.take_without_redis()
        assert sleeper.inflight.get(job_id) is not None
    assert taken(other.store.leases, {job_id: 30}) == set()


def test_a_worker_that_waits_for_a_second_has_not_stood_still(hands: Pair) -> None:
    worker, other = hands
    job_id = submit_due(hands.system)
    worker.stand_still(1.1)
    worker.begin()
    assert taken(other.store.leases, {job_id: 30}) == {job_id}, "it runs for a moment only"
    worker.end_and_finish()
