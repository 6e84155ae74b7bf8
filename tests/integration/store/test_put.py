"""Replacing: one task per name, with the body of its version, a request done once;
puts of many in one transaction."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from fault.kit.proxy import Proxy, through
from harness.leases import taken
from harness.rows import NewRow, known, put

from toc.model.errors import DedupConflict, RequestReused, StoreUnavailable, SubmitUnknown, TaskExists
from toc.model.pull import AckOutcome, PullLease
from toc.model.sharding import BizId
from toc.model.task import Content, OnConflict, Put, PutOutcome, Request, Submission, TaskRow, TaskStatus
from toc.model.verdict import Failure
from toc.store.servers.server import Lost, Statement
from toc.store.servers.sqlite import SqliteConnection
from toc.store.store import Store
from toc.store.tasks.plan import Stored
from toc.store.tasks.pulls import HandOut

# Replacing: one task per name, with the body of its version; a request is done once, whatever is lost.

NEW, KEPT = PutOutcome.NEW, PutOutcome.KEPT
REPLACED, MAY_HAVE_STARTED = PutOutcome.REPLACED, PutOutcome.MAY_HAVE_STARTED


def with_body(row: TaskRow, data: bytes) -> tuple[TaskRow, Content]:
    content = Content("x/y", data)
    return row._replace(body_length=len(data), body_sha256=content.fingerprint()), content


def named(new_row: NewRow, first: TaskRow, **values: Any) -> TaskRow:
    """Another row with the name of the first."""
    values = {"biz_type": first.biz_type, "dedup_key": first.dedup_key, **values}
    return new_row(first.biz_id if first.biz_key is None else first.biz_key, **values)


def body_of(store: Store, row: TaskRow) -> bytes | None:
    content = store.bodies.read({row.job_id: row.version}).whole().get(row.job_id)
    return None if content is None else content.data


def as_stored(store: Store, job_id: int) -> TaskRow:
    return known(store.get(job_id))


def of_name(store: Store, row: TaskRow, *types: int) -> list[TaskRow]:
    """The rows that have the row's name."""
    found = store.read(all_of(store, row))
    return [
        one
        for one in found.values()
        if one.dedup_key == row.dedup_key and one.biz_type in (types or (row.biz_type,))
    ]


def all_of(store: Store, row: TaskRow) -> list[int]:
    return [one.job_id for one in store.find(BizId.of(row.biz_key or row.biz_id))]


def test_a_pending_task_keeps_its_id_and_gets_everything_else_anew(store: Store, new_row: NewRow) -> None:
    old, content = with_body(new_row(dedup_key="k", tries=3, attribute='{"a":1}'), b"old")
    assert put(store, old, content).put == (old.job_id, NEW)
    store.fail([Failure(old.job_id, 0, 0, 0, 1, 0, old.next_time, "boom")])
    later = old.action_time + 60_000
    new, content = with_body(
        named(new_row, old, action_time=later, attribute='{"a":2}', expires_at=later + 5), b"new"
    )
    stored = put(store, new, content)
    assert stored.put == (old.job_id, MAY_HAVE_STARTED), "a try has failed"
    assert stored.inserted is None
    now = as_stored(store, old.job_id)
    assert (now.version, now.attempts, now.crashes, now.tries) == (1, 0, 0, 0)
    assert (now.action_time, now.next_time, now.expires_at) == (later, later, later + 5)
    assert (now.attribute, now.gmt_create) == ('{"a":2}', old.gmt_create)
    assert body_of(store, now) == b"new"
    assert body_of(store, old) is None, "that of the former version is gone"

    same, content = with_body(named(new_row, old, action_time=later + 1), b"new")
    assert put(store, same, content).put.job_id == old.job_id
    now = as_stored(store, old.job_id)
    assert (now.version, body_of(store, now)) == (2, b"new")
    assert put(store, named(new_row, old)).put.job_id == old.job_id
    now = as_stored(store, old.job_id)
    assert (now.version, now.body_length, body_of(store, now)) == (3, None, None)


def test_replacing_before_the_time_of_a_task_that_is_not_taken_is_sure(store: Store, new_row: NewRow) -> None:
    row = new_row(dedup_key="k")
    put(store, row)
    assert put(store, named(new_row, row)).put == (row.job_id, REPLACED)
    due = new_row(dedup_key="k", action_time=int(time.time() * 1000) - 5)
    put(store, due)
    assert put(store, named(new_row, due)).put == (due.job_id, MAY_HAVE_STARTED), "it was due"


