"""The rows of members: what each writes and reads, who is called dead, what comes too late."""

from __future__ import annotations

import pytest

from toc.dev.local.process import until
from toc.store.records import cluster
from toc.store.store import Store


def beats(store: Store, name: str) -> int | None:
    return next((row.beat for row in store.members.list() if row.name == name), None)


@pytest.fixture(autouse=True)
def empty(store: Store) -> None:
    for row in store.members.list():
        store.members.leave(row.name)


def test_a_member_writes_its_row_and_reads_all_that_live(store: Store) -> None:
    table = store.members
    assert table.beat("a", 1, 6000, "{}") is None, "there is no row yet"
    table.join("a", "host-a", 1, 6000, "{}")
    table.join("b", "host-b", 1, 3000, "{}")
    data = '{"workers": {"a-0": "100 % of it, \'quoted\', ü"}}'
    rows = table.beat("a", 2, 6000, data)
    assert rows is not None
    a, b = rows
    assert (a.name, a.host, a.beat, a.timeout, a.dead, a.data) == ("a", "host-a", 2, 6000, False, data)
    assert (b.name, b.beat, b.timeout, b.alive) == ("b", 1, 3000, True)
    assert 0 <= a.age < 60_000
    table.leave("a")
    assert table.beat("a", 3, 6000, "{}") is None
    assert [row.name for row in table.list()] == ["b"]


def test_what_was_written_later_is_not_undone_by_what_comes_late(store: Store) -> None:
    table = store.members
    table.join("a", "h", 1, 6000, "{}")
    assert table.beat("a", 5, 6000, "new")
    assert table.beat("a", 4, 6000, "old") is None
    table.join("a", "h", 4, 6000, "older")
    assert [(row.beat, row.data) for row in table.list()] == [(5, "new")]
    assert table.beat("a", 5, 6000, "new"), "the answer was lost, and the same is sent again"


def test_a_member_that_has_not_written_since_is_called_dead_and_learns_it(store: Store) -> None:
    table = store.members
    table.join("a", "h", 1, 6000, "{}")
    table.join("b", "h", 1, 6000, "{}")
    table.beat("a", 2, 6000, "it holds much")
    table.bury("a", 1)
    assert table.beat("a", 3, 6000, "it holds much"), "it had written meanwhile"
    table.bury("a", 3)
    rows = table.beat("b", 2, 6000, "{}")
    assert rows is not None
    assert [row.name for row in rows] == ["b"], "the dead own nothing"
    assert table.beat("a", 4, 6000, "it holds much") is None
    (dead, _) = table.list()
    assert (dead.name, dead.host, dead.dead, dead.alive, dead.data) == ("a", "h", True, False, "{}")
    table.join("a", "h", 5, 6000, "{}")
    assert table.beat("a", 6, 6000, "{}"), "it is alive again, with nothing"


def test_the_long_dead_are_forgotten_when_another_joins(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = store.members
    for name in ("gone", "silent"):
        table.join(name, "h", 1, 6000, "{}")
    table.bury("gone", 1)
    table.join("a", "h", 1, 6000, "{}")
    assert len(table.list()) == 3
    monkeypatch.setattr(cluster, "DEAD_KEPT_MS", 0)
    assert until(lambda: table.list()[1].age > 1, 60)
    table.join("b", "h", 1, 6000, "{}")
    assert [row.name for row in table.list()] == ["a", "b", "silent"], "only others may call one dead"
