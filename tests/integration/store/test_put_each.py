"""Puts of many callers in one transaction: each has its own outcome, and nothing is done twice."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from fault.kit.proxy import Proxy
from harness.patience import until
from integration.store.test_put import KEPT, NEW, REPLACED, as_stored, body_of, named, with_body

from toc.model.errors import DedupConflict, RequestReused, StoreUnavailable, SubmitUnknown, TaskExists
from toc.model.sharding import BizId
from toc.model.task import OnConflict, Put, Request, TaskRow
from toc.store.put_plan import Stored, ToPut
from toc.store.server import Statement
from toc.store.store import Store

NewRow = Callable[..., TaskRow]


def request(payload: bytes = b"") -> Request:
    return Request.of("token /path", secrets.token_hex(), payload)


def put_all(store: Store, wanted: Sequence[ToPut]) -> list[Put]:
    """Put all as the batcher does: together, and by itself what cannot go so."""
    done = []
    for one, outcome in zip(wanted, store.put_each(wanted), strict=True):
        stored = store.put_alone(one) if outcome is None else outcome
        if not isinstance(stored, Stored):
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
        store.put(row)
    store.finish([(ended.job_id, 0)])
    before, used, fresh = request(), request(b"one"), request()
    store.put(answered, request=before)
    store.put(reused, request=used)
    unnamed = of_one_server(store, new_row, 1)[0]
    again, body = named(new_row, ended), with_body(named(new_row, pending, action_time=new.action_time), b"x")
    outcomes = store.put_each(
        [
            ToPut(new),
            ToPut(*body),
            ToPut(again),
            ToPut(named(new_row, kept, attribute='{"a":1}'), on_conflict=OnConflict.KEEP, request=request()),
            ToPut(named(new_row, conflict), on_conflict=OnConflict.KEEP, request=request()),
            ToPut(named(new_row, taken), on_conflict=OnConflict.ERROR),
            ToPut(named(new_row, answered), request=before),
            ToPut(named(new_row, reused), request=used._replace(payload=request().payload)),
            ToPut(unnamed, request=fresh),
            ToPut(named(new_row, new)),
        ]
    )
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
    assert told[9] is None, "the name of the first: it goes by itself"
    now = as_stored(store, pending.job_id)
    assert (now.version, body_of(store, now)) == (1, b"x")
    assert as_stored(store, ended.job_id).dedup_key is None
    assert {as_stored(store, row.job_id).version for row in (kept, conflict, taken, answered, reused)} == {0}
    assert store.put(unnamed, request=fresh).put == (unnamed.job_id, NEW), "it is remembered"


def test_many_are_one_transaction(mysql_store: Store, new_row: NewRow) -> None:
    rows = of_one_server(mysql_store, new_row, 50, dedup_key="k")
    half = rows[:25]
    for row in half:
        mysql_store.put(row)
    server = mysql_store._shards.servers[0]

    def commits() -> int:
        (result,) = server.run([Statement("SHOW GLOBAL STATUS LIKE 'Com_commit'")])
        return int(result.rows[0][1])

    before = commits()
    wanted = [*(named(new_row, row) for row in half), *rows[25:]]
    outcomes = mysql_store.put_each([ToPut(row, request=request()) for row in wanted])
    assert all(isinstance(one, Stored) for one in outcomes)
    # Claims commit by themselves, without a COMMIT.
    assert commits() - before == 1


def test_two_batches_with_the_same_names_in_opposite_order_are_both_done(
    mysql_place: Any, new_row: NewRow
) -> None:
    stores = [mysql_place.open() for _ in range(2)]
    rows = of_one_server(stores[0], new_row, 120, dedup_key="k")
    put_all(stores[0], [ToPut(row) for row in rows[:60]])
    rounds, start = 6, threading.Barrier(2)

    def batches(number: int) -> None:
        for n in range(rounds):
            start.wait(120)
            wanted = [named(new_row, row, attribute=json.dumps({"n": n})) for row in rows]
            done = put_all(stores[number], [ToPut(row) for row in (wanted if number else wanted[::-1])])
            assert len({put.job_id for put in done}) == len(rows)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(batches, number) for number in range(2)]:
            done.result()
    for n, row in enumerate(rows):
        found = [one for one in stores[0].find(BizId.of(row.biz_id)) if one.dedup_key == "k"]
        assert len(found) == 1
        assert found[0].version == 2 * rounds - (0 if n < 60 else 1)
    for store in stores:
        store.close()


def test_a_row_that_another_transaction_has_locked_holds_up_no_other(
    mysql_store: Store, new_row: NewRow
) -> None:
    rows = of_one_server(mysql_store, new_row, 40, dedup_key="k")
    put_all(mysql_store, [ToPut(row) for row in rows])
    locked = rows[17]
    name = mysql_store._shards.names[mysql_store._shards.table_of(locked.job_id)]
    stranger = mysql_store._shards.servers[0]._connect_within(5.0)
    try:
        stranger.batch(["START TRANSACTION", f"SELECT * FROM {name} WHERE job_id={locked.job_id} FOR UPDATE"])
        outcomes = mysql_store.put_each([ToPut(named(new_row, row)) for row in rows])
    finally:
        stranger.close()
    assert [n for n, one in enumerate(outcomes) if one is None] == [17]
    assert all(isinstance(one, Stored) for n, one in enumerate(outcomes) if n != 17)
    assert {as_stored(mysql_store, row.job_id).version for row in rows if row is not locked} == {1}
    assert as_stored(mysql_store, locked.job_id).version == 0


def test_many_whose_answer_is_lost_are_done_once_each(
    through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
    rows = of_one_server(through_proxy, new_row, 30, dedup_key="k")
    proxy.eat(b"INSERT INTO")
    assert [put.outcome for put in put_all(through_proxy, [ToPut(row) for row in rows])] == [NEW] * 30
    assert proxy.stats.eaten == 1
    for requests in ([None] * 30, [request() for _ in rows]):
        version = as_stored(through_proxy, rows[0].job_id).version
        wanted = [
            ToPut(named(new_row, row, attribute=json.dumps({"v": version})), request=one)
            for row, one in zip(rows, requests, strict=True)
        ]
        eaten = proxy.stats.eaten
        proxy.eat(b"SET version=version+1")
        assert [put.job_id for put in put_all(through_proxy, wanted)] == [row.job_id for row in rows]
        assert proxy.stats.eaten == eaten + 1
        assert {as_stored(through_proxy, row.job_id).version for row in rows} == {version + 1}


def test_batches_that_race_while_connections_break_are_done_once_each(
    mysql_place: Any, through_proxy: Store, proxy: Proxy, mysql_store: Store, new_row: NewRow
) -> None:
    """Two callers repeat each batch until it is answered, in opposite order."""
    rows = of_one_server(mysql_store, new_row, 25, dedup_key="k")
    put_all(mysql_store, [ToPut(row) for row in rows])
    rounds = 8
    requests = [[request() for _ in rows] for _ in range(rounds)]
    direct = mysql_place.open()
    deadline = time.monotonic() + 300
    over = threading.Event()

    def repeat(number: int) -> None:
        store = (through_proxy, direct)[number]
        for n, named_requests in enumerate(requests):
            wanted = [
                ToPut(named(new_row, row, attribute=json.dumps({"n": n})), request=one)
                for row, one in zip(rows, named_requests, strict=True)
            ]
            if number:
                wanted.reverse()
            answered = False
            while not answered:
                assert time.monotonic() < deadline
                with suppress(StoreUnavailable, SubmitUnknown):
                    put_all(store, wanted)
                    answered = True

    def cut() -> None:
        while not over.wait(0.1):
            proxy.cut()

    proxy.eat(b"SET version=version+1", count=None, probability=0.5, quiet=0.02)
    with ThreadPoolExecutor(3) as pool:
        cutter = pool.submit(cut)
        try:
            first = pool.submit(repeat, 0)
            assert until(lambda: proxy.stats.eaten > 0 and proxy.stats.cut > 0)
            for done in (first, pool.submit(repeat, 1)):
                done.result()
        finally:
            over.set()
        cutter.result()
    assert proxy.stats.eaten
    assert proxy.stats.cut
    direct.close()
    assert {as_stored(mysql_store, row.job_id).version for row in rows} == {rounds}
