"""Migrations build what the code declares, on every shard, whatever interrupts them."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from harness import forks
from sqlalchemy import Engine, create_engine, inspect
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB
from toc.model.clock import Clock
from toc.model.errors import ConfigError, SchemaBehind
from toc.store import migrate
from toc.store.migrate import Migrator, directory
from toc.store.schema import REVISION, database_metadata
from toc.store.store import Store

TESTS = Path(__file__).parents[1]
UPGRADE = (TESTS / "harness/upgrade.py").read_text()

WHERE = """
from toc.store.migrate import directory
print(directory())
"""

SECOND = """
from alembic import context, op
revision, down_revision = "1002", "1001"
def upgrade():
    tables, bind = list(context.config.attributes["tables"]), op.get_bind()
    having = "SELECT table_name FROM information_schema.columns WHERE table_schema=DATABASE() AND column_name"
    if bind.dialect.name == "sqlite":
        having = "SELECT t.name FROM sqlite_master t, pragma_table_info(t.name) c WHERE c.name"
    done = set(bind.exec_driver_sql(f"{having} = 'made_up'").scalars())  # of all tables at once
    names = {f"timeout_task_{table:04d}" for table in tables} - done
    context.config.attributes["execute"]([f"ALTER TABLE {name} ADD COLUMN made_up INTEGER" for name in names])
    context.config.attributes["migrated"](revision, len(tables))