def test_a_leased_task_is_replaced_and_the_lease_stays(store: Store, new_row: NewRow) -> None:
    row = new_row(dedup_key="k")
    put(store, row)
    store.leases.identify("worker-one")
    assert taken(store.leases, {row.job_id: 30}) == {row.job_id}
    stored = put(store, named(new_row, row))
    assert stored.put == (row.job_id, MAY_HAVE_STARTED)
    assert as_stored(store, row.job_id).version == 1
    store.leases.identify("worker-two")
    assert taken(store.leases, {row.job_id: 30}) == set(), "until it has ended, nobody runs the new version"


def test_a_handed_out_task_is_replaced_and_due_after_its_hand_out(store: Store, new_row: NewRow) -> None:
    row = new_row(dedup_key="k", action_time=int(time.time() * 1000) - 10)
    put(store, row)
    nonce = secrets.token_bytes(16)
    given = store.pulls.hand_out(
        [HandOut(row.job_id, 7, 3, 3_600_000, nonce)], int(time.time() * 1000)
    ).whole()
    ends = given[row.job_id].next_time
    assert put(store, named(new_row, row)).put == (row.job_id, MAY_HAVE_STARTED)
    now = store.pulls.read([row.job_id])[row.job_id]
    assert (now.version, now.attempts, now.nonce, now.next_time) == (1, 0, b"", ends)
    lease = PullLease(row.job_id, 0, 7, 0, nonce)
    assert store.pulls.ack([lease]).whole() == {row.job_id: AckOutcome.REPLACED}
    late = named(new_row, row, action_time=ends + 1000)
    put(store, late)
    assert store.pulls.read([row.job_id])[row.job_id].next_time == ends + 1000


# --- requests


def test_answers_are_forgotten_after_their_retention(store: Store, new_row: NewRow) -> None:
    request, row = Request.of("", secrets.token_hex(), b""), new_row()
    put(store, row, request=request)
    databases = range(4 if len(store.tables_of_server()) > 1 else 1)
    for number in databases:
        store.requests.purge(number, 60_000)
    assert store.requests.answer(request, BizId.of(row.biz_id)) is not None
    for number in databases:
        store.requests.purge(number, -60_000)
    assert store.requests.answer(request, BizId.of(row.biz_id)) is None


