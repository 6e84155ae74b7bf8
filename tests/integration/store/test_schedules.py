"""The rows of schedules: whoever moves them on, each occurrence is one task."""

from __future__ import annotations

import threading
from itertools import count, islice
from typing import Any

import pytest
from fault.kit.proxy import Proxy
from harness.rows import insert
from harness.tables import engine_of

from toc.model.clock import Clock
from toc.model.errors import InvalidSchedule
from toc.model.schedule import Definition
from toc.model.schedule_state import Occurrence, new_state, step
from toc.model.sharding import BizId
from toc.model.task import TaskRow
from toc.model.topic import Topic
from toc.model.verdict import Failure
from toc.store.store import Store
from toc.store.tasks import schedules
from toc.store.tasks.schedules import Move, StoredSchedule, occurrence_key

TOPIC = Topic("t", 7, 16)
NOW = 1_699_999_200_000
ROOMY: dict[str, Any] = {"overlap": "allow"}


def made(store: Store, name: str) -> list[TaskRow]:
    return sorted(store.find(BizId.of(name)), key=lambda row: row.dedup_key or "")


def new(store: Store, name: str, schedule_id: int = 11, now: int = NOW, **options: Any) -> StoredSchedule:
    definition = Definition(name, "t", every=options.pop("every", 10), **(ROOMY | options))
    return store.schedules.create(definition, new_state(definition, schedule_id, now))


def take(store: Store, stored: StoredSchedule, now: int) -> Move:
    ended = store.schedules.ended(stored)
    return store.schedules.move(stored, step(stored.definition, stored.state, now, ended=ended), TOPIC)


def test_a_topic_has_at_most_so_many_schedules_in_a_table(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "MAX_OF_TOPIC", 2)
    names = [f"many{number}" for number in range(100)]
    table = store.schedules.table_of(names[0])
    first, second, third, *_ = (name for name in names if store.schedules.table_of(name) == table)
    new(store, first)
    new(store, second)
    with pytest.raises(InvalidSchedule, match="topic 't' has too many schedules"):
        new(store, third)
    assert store.schedules.get(third) is None


