"""What another program has written into a row harms that row alone, and is named; on MariaDB and SQLite."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from toc.model.access import Role, Token
from toc.model.target import Target, TargetSecrets, new_secret
from toc.model.topic import Template, Topic
from toc.operate.audit import action_record, audited
from toc.store.records.table import RecordTable
from toc.store.records.targets import new_key
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.store.tasks.history import FailedTry, line, parse

DAMAGE = ["[" * 3000, '{"a":' * 70 + "1" + "}" * 70, "7", "null", '{"a": 1e999}', '["\\ud800"]', "", "{}"]


@pytest.fixture
def store(place: Any) -> Iterator[Store]:
    one: Store = place.open(secret_keys=[new_key()])
    yield one
    for table in (one.tokens, one.templates, one.targets, one.topics):
        change(table, f"DELETE FROM {table._table}")
    one.close()


def change(table: RecordTable, statement: str, *params: str) -> None:
    table._server.run([Statement(statement, list(params))])


def tokens(store: Store, name: str) -> None:
    store.tokens.create(Token(name, frozenset({Role.READ}), ("*",)), name.encode().ljust(32))


def templates(store: Store, name: str) -> None:
    store.templates.create(Template(f"{name}.*", {"slot_amount": 4}, 10))


def targets(store: Store, name: str) -> None:
    store.targets.create(Target(name, "https://example.com"), TargetSecrets(new_secret(), None, {}))


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("make", "column"), [(tokens, "topics"), (templates, "policies"), (targets, "settings")]
)
def test_a_damaged_row_of_a_small_table_is_named_and_the_others_are_read(
    store: Store, make: Callable[[Store, str], None], column: str, damage: str
) -> None:
    table: Any = getattr(store, make.__name__)
    for name in ("one", "two"):
        make(store, name)
    key = table._name.name
    name = "one.*" if key == "pattern" else "one"
    change(table, f"UPDATE {table._table} SET {column}=%s WHERE {key}=%s", damage, name)
    with capture_logs() as lines:
        assert [getattr(each, key) for each in table.list()] == [name.replace("one", "two")]
    assert [line["event"] for line in lines] == [f"{make.__name__[:-1]}_not_understood"]
    assert name in lines[0].values()
    assert table.damaged() == {name}


@pytest.mark.parametrize(
    "columns", ["slot_amount=65535", "slot_amount=0", "retries=99", "delivery='carrier'", "horizon=0"]
)
def test_a_topic_out_of_its_range_is_named_and_the_others_are_read(store: Store, columns: str) -> None:
    for number, name in enumerate(("one", "two")):
        store.topics.create(Topic(name, number, 4))
    change(store.topics, f"UPDATE {store.topics._table} SET {columns} WHERE name='one'")
    with capture_logs() as lines:
        assert [topic.name for topic in store.topics.list()] == ["two"]
    assert [(line["event"], line["name"]) for line in lines] == [("topic_not_understood", "one")]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_row_of_the_audit_is_shown_as_such(store: Store, damage: str) -> None:
    with audited(store, "ann", "topic.pause", "one"):
        pass
    table = store.audit._table
    for column in ("details", "result"):
        change(store.audit, f"UPDATE {table} SET {column}=%s WHERE action='topic.pause'", damage)
    (row, *_) = store.audit.list(1)
    shown = action_record(row)
    assert (shown["by"], shown["outcome"]) == ("ann", "unknown")
    json.dumps(shown, allow_nan=False).encode()
    assert ("unreadable" in shown["details"]) == (damage != "{}")


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_lines_of_a_history_are_left_out(damage: str) -> None:
    sound = FailedTry(1, 0, 0, 1_700_000_000_000, "down")
    late = json.dumps({**sound._asdict(), "at": 10**30})
    texts = json.dumps({**sound._asdict(), "at": "now", "ms": "1"})
    assert parse(f"{damage}\n{line(sound)}{late}\n{texts}\n") == [sound]
