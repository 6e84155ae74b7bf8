"""The rows of schedules and of webhook targets, and what a process knows of them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
from fault.kit.proxy import Proxy
from harness.rows import insert, known
from harness.tables import engine_of
from structlog.testing import capture_logs

from toc.model.clock import Clock
from toc.model.errors import InvalidSchedule, SecretsLocked, UnknownTarget
from toc.model.schedule import Definition
from toc.model.schedule_state import Occurrence, new_state, step
from toc.model.sharding import BizId
from toc.model.target import Target, TargetSecrets, new_secret
from toc.model.task import TaskRow
from toc.model.topic import Topic
from toc.model.verdict import Failure
from toc.store.records.targets import TargetBook, TargetTable, new_key
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.store.tasks import schedules
from toc.store.tasks.schedules import Move, StoredSchedule

# The rows of schedules: whoever moves them on, each occurrence is one task.

TOPIC = Topic("t", 7, 16)
NOW = 1_699_999_200_000
AHEAD = 4_099_999_200_000
"""Long after the tests."""
ROOMY: dict[str, Any] = {"overlap": "allow"}


def made(store: Store, name: str) -> list[TaskRow]:
    return sorted(store.find(BizId.of(name)), key=lambda row: row.dedup_key or "")


def new(store: Store, name: str, schedule_id: int = 11, now: int = NOW, **options: Any) -> StoredSchedule:
    definition = Definition(name, "t", every=options.pop("every", 10), **(ROOMY | options))
    return store.schedules.create(definition, new_state(definition, schedule_id, now))


def take(store: Store, stored: StoredSchedule, now: int) -> Move:
    ended = store.schedules.ended(stored)
    return store.schedules.move(stored, step(stored.definition, stored.state, now, ended=ended), TOPIC)


def test_a_topic_has_only_so_many_schedules_in_a_table(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "MAX_OF_TOPIC", 2)
    names = [f"many{number}" for number in range(100)]
    table = store.schedules.table_of(names[0])
    first, second, third, *_ = (name for name in names if store.schedules.table_of(name) == table)
    new(store, first)
    new(store, second)
    with pytest.raises(InvalidSchedule, match="topic 't' has too many schedules"):
        new(store, third)
    assert store.schedules.get(third) is None
    elsewhere = Definition(third, "u", **{"every": 10, **ROOMY})
    stored = store.schedules.create(elsewhere, new_state(elsewhere, 12, NOW))
    with pytest.raises(InvalidSchedule, match="topic 't' has too many schedules"):
        store.schedules.change(stored, elsewhere.changed(topic="t"), stored.state)
    assert store.schedules.get(third) == stored
    kept = known(store.schedules.get(first))
    assert store.schedules.change(kept, kept.definition.changed(every=20), kept.state)


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
    seen = known(store.schedules.get("filled"))
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
            moves[1] = take(mysql_store, known(table.get(bad)), NOW)
        moved = table.advance(moves)
        holder.rollback()
    others = {name for name in names if name != bad}
    assert {move.stored.name for move in moved.done} == others
    assert moved.failed.keys() == {bad}
    assert {name for name in names if made(mysql_store, name)} == others
    if trouble == "locked":
        assert [move.stored.name for move in table.advance(moves).done] == [bad], "each once"


@pytest.mark.parametrize("meanwhile", ["moved", "cancelled", "tried"])
def test_a_change_takes_effect_only_if_all_occurrences_are_as_read(store: Store, meanwhile: str) -> None:
    stored = new(store, f"guard.{meanwhile}", now=AHEAD)
    first, second, third = store.schedules.advance([take(store, stored, AHEAD)]).done[0].rows
    stored = store.schedules.get(stored.name) or stored
    planned = store.schedules.planned(stored, 7, AHEAD)
    assert [each.job_id for each in planned] == [row.job_id for row in (first, second, third)]
    if meanwhile == "moved":
        assert store.reschedule(second.job_id, AHEAD + 60_000)[0]
    elif meanwhile == "cancelled":
        store.cancel_many([second.job_id])
    else:
        store.fail([Failure(second.job_id, 0, 0, 0, 1, 0, AHEAD + 20_000, "it fails")])
    before = made(store, stored.name)
    other = stored.definition.changed(attribute={"new": 1})
    instead = store.schedules.occurrence_row(other, stored.state, Occurrence(AHEAD, AHEAD + 20_000), TOPIC)
    assert store.schedules.change(stored, other, stored.state, planned, [instead]) is None
    assert not store.schedules.delete(stored, planned)
    assert made(store, stored.name) == before
    assert store.schedules.get(stored.name) == stored
    planned = store.schedules.planned(stored, 7, AHEAD)
    assert [each.job_id for each in planned] == [first.job_id, third.job_id]
    assert store.schedules.delete(stored, planned)


def test_what_has_come_due_since_it_was_read_is_neither_replaced_nor_cancelled(store: Store) -> None:
    """By then its task may run, as that of a host that was slow in between would again."""
    stored = new(store, "slow")
    store.schedules.advance([take(store, stored, NOW)])
    stored, before = known(store.schedules.get("slow")), made(store, "slow")
    planned = store.schedules.planned(stored, 7, NOW)
    assert len(planned) == len(before) == 3
    instead = [store.schedules.occurrence_row(stored.definition, stored.state, Occurrence(NOW, NOW), TOPIC)]
    assert store.schedules.change(stored, stored.definition, stored.state, planned, instead) is None
    assert not store.schedules.delete(stored, planned)
    assert (store.schedules.get("slow"), made(store, "slow")) == (stored, before)
    assert store.schedules.delete(stored)


def test_what_is_not_due_by_its_server_is_not_due_and_the_earlier_clock_counts(store: Store) -> None:
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
    seen = known(through_proxy.schedules.get("lost"))
    assert seen.state.version == 1
    assert not through_proxy.schedules.advance([move]).done, "the same step again: it was taken"
    changed = seen.definition.changed(attribute={"a": 1})
    proxy.eat(b"UPDATE ")
    assert through_proxy.schedules.change(seen, changed, seen.state) is None
    assert known(through_proxy.schedules.get("lost")).definition == changed
    proxy.eat(b"INSERT INTO")
    again = new(through_proxy, "lost2")
    assert through_proxy.schedules.get("lost2") == again
    proxy.eat(b"DELETE FROM")
    assert not through_proxy.schedules.delete(again)
    assert through_proxy.schedules.get("lost2") is None
    assert proxy.stats.eaten == 4
    assert [row.dedup_key for row in made(through_proxy, "lost")] == [row.dedup_key for row in move.rows]


# The table of webhook targets, and what a process knows of it; on MariaDB and SQLite.

KEYS = [new_key()]
SECRETS = TargetSecrets(new_secret(), None, {"X-Api-Key": "hunter2"})


@pytest.fixture
def stores(place: Any) -> Iterator[Callable[..., Store]]:
    """Opens stores with keys."""
    opened: list[Store] = []

    def open_store(keys: list[str], **options: Any) -> Store:
        opened.append(place.open(secret_keys=keys, **options))
        return opened[-1]

    yield open_store
    for target in opened[0].targets.list():
        opened[0].targets.delete(target.name)
    for store in opened:
        store.close()


@pytest.fixture
def table(stores: Callable[..., Store]) -> TargetTable:
    return stores(KEYS).targets


def target(name: str = "shop", **values: Any) -> Target:
    return Target(name, "https://example.com/hooks", **values)


def test_no_secret_is_in_the_table_in_clear(table: TargetTable) -> None:
    table.create(target(), SECRETS)
    server, name = table._server, table._table
    (row,) = server.run([Statement(f"SELECT * FROM {name}")])[0].rows
    assert SECRETS.secret not in repr(row)
    assert "hunter2" not in repr(row)


def test_secrets_copied_into_another_targets_row_are_refused(table: TargetTable) -> None:
    one = table.create(target("one"), SECRETS)
    two = table.create(target("two"), TargetSecrets(new_secret()))
    with pytest.raises(SecretsLocked, match="two"):
        table.open(replace(two, sealed=one.sealed))


def test_rotating_the_key_reads_with_the_old_and_writes_with_the_new(
    table: TargetTable, stores: Callable[..., Store]
) -> None:
    new = [new_key()]
    foreign = stores([new_key()]).targets
    table.create(target("one"), SECRETS)
    table.create(target("two"), TargetSecrets(new_secret()))
    foreign.create(target("three"), TargetSecrets(new_secret()))
    both = stores(new + KEYS).targets
    table.create(target("hand"), SECRETS)
    table._server.run([Statement(f"UPDATE {table._table} SET settings='' WHERE name='hand'")])
    for _ in range(2):
        assert both.reseal() == (2, ["hand", "three"])
    table.delete("hand")
    assert stores(new).targets.open(both.get("one")).headers == SECRETS.headers
    with pytest.raises(SecretsLocked):
        table.open(both.get("one"))
    with pytest.raises(SecretsLocked, match="toc secrets key"):
        stores([]).targets.reseal()


def test_of_changes_at_once_none_is_lost(table: TargetTable) -> None:
    table.create(target(), TargetSecrets("none"))

    def one_more(number: int) -> None:
        for _ in range(20):  # a change gives up after some lost races
            try:
                table.change(
                    "shop", {}, lambda opened: replace(opened, headers={**opened.headers, f"x-{number}": "1"})
                )
            except Exception as exc:
                assert "keeps changing" in str(exc)  # noqa: PT017
            else:
                return

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one_more, range(20)))
    assert len(table.open(table.get("shop")).headers) == 20


def test_a_pause_by_an_answer_does_not_undo_what_was_changed_meanwhile(table: TargetTable) -> None:
    sent_to = table.create(target(), SECRETS)
    table.change("shop", {"url": "https://example.com/new"})
    assert not table.pause("shop", by="webhook", why="answered 410", change_id=sent_to.change_id)
    assert not table.get("shop").paused
    assert table.pause("shop", by="webhook", why="answered 410", change_id=table.get("shop").change_id)
    assert (table.get("shop").paused_by, table.get("shop").paused_why) == ("webhook", "answered 410")
    assert table.pause("shop", by="ann", why="mine")  # it stays the answer's
    assert table.get("shop").paused_by == "webhook"


@pytest.mark.parametrize("name", ["shop ", "SHOP", "", "a b", "\udc80", "x" * 200])
def test_no_other_name_leads_to_a_target(table: TargetTable, name: str) -> None:
    table.create(target("shop"), SECRETS)
    for use in (table.get, table.delete):
        with pytest.raises(UnknownTarget):
            use(name)
    assert [each.name for each in table.list()] == ["shop"]


# --- the book


class SetClock(Clock):
    """Its monotonic clock stands still until a test moves it."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_book_may_be_read_while_secrets_are_opened(table: TargetTable) -> None:
    looking = False

    class Interrupted(int):
        """A key. As the book looks it up, another thread opens the secrets of one more target."""

        def __hash__(self) -> int:
            if looking:
                book.secrets(replace(stored, change_id=len(book._opened)))
            return 0

    book = TargetBook(table, SetClock())
    stored = table.create(target(), SECRETS)
    book.run_once()
    book._opened = dict.fromkeys(map(Interrupted, range(3)), SECRETS)
    table.pause("shop", by="me", why="")
    looking = True
    book.run_once()
    looking = False
    assert known(book.known("shop")).paused