def test_of_many_that_move_a_schedule_on_one_does(store: Store) -> None:
    """A hundred schedules, four threads that take the same steps at once, batch by batch, four times."""
    names = [f"race{number}" for number in range(100)]
    for name in names:
        new(store, name, every=15)
    for turn in range(4):
        now = NOW + turn * 20_000
        moves = [take(store, one, now) for name in names if (one := store.schedules.get(name))]
        barrier = threading.Barrier(4)
        done: list[Move] = []

        def advance(moves: list[Move], now: int, barrier: threading.Barrier, done: list[Move]) -> None:
            again = [store.schedules.move(each.stored, step_of(each, now), TOPIC) for each in moves]
            barrier.wait()
            moved = store.schedules.advance(again)
            assert not moved.failed
            done += moved.done

        def step_of(move: Move, now: int) -> Any:
            return step(move.stored.definition, move.stored.state, now, ended=True)

        threads = [threading.Thread(target=advance, args=(moves, now, barrier, done)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(move.stored.name for move in done) == sorted(move.stored.name for move in moves)
    stored = {seen.name: seen for seen in store.schedules.page()}
    for name in names:
        keys = [row.dedup_key for row in made(store, name)]
        wanted = [occurrence_key(11, NOW + number * 15_000) for number in range(len(keys) + 1)]
        assert keys in (wanted[:-1], wanted[1:])
        assert len(keys) == stored[name].state.fired == 6


def test_an_occurrence_that_a_backfill_has_made_is_left_alone(store: Store) -> None:
    stored = new(store, "filled")
    move = take(store, stored, NOW)
    insert(store, move.rows[1]._replace(job_id=move.rows[1].job_id + 1, attribute='{"first":1}'))
    others = [take(store, new(store, f"beside{number}"), NOW) for number in range(3)]
    moved = store.schedules.advance([*others, move])
    assert len(moved.done) == 4
    rows = made(store, "filled")
    assert [row.dedup_key for row in rows] == [row.dedup_key for row in move.rows]
    assert rows[1].attribute == '{"first":1}'
    seen = store.schedules.get("filled")
    assert seen is not None
    assert (seen.state.fired, seen.state.last_job_id) == (2, rows[-1].job_id)


@pytest.mark.parametrize("trouble", ["locked", "refused"])
def test_a_schedule_that_is_locked_or_refused_holds_up_no_other_of_its_table(
    mysql_store: Store, mysql_place: Any, trouble: str
) -> None:
    """A lock is waited for 2 s, three times: with all, with its table, and alone."""
    table = mysql_store.schedules
    of_table_0 = (f"{trouble}{number}" for number in count())
    names = list(islice((name for name in of_table_0 if table.table_of(name) == 0), 4))
    moves = [take(mysql_store, new(mysql_store, name), NOW) for name in names]
    rows, bad = f"{mysql_place.prefix}0.timeout_schedule_0000", names[1]
    with engine_of(mysql_place.root_url) as engine, engine.connect() as holder:
        if trouble == "locked":
            holder.exec_driver_sql(f"SELECT * FROM {rows} WHERE name='{bad}' FOR UPDATE")
        else:
            harm = f"UPDATE {rows} SET fired=18446744073709551615 WHERE name='{bad}'"
            holder.exec_driver_sql(harm)
            holder.commit()
            stored = table.get(bad)
            assert stored is not None
            moves[1] = take(mysql_store, stored, NOW)
        moved = table.advance(moves)
        holder.rollback()
    others = {name for name in names if name != bad}
    assert {move.stored.name for move in moved.done} == others
    assert moved.failed.keys() == {bad}
    assert {name for name in names if made(mysql_store, name)} == others
    if trouble == "locked":
        assert [move.stored.name for move in table.advance(moves).done] == [bad], "each once"


@pytest.mark.parametrize("meanwhile", ["moved", "cancelled", "tried"])
def test_a_change_takes_effect_only_if_all_occurrences_are_as_they_were_read(
    store: Store, meanwhile: str
) -> None:
    stored = new(store, f"guard.{meanwhile}")
    first, second, third = store.schedules.advance([take(store, stored, NOW)]).done[0].rows
    stored = store.schedules.get(stored.name) or stored
    planned = store.schedules.planned(stored, 7, NOW)
    assert [each.job_id for each in planned] == [row.job_id for row in (first, second, third)]
    if meanwhile == "moved":
        assert store.reschedule(second.job_id, NOW + 60_000)[0]
    elif meanwhile == "cancelled":
        store.cancel_many([second.job_id])
    else:
        store.fail([Failure(second.job_id, 0, 0, 0, 1, 0, NOW + 20_000, "it fails")])
    before = made(store, stored.name)
    other = stored.definition.changed(attribute={"new": 1})
    instead = store.schedules.occurrence_row(other, stored.state, Occurrence(NOW, NOW + 20_000), TOPIC)
    assert store.schedules.change(stored, other, stored.state, planned, [instead]) is None
    assert not store.schedules.delete(stored, planned)
    assert made(store, stored.name) == before
    assert store.schedules.get(stored.name) == stored
    planned = store.schedules.planned(stored, 7, NOW)
    assert [each.job_id for each in planned] == [first.job_id, third.job_id]
    assert store.schedules.delete(stored, planned)


def test_what_is_not_due_by_its_server_is_not_due_and_the_time_is_the_earlier_of_both_clocks(
    store: Store,
) -> None:
    real = Clock().now_ms()
    new(store, "soon", now=real + 60_000)
    new(store, "since", now=real - 60_000)
    tables = {store.schedules.table_of("soon"), store.schedules.table_of("since")}
    by_both = {
        until: {one.stored.name: one.now for one in store.schedules.due(tables, until, 1000).rows}
        for until in (real - 30_000, real + 3_600_000)
    }
    for found in by_both.values():
        assert "soon" not in found
    behind, ahead = (found["since"] for found in by_both.values())
    assert behind == real - 30_000
    assert real - 1000 < ahead < real + 60_000


def test_a_reply_that_is_lost_at_commit_makes_no_occurrence_twice(through_proxy: Store, proxy: Proxy) -> None:
    stored = new(through_proxy, "lost")
    move = take(through_proxy, stored, NOW)
    proxy.eat(b"UPDATE ")
    assert not through_proxy.schedules.advance([move]).failed
    assert proxy.stats.eaten == 1
    seen = through_proxy.schedules.get("lost")
    assert seen is not None
    assert seen.state.version == 1
    assert not through_proxy.schedules.advance([move]).done, "the same step again: it was taken"
    changed = seen.definition.changed(attribute={"a": 1})
    proxy.eat(b"UPDATE ")
    assert through_proxy.schedules.change(seen, changed, seen.state) is None
    altered = through_proxy.schedules.get("lost")
    assert altered is not None
    assert altered.definition == changed
    proxy.eat(b"INSERT INTO")
    again = new(through_proxy, "lost2")
    assert through_proxy.schedules.get("lost2") == again
    proxy.eat(b"DELETE FROM")
    assert not through_proxy.schedules.delete(again)
    assert through_proxy.schedules.get("lost2") is None
    assert proxy.stats.eaten == 4
    assert [row.dedup_key for row in made(through_proxy, "lost")] == [row.dedup_key for row in move.rows]
