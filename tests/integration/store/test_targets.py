"""The table of webhook targets, and what a process knows of it; on MariaDB and SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from fault.kit.proxy import Proxy
from structlog.testing import capture_logs

from toc.model.clock import Clock
from toc.model.errors import SecretsLocked, UnknownTarget
from toc.model.target import Target, TargetSecrets, new_secret
from toc.store.records.targets import TargetBook, TargetTable, new_key
from toc.store.servers.server import Statement
from toc.store.store import Store

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
    assert both.reseal() == (2, ["three"])
    assert both.reseal() == (2, ["three"])
    assert stores(new).targets.open(both.get("one")).headers == SECRETS.headers
    with pytest.raises(SecretsLocked):
        table.open(both.get("one"))
    with pytest.raises(SecretsLocked, match="toc secrets key"):
        stores([]).targets.reseal()


def test_of_changes_at_once_none_is_lost(table: TargetTable) -> None:
    table.create(target(concurrency=1), SECRETS)

    def one_more(_: int) -> None:
        for _ in range(20):  # a change gives up after some lost races
            try:
                table.change(
                    "shop", lambda found, _: (replace(found, concurrency=found.concurrency + 1), None)
                )
            except Exception as exc:
                assert "keeps changing" in str(exc)  # noqa: PT017
            else:
                return

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one_more, range(20)))
    assert table.get("shop").concurrency == 21


def test_a_pause_by_an_answer_does_not_undo_what_was_changed_meanwhile(table: TargetTable) -> None:
    sent_to = table.create(target(), SECRETS)
    table.change("shop", lambda found, _: (replace(found, url="https://example.com/new"), None))
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


def test_a_book_learns_of_every_change(table: TargetTable) -> None:
    clock = SetClock()
    book = TargetBook(table, clock)
    seen = [book.ready]
    assert book.run_once() == 1.0
    assert [*seen, book.ready] == [False, True]
    assert book.known("shop") is None
    stored = table.create(target(), SECRETS)
    assert book.known("shop") is None
    book.run_once()
    assert book.known("shop") == stored
    assert book.secrets(stored).headers == SECRETS.headers
    rotated = table.change("shop", lambda found, _: (found, TargetSecrets("new")), with_secrets=True)
    book.run_once()
    assert book.known("shop") == rotated
    assert book.secrets(rotated).secret == "new"
    assert list(book._opened) == [rotated.change_id]
    table.delete("shop")
    again = table.create(target(), SECRETS)  # deleted and created between two looks
    book.run_once()
    assert book.known("shop") == again
    table.delete("shop")
    book.run_once()
    assert book.known("shop") is None


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
    shop = book.known("shop")
    assert shop is not None
    assert shop.paused


def test_a_rotation_whose_answer_is_lost_is_made_once(
    mysql_place: Any, through_proxy: Store, proxy: Proxy
) -> None:
    """Else the former secret, which the receiver has, would no longer sign."""
    store = mysql_place.open(secret_keys=KEYS)
    store.targets.create(target("lost"), SECRETS)
    behind = TargetTable(through_proxy._shards, store.targets._box, Clock())
    new = new_secret()

    def rotate(found: Target, opened: TargetSecrets | None) -> tuple[Target, TargetSecrets]:
        assert opened is not None
        return found, replace(opened, secret=new, previous=opened.secret)

    proxy.eat(b"timeout_target SET url=")
    changed = behind.change("lost", rotate, with_secrets=True)
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
