"""Puts of many callers in one transaction: each has its own outcome, and nothing is done twice."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from fault.kit.proxy import Proxy
from harness.patience import until
from harness.rows import put
from integration.store.test_put import KEPT, NEW, REPLACED, as_stored, body_of, named, with_body

from toc.model.errors import DedupConflict, RequestReused, StoreUnavailable, SubmitUnknown, TaskExists
from toc.model.task import OnConflict, Put, Request, Submission, TaskRow
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.store.tasks.plan import Stored

NewRow = Callable[..., TaskRow]
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
    before, used, fresh = request(), request(b"one"), request()
    put(store, answered, request=before)
    put(store, reused, request=used)
    (unnamed,) = of_one_server(store, new_row, 1)
    another = new_row(unnamed.biz_id)
    again, body = named(new_row, ended), with_body(named(new_row, pending, action_time=new.action_time), b"x")
    wanted = [
        replacing(new),
        replacing(*body),
        replacing(again),
        replacing(named(new_row, kept, attribute='{"a":1}'), on_conflict=OnConflict.KEEP, request=request()),
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
    assert as_stored(store, ended.job_id).dedup_key is None
    assert {as_stored(store, row.job_id).version for row in (kept, conflict, taken, answered, reused)} == {0}
    assert put(store, unnamed, request=fresh).put == (unnamed.job_id, NEW), "it is remembered"


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


def test_batches_that_race_while_connections_break_are_done_once_each(
    mysql_place: Any, through_proxy: Store, proxy: Proxy, mysql_store: Store, new_row: NewRow
) -> None:
    """Two callers repeat each batch until it is answered, in opposite order."""
    rows = of_one_server(mysql_store, new_row, 25, dedup_key="k")
    put_all(mysql_store, [replacing(row) for row in rows])
    rounds = 8
    requests = [[request() for _ in rows] for _ in range(rounds)]
    direct = mysql_place.open()
    deadline = time.monotonic() + 300
    over = threading.Event()

    def repeat(number: int) -> None:
        store = (through_proxy, direct)[number]
        for n, named_requests in enumerate(requests):
            wanted = [
                replacing(named(new_row, row, attribute=json.dumps({"n": n})), request=one)
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
