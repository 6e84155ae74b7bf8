"""Bodies: written, moved and deleted with their rows, and readable under the version that the row has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fault.kit.proxy import Proxy
from harness.rows import insert, insert_many
from sqlalchemy import create_engine

from toc.model.errors import DedupConflict, StoreUnavailable
from toc.model.task import Content, TaskRow, TaskStatus
from toc.store.servers.server import DatabaseServer
from toc.store.store import Store
from toc.store.tasks.bodies import BODY_BYTES, bounded

NewRow = Callable[..., TaskRow]

EVERY_BYTE = bytes(range(256)) * 41 + b"';\\--%s%%"


def with_body(row: TaskRow, content: Content) -> TaskRow:
    return row._replace(body_length=len(content.data), body_sha256=content.fingerprint())


def stored(store: Store, row: TaskRow) -> Content | None:
    """The body that the row, as it is now, names."""
    now = store.get(row.job_id)
    return None if now is None else store.bodies.read({now.job_id: now.version}).get(now.job_id)


def count(place: Any, rows: list[TaskRow]) -> int:
    """How many bodies these tasks have, of whatever version."""
    engine = create_engine(place.urls[0])
    found = 0
    with engine.connect() as connection:
        for row in rows:
            table = (row.job_id >> 12 & 1023) % place.tables
            schema = "" if place.urls[0].startswith("sqlite") else f"{place.prefix}{table % place.databases}."
            found += connection.exec_driver_sql(
                f"SELECT COUNT(*) FROM {schema}timeout_body_{table:04d} WHERE job_id={row.job_id}"
            ).scalar_one()
    engine.dispose()
    return found


def test_a_body_keeps_to_its_row_through_reschedule_death_and_redrive(
    store: Store, place: Any, new_row: NewRow
) -> None:
    content = Content("a/b", EVERY_BYTE)
    row, plain = with_body(new_row(), content), new_row()
    insert_many(store, [row, plain], content)
    assert store.reschedule(row.job_id, row.action_time + 1)[0]
    assert stored(store, row) == content
    assert not store.bodies.read({row.job_id: 0}), "a try of the old version is superseded"

    from toc.model.verdict import Failure

    store.die([Failure(row.job_id, 1, 0, 0, 1, 0, row.next_time, "no")])
    (again,) = store.redrive([row.job_id, plain.job_id], row.action_time)
    assert (again.version, again.status) == (2, TaskStatus.PENDING)
    assert store.redrive([row.job_id], row.action_time) == []
    assert stored(store, row) == content
    assert count(place, [row, plain]) == 1
    store.die([Failure(row.job_id, 2, 0, 0, 1, 0, row.next_time, "no")])
    assert store.delete_ended({row.job_id: len(content.data)}, [TaskStatus.DEAD]) == 1
    assert count(place, [row]) == 0


def test_dedup_compares_bodies_by_length_hash_and_type(store: Store, new_row: NewRow) -> None:
    first, other, typed = Content("a/b", b"one"), Content("a/b", b"two"), Content("a/c", b"one")
    row = with_body(new_row(dedup_key="k"), first)
    assert insert(store, row, first) == row.job_id
    again = new_row(row.biz_id, dedup_key="k")
    assert insert(store, with_body(again, first), first) == row.job_id
    for content in (other, typed, None):
        another = again if content is None else with_body(again, content)
        with pytest.raises(DedupConflict, match="another body") as caught:
            insert(store, another, content)
        assert caught.value.job_id == row.job_id
        with pytest.raises(DedupConflict):
            insert_many(store, [fresh := new_row(), another], content)
        assert store.read([fresh.job_id, again.job_id]) == {}, "nothing was written"
    assert stored(store, row) == first


def test_a_reschedule_whose_answer_was_lost_is_unknown_and_happened_once_with_its_body(
    through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
    content = Content("a/b", b"x")
    row = with_body(new_row(attempts=2), content)
    insert(through_proxy, row, content)
    proxy.eat(b";COMMIT")
    with pytest.raises(StoreUnavailable):
        through_proxy.reschedule(row.job_id, row.action_time + 1)
    assert proxy.stats.eaten == 1
    assert stored(through_proxy, row) == content
    after = through_proxy.read([row.job_id])[row.job_id]
    assert (after.version, after.attempts, after.action_time) == (1, 0, row.action_time + 1)


def test_a_transaction_deletes_a_bounded_number_of_bytes(
    mysql_store: Store, mysql_place: Any, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Content("a/b", bytes(BODY_BYTES // 2 - 1))
    rows = [with_body(new_row(1), content) for _ in range(5)]
    insert_many(mysql_store, rows, content)
    mysql_store.finish((row.job_id, 0) for row in rows)
    sent: list[int] = []
    run = DatabaseServer.run

    def counted(self: DatabaseServer, statements: Any, **how: Any) -> Any:
        results = run(self, statements, **how)
        if statements[0].sql.startswith("DELETE"):
            sent.append(results[-1].matched)
        return results

    monkeypatch.setattr(DatabaseServer, "run", counted)
    assert mysql_store.delete_ended({row.job_id: len(content.data) for row in rows}) == 5
    assert sent == [2, 2, 1]
    assert count(mysql_place, rows) == 0
    assert [*bounded([("a", -1), ("b", 5), ("c", 5), ("d", 20), ("e", 0)], 10)] == [
        ["a", "b", "c"],
        ["d"],
        ["e"],
    ]