@pytest.mark.parametrize("by", ["request", "dedup_key"])
def test_what_was_answered_before_is_asked_once_of_a_server_that_hangs(
    mysql_place: Any, proxy: Proxy, new_row: NewRow, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Who asks next has an answer at once: a thread that all share would wait."""
    row, request = new_row(dedup_key="k"), Request.of("", secrets.token_hex(), b"")
    with closing(mysql_place.open(urls=[through(proxy, mysql_place.urls[0])], read_timeout=1)) as store:
        answer = partial(store.requests.answer, request, BizId.of(row.biz_id))
        before = answer if by == "request" else partial(store.kept, Submission(row))
        assert before() is None
        proxy.stall()
        with pytest.raises(StoreUnavailable):
            before()
        assert store.away(0)
        with monkeypatch.context() as asked:
            asked.setattr(store._shards.servers[0], "run", None)
            asked.setattr(store._shards.health[store._shards.servers[0]], "examine", None)
            with pytest.raises(StoreUnavailable):
                before()
        proxy.flow()


def test_what_was_answered_before_is_asked_again_if_the_connection_breaks(
    through_proxy: Store, proxy: Proxy
) -> None:
    answer = partial(through_proxy.requests.answer, Request.of("", secrets.token_hex(), b""), BizId.of(1))
    assert answer() is None  # and a connection is open
    proxy.eat(b"SELECT request_key")
    assert answer() is None
    assert proxy.stats.eaten == 1


def test_a_claim_waits_for_its_answer_alone(mysql_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for as long as an answer may take, nor for that to another question."""
    for server, health in mysql_store._shards.health.items():
        server.now_ms()  # so that a connection is open
        monkeypatch.setattr(health, "examine", None)
    key = secrets.token_hex()
    for body, bound in ((b"a", 0), (b"a", 0), (b"b", 1)):
        assert len(mysql_store.requests.claim_each([(Request.of("", key, body), None)])) == bound


def test_a_change_whose_answer_is_lost_is_made(through_proxy: Store, proxy: Proxy, new_row: NewRow) -> None:
    """With a request, and without: that looks for its change on the row."""
    for request in (None, Request.of("", secrets.token_hex(), b"")):
        row = new_row(dedup_key="k")
        proxy.eat(b"INSERT INTO")
        other = request and Request.of("", secrets.token_hex(), b"")
        assert put(through_proxy, row, request=other).put == (row.job_id, NEW)
        proxy.eat(b"SET version=version+1")
        assert put(through_proxy, named(new_row, row), request=request).put == (row.job_id, REPLACED)
        assert as_stored(through_proxy, row.job_id).version == 1
        proxy.eat(b"SET version=version+1")
        body, content = with_body(named(new_row, row), b"x")
        assert put(through_proxy, body, content).put == (row.job_id, REPLACED)
        now = as_stored(through_proxy, row.job_id)
        assert (now.version, body_of(through_proxy, now)) == (2, b"x")
        through_proxy.finish([(row.job_id, 2)])
        again = named(new_row, row)
        proxy.eat(b"COMMIT")
        assert put(through_proxy, again).put == (again.job_id, NEW)
        assert of_name(through_proxy, row, 7) == [again]


@dataclass
class Between:
    one: Store
    other: Store
    steps: list[Callable[[], object]] = field(default_factory=list)

    def lose(self) -> None:
        """The change does not reach the server."""
        raise Lost("the connection")


@pytest.fixture
def between(sqlite_place: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Between]:
    """Two stores, and what the second does once, between the first's read of a row and its change."""
    with closing(sqlite_place.open()) as one, closing(sqlite_place.open()) as other:
        found = Between(one, other)
        execute = SqliteConnection.execute

        def interrupted(connection: SqliteConnection, statements: Any, *how: Any) -> Any:
            if found.steps and any("version=version+1" in statement.sql for statement in statements):
                steps, found.steps = found.steps, []
                for step in steps:
                    step()
            return execute(connection, statements, *how)

        monkeypatch.setattr(SqliteConnection, "execute", interrupted)
        yield found


def test_a_change_that_did_not_reach_the_server_is_not_taken_for_anothers_that_did(
    between: Between, new_row: NewRow
) -> None:
    row = new_row(dedup_key="k")
    put(between.one, row)
    wanted = named(new_row, row)
    between.steps = [lambda: put(between.other, wanted), between.lose]
    expires = wanted.action_time + 60_000
    assert put(between.one, wanted._replace(tries=1, expires_at=expires)).put == (row.job_id, REPLACED)
    now = as_stored(between.one, row.job_id)
    assert (now.version, now.tries, now.expires_at) == (2, 1, expires)


@pytest.mark.parametrize("many", [False, True])
def test_a_try_may_have_begun_before_a_replacement_that_is_written_after_its_time(
    between: Between, new_row: NewRow, many: bool
) -> None:
    rows = [new_row(dedup_key="k", action_time=time.time_ns() // 1_000_000 + 2000) for _ in range(1 + many)]
    for row in rows:
        put(between.one, row)
    due = max(row.action_time for row in rows) / 1000
    between.steps = [lambda: time.sleep(max(0.0, due - time.time()))]
    asked = [Submission(named(new_row, row), None, OnConflict.REPLACE) for row in rows]
    outcomes = between.one.put_each(asked)
    assert [one.put for one in outcomes if isinstance(one, Stored)] == [
        (row.job_id, MAY_HAVE_STARTED) for row in rows
    ]


def test_a_lost_change_is_unknown_once_others_have_changed_the_task_twice(
    between: Between, new_row: NewRow
) -> None:
    """It may have been the first of both: done again, it would undo the second."""
    row = new_row(dedup_key="k")
    put(between.one, row)
    theirs = named(new_row, row)._replace(action_time=row.action_time + 1000)
    between.steps = [lambda: put(between.other, theirs), lambda: put(between.other, theirs), between.lose]
    with pytest.raises(SubmitUnknown):
        put(between.one, named(new_row, row))
    now = as_stored(between.one, row.job_id)
    assert (now.version, now.action_time) == (2, theirs.action_time)


def test_a_task_that_is_cancelled_before_its_change_is_not_said_to_be_replaced(
    between: Between, new_row: NewRow
) -> None:
    row = new_row(dedup_key="k")
    put(between.one, row)
    between.steps = [lambda: between.other.cancel_many([row.job_id])]
    wanted = named(new_row, row)
    assert put(between.one, wanted).put == (wanted.job_id, NEW)
    assert as_stored(between.one, row.job_id).status == TaskStatus.CANCELLED
    assert of_name(between.one, row) == [wanted]


# Puts of many callers in one transaction: each has its own outcome, and nothing is done twice.

replacing = partial(Submission, on_conflict=OnConflict.REPLACE)


def request(payload: bytes = b"") -> Request:
    return Request.of("token /path", secrets.token_hex(), payload)


def put_all(store: Store, wanted: Sequence[Submission]) -> list[Put]:
    """Put all as the batcher does: together, and by itself what cannot go so."""
    done = []
    for one, outcome in zip(wanted, store.put_each(wanted), strict=True):
        stored = store.put_each([one])[0] if outcome is None else outcome
        if not isinstance(stored, Stored):
            assert stored is not None
            raise stored
        done.append(stored.put)
    return done


def of_one_server(store: Store, new_row: NewRow, count: int, **values: Any) -> list[TaskRow]:
    """New rows in tables of the first server."""
    rows: list[TaskRow] = []
    while len(rows) < count:
        row = new_row(**values)
        if store.server_of(row.job_id) == 0:
            rows.append(row)
    return rows


def test_each_of_many_has_the_outcome_that_it_would_have_alone(store: Store, new_row: NewRow) -> None:
    rows = of_one_server(store, new_row, 8, dedup_key="k", attribute='{"a":1}')
    new, pending, ended, kept, conflict, taken, answered, reused = rows
    for row in (pending, ended, kept, conflict, taken):
        put(store, row)
    store.finish([(ended.job_id, 0)])
    before, used, fresh, keeps = request(), request(b"one"), request(), request()
    was = as_stored(store, ended.job_id)
    put(store, answered, request=before)
    put(store, reused, request=used)
    (unnamed,) = of_one_server(store, new_row, 1)
    another = new_row(unnamed.biz_id)
    again, body = named(new_row, ended), with_body(named(new_row, pending, action_time=new.action_time), b"x")
    wanted = [
        replacing(new),
        replacing(*body),
        replacing(again),
        replacing(named(new_row, kept, attribute='{"a":1}'), on_conflict=OnConflict.KEEP, request=keeps),
        replacing(named(new_row, conflict), on_conflict=OnConflict.KEEP, request=request()),
        replacing(named(new_row, taken), on_conflict=OnConflict.ERROR),
        replacing(named(new_row, answered), request=before),
        replacing(named(new_row, reused), request=used._replace(payload=request().payload)),
        replacing(unnamed, request=fresh),
        replacing(another, request=fresh._replace(payload=request().payload[::-1])),
        replacing(named(new_row, new)),
    ]
    outcomes = store.put_each(wanted)
    told = [one.put if isinstance(one, Stored) else one for one in outcomes]
    assert told[:4] == [
        (new.job_id, NEW),
        (pending.job_id, REPLACED),
        (again.job_id, NEW),
        (kept.job_id, KEPT),
    ]
    assert isinstance(told[4], DedupConflict)
    assert isinstance(told[5], TaskExists)
    assert told[6] == (answered.job_id, NEW)
    assert isinstance(told[7], RequestReused)
    assert told[8] == (unnamed.job_id, NEW)
    assert isinstance(told[9], RequestReused | None), "whether the name was claimed or goes with the first"
    assert isinstance(store.put_each([wanted[9]])[0], RequestReused)
    assert told[10] in (None, (new.job_id, REPLACED)), "the name of the first: it goes after it, or by itself"
    now = as_stored(store, pending.job_id)
    assert (now.version, body_of(store, now)) == (1, b"x")
    assert as_stored(store, ended.job_id) == was._replace(dedup_key=None)
    assert {as_stored(store, row.job_id).version for row in (kept, conflict, taken, answered, reused)} == {0}
    assert put(store, unnamed, request=fresh).put == (unnamed.job_id, NEW), "it is remembered"
    store.finish([(kept.job_id, 0)])
    repeated = put(store, named(new_row, kept), on_conflict=OnConflict.KEEP, request=keeps)
    assert repeated.put == (kept.job_id, KEPT)


def test_many_are_one_transaction(mysql_store: Store, new_row: NewRow) -> None:
    rows = of_one_server(mysql_store, new_row, 50, dedup_key="k")
    half = rows[:25]
    for row in half:
        put(mysql_store, row)
    server = mysql_store._shards.servers[0]

    def commits() -> int:
        (result,) = server.run([Statement("SHOW GLOBAL STATUS LIKE 'Com_commit'")])
        return int(result.rows[0][1])

    before = commits()
    wanted = [*(named(new_row, row) for row in half), *rows[25:]]
    outcomes = mysql_store.put_each([replacing(row, request=request()) for row in wanted])
    assert all(isinstance(one, Stored) for one in outcomes)
    # Claims commit by themselves, without a COMMIT.
    assert commits() - before == 1


def test_many_that_replace_and_whose_answer_is_lost_are_done_once_each(
    through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
    rows = of_one_server(through_proxy, new_row, 30, dedup_key="k")
    put_all(through_proxy, [replacing(row) for row in rows])
    for requests in ([None] * 30, [request() for _ in rows]):
        version = as_stored(through_proxy, rows[0].job_id).version
        wanted = [
            replacing(named(new_row, row, attribute=json.dumps({"v": version})), request=one)
            for row, one in zip(rows, requests, strict=True)
        ]
        eaten = proxy.stats.eaten
        proxy.eat(b"SET version=version+1")
        assert [put.job_id for put in put_all(through_proxy, wanted)] == [row.job_id for row in rows]
        assert proxy.stats.eaten == eaten + 1
        assert {as_stored(through_proxy, row.job_id).version for row in rows} == {version + 1}