def test_a_rotation_whose_answer_is_lost_is_one(mysql_place: Any, through_proxy: Store, proxy: Proxy) -> None:
    """Else the former secret, which the receiver has, would no longer sign."""
    store = mysql_place.open(secret_keys=KEYS)
    store.targets.create(target("lost"), SECRETS)
    behind = TargetTable(through_proxy._shards, store.targets._box, Clock())
    new = new_secret()

    def rotate(opened: TargetSecrets) -> TargetSecrets:
        return replace(opened, secret=new, previous=opened.secret)

    proxy.eat(b"timeout_target SET url=")
    changed = behind.change("lost", {}, rotate)
    assert proxy.stats.eaten == 1
    opened = store.targets.open(changed)
    assert (opened.secret, opened.previous) == (new, SECRETS.secret)
    store.targets.delete("lost")
    store.close()


def test_a_book_works_from_what_it_knows_while_the_server_is_away(
    mysql_place: Any, through_proxy: Store, proxy: Proxy
) -> None:
    store = mysql_place.open(secret_keys=KEYS)
    stored = store.targets.create(target("away"), SECRETS)
    behind = TargetTable(through_proxy._shards, store.targets._box, Clock())
    book = TargetBook(behind, SetClock())
    book.run_once()
    proxy.close()
    with capture_logs() as lines:
        for _ in range(2):
            book.run_once()
    assert book.known("away") == stored
    assert book.secrets(stored).headers == SECRETS.headers
    assert [line["event"] for line in lines if line["event"] == "targets_not_read"] == ["targets_not_read"]
    store.targets.delete("away")
    store.close()