"""


class Target:
    """An empty place for a schema, and programs that upgrade it."""

    def __init__(self, url: str, databases: int, tables: int, prefix: str) -> None:
        self.url, self.databases, self.tables, self.prefix = url, databases, tables, prefix
        self.sqlite = url.startswith("sqlite")

    def migrator(self, **changes: Any) -> Migrator:
        options = {"databases": self.databases, "tables": self.tables, "prefix": self.prefix, **changes}
        return Migrator([self.url], **options)

    def store(self) -> Store:
        return Store(
            [self.url], databases=self.databases, tables=self.tables, prefix=self.prefix, clock=Clock()
        )

    def arguments(self) -> list[str]:
        return [self.url, str(self.databases), str(self.tables), self.prefix]

    def upgrade_beside_others(self) -> subprocess.CompletedProcess[str]:
        """One in a process of its own, to its end."""
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        return forks.run(self.arguments(), module="harness.upgrade", env=env, timeout=120)

    def engine(self, database: int = 0, suffix: str = "") -> Engine:
        if self.sqlite:
            return create_engine(self.url + suffix)
        return create_engine(make_url(self.url).set(database=f"{self.prefix}{database}{suffix}"))

    def execute(self, statement: str, *, database: int = 0) -> None:
        """Run a statement there."""
        engine = self.engine(database)
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)
        engine.dispose()


@pytest.fixture
def mysql(mariadb: MariaDB, database_prefix: str) -> Target:
    return Target(mariadb.url, 2, 8, database_prefix)


@pytest.fixture
def sqlite(tmp_path: Path) -> Target:
    return Target(f"sqlite:///{tmp_path}/toc.db", 1, 4, "toc_")


def test_a_lost_database_is_made_anew_and_empty_only_when_told_to(mysql: Target) -> None:
    def drop(number: int) -> None:
        mysql.execute(f"DROP DATABASE {mysql.prefix}{number}", database=1 - number)

    mysql.migrator().upgrade()
    drop(1)
    mysql.migrator().upgrade()  # nobody has used it: the first upgrade was interrupted
    mysql.store().identity.get()
    for number in (0, 1):
        drop(number)
        with pytest.raises(ConfigError, match=f"{mysql.prefix}{number}: no table, though others .* --new"):
            mysql.migrator().upgrade()
        store = mysql.store()
        with pytest.raises(SchemaBehind, match="there is no task table here: is this the right"):
            store.check()
        mysql.migrator().upgrade(new=True)
        store.check()
        store.identity.get()
        store.close()


@pytest.fixture(params=["mysql", "sqlite"])
def target(request: pytest.FixtureRequest) -> Target:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Target)
    return found


def test_the_code_needs_the_newest_revision() -> None:
    config = Config()
    config.set_main_option("script_location", str(directory()))
    assert ScriptDirectory.from_config(config).get_current_head() == REVISION


def test_migrations_and_the_declared_schema_make_the_same_tables(target: Target) -> None:
    """Compared as the server itself describes them: types, keys, collations, order."""
    target.migrator().upgrade()
    metadata = database_metadata(0, target.databases, target.tables)
    declared, migrated = target.engine(suffix="_declared"), target.engine()
    if not target.sqlite:
        with migrated.begin() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {declared.url.database} COLLATE utf8mb4_bin")
    metadata.create_all(declared)
    try:
        assert metadata.tables
        for table in metadata.tables:
            assert _describe(migrated, table) == _describe(declared, table), table
    finally:
        declared.dispose()
        migrated.dispose()


def _describe(engine: Engine, table: str) -> list[Any]:
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            columns = [tuple(row[1:]) for row in connection.exec_driver_sql(f"PRAGMA table_info({table})")]
            # names of implied indexes are SQLite's own
            indexes = [
                (row[2], list(map(tuple, connection.exec_driver_sql(f"PRAGMA index_info({row[1]})"))))
                for row in connection.exec_driver_sql(f"PRAGMA index_list({table})")
            ]
            return [columns, sorted(indexes)]
        return [tuple(row) for row in connection.exec_driver_sql(f"SHOW CREATE TABLE {table}")]


def test_upgrade_twice_changes_nothing_and_reports_progress_once(target: Target) -> None:
    reports: list[tuple[str, str, int, int]] = []
    target.migrator().upgrade(lambda *report: reports.append(report[1:5]))
    part = target.tables // target.databases
    assert reports == [(f"{target.prefix}{n}", REVISION, part, part) for n in range(target.databases)]
    target.migrator().upgrade(lambda *report: pytest.fail(f"migrated again: {report}"))


def test_tables_of_before_the_first_version_are_refused_before_anything_changes(target: Target) -> None:
    target.migrator().upgrade()
    target.execute("UPDATE alembic_version SET version_num = '0009'")
    assert target.migrator().check()[0].behind
    with pytest.raises(ConfigError, match=r"made before the first version.*TOC_DATABASE_PREFIX"):
        target.migrator().upgrade()
    assert target.migrator().check()[0].revision == "0009"
    target.execute("UPDATE alembic_version SET version_num = '9999'")
    assert not target.migrator().check()[0].behind, "a schema that is further on is not behind"


def test_an_older_program_finds_nothing_to_do_on_a_later_schema(target: Target) -> None:
    target.migrator().upgrade()
    target.execute("UPDATE alembic_version SET version_num = '9999'")
    (later,) = target.migrator().upgrade(lambda *report: pytest.fail(f"migrated: {report}"))
    assert (later.database, later.revision) == (f"{target.prefix}0", "9999")
    assert target.migrator().check()[0] == later


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Add a revision that expands every task table, and return its name."""
    shutil.copytree(directory(), tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "migrations/versions/1002_made_up.py").write_text(SECOND)
    monkeypatch.setattr(migrate, "directory", lambda: tmp_path / "migrations")
    return "1002"


def test_a_later_revision_expands_tables_that_are_in_use(
    target: Target, request: pytest.FixtureRequest
) -> None:
    target.migrator().upgrade()
    second = request.getfixturevalue("second")
    store, now = target.store(), 1 if target.sqlite else "NOW(3)"
    target.execute(
        "INSERT INTO timeout_identity (number, identity, lease_secret, gmt_create) "
        f"VALUES (9, 'x', '', {now})"
    )
    store.check()
    target.migrator().upgrade()
    engine = target.engine()
    with engine.connect() as connection:
        columns = {column["name"] for column in inspect(connection).get_columns("timeout_task_0000")}
        assert "made_up" in columns
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM timeout_identity").scalar() == 1
    engine.dispose()
    assert {status.revision for status in target.migrator().check()} == {second}
    store.check()  # programs of the revision before go on
    store.close()


