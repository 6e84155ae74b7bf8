"""Imports point one way; each driver has one importer. The rule is drawn in docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "toc"

VOCABULARY = {
    "task", "topic", "sharding", "errors", "clock", "config", "log", "failpoint", "finding", "metrics",
    "sockets", "presence", "logwriter",
}  # fmt: skip
OUTSIDE = {"store", "queue", "coordination"}  # one package per outside system
PLAIN = {"catalog", "handler", "intake", "exposition", "tracing"}  # built on the vocabulary alone
PASSES = {"sweep", "retention", "narrow"}
SDK = {*OUTSIDE, *PLAIN, "sweep", "sweeper"}

# What a part of toc may import of toc, besides itself and the vocabulary. Parts not named may import all
# but the TOP, which nobody below it imports.
MAY_IMPORT: dict[str, set[str]] = {
    **{name: set() for name in (*VOCABULARY, *OUTSIDE, *PLAIN, "local")},
    **dict.fromkeys(PASSES, OUTSIDE | PLAIN),
    "sweeper": OUTSIDE | PLAIN | {"sweep"},
    "client": SDK,
    "admin": SDK | {"client"},
    "bulk": SDK | {"client", "admin"},
    "top": SDK | {"client"},
    "worker": OUTSIDE | PLAIN,
}
TOP = {"__init__", "cli", "demo", "gateway"}
COMPOSERS = {"app", "start", "process", "upkeep"}  # of toc.worker: they put the loops together

DRIVERS = {
    "sqlalchemy": "store",
    "pymysql": "store",
    "alembic": "store",
    "redis": "queue",
    "kazoo": "coordination",
    "prometheus_client": "exposition",
    "opentelemetry": "tracing",
}


class Import(NamedTuple):
    file: Path
    line: int
    importer: str  # the part of toc, for example "store"
    composes: bool  # whether it is a file that may import what the rest of its package may not
    imported: str  # the full dotted name
    typing_only: bool


def imports(package: Path) -> Iterator[Import]:
    """Every import statement of a package, wherever in a file it stands."""
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        tree = ast.parse(file.read_text())
        typing_only = {
            node
            for block in ast.walk(tree)
            if isinstance(block, ast.If)
            and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            for statement in block.body
            for node in ast.walk(statement)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                line, names = node.lineno, [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
                # "from toc import store" imports toc.store: look at every name
                line, names = node.lineno, [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                composes = parts[0] == "worker" and parts[-1] in COMPOSERS
                yield Import(file, line, parts[0], composes, name, node in typing_only)


def violations(package: Path) -> list[str]:
    """What breaks the rules, a line each."""
    files = {file.relative_to(package).with_suffix("").parts[0] for file in package.rglob("*.py")}
    found = []
    for line in imports(package):
        root, *rest = line.imported.split(".")
        where = f"{line.file.relative_to(package.parent)}:{line.line}"
        owner = DRIVERS.get(root)
        for_types = root == "sqlalchemy" and line.importer == "client" and line.typing_only
        if owner is not None and line.importer != owner and not for_types:
            found.append(f"{where}: only toc.{owner} imports {root}")
        if root != "toc":
            continue
        part = rest[0] if rest and rest[0] in files else "__init__"  # the public names: all of toc
        if part == line.importer or part in VOCABULARY:
            continue
        allowed = part in MAY_IMPORT.get(line.importer, files - TOP) or (line.composes and part not in TOP)
        if not allowed and line.importer not in TOP | {"__main__"}:
            found.append(f"{where}: toc.{line.importer} must not import toc.{part}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(PACKAGE) == []


def test_every_part_of_the_vocabulary_exists() -> None:
    assert {name for name in VOCABULARY if not (PACKAGE / f"{name}.py").exists()} == set()


@pytest.mark.parametrize(
    ("file", "source", "verdict"),
    [
        ("queue/nodes.py", "import redis.asyncio", None),
        ("store/engine.py", "from sqlalchemy import create_engine", None),
        ("queue/keys.py", "from toc.model.topic import Slot", None),
        ("queue/nodes.py", "from toc.index import keys", None),
        ("client.py", "from toc.store import Store", None),
        ("client.py", "if TYPE_CHECKING:\n    from sqlalchemy import Connection", None),
        ("worker/daemon.py", "from toc.coordination import local", None),
        ("demo/app.py", "from toc import TimeoutCenter", None),
        ("client.py", "from sqlalchemy import Connection", "only toc.store imports sqlalchemy"),
        ("worker/poll.py", "def f():\n    import redis", "only toc.index imports redis"),
        ("local/servers.py", "import pymysql", "only toc.store imports pymysql"),
        ("worker/daemon.py", "from kazoo.client import KazooClient", "only toc.coordination imports kazoo"),
        ("queue/nodes.py", "from toc import store", "toc.index must not import toc.store"),
        ("store/tasks.py", "import toc.coordination", "toc.store must not import toc.coordination"),
        (
            "task.py",
            "from toc.sdk.client import TimeoutCenter",
            "toc.model.task must not import toc.sdk.client",
        ),
        (
            "sweep.py",
            "from toc.sdk.client import TimeoutCenter",
            "toc.maintenance.sweep must not import toc.sdk.client",
        ),
        ("local/cluster.py", "from toc.store import Store", "toc.dev.local must not import toc.store"),
        (
            "worker/poll.py",
            "from toc.sdk.client import TimeoutCenter",
            "toc.worker must not import toc.sdk.client",
        ),
        ("worker/process.py", "from toc.sdk.client import TimeoutCenter", None),
        ("worker/process.py", "from toc.cli import main", "toc.worker must not import toc.cli"),
        ("worker/process.py", "from toc import Task", "toc.worker must not import toc.__init__"),
    ],
)
def test_an_import_is_judged_by_who_imports_what(
    tmp_path: Path, file: str, source: str, verdict: str | None
) -> None:
    package = tmp_path / "toc"
    for part in ("store", "queue", "coordination", "local", "worker", "cli", "demo"):
        (package / part).mkdir(parents=True)
        (package / part / "__init__.py").touch()
    for name in (*VOCABULARY, "client", "sweep"):
        (package / f"{name}.py").touch()
    (package / file).write_text(source)
    found = [line.partition(": ")[2] for line in violations(package)]
    assert found == ([] if verdict is None else [verdict])