def test_check_names_the_shards_that_are_behind(mysql: Target) -> None:
    store = mysql.store()
    with pytest.raises(SchemaBehind, match=f"toc db upgrade.*{mysql.prefix}0.*{mysql.prefix}1"):
        store.check()
    mysql.migrator().upgrade()
    store.check()
    mysql.execute("DROP TABLE timeout_task_0005", database=1)
    with pytest.raises(SchemaBehind, match="timeout_task_0005") as caught:
        store.check()
    assert f"{mysql.prefix}0" not in str(caught.value)
    store.close()


def test_using_tables_that_are_not_there_says_what_to_do(target: Target) -> None:
    store = target.store()
    for use in (lambda: store.get(1), lambda: store.finish([(1, 0)]).whole(), store.topics.list):
        with pytest.raises(SchemaBehind, match="toc db upgrade"):
            use()
    store.close()


@pytest.mark.parametrize("changes", [{"tables": 16}, {"databases": 1}])
def test_other_numbers_of_tables_are_refused_before_a_change(mysql: Target, changes: dict[str, int]) -> None:
    mysql.migrator().upgrade()
    with pytest.raises(ConfigError, match="differ from those"):
        mysql.migrator(**changes).upgrade()
    said = {status.remedy for status in mysql.migrator(**changes).check() if status.behind}
    assert ["TOC_DATABASES and TOC_TABLES differ" in remedy for remedy in said] == [True]
    assert not any(status.behind for status in mysql.migrator().check())


def test_an_upgrade_that_was_killed_half_way_is_resumed(mariadb: MariaDB, database_prefix: str) -> None:
    target = Target(mariadb.url, 2, 512, database_prefix)
    command = [sys.executable, "-c", UPGRADE, *target.arguments()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        first = program.stdout.readline()
        program.kill()
    assert first.split()[1:5] == [f"{database_prefix}0", REVISION, "32", "256"]
    half = target.migrator().check()
    assert half[0].revision is None  # the fault bit: tables are there, the revision is not
    assert 0 < len(half[0].missing_tables) < 512

    target.migrator().upgrade()

    assert not any(status.behind for status in target.migrator().check())


@pytest.mark.parametrize(
    "lost", ["DELETE FROM alembic_version", f"UPDATE alembic_version SET version_num='{REVISION}'"]
)
def test_an_upgrade_killed_before_it_was_recorded_is_resumed(
    mysql: Target, request: pytest.FixtureRequest, lost: str
) -> None:
    """Its tables are all changed, so there is nothing left to do but to record it."""
    if lost.startswith("DELETE"):
        mysql.migrator().upgrade()
    second = request.getfixturevalue("second")
    if not lost.startswith("DELETE"):
        mysql.migrator().upgrade()
    for database in range(mysql.databases):
        mysql.execute(lost, database=database)
    mysql.migrator().upgrade()
    assert {status.revision for status in mysql.migrator().check()} == {second}
    assert not any(status.behind for status in mysql.migrator().check())


def test_three_upgrades_at_once_all_succeed(target: Target) -> None:
    with ThreadPoolExecutor(3) as threads:
        ended = list(threads.map(lambda _: target.upgrade_beside_others(), range(3)))
    assert [one.returncode for one in ended] == [0, 0, 0], ended
    assert sum(bool(one.stdout) for one in ended) >= 1
    assert not any(status.behind for status in target.migrator().check())


def test_an_installed_package_brings_its_migrations(tmp_path: Path, sqlite: Target) -> None:
    """A wheel holds ``migrations/`` as ``toc/migrations``."""
    checkout = directory().parent
    for source, target in (("toc", "toc"), ("migrations", "toc/migrations")):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(checkout / source, tmp_path / "site" / target, ignore=ignore)
    done = subprocess.run(
        [sys.executable, "-c", UPGRADE + WHERE, sqlite.url, "1", "4", "toc_"],
        cwd=tmp_path / "site",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "site/toc/migrations")
    assert not sqlite.migrator().check()[0].behind
